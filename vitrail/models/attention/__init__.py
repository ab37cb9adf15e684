"""Attention mechanisms, one file each. `ViTConfig.attention` names a mechanism in `ATTENTION`."""

from __future__ import annotations

from vitrail.models.attention.base import AttentionContext, AttentionKind, AttentionLayer, AttentionOperands
from vitrail.models.positions.embedding import AttentionPositions
from vitrail.registry import Registry, subclass_of

__all__ = [
    "ATTENTION",
    "AttentionContext",
    "AttentionKind",
    "AttentionLayer",
    "AttentionOperands",
    "AttentionPositions",
]

ATTENTION = Registry[type[AttentionKind]](
    {
        "full": "vitrail.models.attention.full:FullAttention",
        "local": "vitrail.models.attention.windows:LocalAttention",
        "blocks": "vitrail.models.attention.windows:BlockAttention",
        "axial": "vitrail.models.attention.windows:AxialAttention",
        "linformer": "vitrail.models.attention.linformer:LinformerAttention",
        "strided": "vitrail.models.attention.windows:StridedAttention",
        "fixed": "vitrail.models.attention.windows:FixedAttention",
        "lsh": "vitrail.models.attention.lsh:LshAttention",
    },
    fits=subclass_of(AttentionKind, "AttentionKind"),
)
"""All attention mechanisms, by the name that `ViTConfig.attention` uses."""
