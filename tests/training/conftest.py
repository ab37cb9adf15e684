"""What the tests of training share: data with all three splits, states to step by hand, ways to stop a real run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail.training.run as run_module
from tests.make import idx_bytes
from tests.training.jobs import Finished, Prepare, events_of, model_bytes, values_of
from vitrail.data.formats.idx import BUNDLED, find_idx, read_idx
from vitrail.data.pipeline import Stage, TrainingBatches
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.variants import create
from vitrail.models.vit import VisionTransformer
from vitrail.recipes import RECIPES
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.config import TrainConfig
from vitrail.training.folder import read_record
from vitrail.training.job import Job
from vitrail.training.job import prepare as prepare_run
from vitrail.training.optimizer import make_optimizer
from vitrail.training.run import train
from vitrail.training.state import Average, TrainState, make_network, make_state
from vitrail.weights.bundle import Bundle


@pytest.fixture(scope="session")
def three_splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """IDX files of 200 training, 40 validation and 40 test images."""
    root = tmp_path_factory.mktemp("three-splits")
    for split, prefix, first, last in (("train", "train", 0, 200), ("train", "val", 200, 240), ("test", "t10k", 0, 40)):
        images, labels = find_idx(BUNDLED, split) or ()
        for path, kind in ((images, "images-idx3"), (labels, "labels-idx1")):
            (root / f"{prefix}-{kind}-ubyte").write_bytes(idx_bytes(read_idx(path)[first:last]))
    return root


@pytest.fixture(scope="session")
def small(three_splits: Path) -> Callable[..., TrainConfig]:
    """Makes configs with all that is random switched on; an epoch is exactly 10 steps. The first argument is the run's
    folder."""

    def make(run: Path, **fields: object) -> TrainConfig:
        defaults = {
            "data": str(three_splits), "run": str(run), "variant": "ViT-Pico/7", "image_size": (28, 28),
            "steps": 24, "batch_size": 20, "width": 16, "depth": 2,
            "heads": 2, "mlp_width": 32, "precision": "float32", "device": "cpu", "threads": 2, "evaluations": 6,
            "checkpoints": 3, "keep": "best", "dropout": 0.2, "stochastic_depth": 0.3, "optimizer": "adamw",
            "learning_rate": 1e-2,
        }  # fmt: skip
        return RECIPES["demo"]().override(**{**defaults, **fields})

    return make


@pytest.fixture(scope="session")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes models of random weights to start from, in folders, by default of a transformer of three blocks for colour
    images of 21 x 28 and four classes; fields can be replaced. The same fields give the same folder."""
    made: dict[str, Path] = {}

    def make(variant: str = "ViT-Pico/7", classes: tuple[str, ...] = ("a", "b", "c", "d"), **fields: Any) -> Path:
        name = repr((variant, classes, sorted(fields.items())))
        if name not in made:
            sizes = {} if variant.startswith("BiT") else {"width": 16, "depth": 3, "heads": 2, "mlp_width": 24}
            torch.manual_seed(11)
            size = (21, 28) if variant == "ViT-Pico/7" else (32, 48)
            network = create(variant, **{"image_size": size, "num_classes": len(classes), **sizes, **fields})
            if network.head is not None:
                torch.nn.init.normal_(network.head.weight, std=0.1)
            config = network.config
            preprocess = Preprocess(
                image_size=config.image_size, channels=config.channels, mean=(0.4,), std=(0.3,), resize="crop"
            )
            made[name] = Bundle(network, classes, preprocess).save(tmp_path_factory.mktemp("initial") / "model")
        return made[name]

    return make


@pytest.fixture
def from_model(tmp_path: Path) -> Callable[..., TrainConfig]:
    """Makes configs of short runs from a model on a folder of images."""

    def make(model: Path, data: Path, **fields: Any) -> TrainConfig:
        defaults = {
            "init": str(model), "data": str(data), "run": str(tmp_path / "run"), "steps": 12, "batch_size": 8,
            "device": "cpu", "precision": "float32", "threads": 2, "evaluations": 3, "checkpoints": 1,
            "validation_share": 0.2, "image_size": (21, 28), "learning_rate": 1e-2, "variant": None,
            "position_std": None,
        }  # fmt: skip
        return RECIPES["folder"]().override(**{**defaults, **fields})

    return make


@pytest.fixture
def folder_config(tmp_path: Path) -> Callable[..., TrainConfig]:
    def make(data: Path, **fields: object) -> TrainConfig:
        defaults = {
            "data": str(data), "run": str(tmp_path / "run"), "variant": "ViT-Pico/7", "image_size": (28, 28),
            "steps": 12, "batch_size": 8, "width": 16, "depth": 1, "heads": 2, "mlp_width": 32, "device": "cpu",
            "precision": "float32", "threads": 2, "evaluations": 3, "checkpoints": 1, "validation_share": 0.2,
        }  # fmt: skip
        return RECIPES["folder"]().override(**{**defaults, **fields})

    return make


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[TrainState]:
    """The states of the runs that a test begins, in order."""
    seen, real = list[TrainState](), run_module.fit
    monkeypatch.setattr(run_module, "fit", lambda run, state: (seen.append(state), real(run, state)))
    return seen


@pytest.fixture(scope="session")
def prepare() -> Prepare:
    """The state and the job of a config, to take single steps with. The head is random instead of 0, so that
    gradients reach every weight at once."""

    def build(config: TrainConfig) -> tuple[TrainState, Job]:
        splits, images = config.data.open(), config.images
        torch.manual_seed(config.run.seed)
        shape = {"image_size": images.image_size, "channels": images.channels}
        network = VisionTransformer(config.model.resolve(num_classes=len(splits.classes), **shape))
        assert network.head is not None
        torch.nn.init.normal_(network.head.weight, std=0.1)
        objective = config.task.objective(network, splits)
        batches = TrainingBatches(
            splits.train, [Stage(images, config.run.batch_size)], seed=config.run.seed, readers=config.run.readers
        )
        rates = config.optimizer
        average = Average(objective, rates.average, rates.average_start) if rates.average else None
        state = TrainState(objective, make_optimizer(objective, rates, config.run.precision), batches, average=average)
        return state, prepare_run(config)

    return build


@pytest.fixture(scope="session")
def flat() -> Callable[[Any], dict[str, Any]]:
    """The leaves of nested dictionaries and lists, by their paths."""

    def leaves(value: Any, path: str = "") -> dict[str, Any]:
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return {name: leaf for key, item in items for name, leaf in leaves(item, f"{path}/{key}").items()}
        return {path: value}

    return leaves


@pytest.fixture(scope="session")
def outcome(flat: Callable[[Any], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    """All that two equal runs have equal: the newest checkpoint's tensors (as bytes) and values, the losses in the
    journal, the validation figures, and the model's bytes."""

    def collect(run: Path) -> dict[str, Any]:
        record = read_record(run)
        setup = prepare_run(record.config, origin=record.origin)
        state = make_state(setup, make_network(setup, None)[0])
        assert Checkpoints(run / "checkpoints").restore(state) == []
        tensors = {
            name: leaf.contiguous().numpy().tobytes() if isinstance(leaf, Tensor) else leaf
            for name, leaf in flat(state.tensors()).items()
        }
        moments = [name for name in tensors if "exp_avg" in name or "momentum" in name]
        moved = [parameter for parameter in state.objective.parameters() if parameter.requires_grad]
        assert len(moments) >= len(moved)
        return {
            "tensors": tensors,
            "values": state.values(),
            "steps": values_of(run, "step", "loss", "accuracy", "gradient_norm", "learning_rate"),
            "evaluations": [
                [event[name] for name in ("step", "split", "accuracy", "cross_entropy")]
                for event in events_of(run, "evaluation")
            ],
            "model": model_bytes(run),
        }

    return collect


@pytest.fixture(scope="session")
def finished(small: Callable[..., TrainConfig], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of 24 steps, of which 10 are an epoch, that never stopped."""
    config = small(tmp_path_factory.mktemp("straight") / "run")
    return Finished(config, train(config))


@pytest.fixture(scope="session")
def straight(finished: Finished, outcome: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    return outcome(finished.result.folder)


@pytest.fixture(scope="session")
def command() -> Callable[..., subprocess.Popen[str]]:
    """Starts a real `vitrail train` as a process of its own, with one thread."""

    def start(*words: str, **options: Any) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, "-m", "vitrail", "train", *words], env=environment, **pipes)

    return start
