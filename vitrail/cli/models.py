"""`vitrail models`: the sizes of networks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vitrail.cli.options import parse
from vitrail.models.cost import macs, parameters
from vitrail.models.variants import PUBLISHED, variant_config

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class Models:
    """List the sizes of networks with their parameters and the cost of one image in multiply-accumulates (GMAC).

    Any size takes any patch that divides the image: ViT-S/8, or ViT-S/16x8 for patches of 16 rows and 8 columns.
    """

    image_size: tuple[int, int] | None = None
    """Height and width in pixels; by default 224 x 224, or 28 x 28 and 64 x 64 for the two smallest."""
    num_classes: int = 1000
    """Outputs of the head."""
    json: bool = False
    """Print JSON instead of a table."""


OWN_SIZES = {"ViT-Pico/7": (28, 28), "ViT-Nano/8": (64, 64)}


def main(words: Sequence[str], started: float) -> int:
    options = parse(Models, words, usage="vitrail models", description=Models.__doc__ or "")
    rows = [_row(name, options) for name in PUBLISHED]
    if options.json:
        print(json.dumps(rows))
        return 0
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("name", "width", "depth", "heads", "MLP", "image", "tokens", "parameters", "GMAC"):
        table.add_column(heading, justify="left" if heading == "name" else "right", no_wrap=True)
    for row in rows:
        row["image_size"] = "x".join(map(str, row["image_size"]))
        row["parameters"], row["macs"] = f"{row['parameters']:,}", f"{row['macs'] / 1e9:.2f}"
        table.add_row(*map(str, row.values()))
    Console().print(table)
    return 0


def _row(name: str, options: Models) -> dict[str, Any]:
    patch = int(name.rpartition("/")[2])
    height, width = (
        max(1, round(side / patch)) * patch for side in options.image_size or OWN_SIZES.get(name, (224, 224))
    )
    config = variant_config(name, image_size=(height, width), num_classes=options.num_classes)
    return {
        "name": name,
        "width": config.width,
        "depth": config.depth,
        "heads": config.heads,
        "mlp_width": config.mlp_width,
        "image_size": [height, width],
        "tokens": config.tokens,
        "parameters": parameters(config),
        "macs": macs(config),
    }
