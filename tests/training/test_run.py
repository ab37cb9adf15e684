"""Tests of a run from config to model: its files, the images that it uses for each purpose, and its folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail.training.run as run_module
import vitrail.training.state as making_module
from tests.listening import Display
from tests.make import MemorySource, keys_of, make_colour_folder, targets_of
from tests.training.jobs import Finished, Make, Outcome, events_of, model_bytes, steps_of, train_until, values_of
from vitrail.data.batch import Batch
from vitrail.data.source import Sample
from vitrail.data.sources import OpenedData, open_data
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError, RunError
from vitrail.models.compiled import compile_blocks
from vitrail.training import loop as loop_module
from vitrail.training.after_step import Run
from vitrail.training.folder import read_record
from vitrail.training.log import Log, read_journal
from vitrail.training.run import resume, train
from vitrail.training.state import TrainState
from vitrail.weights.load import load


def test_everything_is_in_its_place(finished: Finished) -> None:
    result = finished.result
    names = {path.relative_to(result.folder).as_posix() for path in result.folder.rglob("*") if path.is_file()}
    step = {"manifest.json", "state.json", ".metadata", "__0_0.distcp"}
    assert names == {
        "run.json", "journal.jsonl", "progress.html", "model/model.json", "model/model.safetensors",
        *(f"checkpoints/step-{number}/{name}" for number in (16, 24) for name in step),
        *(path.relative_to(result.folder).as_posix() for path in (example.path for example in result.examples)),
    }  # fmt: skip


def test_the_journal_tells_the_run(finished: Finished) -> None:
    config, result = finished
    events = read_journal(result.folder / "journal.jsonl")
    assert [event["event"] for event in (events[0], events[-1])] == ["started", "finished"]
    assert events[0]["steps"] == 24
    steps = events_of(result.folder)
    assert steps_of(result.folder) == list(range(1, 25))
    for event in steps:
        assert 0 <= event["accuracy"] <= 1 and 0 < event["loss"] < 10 and event["gradient_norm"] > 0
        assert event["images_per_second"] > 0
    peak = config.optimizer.learning_rate
    assert [event["learning_rate"] for event in steps[:2]] == pytest.approx([peak / 2, peak])
    measured = events_of(result.folder, "evaluation")
    assert [(event["step"], event["split"]) for event in measured[:6]] == [
        (step, "validation") for step in (4, 8, 12, 16, 20, 24)
    ]
    best = max(measured[:6], key=lambda event: (event["accuracy"], -event["cross_entropy"]))
    assert [(e["step"], e["split"], e["kept"]) for e in measured[6:]] == [
        (best["step"], "validation", True), (best["step"], "test", True),
    ]  # fmt: skip
    assert steps_of(result.folder, "checkpoint") == [8, 16, 24]
    assert events[-1]["metrics"] == result.metrics
    assert events == sorted(events, key=lambda event: event["time"])


@pytest.mark.slow
def test_two_views_of_an_image_are_one_image(tiny: Make) -> None:
    config = tiny(task="simclr", crop_area=(0.3, 1.0), steps=2, batch_size=6, evaluations=0, keep="last")
    summary = train(config).summary
    assert summary["images_per_second"] == pytest.approx(2 * 6 / summary["training_seconds"])


def test_the_model_on_disk_is_the_one_returned(finished: Finished) -> None:
    config, result = finished
    bundle = load(result.folder)
    assert set(result.metrics) == {"validation_accuracy", "test_accuracy"}
    assert bundle.metrics == result.metrics == result.bundle.metrics
    for name, tensor in result.bundle.network.state_dict().items():
        assert torch.equal(tensor, bundle.network.state_dict()[name])
    assert not result.bundle.network.training and "logits" not in repr(result)
    assert bundle.classes == tuple("0123456789") and bundle.preprocess == config.images
    assert bundle.provenance["seed"] == 0 and bundle.provenance["data"] == config.data.spec
    data = open_data(config.data.spec, validation_share=0.1)
    assert data.test is not None
    images = [data.test[index] for index in range(40)]
    guesses = bundle.predict([sample.image for sample in images])
    right = sum(int(guess.label) == sample.target for guess, sample in zip(guesses, images, strict=True))
    assert result.metrics["test_accuracy"] == right / 40


class Watching(Display):
    """A display that keeps the measured weights by step, and the result."""

    def __init__(self, states: list[TrainState]) -> None:
        self.states = states
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.results: dict[int, tuple[float, float]] = {}

    def evaluated(self, step: int, result: Mapping[str, Any], training: Mapping[str, float]) -> None:
        self.weights[step] = {k: v.clone() for k, v in self.states[-1].objective.network.state_dict().items()}
        self.results[step] = result["accuracy"], -result["cross_entropy"]


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_weights_that_were_asked_for_are_kept(
    keep: str, small: Make, tmp_path: Path, states: list[TrainState]
) -> None:
    watching = Watching(states)
    result = train(small(tmp_path / "run", keep=keep, learning_rate=0.03, schedule="constant"), log=Log(watching))
    best = max(watching.results, key=lambda step: watching.results[step])
    assert best != 24, "the best and the last weights must differ for this test to tell"
    step = best if keep == "best" else 24
    kept = load(result.folder).network.state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in watching.weights[step].items())
    assert result.metrics["validation_accuracy"] == watching.results[step][0]


class Noting(MemorySource):
    """A source that records when samples were read."""

    def __init__(self, source: Any, log: list[str], name: str) -> None:
        images = [source[index].image for index in range(len(source))]
        super().__init__(images, labels=targets_of(source), keys=keys_of(source), classes=source.classes)
        self.log, self.name = log, name

    def __getitem__(self, index: int) -> Sample:
        self.log.append(self.name)
        return super().__getitem__(index)


def test_held_out_images_are_never_trained_on_and_the_test_split_waits(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    config = tiny(steps=24, flip=False)
    splits = config.data.open()
    noting = Splits(*(Noting(getattr(splits, name), log, name) for name in ("train", "validation", "test")))
    opened = OpenedData(config.data.spec, noting)
    trained: list[Batch] = []
    real = run_module.fit

    def fit(run: Run, state: TrainState) -> None:
        state.objective.register_forward_pre_hook(lambda module, inputs: trained.append(inputs[0]))
        real(run, state)
        log.append("trained")

    monkeypatch.setattr(run_module, "fit", fit)
    train(config, data=opened)
    assert splits.validation is not None
    cut, of_train = {*keys_of(splits.validation)}, keys_of(splits.train)
    keys = [of_train[index] for batch in trained for index in batch.samples.tolist()]
    assert len(keys) == 24 * 16 and len(set(keys)) == 179, "two epochs see every training image"
    assert len(cut) == 21 and not cut & set(keys)
    held_out = {splits.validation[index].image.tobytes() for index in range(21)}  # type: ignore[union-attr]
    pixels = torch.cat([batch.images for batch in trained])
    as_bytes = ((pixels * 0.353 + 0.286) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    assert not held_out & {image.tobytes() for image in as_bytes}
    assert {splits.train[index].image.tobytes() for index in range(179)} & {image.tobytes() for image in as_bytes}
    before, after = log[: log.index("trained")], log[log.index("trained") :]
    assert {*before} == {"train", "validation"} and {*after} >= {"validation", "test"}


def test_the_test_split_has_no_say_in_the_model(tiny: Make, tmp_path: Path) -> None:
    first = train(tiny(run=str(tmp_path / "first"), steps=4, evaluations=1))
    labels = Path(tiny().data.spec) / "t10k-labels-idx1-ubyte"
    data = labels.read_bytes()
    labels.write_bytes(data[:8] + bytes(9 - label for label in data[8:]))
    second = train(tiny(run=str(tmp_path / "second"), steps=4, evaluations=1))
    assert first.metrics["test_accuracy"] != second.metrics["test_accuracy"]
    assert first.metrics["validation_accuracy"] == second.metrics["validation_accuracy"]
    assert model_bytes(first.folder) == model_bytes(second.folder)


@pytest.mark.slow
def test_the_seed_decides(small: Make, tmp_path: Path) -> None:
    def model(name: str, seed: int) -> bytes:
        return model_bytes(train(small(tmp_path / name, seed=seed, steps=3, evaluations=1, checkpoints=1)).folder)

    assert model("a", 1) == model("b", 1) != model("c", 2)


@pytest.mark.slow
def test_a_deterministic_run_computes_the_same_bits_in_bf16(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    plain = loop_module.after_step

    def watched(*args: Any) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        plain(*args)

    monkeypatch.setattr(loop_module, "after_step", watched)
    weights = []
    for name in ("one", "two"):
        config = small(tmp_path / name, deterministic=True, precision="bf16", steps=2, evaluations=1, checkpoints=1)
        run = train(config)
        weights.append(run.bundle.network.state_dict())
        assert read_record(tmp_path / name).config.run.compute_threads == torch.get_num_threads()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert seen == [True] * 4 and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_runs_that_choose_leave_the_test_split_alone(tiny: Make, tmp_path: Path) -> None:
    short = {"steps": 4, "evaluations": 2}
    first = train(tiny(run=str(tmp_path / "first"), **short))
    train_until(tiny(**short), 3, measure_test=False)
    second = resume(tmp_path / "run", measure_test=False)
    assert set(second.metrics) == {"validation_accuracy"} and "test_accuracy" in first.metrics
    assert {event["split"] for event in events_of(second.folder, "evaluation")} == {"validation"}
    assert {example.path.name for example in second.examples} != {example.path.name for example in first.examples}
    assert model_bytes(first.folder) == model_bytes(second.folder)


@pytest.mark.slow
def test_overwrite_replaces_a_run_and_nothing_else(tiny: Make, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(tiny(steps=2))
    for name in ("notes.txt", "model/notes.txt", "examples/mine.jpg"):
        (folder / name).touch()
        with pytest.raises(RunError, match=rf"also holds files that a run does not write \({name}\)"):
            train(tiny(steps=3, overwrite=True))
        (folder / name).unlink()
    result = train(tiny(steps=3, overwrite=True))
    assert [event["steps"] for event in events_of(folder, "started")] == [3] and result.folder == folder
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"is not the folder of a run \(it has no run\.json\), so it is not overwritten"):
        train(tiny(overwrite=True))
    assert (folder / "thesis.tex").exists()


@pytest.mark.slow
def test_a_mistake_overwrites_nothing(tiny: Make, tmp_path: Path) -> None:
    train(tiny(steps=2))
    before = (tmp_path / "run" / "journal.jsonl").read_bytes()
    for fields in ({"data": str(tmp_path / "nowhere")}, {"width": 15}, {"device": "cuda:77"}):
        with pytest.raises((DataError, ConfigError)):
            train(tiny(overwrite=True, **fields))
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"validation_share": 0.0}, {"evaluations": 0}], ids=str)
def test_the_best_cannot_be_kept_unmeasured(fields: dict[str, Any], tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^keep='best' needs a validation split and evaluations, .* keep='last'$"):
        train(tiny(**fields))
    assert not (tmp_path / "run").exists()
    result = train(tiny(keep="last", steps=2, **fields))
    measured = {event["split"] for event in events_of(result.folder, "evaluation")}
    assert measured == ({"test"} if "validation_share" in fields else {"validation", "test"})


def break_images(folder: Path) -> set[str]:
    """Add four broken files to the images, and return their keys."""
    whole = (folder / "red" / "00.png").read_bytes()
    broken = {
        "red/empty.png": b"", "blue/page.jpg": b"<html>Not found</html>", "green/cut.png": whole[: len(whole) // 2],
        "blue/noise.png": bytes(range(256)),
    }  # fmt: skip
    for key, data in broken.items():
        (folder / key).write_bytes(data)
    return set(broken)


@pytest.mark.slow
def test_broken_images_are_skipped_and_named_once(folder_config: Make, colour_folder: Path, outcome: Outcome) -> None:
    broken = break_images(colour_folder)
    config = folder_config(colour_folder, steps=30, max_skipped=0.5, validation_share=0.2)
    splits = open_data(config.data.spec, validation_share=0.2)
    in_training = {splits.train.key(index) for index in range(len(splits.train))} & broken
    assert len(in_training) >= 2
    run = Path(config.run.folder or "")
    train_until(config, 17)
    assert 2 * len(splits.train) < 17 * 8, "all of the images were seen, some twice"
    result = resume(run)
    named = {event["key"]: event["reason"] for event in events_of(run, "skipped")}
    assert len(events_of(run, "skipped")) == len(broken), "each once, those held out for validation included"
    assert named.keys() == broken and named["red/empty.png"] == "is empty (0 bytes)"
    assert set(outcome(run)["values"]["skipped"]) == in_training
    assert {event["skipped"] for event in events_of(run, "evaluation")} == {len(broken - in_training)}
    assert all(0 <= loss < 10 for (loss,) in values_of(run, "loss"))
    assert result.metrics["validation_accuracy"] >= 0


@pytest.mark.slow
def test_too_many_broken_images_end_the_run(folder_config: Make, colour_folder: Path) -> None:
    broken = break_images(colour_folder)
    config = folder_config(colour_folder, steps=30, validation_share=0.0, keep="last", max_skipped=0.08)
    with pytest.raises(DataError, match=r"^4 training images cannot be decoded, more than the 3 that --max-skipped "):
        train(config)
    run = Path(config.run.folder or "")
    assert {event["key"] for event in events_of(run, "skipped")} == broken and not events_of(run, "finished")
    train(folder_config(colour_folder, steps=10, validation_share=0.0, keep="last", max_skipped=0.1, overwrite=True))


@pytest.mark.slow
def test_broken_images_of_held_out_splits_are_named_once(folder_config: Make, tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        make_colour_folder(tmp_path / "data" / name, images=8)
        if name != "train":
            (tmp_path / "data" / name / "red" / "01.png").write_bytes(b"")
    display = Display()
    result = train(folder_config(tmp_path / "data", steps=4), log=Log(display))
    assert sorted(note for note in display.notes if "skipped" in note) == [
        f"skipped red/01.png of the {split} split: is empty (0 bytes)" for split in ("test", "validation")
    ]
    events = {(event["split"], event["key"]) for event in events_of(result.folder, "skipped")}
    assert events == {("validation", "red/01.png"), ("test", "red/01.png")}


def test_a_file_that_vanishes_is_named(folder_config: Make, colour_folder: Path) -> None:
    config = folder_config(colour_folder, steps=30, validation_share=0.0, keep="last", max_skipped=0.0)
    vanish = Log(lambda event: (colour_folder / "red" / "00.png").unlink() if event["event"] == "started" else None)
    with pytest.raises(DataError, match=r"^1 training images cannot be decoded, .*red/00\.png: No such file"):
        train(config, log=vanish)


@pytest.mark.slow
def test_a_run_in_float8_learns_and_leaves_a_plain_model(tiny: Make) -> None:
    result = train(tiny(precision="float8", steps=60, flip=False, shift=0, learning_rate=0.01))
    record = json.loads((result.folder / "run.json").read_text(encoding="utf-8"))
    assert record["config"]["run"]["precision"] == "float8" and record["config"]["run"]["compile"] == "auto"
    losses = [loss for (loss,) in values_of(result.folder, "loss")]
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0]
    assert result.metrics["test_accuracy"] > 0.3
    assert all(tensor.dtype == torch.float32 for tensor in load(result.folder).network.state_dict().values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"precision": "float8", "width": 24, "mlp_width": 40}, "precision='float8' needs dense layers"),
        ({"compile": "graphs"}, "compile='graphs' needs CUDA, but this device is 'cpu'"),
        ({"compile": "on", "variant": "BiT-R26x1", **dict.fromkeys(("width", "depth", "heads", "mlp_width"))},
         "compile='on' compiles a transformer's blocks"),
    ],
)  # fmt: skip
def test_what_this_network_or_machine_cannot_do_is_said_before_anything_is_written(
    fields: dict[str, Any], message: str, tiny: Make, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tiny(**fields))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_run_follows_a_plain_one_and_resumes_exactly(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types_unchecked: None
) -> None:
    monkeypatch.setattr(making_module, "compile_blocks", partial(compile_blocks, backend="aot_eager"))
    fields = {"steps": 12, "stochastic_depth": 0.0, "dropout": 0.0}
    folders = [train(tiny(compile=name, run=str(tmp_path / name), **fields)).folder for name in ("on", "off")]
    train_until(tiny(compile="on", **fields), 5)
    folders.append(resume(tmp_path / "run").folder)
    compiled, plain, resumed = (load(folder).network.state_dict() for folder in folders)
    assert compiled.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-2, atol=1e-4)
        assert torch.equal(compiled[name], resumed[name])
