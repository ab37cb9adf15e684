"""Tests of `vitrail explain`."""

from __future__ import annotations

import html
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.cli.conftest import Cli
from tests.make import dense_bundle
from vitrail.analysis.saliency import attention_rollout, class_relevance
from vitrail.cli import main
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.vit import VisionTransformer
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load


def save_model(
    path: Path, *, classes: tuple[str, ...] = ("ant & bee", "cat", "dog"), resize: Any = "crop", **fields: object
) -> Path:
    """Write a model of two blocks for images of 12 x 20."""
    defaults = {
        "image_size": (12, 20), "patch_size": (4, 5), "width": 16, "depth": 2, "heads": 2, "mlp_width": 24,
        "num_classes": len(classes),
    }  # fmt: skip
    network = VisionTransformer(ViTConfig(**{**defaults, **fields}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return Bundle(network, classes, Preprocess(image_size=network.config.image_size, resize=resize)).save(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (33, 47, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a rose.png")
    return tmp_path / "a rose.png"


@pytest.fixture
def explain(model: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Explains one image."""
    return Cli(capsys, "explain", model, image, "--out", tmp_path / "out", "--device", "cpu")


def about_of(text: str) -> dict[str, Any]:
    """Return the data of a page, without the weights."""
    found = re.search(r'id="about">(.*?)</script>', text)
    return dict(json.loads(found[1]))


def test_files_have_the_size_of_the_picture(image: Path, tmp_path: Path, explain: Cli) -> None:
    out = tmp_path / "out"
    assert explain.shows() == f"{image}: {out / 'a rose.html'}\n"
    maps = ["layer-01-head-00", "layer-01-head-01", "relevance", "rollout"]
    assert sorted(path.name for path in out.glob("*.png")) == [f"a rose-{name}.png" for name in maps]
    pictures = {}
    for name in maps:
        with Image.open(out / f"a rose-{name}.png") as picture:
            assert picture.size == (47, 33)
            pictures[name] = np.asarray(picture).astype(int)
    original = np.asarray(Image.open(image)).astype(int)
    # The network sees a window of 28 x 47 in the middle: what lies above and below keeps its colours.
    changed = np.abs(pictures["rollout"] - original).max(axis=(1, 2)) > 0
    assert not changed[:2].any() and not changed[-2:].any() and changed[5:28].all()


def test_the_page_has_the_numbers(model: Path, image: Path, tmp_path: Path, explain: Cli) -> None:
    explain.shows("--label", "ant & bee", "--top", "2")
    text = (tmp_path / "out" / "a rose.html").read_text(encoding="utf-8")
    assert not re.search(r'<(?:iframe|img|link(?! [^>]*href="data:,"))', text), "the page needs no other file"
    about, bundle = about_of(text), load(model, device="cpu")
    assert (about["grid"], about["layers"], about["heads"]) == ([3, 4], [0, 1], [0, 1])
    assert about["prefix"] == ["class token"]
    inputs = bundle.preprocess.normalise(torch.from_numpy(np.stack([bundle.preprocess.pixels(image.read_bytes())])))
    np.testing.assert_allclose(about["rollout"], attention_rollout(bundle.network, inputs).values.ravel(), rtol=1e-5)
    likeliest = bundle.network(inputs)[0].argsort(descending=True).tolist()[:2]
    numbers = [0, *(number for number in likeliest if number != 0)]  # --label comes first
    assert [one["label"] for one in about["relevance"]] == [bundle.classes[number] for number in numbers]
    for number, one in zip(numbers, about["relevance"], strict=True):
        wanted = class_relevance(bundle.network, inputs, torch.tensor([number])).values[0]
        np.testing.assert_allclose(one["values"], wanted.ravel(), rtol=1e-4)
    # The network sees a window of 28 x 47 in the middle of 33 x 47 pixels.
    np.testing.assert_allclose(about["area"], [0, 2.36, 47, 28.2], atol=0.1)
    (prediction,) = bundle.predict([image], top=2)
    label, probability = prediction.ranking[0]
    assert html.escape(label) in text and f"{probability:.1%}" in text


@pytest.mark.parametrize(
    ("fields", "prefix"),
    [
        ({"classes": (), "pool": "gap", "class_token": False}, []),
        ({"registers": 2}, ["class token", "register 0", "register 1"]),
        ({"registers": 2, "pool": "cls+dist"}, ["class token", "distillation token", "register 1"]),
    ],
)
def test_tokens_have_names(fields: dict[str, Any], prefix: list[str], image: Path, tmp_path: Path, cli: Cli) -> None:
    cli.shows("explain", save_model(tmp_path / "model", **fields), image, "--out", tmp_path / "out", "--device", "cpu")
    about = about_of((tmp_path / "out" / "a rose.html").read_text(encoding="utf-8"))
    assert about["prefix"] == prefix and about["hasClassToken"] == bool(prefix)
    assert bool(about["relevance"]) == (tmp_path / "out" / "a rose-relevance.png").exists() == bool(prefix)


def test_a_page_that_would_be_too_large_is_announced(tmp_path: Path, explain: Cli) -> None:
    note = "The page has no attention of heads, because one map of 13 tokens exceeds the limit of 0.01 MB (--page-size)"
    assert f"a rose.html: {note}. Choose a smaller --image-size" in explain.call("--page-size", "0.01").err
    assert note in (tmp_path / "out" / "a rose.html").read_text(encoding="utf-8")


def test_images_of_one_name_and_a_broken_one(model: Path, image: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "more").mkdir()
    Image.open(image).resize((9, 60)).save(tmp_path / "more" / "a rose.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    words = ["explain", str(model), str(image), str(tmp_path / "more"), str(tmp_path / "broken.png")]
    assert str(tmp_path / "broken.png") in cli.refuses(*words, "--out", tmp_path / "out", "--device", "cpu")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.html")) == ["a rose-2.html", "a rose.html"]


def test_only_earlier_explanations_are_replaced(tmp_path: Path, explain: Cli) -> None:
    out = tmp_path / "out"
    explain.shows("--layers", "0", "-1", "--heads", "0")
    found = sorted(path.name for path in out.glob("*head*"))
    assert found == ["a rose-layer-00-head-00.png", "a rose-layer-01-head-00.png"]
    assert "--overwrite" in explain.refuses()
    explain.shows("--overwrite")
    assert not (out / "a rose-layer-00-head-00.png").exists() and (out / "a rose-layer-01-head-00.png").exists()
    (out / "mine.png").write_bytes(b"")
    assert "holds files that Vitrail did not write (mine.png)" in explain.refuses("--overwrite")
    assert "a rose.html" in json.loads((out / "explain.json").read_text())["files"]


def test_a_name_that_leaves_no_room_is_shortened(image: Path, tmp_path: Path, explain: Cli) -> None:
    long = [shutil.copy(image, tmp_path / f"{'ü' * 124}{end}.png") for end in "ab"]
    explain.shows(*long)
    pages = sorted((tmp_path / "out").glob("ü*.html"))
    assert len(pages) == 2 and all((tmp_path / "out" / f"{page.stem}-rollout.png").exists() for page in pages)


def test_an_image_without_the_chosen_place_does_not_lose_the_others(image: Path, tmp_path: Path, cli: Cli) -> None:
    dense_bundle("patches").save(tmp_path / "masks")
    Image.new("RGB", (9, 9)).save(tmp_path / "small.png")
    words = ["explain", tmp_path / "masks", image, "--place", "40.7", "20", "--out", tmp_path / "out"]
    message = cli.refuses(*words[:2], tmp_path / "small.png", *words[2:])
    assert "small.png: --place" in message and "outside of the image" in message
    assert [path.name for path in (tmp_path / "out").glob("*.html")] == ["a rose.html"]
    words[2] = tmp_path / "small.png"
    assert "--place: 40.7 20.0 is outside" in cli.refuses(*words, "--overwrite")
    words[2] = tmp_path / "broken.png"
    words[2].write_bytes(b"no image")
    assert "broken.png" in cli.refuses(*words, "--overwrite")
    assert (tmp_path / "out" / "a rose.html").exists(), "an earlier result is kept"


def test_the_last_fraction_of_a_pixel_is_a_place(image: Path, tmp_path: Path, cli: Cli) -> None:
    dense_bundle("patches").save(tmp_path / "masks")
    places = [
        cli.shows("explain", tmp_path / "masks", image, "--place", *at, "--out", tmp_path / "out", "--overwrite")
        and about_of((tmp_path / "out" / "a rose.html").read_text(encoding="utf-8"))["relevance"][0]["label"]
        for at in (("46", "32"), ("46.9", "32.9"))
    ]
    assert places[0] == places[1]


def test_the_patches_cover_a_picture_that_is_mostly_long(tmp_path: Path, model: Path, cli: Cli) -> None:
    save_model(tmp_path / "squash", resize="squash")
    Image.new("RGB", (10, 4000)).save(tmp_path / "long.png")
    cli.shows("explain", tmp_path / "squash", tmp_path / "long.png", "--out", tmp_path / "out")
    about = about_of((tmp_path / "out" / "long.html").read_text(encoding="utf-8"))
    assert about["area"] == [0, 0, *about["picture"]]


def test_the_number_of_classes_is_refused_without_a_head(image: Path, tmp_path: Path, cli: Cli) -> None:
    model = save_model(tmp_path / "headless", classes=())
    assert "--top: 3" in cli.refuses("explain", model, image, "--top", "3", "--out", tmp_path / "out")


@pytest.mark.slow
def test_names_with_wildcards_and_raw_bytes(
    model: Path, image: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for name in ("photo[1].png", "*.png", raw := os.fsdecode(b"\xe9.png")):
        shutil.copy(image, tmp_path / name)
    words = ["explain", str(model), str(tmp_path / "photo[1].png"), "--out", str(out), "--device", "cpu", "--overwrite"]
    assert main(words) == 0 and main(words) == 0
    words[2] = str(tmp_path / "*.png")
    assert main(words) == 0 and not (out / "photo[1].html").exists()
    (out / "mine.html").write_text("mine")
    assert "files that Vitrail did not write (mine.html)" in cli.refuses(*words)
    assert (out / "mine.html").read_text() == "mine"
    words[2], words[4] = str(tmp_path / raw), str(tmp_path / "raw")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed := io.BytesIO(), encoding="utf-8"))
    assert main(words) == 0 and main(words) == 0
    assert printed.getvalue() == 2 * os.fsencode(f"{words[2]}: {tmp_path}/raw/{raw.replace('png', 'html')}\n")


def test_numbers_that_are_not_finite_are_refused(model: Path, tmp_path: Path, explain: Cli) -> None:
    for name, value, message in (
        ("blocks.1.norm1.weight", float("nan"), "layer 1 of the model has attention that is not finite"),
        ("head.bias", float("inf"), "outputs are not finite"),
    ):
        broken = save_model(model.with_name(name))
        bundle = load(broken, device="cpu")
        with torch.no_grad():
            bundle.network.get_parameter(name)[0] = value
        bundle.save(model, overwrite=True)
        assert message in explain.refuses() and not (tmp_path / "out").exists()
