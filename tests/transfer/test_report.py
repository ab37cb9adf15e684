"""Tests of the report of a run, which is made from the files in the run's folder."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image

from tests.evaluation.memory import MemorySource
from tests.targets import number_targets, single_labels
from vitrail.data.batch import Skipped
from vitrail.data.source import Source, samples_of
from vitrail.data.sources import open_data
from vitrail.errors import RunError, SaveError
from vitrail.evaluation.metrics.report import ClassificationReport, regression_report, report
from vitrail.evaluation.outputs import Outputs, Predictions
from vitrail.models.variants import create
from vitrail.recipes import RECIPES
from vitrail.training.config import TrainConfig
from vitrail.training.log import Log
from vitrail.training.optimizer import OptimizerName
from vitrail.training.page import HeldOutExample
from vitrail.training.run import train
from vitrail.transfer.report import write_report
from vitrail.transfer.trials import Tried
from vitrail.weights.answers import NumberPrediction
from vitrail.weights.bundle import Bundle

EVIL = "<script>alert('1 & 2')<"
LONG = "y" * 200


MakeRun = Callable[..., tuple[Path, Bundle]]
Write = Callable[..., str]


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders whose names are markup, long, or written from right to left, and a file that is not an image."""
    root = tmp_path_factory.mktemp("evil") / "data & <b>"
    random = np.random.default_rng(0)
    for split, count in (("train", 10), ("test", 4)):
        for channel, name in enumerate((EVIL, LONG, "שלום")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 80, (9 + number, 30 - number, 3), dtype=np.uint8)
                pixels[..., channel] += 150
                Image.fromarray(pixels).save(root / split / name / f"<i>{number}.png")
    for split in ("train", "test"):
        (root / split / LONG / "broken.png").write_text("<img src=x>")
    (root / "test" / "שלום" / "wrong.png").write_bytes((root / "test" / EVIL / "<i>0.png").read_bytes())
    return root


@pytest.fixture(scope="module")
def trained(evil: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bundle]:
    """A run with averaged weights on that folder."""
    config = RECIPES["folder"]().override(
        data=str(evil), run=str(tmp_path_factory.mktemp("runs") / "a <run>"), variant="ViT-Pico/7", width=16, depth=1,
        heads=2, mlp_width=32, image_size=(14, 21), steps=12, batch_size=8, precision="float32", device="cpu",
        threads=1, evaluations=3, checkpoints=1, validation_share=0.2, average=0.5, keep="best", max_skipped=0.5,
    )  # fmt: skip
    result = train(config)
    return result.folder, result.bundle


@pytest.mark.slow
def test_the_report_of_a_real_run(trained: tuple[Path, Bundle], evil: Path, read_page: Callable[[str], Any]) -> None:
    folder, bundle = trained
    source = open_data(str(evil), validation_share=0.2).test
    found = report(Outputs(bundle).predictions(source), temperature=1.5)
    commands = (f"vitrail predict {folder}/model '{EVIL}'", "vitrail evaluate")
    path = write_report(folder, bundle, source, "test", found, next_commands=commands)
    assert path == folder / "report.html"
    page = read_page(path.read_text(encoding="utf-8"))
    shown = "\n".join(page.text)
    assert page.names.count("h1") == 1
    assert "Report of a <run>" in page.text
    assert [text for text in page.text if text in SECTIONS] == SECTIONS
    assert EVIL in page.text and LONG in page.text and "שלום" in page.text
    assert f"{found.metrics['accuracy'].value:.2%} accuracy" in page.text
    assert "13 test images of 3 classes; 1 image could" in shown
    assert f"ViT-Pico/7, trained from scratch on {evil}." in page.text
    assert page.names.count("svg") == 5, "loss, accuracy, learning rate, confusion and calibration"
    assert page.names.count("rect") == len(found.confusion)
    assert page.names.count("img") == len(found.worst) > 0
    assert "2 images skipped" in page.text
    left_out = [text for text in page.text if text.endswith("broken.png")]
    assert len(left_out) == 2 and all(LONG in name for name in left_out)
    assert "\n".join(commands) in page.text
    assert not list(folder.glob("*-partial"))


SECTIONS = [
    "Training curves", "Settings", "Confusion matrix", "Metrics per class, worst first",
    "Calibration", "Largest errors", "2 images skipped", "Next steps",
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> MakeRun:
    """Write the folder of a run with these settings and events, and make a model for it."""

    def make(
        events: Iterable[tuple[str, dict[str, Any]]] = (),
        *,
        kept: int | None = None,
        steps: int = 100,
        note: str = "cut",
        **fields: Any,
    ) -> tuple[Path, Bundle]:
        folder = tmp_path / "run"
        folder.mkdir()
        config = TrainConfig().override(**{"data": "flowers", "image_size": (14, 21), "batch_size": 32, **fields})
        data = {"train": 320, "validation": 40, "test": 0, "fingerprint": "0", "classes": ["a", "b"], "notes": [note]}
        record = {
            "format": 2, "config": config.to_plain(), "steps": steps, "init": None, "data": data,
            "machine": {"device": "X"},
        }  # fmt: skip
        (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
        for name, values in events:
            Log(path=folder / "journal.jsonl").tell(name, **values)
        network = create("ViT-Pico/7", num_classes=2, image_size=(14, 21), width=16, depth=1, heads=2, mlp_width=32)
        provenance = {} if kept is None else {"step": kept}
        return folder, Bundle(network, ("a", "b"), config.images, provenance=provenance)

    return make


@pytest.fixture
def measured() -> ClassificationReport:
    """Return a report of two images, one of which is predicted correctly."""
    logits, labels = np.asarray([[2, 0], [1, 0]], np.float32), single_labels(np.asarray([0, 1]), 2)
    return report(Predictions(logits, labels, ("0", "1"), np.arange(2), ("a", "b")), bootstrap=20)


def step(number: int, loss: float, rate: float = 1e-3) -> tuple[str, dict[str, Any]]:
    return "step", {"step": number, "loss": loss, "learning_rate": rate, "images_per_second": 1.0}


def evaluation(number: int, accuracy: float, weights: str = "trained", **more: Any) -> tuple[str, dict[str, Any]]:
    values = {"step": number, "split": "validation", "weights": weights, "accuracy": accuracy}
    return "evaluation", {**values, **more}


@pytest.fixture
def written(
    run: MakeRun, measured: ClassificationReport, source: Source,
    read_page: Callable[[str], Any],
) -> Write:  # fmt: skip
    """Return the text of the report of such a run."""

    def write(*arguments: Any, split: str = "validation", **fields: Any) -> str:
        folder, bundle = run(*arguments, **fields)
        text = write_report(folder, bundle, source, split, measured).read_text(encoding="utf-8")
        read_page(text)
        return text

    return write


@pytest.fixture
def source(colour_folder: Path) -> Source:
    """Return images for two predictions."""
    return open_data(str(colour_folder), validation_share=0.0).train


def settings_in(text: str) -> dict[str, str]:
    text = text[text.index("<h2>Settings") :].partition("<h2>Confusion")[0]
    return dict(re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)</td></tr>", text))


def charts_in(text: str) -> dict[str, str]:
    """Return the charts of a run, by the first words of their captions."""
    section = text.partition("<h2>Confusion")[0]
    found = re.findall(r"<figcaption>([A-Za-z ]+)(.*?)</figure>", section, re.S)
    return dict(found)


def corners(text: str) -> int:
    """Return the number of corners of a line."""
    (path,) = re.findall(r'class="line one" d="([^"]*)"', text)
    return len(re.findall(r"[ML][\d. ]+", path))


def test_settings_that_matter(written: Write) -> None:
    text = written(
        [
            ("ended early", {"step": 60, "patience": 3, "best": 30}),
            ("finished", {"step": 60, "seconds": 130.0, "images_per_second": 1234.5, "peak_memory_bytes": 2.0**30}),
        ],
        kept=30, init="google/vit", train_blocks=2, optimizer="sgd", learning_rate=3e-3, layer_decay=0.75,
        warmup=0.1, average=0.999, label_smoothing=0.1, class_weights="balanced", mixup=0.2, crop_area=(0.3, 1.0),
        seed=7, precision="bf16",
    )  # fmt: skip
    shown = {
        "model": "google/vit", "trained weights": "last 2 blocks and the head", "data": "flowers: 320 train, 40 valid",
        "image size": "14 x 21", "steps": "100 with a batch size of 32 (10.0 epochs)", "optimizer": "weight decay 0.05",
        "learning rate": "0.003, cosine, warm-up 10%", "augmentation": "crop area 0.3 1.0, flip, mixup 0.2",
        "averaging": "decay 0.999", "label smoothing": "0.1", "class weights": "balanced", "saved weights": "step 30",
        "precision": "bf16", "seed": "7", "stopped early": "after step 60", "time": "2 min on X, 1,234 images/s",
    }  # fmt: skip
    found = settings_in(text)
    assert found.keys() == shown.keys() and all(shown[name] in found[name] for name in shown), found
    assert "The best weights were chosen on the same images" in text
    assert "google/vit, fine-tuned on flowers." in text and '<p class="dim">cut.</p>' in text


def test_the_learning_rate_is_that_of_the_batch_size(written: Write) -> None:
    assert settings_in(written(learning_rate=0.5, base_batch_size=16))["learning rate"].startswith("1, ")


def test_a_short_warm_up_is_not_rounded_to_0(written: Write) -> None:
    assert settings_in(written(warmup=0.003))["learning rate"].endswith("warm-up 0.3% of the steps")


@pytest.mark.parametrize("kind", get_args(OptimizerName))
def test_every_optimizer_has_a_name(written: Write, kind: str) -> None:
    assert settings_in(written(optimizer=kind))["optimizer"].lower().startswith(kind)


@pytest.mark.parametrize(
    ("kept", "linear_head", "shown"),
    [(0, True, "is the linear model of the frozen features"), (0, False, "has the initial weights"), (9, True, None)],
)
def test_the_top_says_that_training_changed_nothing(
    written: Write, kept: int, shown: str | None, *, linear_head: bool
) -> None:
    text = written(kept=kept, init="somewhere", linear_head=linear_head)
    top = text[: text.index("<table")]
    assert ("training did not improve" in top) == (shown is not None) and (shown or "") in top


def test_the_top_says_that_the_initial_model_learned_from_the_measured_images(
    run: MakeRun, measured: ClassificationReport, source: Source
) -> None:
    folder, bundle = run(kept=9, init="somewhere", note="somewhere: 9 of 13")
    for split, is_said in (("validation", True), ("test", False)):
        page = write_report(folder, bundle, source, split, measured).read_text(encoding="utf-8")
        assert ("9 of 13" in page[: page.index("<table")]) == is_said


def test_the_top_shows_each_image_once(run: MakeRun, tmp_path: Path) -> None:
    names, truth = ("age", "weight"), np.asarray([[1, 100], [2, 200], [3, 300]], np.float64)
    predicted = np.asarray([[1, 110], [5, 290], [3, 300]], np.float32)
    keys, targets = ("0.png", "1.png", "2.png"), number_targets(truth, names)
    found = regression_report(Predictions(predicted, targets, keys, np.arange(3), names, scores="numbers"), bootstrap=0)
    folder, bundle = run(task="regression", numbers=names, keep="last")
    examples = []
    for number, key in enumerate(keys):
        Image.new("RGB", (9, 9)).save(tmp_path / key)
        guess = NumberPrediction(names, tuple(predicted[number].tolist()))
        examples.append(HeldOutExample(tmp_path / key, key, (f"example {number}",), guess))
    source = samples_of(MemorySource([np.zeros((9, 9, 3), np.uint8)] * 3, labels=[0] * 3, classes=names))
    source = replace(source, targets=targets)
    page = write_report(folder, bundle, source, "validation", found, examples=examples).read_text(encoding="utf-8")
    top = page[page.index("<h2>Held-out images") : page.index("<h2>Settings")]
    assert top.count("<figure") == 3 and all(top.count(text) == 1 for text in ("0.png", "1.png"))
    assert "example 2" in top and "example 0" not in top and "example 1" not in top


@pytest.mark.parametrize("steps", [0, 5])
def test_trials_chose_the_settings_if_there_were_any(
    run: MakeRun, measured: ClassificationReport, source: Source, steps: int
) -> None:
    folder, bundle = run([evaluation(0, 0.5)], kept=10)
    bundle.metrics["validation_accuracy"] = 0.75
    tried = [Tried("a linear model", 0, 0.5), *[Tried("a rate", steps, 0.6) for _ in range(steps)]]
    page = write_report(folder, bundle, source, "validation", measured, tried=tried).read_text(encoding="utf-8")
    assert "75.00%" in page and ("They chose the settings" in page) == ("<h2>Trials</h2>" in page) == (steps > 0)


def test_the_curves_are_the_journal(written: Write) -> None:
    events = [step(10, 2.0, 1e-4), step(20, 1.0, 3e-4), evaluation(20, 0.5), step(40, math.nan, 2e-4)]
    events += [step(100, 0.5, 0.0)]
    events += [evaluation(100, 0.8, best=True), evaluation(100, 0.8, kept=True)]
    charts = charts_in(written(events, kept=100, keep="last"))
    assert [*charts] == ["Validation accuracy", "Training loss", "Learning rate"]
    assert corners(charts["Training loss"]) == 3, "without the one that is not a number"
    assert 'aria-label="Training loss: 2 at step 10, 0.5 at step 100."' in charts["Training loss"]
    assert 'aria-label="Learning rate: 0.0001 at step 10, 0 at step 100."' in charts["Learning rate"]
    accuracy = charts["Validation accuracy"]
    assert "50 at step 20, 80 at step 100." in accuracy and ">last, saved: 80.00%</text>" in accuracy
    assert corners(accuracy) == 2 and "line two" not in accuracy


def test_averaged_weights_come_first(written: Write) -> None:
    events = [one for at in (50, 100) for one in (evaluation(at, at / 200), evaluation(at, at / 150, "averaged"))]
    accuracy = charts_in(written(events, kept=50))["Validation accuracy of the weights"]
    assert '<span class="legend one">averaged</span> <span class="legend two">trained</span>' in accuracy
    assert "averaged weights: 33.33 at step 50, 66.67 at step 100." in accuracy
    assert ">best, saved: 33.33%</text>" in accuracy


def skipped(key: str) -> tuple[str, dict[str, Any]]:
    return "skipped", {"step": 9, "key": key, "reason": "is <cut> short"}


def test_what_was_left_out_is_named_with_its_split(written: Write) -> None:
    checkpoint = ("checkpoint", {"step": 10, "path": "step-10"})
    events = [skipped("a"), skipped("b"), checkpoint, skipped("a"), skipped("c"), checkpoint]
    events += [skipped("a"), evaluation(10, 0.5, kept=True), skipped("b"), evaluation(10, 0.5, kept=True, split="test")]
    name, values = skipped("d")
    events += [(name, values | {"split": "test"}), checkpoint]  # newer journals name the split
    text = written(events)
    assert "<h2>6 images skipped</h2>" in text
    found = re.findall(r"<tr><td>(\w)</td><td>is &lt;cut&gt; short</td><td>(\w+)</td></tr>", text)
    assert found == [("a", "train"), ("b", "train"), ("c", "train"), ("a", "validation"), ("b", "test"), ("d", "test")]


def test_what_only_the_report_left_out_is_named_too(
    run: MakeRun, measured: ClassificationReport, source: Source
) -> None:
    folder, bundle = run([skipped("a")])
    found = replace(measured, skipped=(Skipped("a", "is gone"), Skipped("b", "is gone")), absent=("<b>",))
    text = write_report(folder, bundle, source, "test", found).read_text()
    assert "<h2>3 images skipped</h2>" in text
    for row in ("a</td><td>is &lt;cut&gt; short</td><td>train", "a</td><td>is gone</td><td>test", "b</td><td>is gone"):
        assert f"<tr><td>{row}</td>" in text
    top = text.partition("<h2>")[0]
    assert "2 images could not be decoded" in top and "no image in the test split" in top and "&lt;b&gt;" in top


def test_it_replaces_what_it_wrote_before(run: MakeRun, measured: ClassificationReport, source: Source) -> None:
    folder, bundle = run()
    first = write_report(folder, bundle, source, "test", measured, next_commands=["one"])
    assert "one</pre>" in first.read_text()
    again = write_report(folder, bundle, source, "test", measured, next_commands=["two"])
    assert again == first and "<pre>two</pre>" in again.read_text()
    again.unlink()
    again.mkdir()
    with pytest.raises(SaveError, match=r"could not save the report to .*report\.html"):
        write_report(folder, bundle, source, "test", measured)
    with pytest.raises(RunError, match="is not the folder of a run"):
        write_report(folder.parent, bundle, source, "test", measured)
