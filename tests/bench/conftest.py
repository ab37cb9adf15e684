"""A workload of a few milliseconds for all tests of benchmarks. Its images are not square."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vitrail.bench.workload import Workload
from vitrail.models.variants import variant_config

MakeWork = Callable[..., Workload]
"""The fixture that makes workloads."""


@pytest.fixture
def tiny_work() -> MakeWork:
    """Return a function that makes workloads of a ViT with two blocks on 28 x 21 pixels. It can replace fields."""

    def make(variant: str = "ViT-Pico/7", **fields: Any) -> Workload:
        of_workload = {name: fields.pop(name) for name in ("task", "batch", "precision", "float8") if name in fields}
        if variant.startswith("ViT"):
            fields = {"width": 32, "depth": 2, "heads": 2, "mlp_width": 48, **fields}
        config = variant_config(variant, image_size=fields.pop("image_size", (28, 21)), **{"num_classes": 5, **fields})
        return Workload(name=variant, config=config, **{"batch": 3, **of_workload})

    return make
