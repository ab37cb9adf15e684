"""Position embeddings: those that the paper compares (Appendix D.4, Table 8), and two newer ones.

| kind | what it is | where it acts |
|---|---|---|
| none | no positions: tokens are a set | - |
| learned | a vector for each token | added to tokens |
| learned-2d | a vector of D / 2 for each column and one for each row, concatenated | added to tokens |
| sincos-2d | sines and cosines of column and row, fixed (2205.01580) | added to patch tokens |
| sincos-2d-mae | the same with the frequencies of MoCo v3 and MAE (2111.06377) | added to patch tokens |
| relative-bias | a number for each head and offset between two patches (2103.14030) | added to attention's logits |
| relative-bias-class | the same, also for pairs with the class token (2106.08254) | added to attention's logits |
| relative-keys | a key for each row-major offset between two patches (Appendix D.4) | added to attention's logits |
| rotary-2d | rotation of queries and keys by angles that grow with row and column (2403.13298) | on patch tokens |

"relative-keys" is the paper's relative variant: it adds the product of the query and a learned vector for the offset to
each logit. Every query is multiplied by the vectors of all 2 N - 1 offsets, which costs twice as much as the product of
queries and keys. "relative-bias" adds a learned number for the offset in rows and columns, which does not depend on the
query and costs no products.
"""

from __future__ import annotations

from vitrail.models.positions.embedding import (
    Covered,
    LearnedPositions,
    LearnedPositions2d,
    PositionPlace,
    PositionResize,
    Positions,
    RelativeBias,
    RelativeBiasWithClass,
    RelativeKeyPositions,
    RotaryPositions,
    SinCosMaePositions,
    SinCosPositions,
    resize_grid,
    sincos_2d,
)
from vitrail.registry import Registry, subclass_of

__all__ = ["POSITIONS", "Covered", "PositionPlace", "PositionResize", "Positions", "resize_grid", "sincos_2d"]

POSITIONS = Registry[type[Positions]](
    {},
    rest=lambda: {
        "none": Positions,
        "learned": LearnedPositions,
        "learned-2d": LearnedPositions2d,
        "sincos-2d": SinCosPositions,
        "sincos-2d-mae": SinCosMaePositions,
        "relative-bias": RelativeBias,
        "relative-bias-class": RelativeBiasWithClass,
        "relative-keys": RelativeKeyPositions,
        "rotary-2d": RotaryPositions,
    },
    fits=subclass_of(Positions, "Positions"),
)
"""All position embeddings, by the name that `ViTConfig.positions` uses."""

WITHOUT_WEIGHTS = ("none", "sincos-2d", "sincos-2d-mae", "rotary-2d")
"""Names of the position embeddings without weights. An embedding that a user adds counts as one with weights."""
