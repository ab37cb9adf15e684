"""Conversion between our preprocessing and `preprocessor_config.json` of Hugging Face's transformers.

Two differences remain, because no field describes them. If an odd number of pixels is cropped, the exact start of the
crop lies between two pixels. The library then rounds the start down, and Vitrail rounds the start to the even pixel.
The library's fast processors resize tensors, and pixels differ from Pillow's results by one level.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitrail.data.pixels.geometry import Resize, scaled_side
from vitrail.data.pixels.preprocess import Interpolation, Preprocess
from vitrail.errors import BundleError
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.layouts.layout import (
    IMAGENET,
    KEPT,
    Table,
    border_loss,
    each_channel,
    mean_levels,
    resampling_loss,
)

RESAMPLE: dict[int, Interpolation] = {0: "nearest", 2: "bilinear", 3: "bicubic", 4: "area"}
"""Our names of the interpolation filters by their numbers in Pillow."""

READ = "resize|center_crop|rescale|normalize|convert_rgb|split_image|pad|reduce_labels|convert_annotations"
UNREAD = re.compile(
    r"crop_pct|keep_aspect_ratio|ensure_multiple_of|size_divisor|(rescale_)?offset|(min|max)_pixels"
    rf"|do_(?!({READ})$)\w+"
)
"""Names of fields that change images, and that are not read."""

HALF: dict[str, Any] = {"image_mean": [0.5], "image_std": [0.5]}
CUT: dict[str, Any] = {"size": {"shortest_edge": 256}, "crop_size": 224}

PREPROCESS: Table = dict.fromkeys(
    (
        "image_size", "channels", "interpolation", "mean", "std",
        # `preprocessor_config` reports these losses itself:
        "resize", "crop_share", "pad_value", "antialias", "resampler", "scaled_decode",
    ),
    KEPT,
)  # fmt: skip


@dataclass(frozen=True)
class ReadPreprocess:
    """Preprocessing that was read from a file, for the network's image size."""

    preprocess: Preprocess
    size: tuple[int, int] | None
    """Height and width of the images that the file describes, if it states them."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Geometry:
    """The resizing and cropping that a file describes."""

    resize: Resize
    crop_share: float = 1.0
    size: tuple[int, int] | None = None
    note: str = ""


def preprocess_of(content: Mapping[str, Any], config: ViTConfig, model_type: str) -> ReadPreprocess:
    """Return the preprocessing in `content` for the network's image size, with notes on all differences from the
    library.

    `model_type` is the model family of the library. Missing fields take its defaults. Raise `BundleError` for an
    invalid field.
    """
    content = {name: value for name, value in content.items() if value is not None}
    notes = []
    dinov2, detects = model_type.startswith("dinov2"), model_type in ("yolos", "eomt")
    if not content:
        how = (
            "short side to 800, long side to at most 1333, bilinear, ImageNet's"
            if detects
            else "short side to 256, crop of 224, bicubic, ImageNet's"
            if dinov2
            else "squashed, bilinear, 0.5 for"
        )
        notes.append(
            "there is no preprocessor_config.json: the default of the model family is assumed "
            f"({how} mean and standard deviation)"
        )
    filled = {
        "resample": 3 if dinov2 else 2,
        **(
            {f"image_{name}": list(IMAGENET[name]) for name in IMAGENET}
            if model_type != "vit" and config.channels == 3
            else HALF
        ),
        **(CUT if dinov2 and "size" not in content else {}),
        **content,
    }
    kind = str(content.get("image_processor_type", ""))
    crops = kind.lower().startswith(("bit", "clip")) and content.get("do_center_crop", True)
    needed = ("size", *(("crop_size",) if crops else ()), "resample", "image_mean", "image_std")
    missing = [name for name in needed if name not in content]
    if missing and kind and not kind.lower().startswith(model_type):
        notes.append(
            f"preprocessor_config.json lacks {', '.join(missing)}: the default of the model family is assumed, not "
            f"that of {kind}"
        )
    notes += [
        f"preprocessor_config.json has {name}={value!r}, which has no effect here"
        for name, value in content.items()
        if value and UNREAD.fullmatch(name)
    ]
    geometry = _detector_geometry(filled) if detects else _geometry(filled)
    if geometry.note:
        notes.append(f"preprocessor_config.json {geometry.note}")
    interpolation = RESAMPLE.get(filled["resample"]) if isinstance(filled["resample"], int) else None
    if interpolation is None:
        notes.append(
            f"preprocessor_config.json has resample={filled['resample']!r}, which is not supported, so bicubic is used"
        )
    mean, std = _tones(filled)
    border: dict[str, Any] = {"pad_value": mean_levels(mean)} if geometry.resize == "pad" else {}
    preprocess = Preprocess(
        image_size=config.image_size,
        channels=config.channels,
        resize=geometry.resize,
        crop_share=geometry.crop_share,
        interpolation=interpolation or "bicubic",
        mean=mean,
        std=std,
        **border,
    )
    return ReadPreprocess(preprocess, geometry.size if content else None, tuple(notes))


def _geometry(content: Mapping[str, Any]) -> _Geometry:
    size, crop = content.get("size"), content.get("crop_size")
    made = _sides(crop, "crop_size") if crop is not None and content.get("do_center_crop", True) else None
    if not content.get("do_resize", True):
        return _Geometry(
            "squash", size=made, note="does not resize images, but here they are squashed to the image size"
        )
    if isinstance(size, int) and made is not None:  # older files give the short side as one number
        size = {"shortest_edge": size}
    if isinstance(size, dict) and set(size) == {"shortest_edge"}:
        edge = _whole(size["shortest_edge"], "size")
        if made is None:
            note = f"scales the short side to {edge} without cropping, but here the centre is cropped"
            return _Geometry("crop", size=(edge, edge), note=note)
        note = (
            "crops a rectangle from images scaled by their short side, but here they are scaled to cover the rectangle"
        )
        return _crop(made, (edge, edge), note if made[0] != made[1] else "")
    scaled = None if size is None else _sides(size, "size")
    if made is None or made == scaled or scaled is None:
        return _Geometry("squash", size=made or scaled)
    share = made[0] / scaled[0]
    if share <= 1 and all(scaled_side(part, share) == whole for part, whole in zip(made, scaled, strict=True)):
        return _Geometry("squash", share, made)
    return _crop(made, scaled, f"squashes images to {scaled} and crops {made}, but here they keep their proportions")


def _detector_geometry(content: Mapping[str, Any]) -> _Geometry:
    """Return the geometry of a detector's images. All images of a network have one size here, so images of any other
    proportions have borders."""
    size, padded = content.get("size", {"shortest_edge": 800, "longest_edge": 1333}), content.get("pad_size")
    if not content.get("do_resize", True) or (isinstance(size, dict) and {"height", "width"} <= set(size)):
        return _geometry(content)
    if padded and size == {f"max_{name}": side for name, side in padded.items()}:
        where = "scales images until they fit and adds a border below and on the right, but here it is around them"
        return _Geometry("pad", size=_sides(padded, "pad_size"), note=where)
    return _Geometry(
        "pad",
        note=f"scales images by size={size!r} to sizes that differ, but here they are scaled until they fit the image "
        "size of the network, and the mean colour fills the borders; image_size chooses another size",
    )


def _crop(made: tuple[int, int], scaled: tuple[int, int], note: str) -> _Geometry:
    share = min(part / whole for part, whole in zip(made, scaled, strict=True))
    if share > 1:
        note = f"crops {made} from images of {scaled}, with a black border, but here there is no border"
    return _Geometry("crop", min(share, 1.0), made, note)


def _sides(value: Any, name: str) -> tuple[int, int]:
    if isinstance(value, dict) and {"height", "width"} <= set(value):
        return _whole(value["height"], name), _whole(value["width"], name)
    side = _whole(value, name)
    return side, side


def _whole(value: Any, name: str) -> int:
    if not isinstance(value, int) or value < 1:
        raise BundleError(
            f"preprocessor_config.json: {name}={value!r} is not a number of pixels, a height and width, or a "
            "shortest_edge"
        )
    return value


def _tones(content: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation of pixels in [0, 1], converted from the file's units."""
    mean, std = (_numbers(content[name], name) for name in ("image_mean", "image_std"))
    if not content.get("do_normalize", True):
        mean, std = (0.0,), (1.0,)
    factor = content.get("rescale_factor", 1 / 255) if content.get("do_rescale", True) else 1.0
    if not isinstance(factor, int | float) or not factor > 0:
        raise BundleError(f"preprocessor_config.json: rescale_factor={factor!r} is not a number above 0")
    unit = 255 * factor
    if abs(unit - 1) > 1e-6:
        mean, std = (tuple(value / unit for value in values) for values in (mean, std))
    return mean, std


def _numbers(value: Any, name: str) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(item, int | float) for item in values):
        raise BundleError(f"preprocessor_config.json: {name}={value!r} is not a number for each channel")
    return (float(values[0]),) if len(set(values)) == 1 else tuple(map(float, values))


def preprocessor_config(preprocess: Preprocess, model_type: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the content of `preprocessor_config.json` for a model family of the library, and a list of the settings
    that it does not store."""
    height, width = preprocess.image_size
    size: dict[str, int] = {"height": height, "width": width}
    content: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": size,
        "resample": next(number for number, name in RESAMPLE.items() if name == preprocess.interpolation),
        "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": each_channel(preprocess.mean, preprocess.channels),
        "image_std": each_channel(preprocess.std, preprocess.channels),
    }  # fmt: skip
    lost: list[str] = []
    edges = [scaled_side(side, preprocess.crop_share) for side in (height, width)]
    detects = model_type in ("yolos", "eomt")
    if not detects and (preprocess.resize == "crop" or preprocess.crop_share < 1):
        content |= {
            "image_processor_type": "BitImageProcessor", "do_center_crop": True, "crop_size": size,
            "size": dict(zip(size, edges, strict=True)),
        }  # fmt: skip
    if detects:
        further, lost = _detector_sizes(preprocess)
        content |= further
        if model_type == "eomt":
            content |= {
                "image_processor_type": "EomtImageProcessor", "do_split_image": False,
                "size": {"shortest_edge": min(height, width), "longest_edge": max(height, width)},
            }  # fmt: skip
    elif preprocess.resize == "pad":
        lost.append("resize='pad' (written as 'squash')")
    elif preprocess.resize == "crop":
        edge = min(edges)
        content["size"] = {"shortest_edge": edge}
        if height != width:
            lost.append(f"scaling until {height} x {width} is covered (its code scales the short side to {edge})")
        elif abs(edge * preprocess.crop_share - height) > 1e-6:
            lost.append(f"crop_share={preprocess.crop_share} (written as {height} of {edge} pixels)")
    lost += resampling_loss(preprocess)
    if preprocess.channels == 1:
        lost.append("the conversion to grey (its code takes images as they are)")
    else:
        content["do_convert_rgb"] = True
    return content, tuple(lost)


def _detector_sizes(preprocess: Preprocess) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that describe the sizes of a detector's images, and the settings that they do not store."""
    height, width = preprocess.image_size
    fields = {"image_processor_type": "YolosImageProcessor", "format": "coco_detection", "do_pad": True}
    if preprocess.resize != "pad":
        crops = preprocess.resize == "crop" or preprocess.crop_share < 1
        return fields, [f"resize='crop' with crop_share={preprocess.crop_share} (its code never crops)"] * crops
    fields |= {
        "size": {"max_height": height, "max_width": width}, "pad_size": {"height": height, "width": width}
    }  # fmt: skip
    return fields, ["a border around the image (its code adds it below and on the right)", *border_loss(preprocess)]
