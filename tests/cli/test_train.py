"""Tests of `vitrail train`: its output, and the messages for all mistakes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.conftest import Cli
from tests.make import make_colour_folder, small_model
from vitrail.cli import main
from vitrail.cli.train import recipe_for, restarted_run
from vitrail.processes.launch import Launch
from vitrail.recipes import RECIPES
from vitrail.recipes.from_data import CONTINUED
from vitrail.tasks.masked_patches import MaskedPatches
from vitrail.training.folder import read_record
from vitrail.training.log import read_journal
from vitrail.training.run import RunResult
from vitrail.weights.bundle import weights_sha256
from vitrail.weights.load import load

SHORT = ["--steps", "3", "--device", "cpu", "--evaluations", "1", "--checkpoints", "1", "--threads", "1"]
TINY = [*SHORT, "--width", "16", "--depth", "1", "--heads", "2", "--mlp-width", "16"]


def test_a_folder_of_colours_is_learned_shown_and_used(
    colour_folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    more = ["--steps", "30", "--image-size", "16", "24", "--learning-rate", "0.003", "--batch-size", "12"]
    place = "runs/my [red] run"
    assert main(["train", "--data", str(colour_folder), "--run", place, *TINY[2:], *more]) == 0
    shown = capsys.readouterr().out
    for text in ("has no validation split", "validation accuracy", "; training accuracy ", "waiting for data"):
        assert text in shown
    assert f"vitrail predict '{place}/model' '{place}/examples'" in shown
    description = json.loads((here / place / "model/model.json").read_text())
    assert description["classes"] == ["blue", "green", "red"]
    assert description["config"]["image_size"] == [16, 24]
    assert main(["predict", f"{place}/model", f"{place}/examples", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row["label"] in Path(row["image"]).name for row in rows)


@pytest.mark.slow
def test_a_network_is_pre_trained_without_labels_and_used(
    colour_folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = ["--data", str(colour_folder), "--image-size", "16", "24", "--batch-size", "12", *TINY]
    fractions = ["--corrupt-fraction", "0.4", "--mask-fraction", "0.7", "--swap-fraction", "0.2"]
    shown = cli.shows("train", "--task", "masked-patches", "--patch-target", "colours", *fractions, *words)
    assert "validation patch loss" in shown and "vitrail finetune runs/colours/model --data DIR" in shown
    assert read_record(here / "runs/colours").config.task == MaskedPatches(
        patch_target="colours", corrupt_fraction=0.4, mask_fraction=0.7, swap_fraction=0.2
    )
    by = ["--by", "knn,linear,fewshot", "--shots", "1"]
    cli.shows("evaluate", "runs/colours/model", "--data", colour_folder, *by)
    cli.shows("embed", "runs/colours/model", "--data", colour_folder, "--out", "features")
    short = ["--steps", "2", "--batch-size", "8", "--device", "cpu", "--threads", "1", "--no-flip"]
    cli.shows("finetune", "runs/colours/model", "--data", colour_folder, "--name", "tuned", *short)
    before, after = (load(f"runs/{name}/model") for name in ("colours", "tuned"))
    assert after.classes == ("blue", "green", "red") and after.preprocess.image_size == (16, 24)
    assert after.provenance["init_sha256"] == weights_sha256(before.network)


@pytest.mark.slow
def test_a_model_decides_what_images_are_like_unless_told(
    model: Path, colour_folder: Path, tmp_path: Path, cli: Cli
) -> None:
    words = ["train", "--init", model, "--data", colour_folder, *SHORT, "--validation-share", "0.2"]
    shown = cli.shows(*words, "--run", tmp_path / "as-it-is", "--lora-rank", "2", "--lora-on", "query", "up")
    shown = shown.replace("\n", " ")
    assert "the new head has 3 classes; its weights start at zero" in shown and "of them trained" in shown
    more = ["--image-size", "32", "48", "--std", "0.5", "--train-blocks", "1", "--average", "0.9"]
    cli.shows(*words, "--run", tmp_path / "other", *more)
    of_model, first, second = (
        json.loads((folder / "model.json").read_text())
        for folder in (model, tmp_path / "as-it-is" / "model", tmp_path / "other" / "model")
    )
    assert first["preprocess"] == of_model["preprocess"] and first["classes"] == ["blue", "green", "red"]
    changed = {name for name, value in second["preprocess"].items() if value != of_model["preprocess"][name]}
    assert changed == {"image_size", "std"} and second["preprocess"]["image_size"] == [32, 48]
    record = json.loads((tmp_path / "other" / "run.json").read_text())
    assert record["config"]["start"]["train_blocks"] == 1 and record["config"]["model"]["variant"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_run_is_repeated_with_its_settings(colour_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", str(colour_folder), "--image-size", "14", "21", "--batch-size", "8", "--device", "cpu"]
    assert main(["train", "folder", *words, "--variant", "ViT-Pico/7", "--steps", "1", "--name", "one"]) == 0
    assert main(["train", "--like", "runs/one", "--name", "two"]) == 0
    assert "has changed" not in capsys.readouterr().out
    first, second = (read_record(Path("runs") / name) for name in ("one", "two"))
    assert second.config == first.config.override(run=second.config.run.folder, name="two")
    weights = [(Path("runs") / name / "model/model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]

    picture = next(colour_folder.rglob("*.png"))
    shutil.copy(picture, picture.with_name("another.png"))
    assert main(["train", "--like", "runs/one", "--steps", "2", "--name", "three"]) == 0
    picture.with_name("another.png").unlink()
    assert "the data has changed since runs/one was trained" in " ".join(capsys.readouterr().out.split())
    assert read_record(Path("runs/three")).config.run.steps == 2


def test_a_wrong_time_out_is_refused_before_processes_join(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("vitrail.cli.train.join_processes", lambda seconds: pytest.fail("processes must not join"))
    assert "--process-timeout: 'soon' is not a time" in cli.refuses("train", "demo", "--process-timeout", "soon")


@pytest.mark.slow
def test_worker_processes_print_nothing(tmp_path: Path) -> None:
    words = "train demo --data bundled[:8] --validation-share 0 --steps 1 --batch-size 4 --processes 1 --run r"
    found = subprocess.run(
        [sys.executable, "-m", "vitrail", *words.split()], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "jax" not in found.stderr + found.stdout


@pytest.mark.parametrize(
    ("given", "continues"),
    [
        ({}, True),
        ({"recipe": "demo", "steps": 30, "width": 16, "threads": 5, "precision": "auto", "overwrite": True}, True),
        ({"data": "bundled", "variant": "Conv+ViT-Pico/8"}, True),
        ({"steps": 31}, False),
        ({"data": "photos"}, False),
        ({"recipe": "fashion-mnist"}, False),
        ({"task": "mae"}, False),
    ],
)
def test_a_command_that_is_started_again_continues_only_a_run_of_its_settings(
    given: dict[str, object], continues: bool, trained: RunResult
) -> None:
    again = {"run": trained.folder, **given}
    assert restarted_run(again, Launch(restarts=1)) == (trained.folder if continues else None)
    assert restarted_run(again, Launch()) is None


def test_the_recipe_follows_the_data_and_the_task() -> None:
    assert recipe_for({}) == recipe_for({"data": "bundled"}) == RECIPES["demo"]()
    assert recipe_for({"data": "fashion-mnist"}) == RECIPES["fashion-mnist"]()
    assert recipe_for({"data": "flowers", "seed": 1}) == RECIPES["folder"]()
    assert recipe_for({"data": "flowers", "recipe": "demo"}) == RECIPES["demo"]()
    for task in ("masked-patches", "mae", "simclr", "dino", "moco", "vqvae"):
        assert recipe_for({"task": task}) == recipe_for({"task": task, "data": "fashion-mnist"}) == RECIPES[task]()
        assert recipe_for({"task": task, "data": "photos"}) == RECIPES["folder"]()
    assert recipe_for({"task": "distillation"}) == RECIPES["demo"]()
    assert recipe_for({"task": "distillation", "data": "photos"}) == RECIPES["folder"]()
    continued = recipe_for({"task": "dino", "data": "photos", "init": "model"})
    assert continued == RECIPES["folder"]().override(task="dino", **CONTINUED)
    assert continued.optimizer.layer_decay == 0.8


@pytest.mark.slow
def test_help_shows_the_values_of_the_recipe_and_the_settings_of_the_task(cli: Cli) -> None:
    def shown(*words: str) -> str:
        return cli.shows("train", *words)

    def default(name: str, *words: str) -> str:
        entry = shown(*words, "--help-all").split(f"\n  --{name} ")[1].split("\n  --")[0].split("\n\n")[0]
        return " ".join(entry.split()).rpartition(" Default: ")[2]

    assert default("variant") == "RPico+ViT-Pico/8."
    assert default("width", "plain-vit-s16-90", "--variant", "ViT-B/32") == "768."
    assert default("mixup", "--preset", "strong1") == "0.5."
    text = " ".join(shown("--data", "flowers", "--help").split())
    assert "Default: chosen from the data." in text and "Default: 40." not in text
    assert "--loss" in text and "--patch-target" not in text
    text = shown("--task", "masked-patches", "--help")
    assert "--loss" not in text and "--patch-target" in text
    text = shown("--task", "regression", "--help")
    assert "--loss squared|huber" in text and "Default: regression." in text


def test_a_plan_is_printed_and_nothing_is_trained(
    colour_folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = ["train", "folder", "--data", colour_folder, "--variant", "ViT-S/16", "--image-size", "96", "128"]
    words += ["--batch-size", "1024", "--shard", "hybrid", "--plan"]
    shown = cli.shows(*words, "1", "8", "64")
    assert "ViT-S/16, " in shown and "1,024 images per step, on H100 SXM GPUs with 80 GB, 8 per machine" in shown
    columns = {line.split("  ")[0].strip(): line.split()[1:] for line in shown.splitlines() if "  " in line}
    assert columns["GPUs"] == ["1", "8", "64"] and "sharded by machine" in shown and "images/s" in columns
    shown = cli.shows(*words, "8", "--optimizer", "sgd", "--momentum-format", "bfloat16")
    assert "the run with --momentum-format bfloat16 needs less" in shown
    assert [path.name for path in here.iterdir()] == ["colours"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("train folder --data data --variant ViT-Pico/8 --image-size 24 --plan 1", 0),
        ("data check data --page None", 0),
        ("bench accuracy demo --data data --out data", 2),
        ("noisy-student --data data --unlabelled nowhere", 2),
    ],
)
def test_a_fraction_that_has_no_effect_is_noted(words: str, code: int, here: Path, cli: Cli) -> None:
    for split in ("train", "val"):
        make_colour_folder(here / "data" / split)
    for typed in ((), ("--validation-share", "0.3"), ("--cut-method", "threshold")):
        if "--cut-method" in typed and words.split()[0] in ("bench", "data"):  # without this option
            continue
        shown = " ".join(cli.call(*words.split(), *typed, code=code).out.split())
        assert ("has no effect" in shown) == bool(typed) and all(f"{name} has" in shown for name in typed[:1])


@pytest.mark.usefixtures("here")
def test_settings_that_a_model_does_not_take_from_a_recipe_are_noted(colour_folder: Path, cli: Cli) -> None:
    model = small_model(Path("model"))
    words = [
        "train",
        "deit3-s16-i1k",
        "--data",
        colour_folder,
        "--init",
        model,
        "--validation-share",
        "0.2",
        "--plan",
        "1",
    ]
    for typed in ((), ("--stochastic-depth", "0.2")):
        shown = " ".join(cli.shows(*words, *typed).split())
        assert ("--stochastic-depth 0.05 of the recipe has no effect" in shown) == (not typed)
    words = ["noisy-student", "--data", colour_folder, "--unlabelled", "nowhere", "--init", model, "--dropout", "0.2"]
    shown = " ".join(cli.call(*words, code=2).out.split())
    assert "--stochastic-depth 0.1 of the recipe has no effect" in shown


@pytest.mark.slow
def test_a_run_records_its_choice_of_splits_and_is_extended_with_moved_data(
    colour_folder: Path, tmp_path: Path, cli: Cli
) -> None:
    data, folder = tmp_path / "data", str(tmp_path / "run")
    for site in ("first site", "second site"):
        shutil.copytree(colour_folder, data / site)
    for file in (data / "second site").rglob("*.png"):
        file.rename(file.with_name(f"of-{file.name}"))
    words = ["--data", str(data), "--run", folder, *TINY, "--image-size", "16", "16"]
    cli.shows("train", *words, "--splits", "train=first site,test=second site")
    spec = f"{data}?train=first%20site&test=second%20site"
    assert read_record(tmp_path / "run").config.data.spec == spec
    finished = cli.call("train", "--resume", folder).err
    assert "To train it further, give a larger total with --steps or --epochs" in finished
    data.rename(tmp_path / "moved")
    assert "add --data NEW --allow data" in cli.refuses("train", "--resume", folder, "--steps", "4")
    moved = spec.replace("/data?", "/moved?")
    shown = cli.shows("train", "--resume", folder, "--steps", "4", "--data", moved, "--allow", "data")
    assert "continuing after step 3 of 4" in shown and "test accuracy" in shown
    assert read_journal(tmp_path / "run" / "journal.jsonl")[-1]["step"] == 4


@pytest.mark.slow
def test_numbers_of_a_table_are_learned(tmp_path: Path, cli: Cli) -> None:
    rows = ["file,brightness,width [px]"]
    for number in range(40):
        Image.new("RGB", (9 + number, 14), (6 * number,) * 3).save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{6 * number},{'' if number % 5 == 2 else 9 + number}")
    (tmp_path / "grey.csv").write_text("\n".join(rows))
    words = ["--data", str(tmp_path / "grey.csv"), "--numbers", "brightness", "width [px]", "--loss", "huber"]
    more = ["--image-size", "16", "24", "--validation-share", "0.3", "--seed", "1", "--run", str(tmp_path / "run")]
    shown = cli.shows("train", *words, *TINY, *more)
    assert "brightness" in shown and "validation R²" in shown and "probability" not in shown
    assert "width [px]: mean" in shown.splitlines()[-4], "a name is no markup"
    assert list((tmp_path / "run" / "examples").glob("*-unknown.png"))
    task = read_record(tmp_path / "run").config.task
    assert (task.name, task.loss) == ("regression", "huber")
    assert list(cli.json("predict", tmp_path / "run", tmp_path / "3.png")["numbers"]) == ["brightness", "width [px]"]
