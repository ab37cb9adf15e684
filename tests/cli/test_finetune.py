"""Tests of `vitrail finetune` with several models on an untidy folder: the model, the report and the next commands."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.cli.conftest import Cli
from tests.listening import Display
from vitrail.cli.finetune import _plan
from vitrail.cli.run_options import say_chosen
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError, Stopped
from vitrail.training import after_step
from vitrail.training.after_step import Run
from vitrail.training.log import Log
from vitrail.training.state import TrainState
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import convert

QUICK = ["--max-skipped", "0.1", "--device", "cpu", "--threads", "1", "--precision", "float32", "--no-flip"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer of three classes for images of 32 x 32 that other layouts can store."""
    torch.manual_seed(0)
    network = vitrail.create(
        "ViT-Pico/8", width=32, depth=2, heads=2, mlp_width=64, num_classes=3, image_size=(32, 32),
        activation="gelu-tanh",
    )  # fmt: skip
    bundle = Bundle(network, ("cat", "dog", "owl"), Preprocess(image_size=(32, 32)))
    return bundle.save(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def badges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RGBA PNG files of different sizes in folders with odd names. One file is broken."""
    root, random = tmp_path_factory.mktemp("data") / "my badges", np.random.default_rng(0)
    for channel, name in enumerate(("Grün & co", "red <b>", "日本")):
        (root / name).mkdir(parents=True)
        for number in range(14):
            height, width = 9 + 5 * number, 70 - 4 * number
            pixels = random.integers(0, 60, (height, width, 4), dtype=np.uint8)
            pixels[..., channel] += 190
            pixels[..., 3] = 255 - 10 * number
            Image.fromarray(pixels).save(root / name / f"badge {number}.png")
    (root / "日本" / "cut.png").write_bytes((root / "日本" / "badge 3.png").read_bytes()[:60])
    return root


@pytest.mark.parametrize(
    ("given", "named"), [({"epochs": 2}, ["--epochs"]), ({"steps": 3}, ["--steps"]), ({"learning_rate": 0.1}, [])]
)
def test_a_budget_says_what_it_does_not_limit(given: dict[str, float], named: list[str]) -> None:
    display = Display()
    say_chosen(Log(display), {"budget": "1m", **given}, ["a reason"])
    say_chosen(Log(display), given, ["a reason"])
    assert [name for name in ("--epochs", "--steps") if name in str(display.notes)] == named
    assert len(display.notes) == len(named)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["vitrail", "google"])
def test_it_works_untouched_from_every_layout(layout: str, model: Path, badges: Path, here: Path, cli: Cli) -> None:
    source = model
    if layout != "vitrail":
        source = here / "model.npz"
        convert(model, source, layout)
    words = ["finetune", str(source), "--data", str(badges), *QUICK, "--steps", "30"]
    out = cli.shows(*words)
    assert "image size 32 x 32: the model's own" in out and "the head starts as a linear model" in out
    (run,) = Path("runs").iterdir()
    assert f"vitrail predict {run}/model {run}/examples" in out and f"{run}/report.html" in out
    assert "日本/cut.png" in (run / "journal.jsonl").read_text(encoding="utf-8")
    bundle = vitrail.load(run / "model")
    assert bundle.classes == ("Grün & co", "red <b>", "日本")
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "red &lt;b&gt;" in page and "<b>" not in page.replace("</b>", "")
    prediction = cli.json("predict", run / "model", badges / "日本" / "badge 5.png")
    assert prediction["label"] == "日本"


@pytest.mark.slow
def test_options_replace_what_the_rule_says(model: Path, badges: Path, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    words = [str(model), "--data", str(badges), "--run", str(run), "--image-size", "24", "40", "--batch-size", "16"]
    words += ["--train-blocks", "1", "--learning-rate", "0.02", "--average", "0.9", "--class-weights", "balanced"]
    out = cli.shows("finetune", *words, *QUICK, "--steps", "6", "--keep", "last")
    config = json.loads((run / "run.json").read_text())["config"]
    assert config["images"]["image_size"] == [24, 40]
    assert config["run"]["batch_size"] == 16 and config["run"]["steps"] == 6
    assert config["start"]["train_blocks"] == 1 and config["optimizer"]["learning_rate"] == 0.02
    assert config["augment"]["flip"] is False and config["augment"]["crop_area"] == [0.8, 1.0]
    reasons = re.findall(r"^  (.*)$", out.partition("settings chosen")[2], re.M)
    assert "layer decay 0.9: lower blocks change less than upper ones" in reasons
    for replaced in ("image size", "steps of", "learning rate", "mirroring"):
        assert not any(replaced in reason for reason in reasons)
    before, after = vitrail.load(model).network, vitrail.load(run / "model").network
    assert torch.equal(before.blocks[0].mlp.up.weight, after.blocks[0].mlp.up.weight)
    assert not torch.equal(before.blocks[1].mlp.up.weight, after.blocks[1].mlp.up.weight)


@pytest.mark.parametrize(("more", "figure"), [((), "all labels right"), (("--numbers", "red"), "red: R²")])
def test_several_labels_and_numbers_have_figures_of_their_own(
    more: tuple[str, ...], figure: str, model: Path, tmp_path: Path, cli: Cli
) -> None:
    random, lines = np.random.default_rng(0), ["file,red,green"]
    for number in range(24):
        there = random.integers(0, 2, 2)
        pixels = np.zeros((20, 30 + number, 3), dtype=np.uint8)
        pixels[..., :2] = 250 * there
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{there[0]},{there[1]}")
    (tmp_path / "labels.csv").write_text("\n".join(lines), encoding="utf-8")
    words = [model, "--data", tmp_path / "labels.csv", "--run", tmp_path / "run", "--validation-share", "0.4", *more]
    out = cli.shows("finetune", *words, *QUICK, "--steps", "2")
    (shown,) = re.findall(rf"{figure} +(-?[\d.]+)", out)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert shown in re.findall("<strong>(.*?)</strong>", page)[0] and "difficult class" not in out


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_papers_protocol_and_a_stopped_trial_that_goes_on_with_the_same_command(
    model: Path, badges: Path, cli: Cli
) -> None:
    quick = ["--steps", "3", "--batch-size", "8", "--image-size", "32", "32", *QUICK[:-1]]
    words = ["finetune", str(model), "--data", str(badges), "--protocol", "paper", "--name", "p", *quick]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(after_step, "report", _stop_at(2, after_step.report))
        error, trial = cli.call(*words, code=Stopped.exit_code).err, Path("runs/p-trials/learning-rate-0.001")
    assert "to continue, run the first command again" in error and "--resume" not in error
    assert f"run {trial} is a trial of settings" in cli.refuses("finetune", "--resume", trial)
    out = cli.shows(*words)
    for rate in ("0.001", "0.003", "0.01", "0.03"):
        assert f"learning rate {rate}: " in out and Path(f"runs/p-trials/learning-rate-{rate}/model").is_dir()
    assert "was the best of 4" in out and Path("runs/p/model").is_dir()
    config = json.loads(Path("runs/p/run.json").read_text())["config"]
    assert config["optimizer"]["kind"] == "sgd" and config["data"]["validation_share"] == 0


@pytest.mark.slow
def test_images_that_chose_the_weights_are_not_called_unseen_nor_those_of_training(
    model: Path, badges: Path, tmp_path: Path, cli: Cli
) -> None:
    words = ["finetune", str(model), "--data", str(badges), "--run", str(tmp_path / "run")]
    assert "the best weights were chosen on these images" in cli.shows(*words, *QUICK, "--steps", "4")
    more = ["--overwrite", "--keep", "last", "--validation-share", "0", *QUICK, "--steps", "2"]
    assert "best weights" not in cli.shows(*words, *more)
    for split, is_said in (("held-out", True), ("all", False)):
        words = [tmp_path / "run", "--data", badges, "--json", "--bootstrap", "0", "--split", split]
        assert ("have trained this model" in cli.call("evaluate", *words).err) == is_said


@pytest.mark.slow
def test_a_run_goes_on_to_its_report_whenever_it_was_stopped(
    model: Path, badges: Path, tmp_path: Path, cli: Cli
) -> None:
    run = tmp_path / "run"
    words = [str(model), "--data", str(badges), "--run", str(run), *QUICK, "--steps", "4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(after_step, "report", _stop_at(2, after_step.report))
        printed = cli.call("finetune", *words, code=Stopped.exit_code)
    assert f"Continue with: vitrail finetune --resume {run}" in printed.err
    assert "report.html" in cli.shows("finetune", "--resume", run)
    first = (run / "report.html").read_bytes()
    assert "is complete" in cli.call("finetune", "--resume", run).err
    (run / "report.html").unlink()  # as if it was killed before it wrote it
    cli.shows("finetune", "--resume", run)
    assert (run / "report.html").read_bytes() == first
    assert "continuing after step 4 of 6" in cli.shows("finetune", "--resume", run, "--steps", "6")
    longer = (run / "report.html").read_bytes()
    assert longer != first, "the report is that of the longer run"
    (run / "report.html").write_bytes(first)
    os.utime(run / "report.html", (0, 0))  # as if the longer run was killed before it wrote its report
    cli.shows("finetune", "--resume", run)
    assert (run / "report.html").read_bytes() == longer


def _stop_at(step: int, usual: Callable[[Run, TrainState], None]) -> Callable[[Run, TrainState], None]:
    def report(run: Run, state: TrainState) -> None:
        usual(run, state)
        if state.step >= step:
            run.stop.is_asked = True

    return report


@pytest.mark.usefixtures("here")
def test_the_metric_of_select_chooses_between_learning_rates(model: Path, badges: Path) -> None:
    given = {"model": str(model), "data": str(badges), "protocol": "paper", "select": "cross_entropy"}
    chosen, _, _ = _plan(given, Log())
    assert chosen.rates and chosen.config.run.keep == "last" and chosen.config.task.select == "cross_entropy"
    with pytest.raises(ConfigError, match="--select: it has an effect only with --keep best or --patience"):
        _plan({**given, "learning_rate": 0.01}, Log())


@pytest.mark.slow
def test_a_suite_is_fine_tuned_and_ends_with_one_table(model: Path, badges: Path, here: Path, cli: Cli) -> None:
    data = here / "data"
    data.mkdir()
    (data / "badges").symlink_to(badges)
    tasks = "".join(
        f'[[tasks]]\nname = "{name}"\ngroup = "{group}"\nwhere = "ask [the curator]"\ntrain = "[:20]"\n'
        for name, group in (("badges", "natural"), ("gone", "structured"))
    )
    Path("two.toml").write_text(f'name = "two"\n[evaluators.linear]\n{tasks}')
    words = ["finetune", str(model), "--suite", "two.toml", "--data", str(data), *QUICK, "--steps", "4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(after_step, "report", _stop_at(2, after_step.report))
        error = cli.call(*words, code=Stopped.exit_code).err
    assert "The run is a task of a suite; to continue, run the first command again" in error
    assert "run runs/two/badges is a task of a suite" in cli.refuses("finetune", "--resume", "runs/two/badges")
    out = cli.shows(*words)
    (shown,) = re.findall(r"\n badges +([\d.]+%)", out)
    assert re.search(rf"mean of natural +{shown}", out) and re.search(rf"mean of 2 tasks +{shown} \(1 of 2\)", out)
    assert "skipped gone: ask [the curator]" in out and "in runs/two" in out
    plain = json.loads(Path("runs/two/suite.json").read_text())
    assert f"{plain['all']['accuracy']['mean']:.2%}" == shown
    assert "task gone: ask [the curator]" in cli.refuses(*words, "--name", "other", "--strict")
    assert Path("runs/other/badges/model").is_dir()


@pytest.mark.slow
def test_the_report_of_a_run_leads_to_the_page_that_looks_inside(
    model: Path, badges: Path, tmp_path: Path, cli: Cli
) -> None:
    run, link = tmp_path / "run", '<a href="inside/report.html">'
    words = [str(model), "--data", str(badges), "--run", str(run), *QUICK, "--steps", "4"]
    cli.shows("finetune", *words)
    page = (run / "report.html").read_text(encoding="utf-8")
    command = shlex.join(["vitrail", "report", str(run), "--data", str(badges), "--split", "validation"])
    assert html.escape(command) in page and link not in page
    shown = cli.shows(*shlex.split(command)[1:], "--images", "4", "--probe-images", "0", "--saliency-images", "2")
    assert str(run / "inside" / "report.html") in shown
    assert link in (run / "report.html").read_text(encoding="utf-8")
    inside = (run / "inside" / "report.html").read_text(encoding="utf-8")
    assert '<a href="../report.html">' in inside and "Report on run" in inside
    cli.shows("finetune", *words, "--overwrite")
    assert not (run / "inside").exists() and link not in (run / "report.html").read_text(encoding="utf-8")
