"""Position embeddings: those that the paper compares (Appendix D.4, Table 8), and two newer ones.

| kind | what it is | where it acts |
|---|---|---|
| none | no positions: tokens are a set | - |
| learned | a vector for each token | added to tokens |
| learned-2d | a vector of D / 2 for each column and one for each row, concatenated | added to tokens |
| sincos-2d | sines and cosines of column and row, fixed (2205.01580) | added to patch tokens |
| sincos-2d-mae | the same with the frequencies of MoCo v3 and MAE (2111.06377) | added to patch tokens |
| relative-bias | a number for each head and offset between two patches (2103.14030) | added to attention's logits |
| rotary-2d | rotation of queries and keys by angles that grow with row and column (2403.13298) | on patch tokens |

The paper's relative variant adds the product of the query and a learned vector for the offset to each logit.
"relative-bias" adds a learned number for the offset, which does not depend on the query. For 14 x 14 patches,
"relative-bias" has a table of 729 numbers per head. The paper's variant would multiply every query by 729 vectors,
which costs 3.7 times as much as the product of queries and keys.
"""

from __future__ import annotations

from vitrail.models.positions.added import (
    Learned,
    Learned2d,
    LearnedPositions,
    LearnedPositions2d,
    SinCos,
    SinCosMae,
    SinCosPositions,
    sincos_2d,
)
from vitrail.models.positions.embedding import (
    Covered,
    PositionEmbedding,
    PositionPlace,
    PositionResize,
    Positions,
    resize_grid,
)
from vitrail.models.positions.inside import Relative, RelativeBias, Rotary, RotaryPositions

__all__ = [
    "POSITIONS",
    "Covered",
    "LearnedPositions",
    "LearnedPositions2d",
    "PositionEmbedding",
    "PositionPlace",
    "PositionResize",
    "Positions",
    "RelativeBias",
    "RotaryPositions",
    "SinCosPositions",
    "resize_grid",
    "sincos_2d",
]

POSITIONS: dict[str, type[PositionEmbedding]] = {
    "none": PositionEmbedding,
    "learned": Learned,
    "learned-2d": Learned2d,
    "sincos-2d": SinCos,
    "sincos-2d-mae": SinCosMae,
    "relative-bias": Relative,
    "rotary-2d": Rotary,
}
"""All position embeddings, by the name that `ViTConfig.positions` uses."""
