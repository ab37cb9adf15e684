"""Tests of zero-shot classification: its probabilities are those of the pair of towers."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vitrail
from vitrail.errors import ConfigError, DataError
from vitrail.weights.bundle import Bundle
from vitrail.weights.zero_shot import read_templates, readable_name, zero_shot

CLASSES = ["a bee", "a wasp", "a fly"]


def images(count: int = 3) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (count, 30, 41, 3), dtype=np.uint8))


@pytest.mark.slow
def test_probabilities_are_those_of_the_pair(model: Bundle, tmp_path: Path) -> None:
    templates = ("a photo of {}", "{} x")
    made = zero_shot(model, CLASSES, templates=templates)
    words = model.words
    texts = torch.stack(
        [F.normalize(model.embed_texts([t.replace("{}", c) for t in templates]).mean(0), dim=0) for c in CLASSES]
    )
    embedded = F.normalize(model.embed(images()), dim=-1)
    logits = math.exp(words.scale) * embedded @ texts.T + (words.bias or 0.0)
    expected = logits.softmax(dim=1) if words.bias is None else logits.sigmoid()
    found = torch.tensor([[dict(row.ranking)[name] for name in CLASSES] for row in made.predict(images())])
    assert torch.allclose(found, expected, atol=1e-5)
    assert made.output == words.output and made.notes[-1].startswith("zero-shot")
    again = vitrail.load(made.save(tmp_path / "model"), device="cpu")
    for one, other in zip(again.predict(images()), made.predict(images()), strict=True):
        assert dict(one.ranking) == pytest.approx(dict(other.ranking), abs=1e-5)
    assert torch.allclose(again.embed(images()), model.embed(images()), atol=1e-6), "the space of texts is kept"
    assert zero_shot(again, ["a bee", "an ant"]).classes == ("a bee", "an ant")


def test_changes_of_modules_are_kept(model: Bundle) -> None:
    changed = replace(model, network=copy.deepcopy(model.network))
    changed.network.blocks[0].mlp.activation = torch.nn.ReLU()
    expected = model.network.config.num_classes
    made = zero_shot(changed, CLASSES)
    assert isinstance(made.network.blocks[0].mlp.activation, torch.nn.ReLU)
    assert torch.equal(made.embed(images()), changed.embed(images()))
    assert changed.network.config.num_classes == expected, "the model itself stays as it was"


def test_names_of_folders_are_made_readable(model: Bundle) -> None:
    names = {"001.Black_footed-Albatross": "Black footed Albatross", "AnnualCrop": "Annual Crop", "7": "7",
             "great white shark, man-eater": "great white shark", "747-400": "747 400"}  # fmt: skip
    assert {name: readable_name(name) for name in names} == names
    made = zero_shot(model, ["01_honey_bee", "WaspNest"], templates=("{}",), readable=True)
    assert made.provenance["zero_shot"]["texts"] == ["honey bee", "Wasp Nest"]
    assert made.classes == ("01_honey_bee", "WaspNest")
    alike = ["maillot", "maillot, tank suit", "02_honey_bee"]  # the first two are classes of ImageNet
    made = zero_shot(model, alike, templates=("{}",), readable=True)
    assert made.provenance["zero_shot"]["texts"] == ["maillot", "maillot, tank suit", "honey bee"]


def test_published_templates_and_those_of_a_file(tmp_path: Path) -> None:
    assert [len(read_templates(name)) for name in ("usual", "short", "imagenet")] == [1, 7, 80]
    path = tmp_path / "mine.txt"
    path.write_text("\ufeffa {} at night\n\n{}\n", encoding="utf-8")  # with the mark of some editors
    assert read_templates(str(path)) == ("a {} at night", "{}")
    path.write_text("a photo\n")
    with pytest.raises(ConfigError, match="'a photo'"):
        read_templates(str(path))
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(DataError, match=r"mine\.txt"):
        read_templates(str(path))


def test_faults_of_class_names(model: Bundle, types_unchecked: None) -> None:
    for classes in ("cat", {"cat", "dog"}, ["cat", None]):
        with pytest.raises(ConfigError, match=r"^classes=.* is not a list of texts"):
            zero_shot(model, classes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^texts=.* is not a list of texts"):
        model.embed_texts(["a", 5])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="empty"):
        zero_shot(model, [])
    with pytest.raises(ConfigError, match="do not differ"):  # the same letter, as one and as two characters
        zero_shot(model, ["b\u00e9e", "be\u0301e"])
    with pytest.raises(ConfigError, match="do not differ"):  # within the tokens that the model reads
        zero_shot(model, ["wasp", "bee " * 50, "bee " * 60])
    zero_shot(model, ["wasp", "bee"], templates=["a " * 50 + "{}", "a {}"])  # which the second template tells apart
    long = zero_shot(model, ["bee " * 50, "wasp"])
    assert any("12 tokens" in note for note in long.notes)
    if model.words is not None and model.words.bias is None:
        with pytest.raises(ConfigError, match="two or more"):
            zero_shot(model, ["a bee"])
