"""Tests of commands with a model that reads texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.cli.conftest import Cli
from tests.listening import Display
from tests.make import coco_data, make_colour_folder
from tests.words import model_with_words
from vitrail.cli import main
from vitrail.data.sources import DataConfig
from vitrail.registry import optional_module
from vitrail.training.config import StartConfig, TrainConfig
from vitrail.training.log import Log
from vitrail.training.run import resume, train
from vitrail.transfer.finetune import starting_from_words
from vitrail.weights.load import load
from vitrail.weights.zero_shot import zero_shot


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_words(bias=-2.0).save(tmp_path_factory.mktemp("words") / "model")


def test_classes_in_words_without_training(words: Path, colour_folder: Path, tmp_path: Path, cli: Cli) -> None:
    image = next(colour_folder.rglob("*.png"))
    command = ["predict", str(words), str(image), "--classes", "a red wall", "a blue wall", "--json"]
    row = json.loads(cli.shows(*command, "--save", tmp_path / "walls"))
    expected = zero_shot(load(words), ["a red wall", "a blue wall"]).predict([image])[0]
    assert row["probabilities"] == pytest.approx(dict(expected.ranking), abs=1e-5)
    again = cli.json("predict", tmp_path / "walls", image)
    assert again["probabilities"] == pytest.approx(row["probabilities"], abs=1e-5)


def test_fine_tuning_refuses_images_with_texts(words: Path, colour_folder: Path, tmp_path: Path, cli: Cli) -> None:
    pictures = sorted(colour_folder.rglob("*.png"))
    rows = [f"{picture.relative_to(colour_folder)},the text {number}" for number, picture in enumerate(pictures)]
    table = colour_folder / "texts.csv"
    table.write_text("\n".join(["path,caption", *rows]))
    run = tmp_path / "run"
    assert "has texts" in cli.refuses("finetune", words, "--data", table, "--run", run, "--device", "cpu")
    assert not run.exists()


def test_fine_tuning_begins_with_the_names_of_the_classes(
    words: Path, colour_folder: Path, tmp_path: Path, cli: Cli
) -> None:
    run = tmp_path / "run"
    command = ["finetune", words, "--data", colour_folder, "--run", run, "--device", "cpu", "--steps", "2"]
    more = ["--no-linear-head", "--learning-rate", "1e-9", "--evaluations", "1"]
    assert "names of the classes" in cli.shows(*command, *more)
    tuned = load(run / "model")
    expected = zero_shot(load(words), tuned.classes, readable=True)
    image = next(colour_folder.rglob("*.png"))
    found, wanted = (one.network(one.inputs([one.preprocess.pixels(image.read_bytes())])) for one in (tuned, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("classes", "is_named"),
    [
        (("ab", "ab, c"), True),
        (("bee " * 12 + "a", "bee " * 12 + "b"), False),  # equal within the tokens that the model reads
        (("1", "2"), False),
    ],
)
def test_heads_are_made_from_names_that_differ(
    classes: tuple[str, ...], is_named: bool, words: Path, tmp_path: Path
) -> None:
    data = make_colour_folder(tmp_path / "colours", classes=classes)
    found = starting_from_words(load(words), DataConfig(spec=str(data)).open_whole())
    assert bool(found.classes) == is_named
    assert any("do not differ" in note for note in found.notes) == (len(classes[0]) > 40)


def test_a_package_that_reads_texts_and_is_missing_is_named(
    words: Path, colour_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, data = load(words), DataConfig(spec=str(colour_folder)).open_whole()
    monkeypatch.setattr("vitrail.weights.words.Words.embed", lambda *_: optional_module("not_installed", "words"))
    found = starting_from_words(bundle, data)
    assert not found.classes and "pip install 'vitrail[words]'" in found.notes[-1]


@pytest.mark.slow
@pytest.mark.parametrize("linear_head", [False, True])
def test_a_run_from_names_of_classes_that_ended_before_its_first_checkpoint_continues(
    words: Path, colour_folder: Path, tmp_path: Path, linear_head: bool
) -> None:
    """The model on the disk has no head; the one that the run began with was made from the names."""

    class Crash(Display):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            raise MemoryError

    model = load(words, device="cpu")
    config = TrainConfig(
        data=DataConfig(spec=str(colour_folder)), start=StartConfig(init=str(words), linear_head=linear_head),
        images=model.preprocess,
    )  # fmt: skip
    config = config.override(run=str(tmp_path / "run"), steps=2, device="cpu", batch_size=4)
    initial = starting_from_words(model, config.data.open_whole())
    with pytest.raises(MemoryError):
        train(config, initial=initial, log=Log(Crash()))
    straight = train(config.override(run=str(tmp_path / "straight")), initial=initial).bundle
    again = resume(tmp_path / "run").bundle
    for name, weight in straight.network.state_dict().items():
        assert torch.equal(weight, again.network.state_dict()[name]), name


def test_zero_shot_accuracy(words: Path, colour_folder: Path, cli: Cli) -> None:
    shown = cli.call("evaluate", words, "--data", colour_folder, "--by", "zeroshot,knn", "--json")
    (found,) = json.loads(shown.out).values()
    assert 0 <= found["zeroshot_accuracy"] <= 1 and "zeroshot_accuracy_low" in found and found["images"] > 0
    assert "independent" in shown.err and "only numbers" not in shown.err


def test_retrieval_measures_the_texts_of_data_with_boxes_too(words: Path, tmp_path: Path, cli: Cli) -> None:
    data = coco_data(tmp_path / "data", [1, 2, 3])
    listed = json.loads((data / "train" / "_annotations.coco.json").read_text())["images"]
    captions = [{"image_id": one["id"], "caption": f"picture {one['id']}"} for one in listed]
    values = {"images": listed, "annotations": captions}
    (data / "train" / "captions_train.json").write_text(json.dumps(values))
    command = ["evaluate", words, "--data", data, "--by", "retrieval", "--split", "all"]
    assert cli.json(*command)["train"]["texts"] == len(captions)
    assert "measure retrieval alone" in cli.refuses(*command[:4], "--by", "retrieval,zeroshot")


def test_a_note_tells_that_numbers_are_no_names(words: Path, tmp_path: Path, cli: Cli) -> None:
    data = make_colour_folder(tmp_path / "colours")
    for number, folder in enumerate(sorted(path for path in data.iterdir() if path.is_dir())):
        folder.rename(data / str(number))
    shown = cli.call("evaluate", words, "--data", data, "--by", "zeroshot", "--templates", "short", "--json")
    assert "zeroshot_accuracy" in shown.out and "only numbers" in shown.err


@pytest.fixture(scope="module")
def walls(words: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A classifier made from names and templates, the run that fine-tuned it, and the data of the run."""
    folder = tmp_path_factory.mktemp("walls")
    data = str(make_colour_folder(folder / "colours"))
    made, run, templates = str(folder / "made"), str(folder / "run"), folder / "templates.txt"
    templates.write_text("a {} wall\n{} paint\n")
    image = str(next(Path(data).rglob("*.png")))
    named = ["--classes", "blue", "green", "red", "--templates", str(templates), "--save", made]
    assert main(["predict", str(words), image, *named]) == 0
    tune = ["finetune", made, "--data", data, "--run", run, "--device", "cpu", "--steps", "1"]
    assert main([*tune, "--no-linear-head", "--learning-rate", "1e-9", "--evaluations", "1"]) == 0
    return made, run, data


@pytest.mark.slow
def test_the_texts_of_a_head_are_recorded(words: Path, walls: tuple[str, str, str], cli: Cli) -> None:
    for model in walls[:2]:
        text = " ".join(cli.shows("models", model).split())
        assert "a {} wall, {} paint" in text and "in 2 texts" in text
        assert ("Training changed" in text) == bool(load(model).provenance.get("step"))
    assert cli.json("models", words)["words"]["scale"] == pytest.approx(load(words).words.scale)
    assert "--layers: it belongs to the list" in cli.refuses("models", words, "--layers")


def test_a_head_of_a_trained_pair_was_not_trained_itself(words: Path, tmp_path: Path, cli: Cli) -> None:
    pair = replace(load(words), provenance={"step": 4, "recipe": "mine"})
    made = zero_shot(pair, ["bee", "wasp"])
    shown = cli.shows("models", made.save(tmp_path / "made"))
    assert "Training changed" not in shown and "run name" in shown and "mine" in shown
    trained = replace(made, provenance={**made.provenance, "initial": made.provenance})
    assert "Training changed" in " ".join(cli.shows("models", trained.save(tmp_path / "trained")).split())


@pytest.mark.slow
def test_a_pair_beside_a_fine_tuned_model(words: Path, walls: tuple[str, str, str], cli: Cli) -> None:
    made, run, data = walls
    measured = ["--data", data, "--by", "zeroshot,accuracy"]
    shown = cli.call("evaluate", words, run, *measured, "--json")
    pair, tuned = (next(iter(row.values())) for row in json.loads(shown.out).values())
    assert "zeroshot_accuracy" in pair and "accuracy" not in pair
    assert "accuracy" in tuned and "zeroshot_accuracy" not in tuned
    assert "has no head, which --by accuracy measures" in shown.err and "has no text tower" in shown.err
    (both,) = cli.json("evaluate", made, *measured).values()
    assert "zeroshot_accuracy" in both and "accuracy" in both
    assert "If a fine-tuned model is named beside" in cli.refuses("evaluate", words, *measured)
    assert "no text tower" in cli.refuses("evaluate", run, *measured)


@pytest.mark.slow
def test_settings_of_a_recipe_for_a_new_text_tower(words: Path, tmp_path: Path, cli: Cli) -> None:
    """The recipe has another text tower than the model, which only settings that are typed contradict."""
    run = tmp_path / "run"
    small = ["--data", "scenes:24", "--batch-size", "8", "--steps", "1", "--device", "cpu", "--run", str(run)]
    error = cli.refuses("train", "scenes", "--init", words, "--text-width", "512", *small)
    assert "--text-width: the initial model has a text tower" in error
    cli.shows("train", "scenes", "--init", words, *small)
    trained = load(run / "model").words
    assert trained is not None and trained.tower.config == load(words).words.tower.config


@pytest.mark.slow
def test_search_by_text(words: Path, colour_folder: Path, tmp_path: Path, cli: Cli) -> None:
    out = str(tmp_path / "features")
    cli.shows("embed", words, "--data", colour_folder, "--out", out, "--split", "train", "--no-cache")
    shown = cli.call("nearest", out, "--text", "a red wall", "a bee " * 20, "--top", "3", "--json")
    first, second = map(json.loads, shown.out.splitlines())
    assert first["text"] == "a red wall" and len(first["nearest"]) == len(second["nearest"]) == 3
    assert "12 tokens" in shown.err, "a long text is cut and said so"
    bundle = load(words)
    best = first["nearest"][0]
    images = [Path(best["image"]), *colour_folder.rglob("*.png")]
    own, *every = F.normalize(bundle.embed(images), dim=1) @ bundle.embed_texts(["a red wall"])[0]
    assert best["cosine"] == pytest.approx(float(own), abs=5e-3) and best["cosine"] >= max(every) - 1e-2
    assert cli.shows("nearest", out, best["image"], "--text", "a bee", "--csv").splitlines()[0].startswith("query,rank")
    table = cli.shows("nearest", out, "--text", "a bee " * 500, "--top", "3")
    widest = max(len(line) for line in cli.shows("nearest", out, "--text", "a", "--top", "3").splitlines())
    assert all(len(line) <= widest + 100 for line in table.splitlines()), "long texts do not widen the table"
    bare = replace(bundle, words=None).save(tmp_path / "bare")
    cli.shows("embed", bare, "--data", colour_folder, "--out", tmp_path / "others", "--no-cache")
    assert "no text tower" in cli.refuses("nearest", tmp_path / "others", "--text", "a bee")
