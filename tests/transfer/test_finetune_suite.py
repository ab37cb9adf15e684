"""Fine-tuning on the tasks of a suite: the images that each task learns from, what is done again, and the results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.listening import Display
from tests.make import idx_bytes, keys_of, make_colour_folder
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import DataError, NonFiniteLoss, RunError, Stopped
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.variants import build
from vitrail.training import after_step
from vitrail.training.after_step import Run
from vitrail.training.config import TrainConfig
from vitrail.training.folder import read_record
from vitrail.training.log import Log, read_journal
from vitrail.training.state import TrainState
from vitrail.transfer.finetune import Method
from vitrail.transfer.suite import Suite, SuiteResult, finetune_suite, is_suite_run, open_task, read_suite
from vitrail.weights.bundle import Bundle

QUICK = {
    "steps": 2, "batch_size": 4, "precision": "float32", "device": "cpu", "threads": 1, "image_size": (14, 21),
    "checkpoints": 1,
}  # fmt: skip


Tune = Callable[..., SuiteResult]


@pytest.fixture(scope="session")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of three tasks of VTAB-1k: more than 1,000 training images and a test split, as IDX files."""
    root, random = tmp_path_factory.mktemp("downloads"), np.random.default_rng(0)
    for name, images in (("dtd", 1040), ("dspr-loc", 1000), ("clevr-count", 1010)):
        (root / name).mkdir()
        for prefix, count in (("train", images), ("t10k", 20)):
            labels = (np.arange(count) % 5).astype(np.uint8)
            pixels = (random.integers(0, 50, (count, 4, 6)) + 40 * labels[:, None, None]).astype(np.uint8)
            for array, kind in ((pixels, "images-idx3"), (labels, "labels-idx1")):
                (root / name / f"{prefix}-{kind}-ubyte").write_bytes(idx_bytes(array))
    return root


@pytest.fixture
def vtab() -> Suite:
    """VTAB-1k without names on the hub, so that nothing is downloaded."""
    suite = read_suite("vtab-1k")
    return replace(suite, tasks=tuple(replace(task, data="", where="nowhere") for task in suite.tasks))


@pytest.fixture
def small(tmp_path: Path) -> Suite:
    """A suite of two tasks and a half, of 12 images to learn from each."""
    for name in ("near", "far"):
        make_colour_folder(tmp_path / "data" / name / "train", images=6)
        make_colour_folder(tmp_path / "data" / name / "test", images=2)
    text = "".join(
        f'[[tasks]]\nname = "{name}"\ngroup = "{group}"\ntrain = "[:12]"\nwhere = "ask"\n'
        for name, group in (("near", "a"), ("gone", "a"), ("far", "b"))
    )
    (tmp_path / "small.toml").write_text(f'name = "small"\n[evaluators.linear]\n{text}')
    return read_suite(tmp_path / "small.toml")


@pytest.fixture
def tuned(tiny_bundle: Bundle, model: Path, tmp_path: Path) -> Tune:
    """Fine-tunes on a suite, two steps per task."""

    def finetuned(suite: Suite, folder: Path | None = None, **options: Any) -> SuiteResult:
        bundle = options.pop("bundle", tiny_bundle)
        method = Method(**{"explicit": {}, **options.pop("method", {})})
        method = replace(method, explicit=QUICK | dict(method.explicit))
        base = TrainConfig().override(**{"init": str(model), **method.explicit})
        place = options.pop("place", tmp_path / "runs")
        return finetune_suite(
            suite, bundle, base, folder=folder or tmp_path / "data", place=place, method=method, **options
        )

    return finetuned


@pytest.mark.slow
def test_vtab_is_fine_tuned_as_in_the_paper(vtab: Suite, downloads: Path, tuned: Tune, tmp_path: Path) -> None:
    """Once for all 1,000 images, at a learning rate of 0.01, with BiT's crops except where they change the label."""
    result = tuned(vtab, downloads, method={"protocol": "paper"})
    done = {row.task.name: row.metrics for row in result.rows if row.reason is None}
    assert [*done] == ["dtd", "clevr-count", "dspr-loc"]
    for metrics in done.values():
        assert (metrics["training_images"], metrics["test_images"], metrics["learning_rate"]) == (1000, 20, 0.01)
    assert {row.reason for row in result.rows} == {None, "nowhere"}
    means = result.means()
    assert means[None]["accuracy"] == (sum(each["accuracy"] for each in done.values()) / 3, 3)
    assert means["natural"]["accuracy"] == (done["dtd"]["accuracy"], 1) and "accuracy" not in means["specialised"]
    augments = {name: read_record(tmp_path / "runs" / name).config.augment for name in done}
    assert {name: (each.crop_from, each.flip) for name, each in augments.items()} == {
        "dtd": ((16, 24), True), "clevr-count": (None, True), "dspr-loc": (None, False)
    }  # fmt: skip
    assert all(each.settings.crop_area is None for each in augments.values())
    plain = json.loads((tmp_path / "runs" / "suite.json").read_text())
    assert plain["tasks"]["dtd"] == {"group": "natural", "metrics": done["dtd"]}
    assert plain["protocol"] == "paper" and plain["all"]["accuracy"]["tasks"] == 3
    assert not [*(tmp_path / "runs").glob("*-trials")]


@pytest.mark.slow
def test_200_images_choose_the_learning_rate_and_all_1000_are_then_learned_from(
    vtab: Suite, downloads: Path, tuned: Tune, tmp_path: Path
) -> None:
    (row,) = tuned(only_dtd(vtab), downloads, method={"protocol": "paper", "rates": (0.003, 0.1)}).rows
    run, trials = tmp_path / "runs" / "dtd", tmp_path / "runs" / "dtd-trials"
    images = {}
    for folder in (run, *trials.iterdir()):
        data = json.loads((folder / "run.json").read_text())["data"]
        images[folder.name] = data["train"], data["validation"]
    assert images == {"dtd": (1000, 0), "learning-rate-0.003": (800, 200), "learning-rate-0.1": (800, 200)}

    def finished(folder: Path) -> dict[str, float]:
        (event,) = [event for event in read_journal(folder / "journal.jsonl") if event["event"] == "finished"]
        return event["metrics"]

    accuracies = {rate: finished(trials / f"learning-rate-{rate:g}")["validation_accuracy"] for rate in (0.003, 0.1)}
    assert accuracies[row.metrics["learning_rate"]] == max(accuracies.values())  # the loss decides between equal ones
    assert row.task.name == "dtd" and row.metrics["accuracy"] == finished(run)["test_accuracy"]


def only_dtd(vtab: Suite) -> Suite:
    return replace(vtab, tasks=(vtab.tasks[2],))


@pytest.mark.slow
def test_the_pool_is_the_same_for_every_model_seed_and_method(
    vtab: Suite, downloads: Path, tuned: Tune, tiny_bundle: Bundle, tmp_path: Path
) -> None:
    only = only_dtd(vtab)
    first, again = (keys_of(open_task(only.tasks[0], downloads, lambda note: None).train) for _ in range(2))
    assert first == again and len(set(first or ())) == 1000
    other = Bundle(tiny_bundle.network.with_head(0), (), tiny_bundle.preprocess)
    fingerprints = set()
    for number, options in enumerate((
        {"method": {"protocol": "paper", "explicit": {"seed": 7}}},
        {"method": {"rates": (0.1,)}, "bundle": other},
        {"method": {"explicit": {"seed": 3}}},
    )):  # fmt: skip
        tuned(only, downloads, place=tmp_path / str(number), **options)
        fingerprints.add(read_record(tmp_path / str(number) / "dtd").fingerprint)
    assert len(fingerprints) == 1


@pytest.mark.slow
def test_a_stopped_suite_continues_and_what_is_finished_stays(small: Suite, tuned: Tune, tmp_path: Path) -> None:
    near, far = tmp_path / "runs" / "near", tmp_path / "runs" / "far"
    usual = after_step.report

    def report(run: Run, state: TrainState) -> None:
        usual(run, state)
        run.stop.is_asked |= run.folder.name == "far"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(after_step, "report", report)
        with pytest.raises(Stopped) as stop:
            tuned(small)
    assert stop.value.run == far and is_suite_run(far)
    plain = json.loads((tmp_path / "runs" / "suite.json").read_text())
    assert {name: "skipped" in row for name, row in plain["tasks"].items()} == {"near": False, "gone": True}
    before, page = (near / "journal.jsonl").read_bytes(), (near / "report.html").stat().st_mtime_ns
    result = tuned(small)
    assert [row.reason for row in result.rows] == [None, "ask", None]
    assert (near / "journal.jsonl").read_bytes() == before, "a finished task is not done again"
    assert (near / "report.html").stat().st_mtime_ns == page
    events = [event["event"] for event in read_journal(far / "journal.jsonl")]
    assert "resumed" in events and events[-1] == "finished"
    (near / "report.html").unlink()  # as if it was killed before it wrote it
    assert tuned(small) == result and (near / "report.html").is_file()


@pytest.mark.slow
def test_a_task_that_comes_later_is_added(small: Suite, tuned: Tune, tmp_path: Path) -> None:
    tuned(small)
    (tmp_path / "data" / "gone").mkdir()
    (tmp_path / "data" / "far" / "train").rename(tmp_path / "data" / "gone" / "train")
    display = Display()
    result = tuned(small, log=Log(display))
    assert result.rows[1].metrics["training_images"] == 12 and result.rows[1].metrics["test_images"] == 2
    assert result.rows[2].reason is not None and "task gone, 2 of 3" in display.said + display.notes
    page = (tmp_path / "runs" / "gone" / "report.html").read_text()
    assert "vitrail predict" in page and "vitrail evaluate" not in page, "the data has no split to measure again"
    assert "--split test" in (tmp_path / "runs" / "near" / "report.html").read_text()


def test_results_of_tasks_that_the_suite_has_no_more_are_named(
    small: Suite, tuned: Tune, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    about = {"model": str(model), "protocol": "rule", "tasks": {"near": {}, "older": {}}}
    (tmp_path / "runs/suite.json").write_text(json.dumps({"suite": "small", **about}))
    display = Display()
    gone = replace(small, tasks=tuple(replace(task, data="", where="ask") for task in small.tasks))
    with pytest.raises(DataError):
        tuned(gone, tmp_path, log=Log(display))
    assert "older" in display.notes[0] and "near" not in display.notes[0]


@pytest.mark.slow
def test_the_users_settings_replace_the_suites(small: Suite, tuned: Tune, tmp_path: Path) -> None:
    suite = replace(small, tasks=(replace(small.tasks[0], flip=False, crop=False),))
    given = {"flip": True, "crop_area": (0.5, 1.0), "validation_share": 0.25}
    for explicit, expected in (({}, (False, None, 0)), (given, (True, (0.5, 1.0), 0.25))):
        place = tmp_path / str(len(explicit))
        tuned(suite, place=place, method={"explicit": {"steps": 1, **explicit}})
        config = read_record(place / "near").config
        assert (config.augment.flip, config.augment.settings.crop_area, config.data.validation_share) == expected


@pytest.mark.slow
def test_bits_rule_fine_tunes_a_suite(small: Suite, tuned: Tune, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = build(ResNetConfig(depths=(1, 1), width=32, image_size=(32, 32), num_classes=4))
    bundle = Bundle(network.eval(), ("a", "b", "c", "d"), Preprocess(image_size=(32, 32)))
    suite = replace(small, tasks=(small.tasks[0], replace(small.tasks[2], crop=False)))
    place = bundle.save(tmp_path / "resnet")
    explicit = {"image_size": (24, 24), "init": str(place), "steps": 5}
    result = tuned(suite, bundle=bundle, method={"protocol": "bit", "explicit": explicit})
    assert [row.metrics["learning_rate"] for row in result.rows] == [0.003, 0.003]
    crops = [read_record(tmp_path / "runs" / task.name).config.augment.crop_from for task in suite.tasks]
    assert crops == [(30, 30), None]


@pytest.mark.slow
def test_numbers_are_fine_tuned(tuned: Tune, brightness: Path, tmp_path: Path) -> None:
    task = f'name = "grey"\ngroup = "numbers"\ndata = "{brightness}"\nnumbers = ["brightness"]\n'
    head = 'name = "several"\ngroup = "labels"\nwhere = "nowhere"\nevaluators.accuracy.real = "public"\n'
    (tmp_path / "suite.toml").write_text(f'name = "n"\n[evaluators.linear]\n[[tasks]]\n{task}[[tasks]]\n{head}')
    result = tuned(read_suite(tmp_path / "suite.toml"))
    assert "r2" in result.rows[0].metrics and result.columns() == ("r2",)
    assert result.rows[1].reason is not None and "there is nothing to fine-tune" in result.rows[1].reason


@pytest.mark.slow
def test_a_run_that_diverges_is_skipped_with_the_reason(small: Suite, tuned: Tune) -> None:
    explicit = {"learning_rate": 1e30, "optimizer": "sgd", "steps": 6, "clip": 0.0}
    with pytest.raises(DataError, match=r"suite small: no task could be measured:\n  near: .*the run diverged"):
        tuned(small, method={"explicit": explicit})
    with pytest.raises(NonFiniteLoss, match=r"task near: .*the run diverged"):
        tuned(small, method={"explicit": explicit}, strict=True)


@pytest.mark.slow
def test_what_cannot_be_used(small: Suite, tuned: Tune, tmp_path: Path) -> None:
    rows = tuned(small).rows
    moved = (tmp_path / "runs").rename(tmp_path / "moved")
    assert tuned(small, place=moved).rows == rows, "a folder can be moved"
    moved.rename(tmp_path / "runs")
    results = (tmp_path / "runs" / "suite.json").read_bytes()
    with pytest.raises(RunError, match=r"near contains a run with other settings: steps was 2 and is 3"):
        tuned(small, method={"explicit": {"steps": 3}})
    with pytest.raises(RunError, match=r"with other settings: model was .* and is 'other'"):
        tuned(small, method={"explicit": {"init": "other"}})
    assert (tmp_path / "runs" / "suite.json").read_bytes() == results, "refused calls leave the results"
    with pytest.raises(RunError, match="runs of a suite with other settings: suite was 'small' and is 'other'"):
        tuned(replace(small, name="other"))
    (tmp_path / "runs" / "suite.json").write_text("{")
    with pytest.raises(RunError, match=r"suite.json is damaged: .*; choose another --name"):
        tuned(small)
    with pytest.raises(RunError, match="data exists and does not hold the runs of a suite: it has no suite"):
        tuned(small, place=tmp_path / "data")
