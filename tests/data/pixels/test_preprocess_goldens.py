"""Preprocessing of the original code: `Preprocess` gives the pixels of vision_transformer and of big_vision."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.golden import images as goldens
from tests.make import encode
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.pixels.tensorflow import resize

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
RANGES: dict[str, dict[str, Any]] = {
    "value_range(-1, 1)": {},
    "vgg_value_range": IMAGENET,
    "clip_value_range": {
        "mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711),
    },
}  # fmt: skip
"""big_vision's ranges of values as fields of `Preprocess`."""


def fields_of(operations: list[str], size: tuple[int, int]) -> dict[str, Any] | None:
    """The fields that stand for big_vision's operations on an image of this size. None if the result has a size that no
    field states, as that of resize_small alone."""
    found = [re.fullmatch(r"(\w+)\((.*)\)", text) for text in operations]
    (first, arguments), *others = [(match[1], json.loads(f"[{_json(match[2])}]")) for match in found if match]
    if first == "central_crop":
        side = arguments[0] if arguments else min(size)
        height, width = (side, side) if isinstance(side, int) else side
        return {"image_size": (height, width), "resize": "crop", "crop_share": max(height / size[0], width / size[1])}
    target, method, antialias = [*arguments, *DEFAULTS[first][len(arguments) - 1 :]]
    scaling = {"interpolation": method, "antialias": antialias or method == "area"}
    if first == "resize":
        return {"image_size": (target, target) if isinstance(target, int) else tuple(target), **scaling}
    if not others:
        return None
    side = others[0][1][0]
    return {"image_size": (side, side), "resize": "crop", "crop_share": side / target, **scaling}


def _json(arguments: str) -> str:
    return arguments.replace("True", "true").replace("False", "false")


DEFAULTS = {"resize": ["bilinear", False], "resize_small": ["area", False], "resize_long": ["area", True]}


@pytest.mark.slow
def test_pixels_are_big_visions() -> None:
    """Truncated levels: where a sum ends next to a whole number, rounding decides, so a few may be off by one."""
    golden, seen = goldens.read("pp_bv"), 0
    images = [goldens.image(spec) for spec in golden["images"]]
    for case in golden["cases"]:
        image, operations = images[case["image"]], case["pp"].split("|")
        values = RANGES.get(operations[-1])
        geometry = fields_of(operations if values is None else operations[:-1], image.shape[:2])
        if geometry is None:
            continue
        preprocess = Preprocess(**geometry, **(values or {}), resampler="tensorflow-uint8")
        found = preprocess.pixels(image)
        assert found.dtype == np.uint8
        if values is not None:
            found = preprocess.normalise(torch.from_numpy(found)[None])[0].numpy()
        apart, moments = goldens.compare(found.transpose(1, 2, 0), case["output"])
        one = 1.001 / 127.5 if values == {} else 1.001 / (255 * 0.224) if values else 1
        assert apart.max() <= one and (apart > 1e-4).mean() <= 0.005 and moments < 0.001, case["pp"]
        seen += 1
    assert seen == len(golden["cases"]) - 6, "all but resize_small and resize_long alone"


def test_sizes_that_only_one_side_states() -> None:
    golden, seen = goldens.read("pp_bv"), 0
    for case in golden["cases"]:
        match = re.fullmatch(r"resize_(small|long)\((\d+)\)", case["pp"])
        if match:
            image = goldens.image(golden["images"][case["image"]])
            kind: Any = "crop" if match[1] == "small" else "pad"
            side = int(match[2])
            preprocess = Preprocess(image_size=(side, side), resize=kind, resampler="tensorflow-uint8")
            scaled = preprocess.placement(image.shape[:2]).scaled
            levels = resize(image, scaled, "area", antialias=True).clip(0, 255).astype(np.uint8)
            apart, moments = goldens.compare(levels, case["output"])
            assert apart.max() <= 1 and (apart > 0).mean() <= 0.005 and moments < 0.001, case["pp"]
            seen += 1
    assert seen == 6


def test_values_are_vision_transformers() -> None:
    golden = goldens.read("pp_vt_eval")
    images = [goldens.image(spec) for spec in golden["images"]]
    for case in golden["cases"]:
        size = case["size"], case["size"]
        preprocess = Preprocess(image_size=size, interpolation="bicubic").with_geometry("vision_transformer")
        pixels = preprocess.pixels(images[case["image"]])
        assert pixels.dtype == np.float32 and pixels.shape == (3, *size)
        found = preprocess.normalise(torch.from_numpy(pixels)[None])[0].permute(1, 2, 0).numpy()
        apart, moments = goldens.compare(found, case["output"])
        assert apart.max() < 1e-6 and moments < 1e-6


@pytest.mark.parametrize("channels", [1, 3])
def test_padding_and_boxes_as_without_tensorflow(channels: int) -> None:
    """Without scaling, all resamplers return the same pixels, so they agree on the box, the padding and the window."""
    image = np.random.default_rng(0).integers(0, 256, (9, 14, channels)).astype(np.uint8)
    for fields, box in (
        ({"image_size": (20, 14), "resize": "pad", "pad_value": (7,)}, None),
        ({"image_size": (9, 9), "resize": "crop"}, None),
        ({"image_size": (4, 6)}, (3, 5, 4, 6)),
    ):
        made = [
            Preprocess(**fields, channels=channels, resampler=resampler).pixels(image, box)
            for resampler in ("pillow", "torch", "tensorflow", "tensorflow-uint8")
        ]
        assert [array.dtype for array in made] == [np.uint8, np.uint8, np.float32, np.uint8]
        if fields.get("resize") == "crop":
            made[0] = image[:, 2:11].transpose(2, 0, 1)  # 2.5 pixels at the left: Pillow's rule gives 2 as well
        assert all(np.array_equal(made[0], other) for other in made[1:])


def test_whole_levels_are_rounded() -> None:
    file = encode(np.random.default_rng(1).integers(0, 256, (31, 23, 3)).astype(np.uint8), "PNG")
    preprocess = Preprocess(image_size=(13, 17)).with_geometry("vision_transformer")
    exact, whole = preprocess.pixels(file), preprocess.pixels(file, whole_levels=True)
    assert exact.dtype == np.float32 and whole.dtype == np.uint8
    assert np.array_equal(np.rint(exact), whole) and not np.array_equal(exact, whole)
    sharp = Preprocess(image_size=(40, 50), interpolation="bicubic", resampler="tensorflow")
    assert sharp.pixels(file).max() > 255, "bicubic interpolation overshoots"
    assert sharp.pixels(file, whole_levels=True).max() == 255


def test_normalising_leaves_its_input() -> None:
    levels = torch.rand(2, 3, 4, 5) * 255
    before = levels.clone()
    found = Preprocess(image_size=(4, 5)).normalise(levels)
    assert torch.equal(levels, before) and torch.allclose(found, levels / 127.5 - 1, atol=1e-6)
