"""Kinds of attention, one file each. `ViTConfig.attention` names a kind of this table."""

from __future__ import annotations

from vitrail.models.attention.full import FullAttention
from vitrail.models.attention.kind import AttentionKind, AttentionLayer, AttentionPositions

__all__ = ["ATTENTION", "AttentionKind", "AttentionLayer", "AttentionPositions"]

ATTENTION: dict[str, type[AttentionKind]] = {"full": FullAttention}
"""All kinds, by the name that a config has."""
