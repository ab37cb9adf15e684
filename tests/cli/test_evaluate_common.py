"""Tests of the images that `vitrail evaluate` measures: those that training held out, the same ones for all models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.cli.conftest import Cli
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source, fingerprint, key_hash
from vitrail.data.sources import open_data, open_whole
from vitrail.errors import DataError
from vitrail.evaluation.measured_images import (
    CommonImages,
    common_images,
    doubt_about,
    is_data_of,
    open_images,
    overlap_note,
    place_hash,
)
from vitrail.models.variants import create
from vitrail.weights.bundle import Bundle


@pytest.fixture
def birds(tmp_path: Path) -> str:
    """60 images of two classes, without a held-out split."""
    for name, count in (("crow", 40), ("finch", 20)):
        folder = tmp_path / "birds" / name
        folder.mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (5, 4), (number, 9, 200)).save(folder / f"{name}-{number}.png")
    return str(tmp_path / "birds")


def bundle_of(*, classes: tuple[str, ...] = ("crow", "finch"), **provenance: Any) -> Bundle:
    torch.manual_seed(0)
    network = create("ViT-Pico/4", width=8, depth=1, heads=2, mlp_width=8, num_classes=2, image_size=(4, 8))
    return Bundle(network, classes, Preprocess(image_size=(4, 8)), provenance=provenance)


def trained_on(spec: str, share: float, validation: str = "auto", **more: Any) -> Bundle:
    return bundle_of(data=spec, validation_share=share, validation=validation, cut_method="stratified", **more)


def keys_of(source: Source | None) -> set[str]:
    return {source.key(index) for index in range(len(source))}


def held_out(spec: str, share: float, validation: str = "auto") -> set[str]:
    return keys_of(open_data(spec, validation_share=share, validation=validation).validation)


def test_models_with_different_cuts_are_measured_on_what_all_of_them_held_out(birds: str) -> None:
    models = {"a": trained_on(birds, 0.3), "b": trained_on(birds, 0.1), "c": trained_on(birds, 0.4, "train[:30]")}
    expected = held_out(birds, 0.3) & held_out(birds, 0.1) & held_out(birds, 0.4, "train[:30]")
    common = common_images(models, birds, "held-out", None)
    assert common.keys == expected
    assert 0 < len(expected) < 6
    assert "that no model learned from (a held out 18, b held out 6, c held out 30)" in common.note
    for bundle in models.values():
        judged = open_images(bundle, birds, "held-out", common=common)
        assert {name: keys_of(source) for name, source in judged.sources.items()} == {"validation": expected}
        learned = open_images(bundle, birds, "held-out", by_features=True, common=common)
        assert keys_of(learned.train) == keys_of(open_whole(birds).whole.train) - expected
        assert not judged.notes and not learned.notes


def test_the_images_are_the_same_for_models_with_classes_in_another_order(birds: str) -> None:
    turned = bundle_of(classes=("finch", "crow"))
    common = common_images({"a": trained_on(birds, 0.3), "b": turned}, birds, "held-out", None)
    (source,) = open_images(turned, birds, "held-out", common=common).sources.values()
    assert keys_of(source) == held_out(birds, 0.3)
    assert {source.target(at) for at in range(len(source)) if source.key(at).startswith("crow")} == {1}


def test_without_common_images_the_message_names_the_cuts_and_the_way_out(birds: str) -> None:
    models = {"a": trained_on(birds, 0.3), "b": trained_on(birds, 0.0)}
    message = r"has no image that all models held out of training \(a held out 18, b held out 0\); measure them on"
    for split in ("held-out", "validation"):
        with pytest.raises(DataError, match=message):
            common_images(models, birds, split, None)
    for split in ("all", "train"):
        assert common_images(models, birds, split, None) == CommonImages(None, 0.0, "")
    models = {"b": trained_on(birds + "[:50%]", 0.0), "c": bundle_of(data="elsewhere")}
    with pytest.raises(DataError, match=r"\(b held out 0\)"):
        common_images(models, birds, "held-out", 0.2)


def test_models_of_other_data_are_measured_on_the_usual_fraction_or_the_given_one(birds: str) -> None:
    models = {"a": bundle_of(data="elsewhere", validation_share=0.5), "b": bundle_of()}
    common = common_images(models, birds, "held-out", None)
    assert common.keys == held_out(birds, 0.1)
    assert "measuring 6 images of 60" in common.note and "no model records that it learned from them" in common.note
    assert common_images(models, birds, "held-out", 0.25).keys == held_out(birds, 0.25)
    models["a"] = trained_on(birds, 0.3)
    for share, expected in ((0.1, 0.1), (0.6, 0.3)):  # never images that a model learned from
        assert common_images(models, birds, "validation", share).keys == held_out(birds, expected)


def test_a_tiny_fraction_of_other_data_holds_out_images_of_few(birds: str) -> None:
    model = bundle_of(data="elsewhere", validation_share=0.001, cut_method="stratified")
    found = open_images(model, birds, "held-out", by_features=True)
    assert keys_of(found.sources["validation"]) == held_out(birds, 0.1)


def test_data_that_was_moved_is_recognised(birds: str, tmp_path: Path) -> None:
    splits = open_data(birds, validation_share=0.3)
    known = trained_on(birds, 0.3, data_fingerprint=fingerprint(splits.train, splits.validation, splits.test))
    moved = str(Path(birds).rename(tmp_path / "renamed"))
    common = common_images({"a": known, "b": bundle_of()}, moved, "held-out", None)
    assert common.keys == held_out(moved, 0.3)


def test_data_is_recognised_by_its_place(birds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = trained_on("birds", 0.3, places={"birds": place_hash("birds[:50%]")})
    opened = open_whole(birds)
    monkeypatch.chdir("/")
    assert is_data_of(known.provenance, opened), "from another working directory"
    shutil.copytree(birds, tmp_path / "other" / "birds")
    monkeypatch.chdir(tmp_path / "other")
    opened = open_whole("birds")
    assert not is_data_of(known.provenance, opened), "another folder of the same name"
    note = overlap_note(known, opened, opened.splits(validation_share=0.3).validation or opened.whole.train)
    assert note is not None and "in another folder" in note
    mixed = bundle_of(data="elsewhere", mix=["0.5:birds"], places={"birds": place_hash(birds)})
    assert doubt_about(mixed, opened) is None and doubt_about(mixed, open_whole(birds)) is not None
    note = overlap_note(mixed, opened, opened.whole.train)
    assert note is not None and "in another folder" in note


def test_an_absolute_path_is_the_same_place_behind_other_links(birds: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    known = {"data": str(link), "places": {str(link): "the place of the link's target on another machine"}}
    link.symlink_to(birds)
    assert is_data_of(known, open_whole(str(link))) and not is_data_of(known, open_whole(birds))


def test_a_place_with_a_long_query_is_none() -> None:
    assert place_hash(f"https://example.org/shard.tar?signature={300 * 'a'}") == ""


def test_data_of_the_hub_is_recognised_with_another_choice_of_columns(birds: str) -> None:
    opened = replace(open_whole(birds), spec="hf:org/birds?label=fine")
    assert is_data_of({"data": "hf:org/birds[:10%]"}, opened) and is_data_of({"data": "hf:org/birds?label=a"}, opened)
    assert not is_data_of({"data": "hf:org/bees?label=fine"}, opened)


def test_the_cut_of_the_model_that_a_model_was_fine_tuned_from_counts_too(birds: str) -> None:
    first = trained_on(birds, 0.1).provenance
    for third in (trained_on(birds, 0.4, initial=first), bundle_of(data="elsewhere", initial={"initial": first})):
        assert common_images({"a": third, "b": bundle_of()}, birds, "held-out", None).keys == held_out(birds, 0.1)


def test_a_model_of_an_earlier_version_names_only_the_place_of_its_initial_model(birds: str, tmp_path: Path) -> None:
    place = str(tmp_path / "first")
    trained_on(birds, 0.1, init=place).save(tmp_path / "first" / "model")  # as if it had replaced its initial model
    for second in (trained_on(birds, 0.4, init=place), trained_on(birds, 0.4, init=place, initial={})):
        assert common_images({"a": second, "b": bundle_of()}, birds, "held-out", None).keys == held_out(birds, 0.1)


def test_a_cut_that_the_data_does_not_allow_any_more_is_a_doubt(birds: str) -> None:
    opened = open_whole(birds)
    model = trained_on(birds, 0.1, validation="train[1000:]")
    note = overlap_note(model, opened, opened.splits(validation_share=0.3).validation or opened.whole.train)
    assert note is not None and "may have trained" in note and "train[1000:]" in note


def test_a_note_counts_the_images_from_which_an_initial_model_learned(birds: str) -> None:
    first = trained_on(birds, 0.1)
    for share, learned in ((0.3, "12 of the 18"), (0.1, ""), (0.05, "")):
        second = trained_on(birds, share, initial=first.provenance)
        counted = [note for note in open_images(second, birds, "held-out").notes if "have trained" in note]
        assert len(counted) == bool(learned) and all(learned in note for note in counted)
    second = bundle_of(data="elsewhere", initial="?")
    assert not any("have trained" in note for note in open_images(second, birds, "held-out").notes)


def test_data_that_has_changed_holds_out_other_images(birds: str) -> None:
    recorded = key_hash(open_data(birds, validation_share=0.1).validation)
    models = {name: trained_on(birds, 0.1, validation_keys=recorded) for name in ("a", "b")}
    assert common_images(models, birds, "held-out", None).keys == held_out(birds, 0.1)
    assert [note for note in open_images(models["a"], birds, "held-out").notes if "has changed" in note] == []
    for number in range(9):
        Image.new("RGB", (5, 4), (number, 99, 0)).save(Path(birds) / "finch" / f"a-{number}.png")
    with pytest.raises(DataError, match=r"^a: '.*birds' has changed since the model was trained on it"):
        common_images(models, birds, "held-out", None)
    notes = open_images(models["a"], birds, "held-out").notes
    assert any("the measured images may be among those that it learned from" in note for note in notes)
    by_hash = bundle_of(data=birds, validation_share=0.1, cut_method="threshold", validation_keys=recorded)
    assert not any("has changed" in note for note in open_images(by_hash, birds, "held-out").notes)


def test_other_labels_of_the_same_images_may_hold_out_others(birds: str) -> None:
    paths = sorted(Path(birds).rglob("*.png"))
    rows = [f"{path.relative_to(birds)},{path.parent.name},{number % 7}" for number, path in enumerate(paths)]
    (table := Path(birds) / "rows.csv").write_text("\n".join(["path,kind,place", *rows]))
    spec = f"{table}?label=kind"
    recorded = key_hash(open_data(spec, validation_share=0.1).validation)
    model = trained_on(spec, 0.1, validation_keys=recorded)
    notes = {column: open_images(model, f"{table}?label={column}", "held-out", by_features=True).notes
             for column in ("kind", "place")}  # fmt: skip
    doubts = {column: any("may be among those" in note for note in notes[column]) for column in notes}
    assert doubts == {"kind": False, "place": True}


def test_images_that_were_mixed_into_training_count_as_learned(birds: str) -> None:
    mixed = bundle_of(data="elsewhere", validation_share=0.1, mix=[f"0.3:{birds}"])
    with pytest.raises(DataError, match="mixed: the model learned from all of"):
        common_images({"mixed": mixed, "own": trained_on(birds, 0.1)}, birds, "held-out", None)
    assert any("mixed into its training images" in note for note in open_images(mixed, birds, "held-out").notes)


def test_a_held_out_split_of_the_data_is_measured_as_it_is(birds: str, tmp_path: Path) -> None:
    (tmp_path / "split").mkdir()
    Path(birds).rename(tmp_path / "split" / "train")
    for name in ("crow", "finch"):
        (tmp_path / "split" / "test" / name).mkdir(parents=True)
        Image.new("L", (4, 4), 7).save(tmp_path / "split" / "test" / name / "new.png")
    spec = str(tmp_path / "split")
    models = {"a": trained_on(spec, 0.3), "b": trained_on(spec, 0.1)}
    common = common_images(models, spec, "held-out", None)
    assert common == CommonImages(None, 0.0, "")
    found = open_images(models["a"], spec, "held-out", by_features=True, common=common)
    assert list(found.sources) == ["test"] and len(found.train) == 60
    assert common_images(models, spec, "validation", None).keys == held_out(spec, 0.1)
    given = common_images(models, spec, "held-out", 0.2)
    assert given.keys is None and "--validation-share has no effect" in given.note


def test_generated_images_are_generated_anew() -> None:
    spec = "fractals:2:20"
    common = common_images({"a": trained_on(spec, 0.2), "b": bundle_of()}, spec, "held-out", 0.5)
    splits = common.split(open_whole(spec))
    assert splits.validation is not None and len(splits.validation) >= 20
    assert not keys_of(splits.validation) & keys_of(splits.train)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_several_models_are_one_table(birds: str, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    trained_on(birds, 0.3).save("first")
    trained_on(birds, 0.2).save("second")
    words = ["evaluate", "first", "second", "--data", birds, "--device", "cpu", "--no-cache", "--by", "accuracy,knn"]
    captured = cli.call(*words, "--json")
    rows = json.loads(captured.out)
    assert list(rows) == ["first", "second"]
    assert rows["first"] == rows["second"], "the weights and the images are the same"
    assert rows["first"]["validation"]["images"] == 12 == len(held_out(birds, 0.2))
    assert rows["first"]["validation"]["training_images"] == 48
    assert "measuring 12 images of 60" in captured.err.replace("\n", " ")
    heading, _, *lines = cli.shows(*words).split("validation", 1)[1].splitlines()
    assert heading.split() == ["first", "second"]
    assert any(line.split()[:2] == ["images", "12"] for line in lines)
    assert cli.json(*words[:-1], "accuracy", "--split", "all")["second"]["train"]["images"] == 60


@pytest.fixture
def nests(tmp_path: Path) -> Path:
    """40 training images and 6 validation images of two classes."""
    for split, count in (("train", 20), ("val", 3)):
        for name in ("crow", "finch"):
            folder = tmp_path / "nests" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("L", (5, 4), number).save(folder / f"{number}.png")
    return tmp_path / "nests"


@pytest.mark.parametrize("validation", ["train", "train[-5:]"])
def test_the_official_split_is_the_test_split_of_a_model_whose_training_used_it_so(
    nests: Path, validation: str
) -> None:
    bundle = trained_on(str(nests), 0.2, validation)
    expected = open_data(str(nests), validation_share=0.2, validation=validation)
    for split, source in (("test", expected.test), ("validation", expected.validation), ("held-out", expected.test)):
        head = open_images(bundle, str(nests), split)
        (found,) = head.sources.values()
        assert source is not None and keys_of(found) == keys_of(source)
    features = open_images(bundle, str(nests / "." / ""), "test", by_features=True)
    assert list(features.sources) == ["test"] and len(features.train) == (40 if validation == "train" else 35)
    other = open_images(bundle_of(data="elsewhere", validation=validation), str(nests), "held-out")
    assert list(other.sources) == ["validation"]
    none = trained_on(str(nests), 0.0, "train")
    assert list(open_images(none, str(nests), "held-out").sources) == ["test"]
    seen = open_images(none, str(nests), "validation")
    assert any("4 of the 4 measured images have trained" in note for note in seen.notes)
    seen = open_images(bundle_of(data="elsewhere", validation_share=0.0), str(nests / "train"), "validation")
    assert any("if it was trained on this data, the measured images were among" in note for note in seen.notes)


def test_a_model_of_an_earlier_version_is_measured_on_the_images_that_it_held_out(nests: Path) -> None:
    spec = str(nests / "train")
    found = []
    for about, method in (({"data": spec}, "threshold"), ({"cut_method": "stratified"}, "stratified")):
        (source,) = open_images(bundle_of(validation_share=0.3, **about), spec, "held-out").sources.values()
        assert keys_of(source) == keys_of(open_data(spec, validation_share=0.3, cut_method=method).validation)
        found.append(keys_of(source))
    assert found[0] != found[1]
