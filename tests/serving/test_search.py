"""Tests of texts in the server: their embeddings, and the search in stored images."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.nn.functional as F
from PIL import Image

from tests.serving.conftest import make_bundle
from tests.serving.running import Running, data_uri, serving
from tests.words import model_with_words
from vitrail.cli import main
from vitrail.errors import ConfigError
from vitrail.evaluation.features.index import FeatureIndex
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of odd sizes, of which one is larger than its picture in answers."""
    folder, draws = tmp_path_factory.mktemp("search") / "photos", np.random.default_rng(2)
    for number, size in enumerate(((31, 45), (28, 28), (700, 301), (19, 66))):
        (folder / f"class {number % 2}").mkdir(parents=True, exist_ok=True)
        pixels = draws.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"class {number % 2}" / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def words(pictures: Path) -> Bundle:
    saved = model_with_words(bias=-2.0).save(pictures.parent / "model")
    options = ["--data", str(pictures), "--out", str(pictures.parent / "features"), "--no-cache", "--split", "train"]
    assert main(["embed", str(saved), *options, "--precision", "float32", "--device", "cpu"]) == 0
    return load(saved, device="cpu")


@pytest.fixture(scope="module")
def index(words: Bundle, pictures: Path) -> FeatureIndex:
    return FeatureIndex.open(pictures.parent / "features")


@pytest.fixture(scope="module")
def searching(words: Bundle, index: FeatureIndex) -> Iterator[Running]:
    with serving({"flowers": make_bundle(), "words": words}, index) as running:
        yield running


@pytest.mark.slow
def test_embeddings_of_texts_and_images_in_one_request(searching: Running, words: Bundle, pictures: Path) -> None:
    image = sorted(pictures.rglob("*.png"))[0].read_bytes()
    inputs = ["a red wall", data_uri(image), "a blue wall"]
    answer = searching.ask_json("/v1/embeddings", {"input": inputs, "model": "words"})
    assert [one["index"] for one in answer.json["data"]] == [0, 1, 2]
    red, found, blue = (np.array(one["embedding"]) for one in answer.json["data"])
    np.testing.assert_allclose([red, blue], words.embed_texts([inputs[0], inputs[2]]).numpy(), atol=1e-5)
    np.testing.assert_allclose(found, F.normalize(words.embed([image]), dim=1)[0].numpy(), atol=1e-5)
    packed = searching.ask_json("/v1/embeddings", {"input": inputs[0], "model": "words", "encoding_format": "base64"})
    values = np.frombuffer(base64.b64decode(packed.json["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(values, red, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "model", "said"),
    [
        ("a bee", "flowers", "no URL is fetched"),
        (" ", "words", "a text is empty"),
        ("\ud800", "words", "cannot be decoded"),
        ("bee " * 300, "words", "longer than the"),
        ("iVBORw0KGgoAAA", "words", "data:image/png;base64"),
        (["a bee", [3, 4]], "words", "lists of tokens are not read"),
    ],
)
def test_texts_that_are_refused(text: object, model: str, said: str, searching: Running) -> None:
    answer = searching.ask_json("/v1/embeddings", {"input": text, "model": model})
    assert answer.status == 400 and said in answer.json["error"]


def test_the_search_by_a_text_and_by_an_image(
    searching: Running, words: Bundle, index: FeatureIndex, pictures: Path
) -> None:
    answer = searching.ask_json("/search", {"text": "a red wall", "top": 3}).json
    (wanted,) = index.search(words.embed_texts(["a red wall"]).numpy(), 3)
    assert answer["model"] == "words" and len(answer["results"]) == 3
    assert [(one["image"], one["label"]) for one in answer["results"]] == [(one.image, one.label) for one in wanted]
    assert [one["cosine"] for one in answer["results"]] == pytest.approx([one.cosine for one in wanted], abs=1e-5)
    large = pictures / "class 0" / "2.png"
    best = searching.ask("POST", "/search?top=1", large.read_bytes(), Content_Type="image/png").json["results"]
    assert [one["image"] for one in best] == [str(large)] and best[0]["cosine"] == pytest.approx(1, abs=1e-4)
    picture = searching.ask("GET", f"/{best[0]['picture']}")
    with Image.open(io.BytesIO(picture.body)) as shown:
        assert shown.format == "JPEG" and shown.size == (220, 512)
    assert searching.ask("GET", "/models").json["index"] == {"images": 4, "model": "words", "reads_texts": True}


def test_searches_that_are_refused(searching: Running, server: Running, pictures: Path) -> None:
    for body, said in (({"top": 3}, "text: this must"), ({"text": "x", "top": 0}, "not a number of images")):
        answer = searching.ask_json("/search", body)
        assert answer.status == 400 and said in answer.json["error"]
    for path, text in (
        ("/search", b'{"text": "x", "top": 1, "top": 2}'),
        ("/search?top=3", b'{"text": "x", "top": 1}'),
    ):
        answer = searching.ask("POST", path, text, Content_Type="application/json")
        assert answer.status == 400 and "top" in answer.json["error"]
    assert searching.ask("POST", "/search", b"no image", Content_Type="image/png").status == 422
    for row in ("4", "-1", "x", "%2e%2e"):
        assert searching.ask("GET", f"/search/pictures/{row}").status == 404
    assert server.ask_json("/search", {"text": "a bee"}).status == 404, "without an index"


def test_a_file_that_is_gone_has_no_picture(searching: Running, index: FeatureIndex, tmp_path: Path) -> None:
    path = Path(index.images[0])
    moved = path.rename(tmp_path / "moved.png")
    try:
        results = searching.ask_json("/search", {"text": "a bee", "top": 9}).json["results"]
        assert len(results) == 4
        assert [one["picture"] is None for one in results] == [one["image"] == str(path) for one in results]
        assert searching.ask("GET", "/search/pictures/0").status == 404
    finally:
        moved.rename(path)


def test_a_name_of_a_file_that_is_not_utf_8(words: Bundle, index: FeatureIndex) -> None:
    names = tuple(f"caf\udce9-{row}.png" for row in range(len(index)))
    with serving({"words": words}, replace(index, images=names)) as running:
        results = running.ask_json("/search", {"text": "a bee", "top": 9}).json["results"]
        assert sorted(one["image"] for one in results) == list(names)
        assert running.ask("GET", f"/search/pictures/{'9' * 5000}").status == 404


def test_features_of_a_model_that_was_replaced_are_not_searched(words: Bundle, index: FeatureIndex) -> None:
    with serving({"words": words}, index) as running:
        running.service.index = replace(index, about={**index.about, "weights_sha256": "0" * 64})
        answer = running.ask_json("/search", {"text": "a bee"})
        assert answer.status == 409 and "was replaced" in answer.json["error"]
        running.service.index = index
        assert running.ask_json("/search", {"text": "a bee"}).status == 200
        other = replace(words, preprocess=replace(words.preprocess, mean=(0.1,)))
        asyncio.run(running.service.replace("words", other))
        assert running.ask_json("/search", {"text": "a bee"}).status == 409, "the same weights, other images"


def test_an_index_of_no_served_model_is_refused(index: FeatureIndex, words: Bundle) -> None:
    with pytest.raises(ConfigError, match="other weights"), serving({"flowers": make_bundle()}, index):
        pass
    other = replace(words, preprocess=replace(words.preprocess, crop_share=0.5))
    with pytest.raises(ConfigError, match="other preprocessing"), serving({"words": other}, index):
        pass
