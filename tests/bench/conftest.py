"""A workload that takes a few milliseconds, on images that are not square."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vitrail.bench.workload import Workload
from vitrail.models.variants import variant_config


@pytest.fixture
def tiny_work() -> Callable[..., Workload]:
    """Makes workloads of a ViT of two blocks on 28 x 21 pixels; fields of workload and config can be replaced."""

    def make(variant: str = "ViT-Pico/7", **fields: Any) -> Workload:
        of_workload = {name: fields.pop(name) for name in ("task", "batch", "precision", "float8") if name in fields}
        if variant.startswith("ViT"):
            fields = {"width": 32, "depth": 2, "heads": 2, "mlp_width": 48, **fields}
        config = variant_config(variant, image_size=fields.pop("image_size", (28, 21)), **{"num_classes": 5, **fields})
        return Workload(name=variant, config=config, **{"batch": 3, **of_workload})

    return make
