"""Heads that compute outputs from all tokens of an image, such as boxes or a class for each patch, by name."""

from __future__ import annotations

from vitrail.models.heads.dense_head import DenseHead
from vitrail.registry import Registry, subclass_of

__all__ = ["HEADS", "DenseHead"]

HEADS = Registry[type[DenseHead]](
    {
        "detection-tokens": "vitrail.models.heads.boxes:DetectionTokens",
        "patches": "vitrail.models.heads.masks:PatchClasses",
        "queries": "vitrail.models.heads.masks:QueryMasks",
        "fine-patches": "vitrail.models.heads.masks:FinePatchClasses",
        "pyramid": "vitrail.models.heads.boxes:Pyramid",
    },
    fits=subclass_of(DenseHead, "BoxHead or MaskHead"),
)
"""Every kind of head by its name in `ViTConfig.head_kind`. The kind "pooled" is a linear layer of the pooled vector and
is not in this table."""
