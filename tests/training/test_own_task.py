"""Tests of a user's own task. Its objective trains a module beside the network, on images without labels."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.jobs import Make, train_until
from vitrail.data.batch import Batch
from vitrail.data.pipeline import evaluation_batches
from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.evaluators import Evaluator
from vitrail.evaluation.outputs import Outputs
from vitrail.settings import setting
from vitrail.tasks import TASKS
from vitrail.tasks.task import LossOutput, Objective, Task, TaskMetric, mean_of_counted
from vitrail.training.build import make_network, make_state
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.config import TrainConfig
from vitrail.training.folder import read_record
from vitrail.training.job import prepare
from vitrail.training.log import read_journal
from vitrail.training.run import RunResult, resume, train
from vitrail.weights.load import load


class ColourObjective(Objective):
    """Predicts the mean colour of an image from the network's embedding, by a dense layer beside the network."""

    def __init__(self, network: Any, hidden: int) -> None:
        super().__init__(network)
        width = network.config.embed_width
        self.decoder = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, network.config.channels))

    def errors(self, images: torch.Tensor) -> torch.Tensor:
        return (self.decoder(self.network.embed(images).float()) - images.mean(dim=(2, 3))).square().mean(dim=1)

    def forward(self, batch: Batch) -> LossOutput:
        return LossOutput(mean_of_counted(self.errors(batch.images), batch.valid), {})


@dataclass(frozen=True, kw_only=True)
class Colour(Task):
    """Learn the mean colour of images, which needs no labels."""

    name = "colour"
    targets = ("none", "class")
    output_noun = "output"
    metrics = (TaskMetric("colour_error", higher_is_better=False),)
    loss_metric = "colour_error"

    hidden: int = setting(4, least=1)
    """Hidden units of the decoder."""

    @property
    def output(self) -> Any:
        return "softmax"

    def check_data(self, splits: Splits) -> None:
        """Accept all images."""

    def main_metric(self, splits: Splits) -> str:
        return "colour_error"

    def output_names(self, splits: Splits) -> tuple[str, ...]:
        return ()

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        return ColourObjective(network, self.hidden)

    def evaluator(self, objective: Objective) -> Evaluator:
        assert isinstance(objective, ColourObjective)

        @torch.no_grad()
        def evaluate(outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
            objective.eval()
            total = 0.0
            for batch in evaluation_batches(held_out, outputs.bundle.preprocess, batch_size=8):
                total += float(objective.errors(outputs.bundle.preprocess.normalise(batch.images)).sum())
            objective.train()
            return {"colour_error": total / len(held_out), "images": float(len(held_out))}

        return evaluate


@pytest.fixture
def colour_config(folder_config: Make, colour_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that makes configs for learning colours from a folder without class folders."""
    monkeypatch.setitem(TASKS, "colour", Colour)
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in colour_folder.glob("*/*.png"):
        shutil.copy(path, flat / f"{path.parent.name}-{path.name}")

    def make(**fields: Any) -> TrainConfig:
        return folder_config(flat, **{"task": "colour", "hidden": 5, "steps": 24, "learning_rate": 3e-3, **fields})

    return make


def weights_of(result: RunResult) -> dict[str, Any]:
    """Return the weights in the newest checkpoint of a run, including the objective's own modules."""
    setup = prepare(read_record(result.folder).config)
    state = make_state(setup, make_network(setup, None)[0])
    Checkpoints(result.folder / "checkpoints").restore(state)
    return state.objective.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("average", [0.0, 0.9])
def test_modules_beside_the_network_are_trained_saved_and_resumed(
    average: float, colour_config: Make, tmp_path: Path
) -> None:
    straight = train(colour_config(run=str(tmp_path / "straight"), average=average))
    events = [event for event in read_journal(straight.folder / "journal.jsonl") if "colour_error" in event]
    assert events[2]["colour_error"] < events[0]["colour_error"]
    train_until(colour_config(run=str(tmp_path / "stopped"), average=average), 9)
    stopped = resume(tmp_path / "stopped")
    expected, found = weights_of(straight), weights_of(stopped)
    assert {"decoder.0.weight", "decoder.2.bias", "network.patches.projection.weight"} <= set(expected)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    torch.manual_seed(0)
    fresh = nn.Linear(16, 5).weight
    assert not torch.allclose(expected["decoder.0.weight"], fresh, atol=1e-3)


@pytest.mark.slow
def test_a_task_gets_as_many_views_of_each_image_as_it_asks_for(
    colour_config: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Colour, "views", 3)
    config = colour_config(run=str(tmp_path / "views"), steps=3, batch_size=5, accumulation=2)
    setup = prepare(config)
    batch = next(make_state(setup, make_network(setup, None)[0]).batches)
    assert len(batch) == 15 and batch.views.tolist() == [0, 1, 2] * 5
    train(config)


@pytest.mark.slow
def test_the_model_has_no_head(colour_config: Make) -> None:
    result = train(colour_config(keep="best", steps=6))
    bundle = load(result.folder / "model")
    assert bundle.classes == () and bundle.network.head is None and result.examples == ()
    assert set(result.metrics) == {"validation_colour_error"}


def test_its_settings_are_known_by_their_names(colour_config: Make) -> None:
    config = colour_config()
    assert config.task == Colour(hidden=5) and TrainConfig.from_plain(config.to_plain()) == config
    with pytest.raises(ConfigError, match=r"^hidden=0 is less than 1$"):
        config.override(hidden=0)
    with pytest.raises(ConfigError, match=r"^label_smoothing: the task of this run.* classification, distillation"):
        config.override(label_smoothing=0.1)
    assert config.override(task="classification").task == TASKS["classification"]()


def test_classification_needs_labels(colour_config: Make) -> None:
    config = colour_config().override(task="classification")
    with pytest.raises(DataError, match="class folders"):
        train(config)
