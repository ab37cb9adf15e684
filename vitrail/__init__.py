"""Vision Transformers in PyTorch: pre-training, fine-tuning, evaluation and prediction."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.export.engines import with_engine as with_engine
    from vitrail.models.variants import create as create
    from vitrail.recipes import RECIPES as RECIPES
    from vitrail.training.config import TrainConfig as TrainConfig
    from vitrail.training.run import RunResult
    from vitrail.training.run import resume as resume
    from vitrail.training.run import train as train
    from vitrail.weights.answers import NumberPrediction as NumberPrediction
    from vitrail.weights.answers import Prediction as Prediction
    from vitrail.weights.bundle import Bundle as Bundle
    from vitrail.weights.load import convert as convert
    from vitrail.weights.load import load as load

__version__ = "0.1.0.dev0"

__all__ = [
    "RECIPES",
    "Bundle",
    "NumberPrediction",
    "Prediction",
    "RunResult",
    "TrainConfig",
    "convert",
    "create",
    "load",
    "resume",
    "train",
    "with_engine",
]

_HOMES = {
    "RECIPES": "vitrail.recipes",
    "Bundle": "vitrail.weights.bundle",
    "NumberPrediction": "vitrail.weights.answers",
    "Prediction": "vitrail.weights.answers",
    "RunResult": "vitrail.training.run",
    "TrainConfig": "vitrail.training.config",
    "create": "vitrail.models.variants",
    "convert": "vitrail.weights.load",
    "load": "vitrail.weights.load",
    "resume": "vitrail.training.run",
    "train": "vitrail.training.run",
    "with_engine": "vitrail.export.engines",
}


if "--multiprocessing-fork" in sys.orig_argv:
    # A spawned process imports the main module, and this package with it, before it imports Grain, which warns in every
    # process that jax is missing. Elsewhere, `vitrail.data.pipeline` imports Grain without the warning.
    import logging

    logging.getLogger("absl").addFilter(lambda record: "Failed to load jax profiler" not in str(record.msg))


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `vitrail --help` does not wait for torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'vitrail' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
