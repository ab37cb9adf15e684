"""Tests of `vitrail train`: its output, and the messages for all mistakes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from vitrail.cli import main
from vitrail.cli.train import recipe_for
from vitrail.recipes import RECIPES
from vitrail.recipes.from_data import CONTINUED
from vitrail.tasks.mae import Mae
from vitrail.tasks.masked_patches import MaskedPatches
from vitrail.training.folder import read_record
from vitrail.training.log import read_journal
from vitrail.training.run import RunResult
from vitrail.weights.bundle import weights_sha256
from vitrail.weights.load import load

TINY = [
    "--steps", "3", "--width", "16", "--depth", "1", "--heads", "2", "--mlp-width", "16", "--device", "cpu",
    "--evaluations", "1", "--checkpoints", "1", "--threads", "1",
]  # fmt: skip


def run(*words: str) -> int:
    """Return the exit code of `vitrail train WORDS`."""
    return main(["train", *words])


def test_a_folder_of_colours_is_learned_shown_and_used(
    colour_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    more = ["--steps", "30", "--image-size", "16", "24", "--learning-rate", "0.003", "--batch-size", "12"]
    place = "runs/my [red] run"
    assert run("--data", str(colour_folder), "--run", place, *TINY, *more) == 0
    shown = capsys.readouterr().out
    assert "has no validation split" in shown and "validation accuracy" in shown
    assert "; training accuracy " in shown and "(last training steps, with augmentation)" in shown
    assert "waiting for data" in shown and "first step after" in shown and "peak memory" in shown
    assert f"vitrail predict '{place}/model' '{place}/examples'" in shown
    description = json.loads((tmp_path / place / "model/model.json").read_text())
    assert description["classes"] == ["blue", "green", "red"]
    assert description["config"]["image_size"] == [16, 24]
    assert main(["predict", f"{place}/model", f"{place}/examples", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row["label"] in Path(row["image"]).name for row in rows)


def test_a_run_records_and_resumes_a_choice_of_splits(
    colour_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    shutil.copytree(colour_folder, data / "first site")
    shutil.copytree(colour_folder, data / "second site")
    words = ["--data", str(data), "--run", str(tmp_path / "run"), *TINY, "--image-size", "16", "16"]
    assert run(*words) == 2
    assert "--splits train=first site,test=second site" in capsys.readouterr().err
    for file in (data / "second site").rglob("*.png"):
        file.rename(file.with_name(f"of-{file.name}"))
    assert run(*words, "--splits", "train=first site,test=second site") == 0
    record = read_record(tmp_path / "run")
    assert record.config.data.spec == f"{data}?train=first%20site&test=second%20site"
    assert run("--resume", str(tmp_path / "run"), "--steps", "4") == 0
    assert "test accuracy" in capsys.readouterr().out


def test_a_network_is_pre_trained_without_labels_and_used(
    colour_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    words = [
        "--data",
        str(colour_folder),
        "--image-size",
        "16",
        "24",
        "--batch-size",
        "12",
        "--patch-target",
        "colours",
    ]
    fractions = ["--corrupt-fraction", "0.4", "--mask-fraction", "0.7", "--swap-fraction", "0.2"]
    assert run("--task", "masked-patches", *words, *fractions, *TINY) == 0
    shown = capsys.readouterr().out
    assert "validation patch loss" in shown and "images, without a head: 3 steps" in shown
    assert "vitrail finetune runs/colours/model --data DIR" in shown and "A few held-out images" not in shown
    assert read_record(tmp_path / "runs/colours").config.task == MaskedPatches(
        patch_target="colours", corrupt_fraction=0.4, mask_fraction=0.7, swap_fraction=0.2
    )
    by = ["--by", "knn,linear,fewshot", "--shots", "1"]
    assert main(["evaluate", "runs/colours/model", "--data", str(colour_folder), *by]) == 0
    assert main(["embed", "runs/colours/model", "--data", str(colour_folder), "--out", "features"]) == 0
    short = ["--steps", "2", "--batch-size", "8", "--device", "cpu", "--threads", "1", "--no-flip"]
    assert main(["finetune", "runs/colours/model", "--data", str(colour_folder), "--name", "tuned", *short]) == 0
    before, after = (load(f"runs/{name}/model") for name in ("colours", "tuned"))
    assert after.classes == ("blue", "green", "red") and after.preprocess.image_size == (16, 24)
    assert after.provenance["init_sha256"] == weights_sha256(before.network)


def test_help_shows_the_values_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    def default(name: str, *words: str) -> str:
        assert run(*words, "--help-all") == 0
        entry = capsys.readouterr().out.split(f"\n  --{name} ")[1].split("\n  --")[0].split("\n\n")[0]
        return " ".join(entry.split()).rpartition(" Default: ")[2]

    assert default("variant") == "Conv+ViT-Pico/8."
    plain = {"variant": "ViT-S/16", "width": "384", "mixup": "0.2", "randaugment-rule": "big-vision"}
    for name, value in plain.items():
        assert default(name, "plain-vit-s16-90") == f"{value}."
    assert default("width", "plain-vit-s16-90", "--variant", "ViT-B/32") == "768."
    assert default("mixup", "--preset", "strong1") == "0.5."
    assert not default("width", "--data", "nowhere")[0].isdigit(), "the network is chosen from the data"


def test_help_shows_the_settings_of_the_typed_task_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    usual = capsys.readouterr().out
    assert run("--task", "masked-patches", "--help") == 0
    masked = capsys.readouterr().out
    assert "--loss" in usual and "--patch-target" not in usual
    assert "--loss" not in masked and "--patch-target" in masked


def test_a_masked_autoencoder_is_trained_and_continued(
    colour_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--data", str(colour_folder), "--image-size", "16", "24", "--batch-size", "12", "--remove-fraction", "0.5"]
    assert run("--task", "mae", *words, "--decoder-width", "8", "--no-normalise-pixels", *TINY) == 0
    assert "validation patch loss" in capsys.readouterr().out
    task = Mae(remove_fraction=0.5, decoder_width=8, normalise_pixels=False)
    assert read_record(tmp_path / "runs/colours").config.task == task
    assert run("--resume", "runs/colours", "--steps", "5") == 0
    assert load("runs/colours/model").provenance["step"] == 5
    assert run("--task", "mae", "--data", str(colour_folder), "--remove-fraction", "1") == 2
    assert "--remove-fraction: 1.0 is not between 0 and 1" in capsys.readouterr().err


def test_a_student_learns_from_a_teacher(
    model: Path,
    colour_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    data = ["--data", str(colour_folder)]
    assert run(*data, "--name", "teacher", "--image-size", "16", "24", "--batch-size", "12", *TINY) == 0
    words = ["--task", "distillation", *data, "--image-size", "24", "16", "--batch-size", "12", *TINY]
    token = ["--pool", "cls+dist", "--registers", "1", "--positions-cover", "all"]
    assert run(*words, *token, "--teacher", "runs/teacher", "--name", "student", "--teacher-labels", "soft") == 0
    assert "vitrail predict runs/student/model" in capsys.readouterr().out
    student, teacher = load("runs/student/model"), load("runs/teacher/model")
    assert student.provenance["teacher_sha256"] == weights_sha256(teacher.network)
    assert student.network.head.weight.shape == (3, 32) and student.classes == teacher.classes
    assert main(["predict", "runs/student/model", "runs/student/examples"]) == 0
    assert run("--resume", "runs/student", "--steps", "5") == 0
    capsys.readouterr()
    for more, message in (
        ([], "--teacher: the task distillation needs a trained model to learn from"),
        (["--teacher", "./none"], "--teacher: './none' cannot be loaded"),
        (["--teacher", str(model)], "has other classes than"),
        (["--teacher", "runs/teacher", "--loss", "sigmoid"], "--loss: 'sigmoid' cannot be distilled"),
    ):
        assert run(*words, *more, "--name", "other") == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("runs/other").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--label-smoothing", "0.1"], "--label-smoothing is a setting of the task classification"),
        (["--patch-target", "token"], "--patch-target: 'token' is not one of mean-colour, colours, pixels, tokens"),
        (["--patch-target", "tokens"], "--tokenizer: --patch-target 'tokens' needs a trained tokenizer; name a run of"),
        (["--patch-target", "tokens", "--tokenizer", "nowhere"], "--tokenizer: 'nowhere' cannot be loaded: "),
        (["--tokenizer", "runs/vqvae"], "--tokenizer: 'runs/vqvae' is not used with patch_target='colours'; choose"),
        (["--corrupt-fraction", "1"], "--corrupt-fraction: 1.0 is not between 0 and 1"),
        (["--variant", "Conv+ViT-Pico/8", "--image-size", "32", "32"], "the tokens of a hybrid do"),
        (["--mixup", "0.2"], "--mixup: 0.2 mixes the labels of images"),
    ],
)
def test_mistakes_of_masked_patches_are_told(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--task", "masked-patches", *words) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("task", ["masked-patches", "mae", "simclr", "dino", "moco", "vqvae"])
def test_the_recipe_of_a_task_is_for_the_bundled_images(task: str) -> None:
    assert recipe_for({"task": task}) == RECIPES[task]()
    assert recipe_for({"task": task, "data": "fashion-mnist"}) == RECIPES[task]()
    assert recipe_for({"task": task, "data": "photos"}) == RECIPES["folder"]()


def test_a_student_has_the_recipe_of_the_data() -> None:
    continued = recipe_for({"task": "dino", "data": "photos", "init": "model"})
    assert (
        continued == RECIPES["folder"]().override(task="dino", **CONTINUED) and continued.optimizer.layer_decay == 0.8
    )
    assert recipe_for({"task": "distillation"}) == RECIPES["demo"]()
    assert recipe_for({"task": "distillation", "data": "photos"}) == RECIPES["folder"]()


@pytest.mark.slow
def test_a_model_decides_what_images_are_like_unless_told(
    model: Path, colour_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [word for name, value in zip(TINY[::2], TINY[1::2], strict=True) if name not in SIZES
             for word in (name, value)]  # fmt: skip
    words = ["--init", str(model), "--data", str(colour_folder), *short, "--validation-share", "0.2"]
    assert run(*words, "--run", str(tmp_path / "as-it-is"), "--lora-rank", "2", "--lora-on", "query", "up") == 0
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "the new head has 3 classes; its weights start at zero" in shown and "of them trained" in shown
    more = ["--image-size", "32", "48", "--std", "0.5", "--train-blocks", "1", "--average", "0.9", "--patience", "1"]
    assert run(*words, "--run", str(tmp_path / "other"), *more) == 0
    of_model, first, second = (
        json.loads((folder / "model.json").read_text())
        for folder in (model, tmp_path / "as-it-is" / "model", tmp_path / "other" / "model")
    )
    assert first["preprocess"] == of_model["preprocess"] and first["classes"] == ["blue", "green", "red"]
    changed = {name for name, value in second["preprocess"].items() if value != of_model["preprocess"][name]}
    assert changed == {"image_size", "std"} and second["preprocess"]["image_size"] == [32, 48]
    record = json.loads((tmp_path / "other" / "run.json").read_text())
    assert record["config"]["start"]["train_blocks"] == 1 and record["config"]["model"]["variant"] is None


SIZES = ("--width", "--depth", "--heads", "--mlp-width")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--init", "{model}", "--variant", "ViT-S/16"], "--variant: 'ViT-S/16' cannot be given with --init '"),
        (["--init", "{model}", "--train-blocks", "3"], "--train-blocks: 3 is more than the 2 blocks of the model"),
        (["--init", "{model}", "--lora-rank", "2", "--lora-on", "fc1"], "query"),
        (["--init={model}/nowhere"], "does not exist"),
        (["--train-blocks", "0"], "--train-blocks: 0 leaves weights untrained, so it needs a model to start from"),
    ],
)  # fmt: skip
def test_mistakes_in_starting_from_a_model_are_named(
    words: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [word.format(model=model) for word in words]
    assert run(*filled, "--run", str(tmp_path / "run"), "--device", "cpu") == 2
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.split()) or message in " ".join(captured.out.split())
    assert not (tmp_path / "run").exists()


def test_a_plan_is_printed_and_nothing_is_trained(
    colour_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    words = ["folder", "--data", str(colour_folder), "--variant", "ViT-S/16", "--image-size", "96", "128"]
    words += ["--batch-size", "1024", "--shard", "hybrid", "--plan"]
    assert run(*words, "1", "8", "64") == 0
    shown = capsys.readouterr().out
    assert "ViT-S/16, " in shown and "1,024 images per step, on H100 SXM GPUs with 80 GB, 8 per machine" in shown
    columns = {line.split("  ")[0].strip(): line.split()[1:] for line in shown.splitlines() if "  " in line}
    assert columns["GPUs"] == ["1", "8", "64"]
    assert "sharded by machine" in shown and "images/s" in columns
    assert run(*words) == 2  # without a number, which once trained
    assert "--plan: needs N ..." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["colours"]
    assert run(*words, "12") == 2
    assert "--plan: 12 is not a number of GPUs in machines of 8" in capsys.readouterr().err.replace("\n", " ")


def test_the_default_recipe_follows_the_data() -> None:
    assert recipe_for({}) == recipe_for({"data": "bundled"}) == RECIPES["demo"]()
    assert recipe_for({"data": "fashion-mnist"}) == RECIPES["fashion-mnist"]()
    assert recipe_for({"data": "flowers", "seed": 1}) == RECIPES["folder"]()
    assert recipe_for({"data": "flowers", "recipe": "demo"}) == RECIPES["demo"]()


def test_help_shows_a_recipes_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fashion-mnist", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Default: fashion-mnist." in shown and "Default: 28." in shown and "vitrail recipes lists all" in shown
    assert run("--data", "flowers", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Default: chosen from the data." in shown and "Default: 40." not in shown


@pytest.mark.slow
def test_lengths_of_a_schedule_are_fractions_or_have_units(colour_folder: Path, tmp_path: Path) -> None:
    words = ("--schedule", "staircase", "--stair-at", "0.4", "8 steps", "--stair-factors", "0.5", "0.25", "--warmup",
             "2steps", "--warmup-from-zero", "--learning-rate", "0.01", "--cooldown", "20%")  # fmt: skip
    sizes = ("--variant", "ViT-Pico/7", "--image-size", "14", "14", "--width", "16", "--depth", "1", "--heads", "2")
    assert run("--data", str(colour_folder), "--run", str(tmp_path / "run"), *sizes, "--steps", "10", *words) == 0
    events = [event for event in read_journal(tmp_path / "run" / "journal.jsonl") if event["event"] == "step"]
    expected = [0.0, 0.005, 0.01, 0.01, 0.005, 0.005, 0.005, 0.005, 0.0025, 0.00125]
    assert [event["learning_rate"] for event in events] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dmo"], "recipe 'dmo' does not exist; nearest: demo, dino, moco; data is named with --data"),
        (["photos"], "recipe 'photos' does not exist; vitrail recipes lists all; data is named with --data"),
        (["{folder}/none"], "none' does not exist; to train on data, name it with --data: vitrail train --data "),
        (["photos", "--data", "bundled"], "recipe 'photos' does not exist; vitrail recipes lists all "),
        (["--lerning-rate", "1"], "--lerning-rate: vitrail train has no such option; nearest: --learning-rate"),
        (["--lr", "1"], "nearest: --learning-rate"),
        (["--data", "{folder}/none"], "none' does not exist"),
        (["--data", "bundeld"], "nearest: bundled"),
        (["--data", "{folder}/empty"], "has no class folders"),
        (["--data", "{folder}/single"], "has only one class, 'only'"),
        (["--data", "{folder}/hollow"], "has no images"),
        (["--data", "{folder}/file.txt"], "has an unknown file format"),
        (["--image-size", "28", "30"], "patch_size=(4, 4) of a feature map at 1/2; the nearest multiple is (32, 32)"),
        (["--heads", "5"], "--width: 16 is not divisible by --heads 5"),
        (["--variant", "ViT-Q/7"], "size 'Q' does not exist; nearest"),
        (["--variant", "vit-s-16"], "have the form ViT-SIZE/PATCH, R50+ViT-SIZE/PATCH or BiT-R50x1; nearest: ViT-S/16"),
        (["--precision", "fp8"], "fp8"),
        (["--batch-size", "0"], "--batch-size: 0 is less than 1"),
        (["--steps", "many"], "many"),
        (["--learning-rate", "-1"], "--learning-rate: -1.0 is not above 0"),
        (["--warmup", "2"], "--warmup: 2.0 is not in [0, 1)"),
        (["--warmup", "2 weeks"], "--warmup: '2 weeks' is not a length; write for example 0.1 (a fraction of the run)"),
        (["--steps", "20", "--warmup", "21 steps"], "--warmup: '21 steps' is 21 steps, more than the 20 steps of the"),
        (["--schedule", "staircase"], "--schedule: 'staircase' needs --stair-at"),
        (["--device", "abacus"], "--device: 'abacus' cannot be used here"),
        (["--run", "{folder}"], "exists; choose another --run"),
        (["--run", "{folder}/file.txt/run"], "file.txt is not a folder; choose another path"),
        (["--run", "{folder}", "--overwrite"], "is not the folder of a run"),
        (["--keep", "best", "--validation-share", "0"], "--keep: 'best' needs a validation split"),
        (["--resume", "{folder}/none"], "is not the folder of a run: it has no run.json"),
        (["--resume", "{folder}/none", "--seed", "9"],
         "--seed: a run that --resume continues keeps its settings, and only --epochs or --steps can make it longer"),
        (["--resume", "{folder}/none", "--steps", "9", "--epochs", "2"], "give only one of them"),
        (["--allow", "data"], "--allow: only a run that --resume continues can change settings; leave --allow out"),
    ],
)  # fmt: skip
def test_mistakes_are_named(
    words: list[str], message: str, colour_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "single" / "only").mkdir(parents=True)
    (colour_folder / "red" / "00.png").rename(tmp_path / "single" / "only" / "a.png")
    (tmp_path / "hollow" / "bare").mkdir(parents=True)
    (tmp_path / "file.txt").write_text("")
    filled = [word.format(folder=tmp_path) for word in words]
    assert run(*filled, *(_without(TINY, filled) if "--resume" not in filled else [])) == 2
    captured = capsys.readouterr()
    assert message in captured.err.replace("\n", " ") or message in captured.out
    assert "Traceback" not in captured.err and not (tmp_path / "runs").exists()


def _without(defaults: list[str], given: list[str]) -> list[str]:
    """The defaults but for options that are given."""
    pairs = zip(defaults[::2], defaults[1::2], strict=True)
    return [word for name, value in pairs if name not in given for word in (name, value)]


def test_too_many_broken_images_fail_the_run(
    colour_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("blue", "red"):
        (colour_folder / name / "page.jpg").write_text("<html>not found</html>")
    words = ["--data", str(colour_folder), "--run", str(tmp_path / "run"), *TINY]
    assert run(*words, "--batch-size", "38", "--max-skipped", "0") == 2
    assert "more than the 0 that --max-skipped allows" in capsys.readouterr().err.replace("\n", " ")


def test_a_complete_run_is_not_resumed(
    trained: RunResult, fewer_bundled: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--resume", str(trained.folder)) == 0
    assert "is complete" in capsys.readouterr().err


@pytest.fixture
def grey(tmp_path: Path) -> Path:
    """A table with the brightness and the width of images in its columns."""
    rows = ["file,brightness,width,kind"]
    for number in range(40):
        Image.new("RGB", (9 + number, 14), (6 * number,) * 3).save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{6 * number},{'' if number == 7 else 9 + number},{'ab'[number % 2]}")
    (tmp_path / "grey.csv").write_text("\n".join(rows))
    return tmp_path / "grey.csv"


def test_numbers_of_a_table_are_learned_and_predicted(
    grey: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", str(grey), "--numbers", "brightness", "width", "--loss", "huber", "--run", str(tmp_path / "run")]
    more = ["--image-size", "16", "24", "--validation-share", "0.3", "--seed", "1"]
    assert run(*words, *TINY, *more) == 0
    shown = capsys.readouterr().out
    assert "brightness" in shown and "validation R²" in shown and "probability" not in shown
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["task"]["name"] == "regression" and record["config"]["task"]["loss"] == "huber"
    image = str(tmp_path / "3.png")
    assert main(["predict", str(tmp_path / "run"), image, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["image"] == image and list(row["numbers"]) == ["brightness", "width"]
    assert main(["predict", str(tmp_path / "run"), image]) == 0
    shown = capsys.readouterr().out
    assert "width" in shown and f"{row['numbers']['width']:.6g}" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--task", "regression"],
            "--numbers: the task regression needs the names of numeric columns, such as --numbers",
        ),
        (["--task", "regresion"], "--task: 'regresion' is not one of classification, regression"),
        (["--numbers", "brightness", "--loss", "softmax"], "--loss: 'softmax' is not one of squared, huber"),
        (["--numbers", "brightness", "--label-smoothing", "0.1"], "--label-smoothing is a setting of the task"),
        (["--loss", "huber"], "--loss: 'huber' is not one of softmax, sigmoid"),
        (["--numbers", "kind"], "column 'kind' holds 'a', which is not a finite number"),
        (["--numbers", "wdth"], "has no column 'wdth' of numbers; nearest: width"),
    ],
)
def test_mistakes_in_learning_numbers_are_named(
    words: list[str], message: str, grey: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--data", str(grey), *words, "--run", str(tmp_path / "run"), *TINY) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and not (tmp_path / "run").exists()


def test_help_shows_the_settings_of_the_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--task", "regression", "--help") == 0
    shown = capsys.readouterr().out
    assert "--loss squared|huber" in shown and "Default: regression." in shown


def test_a_folder_in_the_place_of_the_recipe_is_answered_with_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my photos").mkdir()
    monkeypatch.chdir(tmp_path)
    for words in (["my photos"], ["my photos", "--epochs", "3"], ["my photos", "--help"]):
        assert run(*words) == 2
        errors = capsys.readouterr().err
        assert (
            "recipe 'my photos' does not exist; to train on data, name it with --data: "
            "vitrail train --data 'my photos'\n" in errors
        )


def test_a_finished_run_is_extended(colour_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "run")
    assert run("--data", str(colour_folder), "--run", folder, *TINY) == 0
    assert run("--resume", folder) == 0  # nothing is left to do
    assert "To train it further, give a larger total with --steps or --epochs" in capsys.readouterr().err
    assert run("--resume", folder, "--steps", "3") == 2
    assert "has 3 steps (" in capsys.readouterr().err
    assert run("--resume", folder, "--steps", "5") == 0
    assert "continuing after step 3 of 5" in capsys.readouterr().out
    assert read_journal(tmp_path / "run" / "journal.jsonl")[-1]["step"] == 5


def test_a_run_is_repeated_with_its_settings(
    colour_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--like", "nowhere"], "'nowhere' is not the folder of a run"),
        (["demo", "--like", "nowhere"], "'nowhere' is not the folder of a run"),
        (["--like", "{own}"], "cannot be repeated, because it was started in Python with its own network"),
        (["--max-time", "soon"], "--max-time: 'soon' is not a time"),
    ],
)
def test_mistakes_in_repeating_a_run_are_named(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RECIPES["demo"]().to_plain()
    data = {"fingerprint": "0", "train": 16}
    record = {"format": 2, "config": config, "data": data, "objects": ["network"]}
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert main(["train", *(word.replace("{own}", str(tmp_path)) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_time_out_is_refused_before_processes_join(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("vitrail.cli.train.join_processes", lambda seconds: pytest.fail("processes must not join"))
    assert run("demo", "--process-timeout", "soon") == 2
    assert "--process-timeout: 'soon' is not a time" in capsys.readouterr().err


def test_resuming_with_a_renamed_data_folder_says_how(
    colour_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, place = shutil.copytree(colour_folder, tmp_path / "data"), str(tmp_path / "run")
    assert run("--data", str(data), "--run", place, *TINY, "--image-size", "16") == 0
    moved = data.rename(tmp_path / "moved")
    capsys.readouterr()
    assert run("--resume", place, "--steps", "4") == 2
    assert "add --data NEW --allow data" in capsys.readouterr().err
    assert run("--resume", place, "--steps", "4", "--data", str(moved), "--allow", "data") == 0


@pytest.mark.slow
def test_worker_processes_print_nothing(tmp_path: Path) -> None:
    words = "train demo --data bundled[:8] --validation-share 0 --steps 1 --batch-size 4 --processes 1 --run r"
    found = subprocess.run(
        [sys.executable, "-m", "vitrail", *words.split()], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "jax" not in found.stderr + found.stdout
