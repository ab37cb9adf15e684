"""Tests of geometry and normalisation against independent computations, and of the pixels of the original code."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.golden import images as goldens
from tests.make import encode, orientation
from vitrail.data.pixels.geometry import Resize
from vitrail.data.pixels.preprocess import WHOLE, Interpolation, Preprocess
from vitrail.data.pixels.tensorflow import resize
from vitrail.errors import ConfigError, UndecodableImage
from vitrail.settings import from_plain, to_plain

SCALINGS: tuple[Interpolation, ...] = ("nearest", "bilinear", "bicubic", "area")
size = st.tuples(st.integers(1, 70), st.integers(1, 70))
some_channels, some_resize = st.sampled_from([1, 3]), st.sampled_from(["squash", "crop", "pad"])


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def triangle(x: float) -> float:
    return max(0.0, 1 - abs(x))


@given(size, size, some_channels, some_resize, st.floats(0.2, 1), st.sampled_from(SCALINGS), some_channels)
def test_files_arrays_and_pillow_images_give_the_same_pixels_of_the_size_asked_for(
    old: tuple[int, int], new: tuple[int, int], channels: int, resize: Resize, share: float,
    interpolation: Interpolation, given_channels: int,
) -> None:  # fmt: skip
    preprocess = Preprocess(
        image_size=new, channels=channels, resize=resize, crop_share=share, interpolation=interpolation
    )
    array = noise(*old, given_channels)
    picture = Image.fromarray(array[..., 0] if given_channels == 1 else array)
    expected = preprocess.pixels(array)
    assert expected.shape == (channels, *new) and expected.dtype == np.uint8 and expected.flags.c_contiguous
    for image in (encode(picture, "PNG"), picture, Image.open(io.BytesIO(encode(picture, "BMP")))):
        np.testing.assert_array_equal(preprocess.pixels(image), expected)


@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
@pytest.mark.parametrize(("size", "channels"), [((7, 5), 3), ((1, 1), 3), ((28, 28), 1)])
def test_images_of_the_size_are_left_as_they_are(resize: Resize, size: tuple[int, int], channels: int) -> None:
    image = noise(*size, channels)
    for interpolation in SCALINGS:
        preprocess = Preprocess(image_size=size, channels=channels, resize=resize, interpolation=interpolation)
        for form in (image, encode(image[..., 0] if channels == 1 else image, "PNG")):
            np.testing.assert_array_equal(preprocess.pixels(form), image.transpose(2, 0, 1))


def test_the_pixels_are_a_copy_of_their_own() -> None:
    image = noise(4, 4, 1)
    before = image.copy()
    image.setflags(write=False)
    found = Preprocess(image_size=(4, 4), channels=1).pixels(image)
    torch.from_numpy(np.stack([found])).zero_()
    np.testing.assert_array_equal(image, before)


@pytest.mark.parametrize(
    ("channels", "mean", "std"),
    [
        (3, (0.5,), (0.5,)), (1, (0.5,), (0.5,)), (3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        (3, (0.0,), (1.0,)), (3, (0.4, 0.5, 0.6), (0.25,)), (1, (0.286,), (0.353,)),
    ],
)  # fmt: skip
def test_normalise_is_the_formula_at_any_level(channels: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(16, 16)
    images = torch.stack([values + channel for channel in range(channels)])[None]
    images = torch.cat([images, 255 - images])
    found = Preprocess(image_size=(16, 16), channels=channels, mean=mean, std=std).normalise(images)
    assert found.dtype == torch.float32 and found.shape == images.shape
    for channel in range(channels):
        m, s = mean[channel % len(mean)], std[channel % len(std)]
        expected = (images[:, channel].double() / 255 - m) / s
        assert (found[:, channel].double() - expected).abs().max() < 1e-6


def test_gradients_pass_normalisation_after_a_first_call_in_inference_mode() -> None:
    preprocess = Preprocess(image_size=(2, 2), mean=(0.123,), std=(0.321,))
    with torch.inference_mode():
        preprocess.normalise(torch.zeros(1, 3, 2, 2))
    images = torch.zeros(1, 3, 2, 2, requires_grad=True)
    preprocess.normalise(images).sum().backward()
    torch.testing.assert_close(images.grad, torch.full((1, 3, 2, 2), 1 / (255 * 0.321)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": (0, 4)}, "image_size=(0, 4) is less than 1"),
        ({"channels": 4}, "channels=4 is not one of 1, 3; 1 is grey, and 3 is RGB"),
        ({"crop_share": 0.0}, "crop_share=0.0 is not in (0, 1]"),
        ({"crop_share": math.nan}, "crop_share=nan is not in (0, 1]"),
        ({"pad_value": (256,)}, "pad_value=256 is not in [0, 255]"),
        ({"pad_value": (0, -1, 0)}, "pad_value=-1 is not in [0, 255]"),
        ({"pad_value": (0, 0)}, "channels=3 does not fit pad_value=(0, 0)"),
        ({"interpolation": "area", "antialias": False}, "interpolation='area' averages pixels, which antialias=False"),
        ({"scaled_decode": True, "antialias": False}, "scaled_decode=True averages pixels, which interpolation="),
        ({"scaled_decode": True, "interpolation": "nearest"}, "scaled_decode=True averages pixels, which"),
        ({"scaled_decode": True, "resampler": "tensorflow"}, "scaled_decode=True changes pixels, so it excludes"),
        ({"scaled_decode": True, "resampler": "tensorflow-uint8"}, "scaled_decode=True changes pixels, so it exclu"),
        ({"resampler": "torch", "interpolation": "area"}, "resampler='torch' needs antialias=True and "),
        ({"mean": ()}, "channels=3 does not fit mean=()"),
        ({"channels": 1, "std": (0.1, 0.2, 0.3)}, "channels=1 does not fit std=(0.1, 0.2, 0.3)"),
        ({"std": (0.5, 0.0, 0.5)}, "mean=(0.5,) and std=(0.5, 0.0, 0.5) must be finite, and std above 0"),
        ({"mean": (123.7, 116.3, 103.5)}, "mean=(123.7, 116.3, 103.5) is above 1; pixels are from 0 to 1"),
    ],
)
def test_fields_out_of_range_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        Preprocess(**{"image_size": (4, 4), **fields})


def test_an_image_too_thin_to_be_scaled_is_refused() -> None:
    thin = np.zeros((1, 2000, 3), np.uint8)
    with pytest.raises(UndecodableImage, match=r"2000 x 1 pixels .* would be scaled to 448000 x 224"):
        Preprocess(image_size=(224, 224), resize="crop").pixels(thin)
    assert Preprocess(image_size=(224, 224)).pixels(thin).shape == (3, 224, 224)


@given(size, size, some_channels)
def test_pytorch_scales_like_pillow_up_to_one_level(old: tuple[int, int], new: tuple[int, int], channels: int) -> None:
    image = noise(*old)[..., :channels]
    found, expected = (
        Preprocess(image_size=new, channels=channels, resampler=resampler).pixels(image).astype(int)
        for resampler in ("torch", "pillow")
    )
    assert found.shape == expected.shape and np.abs(found - expected).max() <= 1


@pytest.mark.parametrize("box", [(0, 0, 0, 3), (-1, 0, 3, 3), (0, 0, 8, 3), (5, 0, 3, 3), (0, 7, 3, 3), (0, 0, 3, -1)])
def test_a_box_that_the_image_does_not_hold_is_refused(box: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"is not a part of an image of 7 x 9 \(height, width\)$"):
        Preprocess(image_size=(7, 9)).pixels(noise(7, 9), box)


def slope(height: int, width: int) -> np.ndarray:
    """Return pixel values that rise by 2 to the right and downwards, so that a shift by half a pixel is visible."""
    rows, columns = np.mgrid[:height, :width]
    levels = columns * 200 / width, rows * 200 / height, (rows + columns) * 200 / (height + width)
    return np.stack(levels, -1).astype(np.uint8)


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize(
    ("box", "resize", "share"),
    [(None, "squash", 1.0), ((9, 21, 64, 70), "squash", 1.0), (None, "crop", 0.8), (None, "pad", 1.0)],
)
def test_scaled_decoding_shows_the_same_part_whatever_way_the_file_is_turned(
    number: int, box: tuple[int, int, int, int] | None, resize: Resize, share: float
) -> None:
    data = encode(slope(91, 109), "JPEG", quality=98, subsampling=0, exif=orientation(number))
    preprocess = Preprocess(image_size=(7, 9), resize=resize, crop_share=share)
    expected = preprocess.pixels(data, box).astype(int)
    for resampler in WHOLE:
        scaled = replace(preprocess, scaled_decode=True, resampler=resampler)
        # PyTorch scales a part of the box, and its `placement` says which.
        taken = scaled.placement((91, 109) if number < 5 else (109, 91), box).box
        same = expected if box is None else preprocess.pixels(data, taken).astype(int)
        assert 0 < np.abs(scaled.pixels(data, box).astype(int) - same).max() <= 4
        assert box in (None, taken) or (resampler == "torch" and taken == (10, 22, 62, 68))


@pytest.mark.parametrize("size", [(17, 16), (16, 17), (33, 33), (64, 64)])
def test_scaled_decoding_keeps_twice_the_pixels_that_are_needed(size: tuple[int, int]) -> None:
    data = encode(noise(64, 64), "JPEG")
    plain = Preprocess(image_size=size)
    np.testing.assert_array_equal(replace(plain, scaled_decode=True).pixels(data), plain.pixels(data))
    smaller = Preprocess(image_size=(16, 16))
    scaled = replace(smaller, scaled_decode=True)
    assert (scaled.pixels(data) != smaller.pixels(data)).any()
    np.testing.assert_array_equal(scaled.pixels(data, (3, 3, 31, 40)), smaller.pixels(data, (3, 3, 31, 40)))


def plain_resampling(old: int, new: int, interpolation: str) -> np.ndarray:
    """Return the matrix of one axis from the nearest 2 or 4 pixels. Pixels outside the image repeat its edge."""

    def keys(x: float) -> float:
        x, a = abs(x), -0.75
        if x < 1:
            return (a + 2) * x**3 - (a + 3) * x**2 + 1
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0

    kernel, reach = (triangle, 1) if interpolation == "bilinear" else (keys, 2)
    matrix = np.zeros((new, old))
    for row in range(new):
        place = (row + 0.5) * old / new - 0.5
        for column in range(math.floor(place) - reach + 1, math.floor(place) + reach + 1):
            matrix[row, min(max(column, 0), old - 1)] += kernel(column - place)
    return matrix


@settings(max_examples=25)
@given(*[st.tuples(st.integers(1, 25), st.integers(1, 25))] * 2, st.sampled_from(["bilinear", "bicubic"]))
def test_without_antialiasing_the_nearest_pixels_alone_count(
    old: tuple[int, int], new: tuple[int, int], interpolation: Interpolation
) -> None:
    image = noise(*old)
    rows, columns = (plain_resampling(*sides, interpolation) for sides in zip(old, new, strict=True))
    expected = np.einsum("hwc,yh,xw->cyx", image.astype(float), rows, columns).clip(0, 255)
    preprocess = Preprocess(image_size=new, interpolation=interpolation, antialias=False)
    assert np.abs(preprocess.pixels(image) - expected).max() <= 0.502


def test_what_older_files_do_not_say_is_as_it_was() -> None:
    older = {
        "image_size": [224, 224], "channels": 3, "resize": "crop", "crop_share": 0.9, "interpolation": "bicubic",
        "mean": [0.5], "std": [0.5],
    }  # fmt: skip
    read = from_plain(Preprocess, older)
    assert (read.antialias, read.scaled_decode, read.pad_value, read.resampler) == (True, False, (255,), "pillow")
    changed = replace(read, antialias=False, resize="pad", pad_value=(1, 2, 3))
    assert from_plain(Preprocess, to_plain(changed)) == changed


IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
RANGES: dict[str, dict[str, Any]] = {
    "value_range(-1, 1)": {},
    "vgg_value_range": IMAGENET,
    "clip_value_range": {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)},
}
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
