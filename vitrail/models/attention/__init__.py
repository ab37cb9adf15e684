"""Attention mechanisms, one file each. `ViTConfig.attention` names a mechanism in `ATTENTION`."""

from __future__ import annotations

from vitrail.models.attention.full import FullAttention
from vitrail.models.attention.kind import AttentionKind, AttentionLayer, AttentionOperands, AttentionPositions

__all__ = ["ATTENTION", "AttentionKind", "AttentionLayer", "AttentionOperands", "AttentionPositions"]

ATTENTION: dict[str, type[AttentionKind]] = {"full": FullAttention}
"""All attention mechanisms, by the name that `ViTConfig.attention` uses."""
