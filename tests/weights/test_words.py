"""Tests of models with a text tower: saved, loaded, and used for texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vitrail
from tests.words import text_config, tokenizer_of_bees
from vitrail.errors import BundleError, ConfigError
from vitrail.models.text import TextTower
from vitrail.weights.bundle import Bundle
from vitrail.weights.words import Words


@pytest.mark.slow
def test_a_saved_model_reads_the_same_texts(model: Bundle, tmp_path: Path) -> None:
    texts = ["a bee", "a photo of a wasp", "x"]
    loaded = vitrail.load(model.save(tmp_path / "model"), device="cpu")
    assert torch.equal(loaded.embed_texts(texts), model.embed_texts(texts))
    assert (loaded.words.scale, loaded.words.bias) == (model.words.scale, model.words.bias)
    assert loaded.words.output == ("softmax" if loaded.words.bias is None else "sigmoid")
    assert torch.allclose(model.embed_texts(texts)[1:2], model.embed_texts(texts[1:2]), atol=1e-6)
    model.save(tmp_path / "half", stored="bfloat16")
    small, large = (path / "text.safetensors" for path in (tmp_path / "half", tmp_path / "model"))
    assert small.stat().st_size < 0.6 * large.stat().st_size
    bare = replace(model, words=None).save(tmp_path / "model", overwrite=True)
    assert sorted(path.name for path in bare.iterdir()) == ["model.json", "model.safetensors"]


def test_embeddings_of_texts_can_be_learned_from(model: Bundle) -> None:
    texts, weights = model.embed_texts(["a bee"]), torch.ones(model.network.config.embed_width, requires_grad=True)
    (texts * weights).sum().backward()
    assert torch.equal(weights.grad, texts[0])


def test_a_long_text_is_cut_and_said_so(model: Bundle) -> None:
    with pytest.warns(UserWarning, match="12 tokens"):
        model.embed_texts(["a bee", "wasp " * 40])


def test_empty_and_broken_texts_are_refused(model: Bundle) -> None:
    for text in (" ", "a\udcff"):  # the second one is a byte of the command line that is no UTF-8
        with pytest.raises(ConfigError, match="text 2 of 2 is empty"):
            model.embed_texts(["a bee", text])
    with pytest.raises(ConfigError, match="at least one"):
        model.embed_texts([])


def test_a_tokenizer_of_other_weights_is_refused() -> None:
    config = text_config(tokenizer := tokenizer_of_bees())
    for changes, message in (
        ({"vocabulary": 49408, "end_token": 49407}, "524 tokens"), ({"vocabulary": 520, "end_token": 9}, "524 tokens"),
        ({"end_token": 3}, "end_token=523"), ({"context": 9}, "context=12"),
    ):  # fmt: skip
        with pytest.raises(BundleError, match=message):
            Words(TextTower(replace(config, **changes)), tokenizer, 1.0)


def test_altered_and_missing_files_are_refused(model: Bundle, tmp_path: Path) -> None:
    folder = model.save(tmp_path / "model")
    original = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(original + b" ")
    with pytest.raises(BundleError, match="altered"):
        vitrail.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BundleError, match=r"tokenizer\.json is missing"):
        vitrail.load(folder)
    (folder / "tokenizer.json").write_bytes(original)
    description = json.loads((folder / "model.json").read_text())
    for name, value in (("scale", None), ("config", {"width": 16, "depths": 2}), ("tokenizer", {"kind": "tiktoken"})):
        changed = {**description, "words": {**description["words"], name: value}}
        (folder / "model.json").write_text(json.dumps(changed))
        with pytest.raises(BundleError):
            vitrail.load(folder)
