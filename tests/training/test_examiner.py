"""Tests of evaluations during a run: averaged and trained weights, the end by patience, and probes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail.training.loop as loop_module
from tests.listening import Display
from tests.training.jobs import Initial, Make, crash, events_of, model_bytes, steps_of, train_until
from vitrail.data.batch import Batch
from vitrail.data.source import Source
from vitrail.errors import ConfigError, RunError
from vitrail.evaluation.outputs import Outputs
from vitrail.tasks.classification import Accuracy
from vitrail.training.job import Job, Probe
from vitrail.training.log import Log
from vitrail.training.run import resume, train
from vitrail.training.state import TrainState
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

COLOURS = ("blue", "green", "red")
STILL = {"optimizer": "sgd", "learning_rate": 1e-12, "steps": 24, "evaluations": 6, "checkpoints": 3}
"""Settings with which no step changes the outputs, so that no evaluation is better than the first one, after four
steps."""


@pytest.fixture
def weights_by_step(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    seen: list[dict[str, Tensor]] = []
    real = loop_module.train_step

    def copies(state: TrainState) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in state.objective.network.state_dict().items()}

    def train_step(job: Job, state: TrainState, batch: Batch) -> dict[str, Tensor]:
        if not seen:
            seen.append(copies(state))
        figures = real(job, state, batch)
        seen.append(copies(state))
        return figures

    monkeypatch.setattr(loop_module, "train_step", train_step)
    return seen


@pytest.mark.parametrize("keep", [pytest.param("last", marks=pytest.mark.slow), "best"])
def test_the_mean_of_the_weights_is_measured_and_kept(
    keep: str, tiny: Make, weights_by_step: list[dict[str, Tensor]]
) -> None:
    config = tiny(average=0.8, average_start="capped", keep=keep, learning_rate=0.02)
    result = train(config)
    assert len(weights_by_step) == 13
    mean = {name: tensor.double() for name, tensor in weights_by_step[0].items()}
    means = []
    for step, weights in enumerate(weights_by_step[1:]):
        kept = min(0.8, (1 + step) / (10 + step))
        mean = {name: kept * mean[name] + (1 - kept) * weights[name].double() for name in mean}
        means.append(mean)
    during = [event for event in events_of(result.folder, "evaluation") if not event.get("kept")]
    assert [(event["step"], event["weights"]) for event in during] == [
        (step, weights) for step in (4, 8, 12) for weights in ("trained", "averaged")
    ]
    averaged = during[1::2]
    assert all("best" not in event for event in during[::2])
    best = max(averaged, key=lambda event: (event["accuracy"], -event["cross_entropy"]))
    step = 12 if keep == "last" else best["step"]
    for name, tensor in load(result.folder).network.state_dict().items():
        torch.testing.assert_close(tensor.double(), means[step - 1][name], rtol=1e-4, atol=1e-6)
    kept = next(e for e in events_of(result.folder, "evaluation") if e.get("kept") and e["split"] == "validation")
    wanted = next(event for event in averaged if event["step"] == step)
    assert (kept["weights"], kept["accuracy"]) == ("averaged", wanted["accuracy"])
    result.bundle.network.load_state_dict(weights_by_step[8])
    validation = config.data.open().validation
    assert validation is not None
    measured = Accuracy()(Outputs(result.bundle), validation, validation)
    assert measured["cross_entropy"] == pytest.approx(during[2]["cross_entropy"], rel=1e-6)


@pytest.mark.slow
def test_patience_ends_the_run(initial: Initial, from_model: Make, colour_folder: Path) -> None:
    shown = Display()
    config = from_model(initial(classes=COLOURS), colour_folder, patience=2, **STILL)
    result = train(config, log=Log(shown))
    run = result.folder
    assert steps_of(run, "evaluation")[:-1] == [4, 8, 12]
    (early,) = events_of(run, "ended early")
    assert (early["step"], early["patience"], early["best"]) == (12, 2, 4)
    assert steps_of(run, "checkpoint") == [8, 12], "the last step has one"
    (finished,) = events_of(run, "finished")
    assert (finished["step"], finished["steps"]) == (12, 12.0)
    assert result.summary["steps"] == 12 and result.bundle.provenance["step"] == 4
    assert "ended early, after step 12 of 24: step 4 is still the best after 2 more evaluations" in shown.notes
    with pytest.raises(RunError, match=r"it ended early, after 12 of its 24 steps\. To train it further"):
        resume(run)
    longer = resume(run, changes={"steps": 40})
    (early,) = events_of(run, "ended early")
    assert (early["step"], longer.summary["steps"]) == (21, 21), "patience counts again from the extension on"


@pytest.mark.slow
def test_patience_is_remembered(initial: Initial, from_model: Make, colour_folder: Path) -> None:
    run = train_until(from_model(initial(classes=COLOURS), colour_folder, patience=2, **STILL), 9)
    resume(run)
    assert steps_of(run, "evaluation")[:-1] == [4, 8, 12]


@pytest.mark.slow
def test_a_run_that_ended_early_and_was_killed_in_its_last_measurements_takes_no_further_step(
    initial: Initial, from_model: Make, colour_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = from_model(initial(classes=COLOURS), colour_folder, patience=2, **STILL)
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.training.run.write_examples", crash)
        with pytest.raises(MemoryError):
            train(config)
    result = resume(Path(config.run.folder or ""))
    assert events_of(result.folder, "step")[-1]["step"] == 12 and result.summary["steps"] == 12
    assert len(events_of(result.folder, "ended early")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, {"average": 0.5}, {"lora_rank": 2, "average": 0.5}, {"train_blocks": 1}], ids=str
)
def test_probes_see_the_model_that_would_be_kept_and_change_nothing(
    fields: dict[str, Any], initial: Initial, from_model: Make, colour_folder: Path, tmp_path: Path
) -> None:
    model = initial()
    seen: list[Bundle] = []

    def measure(outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        torch.rand(7)
        seen.append(outputs.bundle)
        with torch.inference_mode():
            return {"sum": float(outputs.bundle.network(torch.ones(1, 3, 21, 28)).sum())}

    probes = [Probe("sum", 5, measure), Probe("often", 3, lambda outputs, train, held_out: {"three": 3.0})]
    settings = {"keep": "last", "dropout": 0.3, **fields}
    result = train(from_model(model, colour_folder, **settings), probes=probes)
    plain = train(from_model(model, colour_folder, run=str(tmp_path / "plain"), **settings))
    assert model_bytes(result.folder) == model_bytes(plain.folder)
    events = events_of(result.folder, "probe")
    assert [(event["step"], event["name"]) for event in events] == [
        (3, "often"), (5, "sum"), (6, "often"), (9, "often"), (10, "sum"), (12, "sum"), (12, "often"),
    ]  # fmt: skip
    assert {event["weights"] for event in events} == {"averaged" if "average" in fields else "trained"}
    assert [event["three"] for event in events if event["name"] == "often"] == [3.0] * 4
    assert all(not bundle.network.training for bundle in seen)
    last = load(result.folder).network.state_dict()
    assert last.keys() == seen[-1].network.state_dict().keys()
    for name, tensor in seen[-1].network.state_dict().items():
        assert torch.equal(tensor, last[name]), f"{name}, which later steps do not touch"
    with torch.inference_mode():
        logits = load(result.folder).network(torch.ones(1, 3, 21, 28))
    assert events[-2]["sum"] == pytest.approx(float(logits.sum()), abs=1e-5)


@pytest.mark.slow
def test_probes_go_on_when_a_run_is_resumed(tiny: Make, tmp_path: Path) -> None:
    probes = [Probe("one", 4, lambda outputs, train, held_out: {"one": 1.0})]
    train_until(tiny(), 5, probes=probes)
    resume(tmp_path / "run", probes=probes)
    assert steps_of(tmp_path / "run", "probe") == [4, 8, 12]


def test_probes_need_a_validation_split(
    initial: Initial, from_model: Make, colour_folder: Path, tmp_path: Path
) -> None:
    fields = {"probe": "knn", "validation_share": 0.0, "keep": "last", "evaluations": 0}
    with pytest.raises(ConfigError, match="data has no validation split"):
        train(from_model(initial(), colour_folder, **fields))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("select", "best"),
    [
        (None, [True, True, False]),  # mean average precision, because images have several labels
        ("accuracy", [True, False, False]),
        ("cross_entropy", [True, False, True]),
    ],
)
def test_the_tasks_metric_chooses_the_best_weights(
    select: str | None, best: list[bool], folder_config: Make, colour_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = "".join(f"red/{number:02}.png,1,{number % 2}\nblue/{number:02}.png,0,1\n" for number in range(12))
    (colour_folder / "labels.csv").write_text("file,warm,cold\n" + rows)
    results = iter([(0.9, 0.2, 1.0), (0.5, 0.7, 2.0), (0.8, 0.6, 0.5), (0.5, 0.7, 1.0)])  # the last one is of the end

    def measured(self: Accuracy, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        accuracy, precision, loss = next(results)
        return {"accuracy": accuracy, "mean_average_precision": precision, "cross_entropy": loss, "images": 7.0}

    monkeypatch.setattr(Accuracy, "__call__", measured)
    config = folder_config(colour_folder / "labels.csv", keep="best", loss="sigmoid", select=select, steps=3)
    result = train(config)
    events = [event for event in events_of(result.folder, "evaluation") if "best" in event]
    assert [event["best"] for event in events] == best
    assert result.metrics == {"validation_accuracy": 0.5, "validation_mean_average_precision": 0.7}
    assert result.bundle.provenance["step"] == [event["step"] for event in events if event["best"]][-1]
