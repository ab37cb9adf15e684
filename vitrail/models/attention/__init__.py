"""Attention mechanisms, one file each. `ViTConfig.attention` names a mechanism in `ATTENTION`."""

from __future__ import annotations

from vitrail.models.attention.base import AttentionContext, AttentionKind, AttentionLayer, AttentionOperands
from vitrail.models.attention.full import FullAttention
from vitrail.models.attention.linformer import LinformerAttention
from vitrail.models.attention.lsh import LshAttention
from vitrail.models.attention.strided import FixedAttention, StridedAttention
from vitrail.models.attention.windows import AxialAttention, BlockAttention, LocalAttention
from vitrail.models.positions.embedding import AttentionPositions

__all__ = [
    "ATTENTION",
    "AttentionContext",
    "AttentionKind",
    "AttentionLayer",
    "AttentionOperands",
    "AttentionPositions",
]

ATTENTION: dict[str, type[AttentionKind]] = {
    "full": FullAttention,
    "local": LocalAttention,
    "blocks": BlockAttention,
    "axial": AxialAttention,
    "linformer": LinformerAttention,
    "strided": StridedAttention,
    "fixed": FixedAttention,
    "lsh": LshAttention,
}
"""All attention mechanisms, by the name that `ViTConfig.attention` uses."""
