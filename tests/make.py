"""Models, weights and data that tests of several folders share."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import signal
import struct
import tarfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from tests.golden import weights
from vitrail.data.formats.idx import BUNDLED, find_idx, read_idx
from vitrail.data.objects import Runs, drawn
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Sample
from vitrail.data.sources import OpenedData, open_mixed
from vitrail.data.splits import Splits
from vitrail.data.targets import Target
from vitrail.models.variants import AnyConfig, build, create
from vitrail.models.vit import VisionTransformer
from vitrail.models.vit_config import ViTConfig
from vitrail.recipes import RECIPES
from vitrail.training.config import TrainConfig
from vitrail.weights.bundle import Bundle

CLASSES = ("rose", "tulip", "黒い花 / black")


def wait_for(condition: Callable[[], bool], seconds: float = 600) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Limit the size of files, so that writing fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    usual = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, usual)


# --- networks


def randomised(config: AnyConfig, *, std: float = 0.4, seed: int = 0) -> Any:
    """Return a network in evaluation mode. No weight is 0 or 1, so that a missing weight is noticed."""
    network = build(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(centre + std * torch.randn(parameter.shape, generator=generator))
    return network


def small_config(**fields: Any) -> ViTConfig:
    """Return a config for images of 12 x 10 in patches of 4 x 5."""
    defaults = {
        "image_size": (12, 10), "patch_size": (4, 5), "channels": 3, "width": 12, "depth": 3, "heads": 3,
        "mlp_width": 20, "num_classes": 5,
    }  # fmt: skip
    return ViTConfig(**{**defaults, **fields})


def square_config(**fields: Any) -> ViTConfig:
    """Return a config for images of 12 x 12 in patches of 4 x 4, which every layout can store."""
    return small_config(**{"image_size": (12, 12), "patch_size": (4, 4), "depth": 1, "num_classes": 2, **fields})


DIVISORS = {
    "none": 1,
    "learned": 1,
    "learned-2d": 2,
    "sincos-2d": 4,
    "sincos-2d-mae": 4,
    "relative-bias": 1,
    "relative-bias-class": 1,
    "relative-keys": 1,
    "rotary-2d": 4,
}
"""Kinds of positions, with a number that must divide a head's width, or certainly divides the network's width."""


@st.composite
def vit_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Draw fields of valid configs of small networks of every kind."""
    patch = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    grid = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    heads = draw(st.integers(1, 4))
    pool = draw(st.sampled_from(["cls", "gap", "map", "cls+gap"]))
    positions = draw(st.sampled_from([*DIVISORS]))
    inside = positions.startswith(("relative", "rotary"))
    places = [None, "every-layer", *(["shared"] if positions != "rotary-2d" else []), *([] if inside else ["stem"])]
    return {
        "image_size": (patch[0] * grid[0], patch[1] * grid[1]),
        "patch_size": patch,
        "channels": draw(st.integers(1, 4)),
        "width": heads * DIVISORS[positions] * draw(st.integers(1, 3)),
        "depth": draw(st.integers(1, 3)),
        "heads": heads,
        "mlp_width": draw(st.integers(1, 20)),
        "num_classes": draw(st.integers(0, 7)),
        "pool": pool,
        "class_token": positions == "relative-bias-class"
        or draw(st.sampled_from([None, True, *([False] if pool in ("gap", "map") else [])])),
        "registers": draw(st.integers(0, 2)),
        "head_hidden": draw(st.integers(0, 9)),
        "final_norm": draw(st.sampled_from(["tokens", "pooled"])),
        "positions": positions,
        "positions_at": draw(st.sampled_from(places)),
        "positions_cover": draw(st.sampled_from(["all", "class", "patches"])),
        "activation": draw(st.sampled_from(["gelu", "gelu-tanh", "swiglu"])),
        "layer_scale": draw(st.sampled_from([0.0, 0.1])),
        "qk_norm": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "dense_bias": draw(st.booleans()),
        "patch_bias": draw(st.booleans()),
    }


def tiny_config(*, data: Path | str, run: Path | str | None, **fields: object) -> TrainConfig:
    """Return the config of a run of a tiny network for 28 x 28 images, in float32 on the CPU."""
    defaults = {
        "data": str(data), "run": None if run is None else str(run), "variant": "ViT-Pico/7",
        "image_size": (28, 28), "steps": 12,
        "batch_size": 16, "width": 16, "depth": 2, "heads": 2, "mlp_width": 32, "precision": "float32",
        "float32_products": "mkl", "compute_threads": 1, "device": "cpu", "threads": 2, "evaluations": 3,
        "checkpoints": 1, "validation_share": 0.1, "keep": "best", "optimizer": "adamw", "learning_rate": 1e-3,
    }  # fmt: skip
    return RECIPES["demo"]().override(**{**defaults, **fields})


# --- models with classes and preprocessing, and their files


def make_bundle(*, seed: int = 5, output: Any = "softmax", channels: int = 3, **fields: Any) -> Bundle:
    """Return a model for images of 12 x 10 with random weights."""
    defaults: dict[str, Any] = {"depth": 2, "num_classes": 3, "channels": channels}
    network = VisionTransformer(small_config(**{**defaults, **fields}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return Bundle(
        network=network,
        classes=CLASSES[: network.config.num_classes],
        preprocess=Preprocess(image_size=network.config.image_size, channels=channels, mean=(0.4,), std=(0.25,)),
        output=output,
        metrics={"test_accuracy": 0.1 + 0.2},
        provenance={"recipe": "demo", "seed": 3, "notes": ["ü", None, {"deep": 1.5}]},
    )


def dense_bundle(head_kind: str = "pyramid", **fields: Any) -> Bundle:
    """Return a model of boxes or of masks for images of 32 x 40 with random weights, which keeps the aspect ratio of
    pictures. Its classes are those of `make_voc_folder` or of `make_masks_folder`."""
    output: Any = "mask" if head_kind.endswith("patches") else "boxes"
    classes = ("background", *SHAPES) if output == "mask" else SHAPES
    tokens: dict[str, Any] = {
        "detection-tokens": {"registers": 9}, "queries": {"queries": 9, "query_blocks": 1},
    }.get(head_kind, {})  # fmt: skip
    size = {"image_size": (32, 40), "patch_size": (8, 8), "num_classes": len(classes), **tokens, **fields}
    config = small_config(**{"head_kind": head_kind, "width": 16, "heads": 2, **size})
    preprocess = Preprocess(image_size=config.image_size, channels=3, resize="pad")
    return Bundle(randomised(config, std=0.3), classes, preprocess, output=output)


def small_model(
    folder: Path, classes: tuple[str, ...] = (), *, seed: int = 0, output: Any = "softmax", **images: Any
) -> Path:
    """Save a model with random weights for images of 14 x 21, by default without a head."""
    torch.manual_seed(seed)
    network = create(
        "ViT-Pico/7", image_size=(14, 21), num_classes=len(classes), width=16, depth=1, heads=2, mlp_width=32,
        position_std=0.5,
    )  # fmt: skip
    if classes:
        torch.nn.init.normal_(network.head.weight)
    return Bundle(network, classes, Preprocess(image_size=(14, 21), **images), output=output).save(folder)


def random_bundle(config: AnyConfig, **fields: Any) -> Bundle:
    """Return a model of any config. No weight is 0 or 1, so that a missing weight is noticed."""
    classes = tuple(f"class {number}" for number in range(config.num_classes))
    preprocess = Preprocess(image_size=config.image_size, channels=config.channels)
    network = randomised(config, std=0.3, seed=7)
    return Bundle(**{"network": network, "classes": classes, "preprocess": preprocess, **fields})


def assert_same(first: Bundle, second: Bundle) -> None:
    """Assert that two models have the same network, bit by bit."""
    before, after = first.network.state_dict(), second.network.state_dict()
    assert list(before) == list(after)
    for name in before:
        assert torch.equal(before[name], after[name]), name
    assert first.network.config == second.network.config


def assert_close(first: Bundle, second: Bundle, *, atol: float = 1e-5, rtol: float = 1e-5) -> None:
    """Assert that two models have the same outputs for random images of their size."""
    config = first.network.config
    images = torch.randn(3, config.channels, *config.image_size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(second.network.eval()(images), first.network.eval()(images), atol=atol, rtol=rtol)


SUFFIXES = {
    "google": ".npz", "big-vision": ".npz", "bit": ".npz", "bit-torch": ".pth", "timm": "", "huggingface": "",
    "huggingface-clip": "", "huggingface-siglip": "", "open-clip": "", "big-vision-pair": "",
    "torchvision": ".pth",
}  # fmt: skip
"""Suffix of each layout's file, or nothing for a folder."""


def place_of(layout: str, folder: Path) -> Path:
    """Return the path in a folder for a layout's file or folder."""
    return folder / f"out{SUFFIXES[layout]}"


def write_file(tensors: Mapping[str, Any], path: Path) -> Path:
    """Write tensors as other libraries do: with numpy, safetensors or PyTorch, by the path's suffix."""
    if path.suffix == ".npz":
        arrays: dict[str, Any] = dict(tensors)
        np.savez(path, **arrays)
        return path
    content = {name: torch.as_tensor(tensor).contiguous() for name, tensor in tensors.items()}
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


# --- what other implementations computed


@dataclass(frozen=True)
class Golden:
    """What another implementation computed: its tensors by their names, the images, and the logits."""

    tensors: dict[str, Any]
    images: Tensor
    logits: Tensor

    @property
    def image_size(self) -> tuple[int, int]:
        return self.images.shape[2], self.images.shape[3]

    def difference(self, bundle: Bundle) -> float:
        """The largest difference between a bundle's logits and these."""
        with torch.inference_mode():
            return float((bundle.network(self.images) - self.logits).abs().max())


def golden(name: str) -> Golden:
    """Read a golden file, and draw the tensors and images that it was computed with."""
    content = json.loads((Path(weights.__file__).parent / f"{name}.json").read_text())
    return Golden(
        {key: weights.tensor(key, tuple(shape)) for key, shape in content["tensors"].items()},
        torch.from_numpy(weights.image(content["image"]["seed"], tuple(content["image"]["shape_nchw"]))),
        torch.tensor(content["logits"]),
    )


# --- data


class MemorySource:
    """A source of given samples. Without images, reading an image is an error, so only keys and labels can be used."""

    def __init__(
        self,
        images: Sequence[bytes | np.ndarray] | None = None,
        *,
        labels: Sequence[Target],
        keys: Sequence[str] | None = None,
        classes: tuple[str, ...] = ("a", "b", "c", "d"),
    ) -> None:
        self.images = images
        self.labels = list(labels)
        self.keys = [str(index) for index in range(len(self.labels))] if keys is None else list(keys)
        self.classes = classes

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        assert self.images is not None, "no image may be read here"
        return Sample(self.key(index), self.images[index], self.target(index))

    def key(self, index: int) -> str:
        return self.keys[index]

    def target(self, index: int) -> Target:
        return self.labels[index]


def encode(picture: Image.Image | np.ndarray, file_format: str, **options: object) -> bytes:
    """Return the bytes of a file of a picture: `encode(array, "PNG")`."""
    file = io.BytesIO()
    image = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    image.save(file, file_format, **options)
    return file.getvalue()


def orientation(number: int) -> Image.Exif:
    """Return EXIF data that say how a picture is turned or mirrored, with a number from 1 to 8."""
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


def png_chunk(name: bytes, data: bytes, *, is_damaged: bool = False) -> bytes:
    """Return a chunk of a PNG file, with a wrong checksum if it is damaged."""
    checksum = zlib.crc32(name + data) ^ is_damaged
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)


def make_png(
    width: int, height: int, *more: bytes, depth: int = 8, kind: int = 0, rows: bytes = b"", is_interlaced: bool = False
) -> bytes:
    """Return a hand-made PNG file with more chunks in front of the pixels. `kind` 0 is grey, 2 is RGB, and 6 is RGB
    with alpha. Each row begins with its filter, 0."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, is_interlaced))
    pixels = png_chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + pixels + png_chunk(b"IEND", b"")


def to_pillow(image: np.ndarray) -> Image.Image:
    """Return a picture of an array (c, h, w) with one or three channels."""
    return Image.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0)))


def from_pillow(picture: Image.Image) -> np.ndarray:
    """Return the array (c, h, w) of a picture."""
    array = np.asarray(picture)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def make_colour_folder(root: Path, *, images: int = 12, classes: tuple[str, ...] = ("blue", "green", "red")) -> Path:
    """Writes the folder that `colour_folder` gives."""
    random = np.random.default_rng(0)
    for channel, name in enumerate(reversed(classes)):
        (root / name).mkdir(parents=True)
        for number in range(images):
            height, width = 9 + number, 30 - number
            pixels = random.integers(0, 80, (height, width, 3), dtype=np.uint8)
            pixels[..., channel % 3] += 150
            Image.fromarray(pixels).save(root / name / f"{number:02}.png")
    return root


def make_split_colours(root: Path, *, test: int = 1) -> Path:
    """Write the images of `make_colour_folder`, of which `test` of each class are in a test split."""
    for folder in sorted(make_colour_folder(root / "train").iterdir()):
        (root / "test" / folder.name).mkdir(parents=True)
        for file in sorted(folder.iterdir())[-test:]:
            file.rename(root / "test" / folder.name / file.name)
    return root


SHAPES = ("blue", "red box")
"""Classes of the drawn objects."""


def make_voc_folder(root: Path, *, train: int = 12, validation: int = 6, test: int = 4) -> Path:
    """Write pictures of odd sizes with red and blue rectangles, and their boxes as Pascal VOC files. Each sixth picture
    has no object."""
    for number, (split, canvas, pixels) in enumerate(_drawn_scenes({"train": train, "val": validation, "test": test})):
        height, width = canvas.shape
        objects = ""
        for value in range(2, canvas.max() + 1):
            rows, columns = np.nonzero(canvas == value)
            sides = {
                "xmin": columns.min() + 1,
                "ymin": rows.min() + 1,
                "xmax": columns.max() + 1,
                "ymax": rows.max() + 1,
            }
            box = "".join(f"<{name}>{side}</{name}>" for name, side in sides.items())
            objects += f"<object><name>{SHAPES[value % 2]}</name><bndbox>{box}</bndbox></object>"
        size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
        for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / f"JPEGImages/{number:03}.png")
        (root / f"Annotations/{number:03}.xml").write_text(f"<annotation>{size}{objects}</annotation>")
        with open(root / f"ImageSets/Main/{split}.txt", "a") as names:
            names.write(f"{number:03}\n")
    return root


def make_outlines_folder(root: Path, *, train: int = 12, validation: int = 6, test: int = 4) -> Path:
    """Write pictures of odd sizes with blue ellipses before red triangles, and COCO files with the polygons of the
    ellipses, the run lengths of the triangles, and a crowd in each fourth picture."""
    random = np.random.default_rng(0)
    (root / "annotations").mkdir(parents=True)
    categories = [{"id": number, "name": name} for number, name in zip((3, 7), SHAPES, strict=True)]
    for split, count in {"train": train, "val": validation, "test": test}.items():
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        (root / split).mkdir()
        for number in range(count):
            height, width = 49 + 2 * (number % 5), 63 + 4 * (number % 3)
            canvas = np.zeros((height, width), np.uint8)
            polygons = []
            for place in range(4):  # two triangles, then two ellipses, each in a quarter of its own
                middle = np.array([(0.27 + 0.46 * (place // 2)) * width, (0.27 + 0.46 * (place % 2)) * height])
                reach = random.uniform(0.17, 0.25, 2) * (width, height)
                angles = np.arange(24 if place > 1 else 3) * 2 * np.pi / (24 if place > 1 else 3) + 0.4 * number
                polygons.append(middle + reach * np.stack([np.cos(angles), np.sin(angles)], axis=1))
                canvas[drawn((polygons[-1] / (width, height),), (height, width))] = 1 + place
            name = f"{number:03}.png"
            images.append({"id": 100 + number, "file_name": name, "height": height, "width": width})
            colours = np.array([[90, 90, 90], *[[230, 30, 20]] * 2, *[[20, 30, 230]] * 2])
            noise = random.integers(-15, 15, (height, width, 1))
            pixels = np.clip(colours[canvas] + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / split / name)
            for place, polygon in enumerate(polygons):
                rows, columns = np.nonzero(canvas == 1 + place)
                left, top = int(columns.min()), int(rows.min())
                runs = Runs.of(canvas == 1 + place)
                coded: Any = {"size": list(runs.size), "counts": runs.counts.decode()}
                annotations.append({
                    "id": len(annotations) + 1, "image_id": 100 + number, "category_id": 3 if place > 1 else 7,
                    "bbox": [left, top, int(columns.max()) + 1 - left, int(rows.max()) + 1 - top],
                    "area": len(rows), "iscrowd": int(place == 0 and number % 4 == 3),
                    "segmentation": [polygon.ravel().tolist()] if place > 1 else coded,
                })  # fmt: skip
        values = {"images": images, "annotations": annotations, "categories": categories}
        (root / f"annotations/instances_{split}.json").write_text(json.dumps(values))
    return root


def make_masks_folder(root: Path, *, train: int = 12, validation: int = 6, test: int = 4) -> Path:
    """Write the pictures of `make_voc_folder`, and masks with their classes and the background."""
    for number, (split, canvas, pixels) in enumerate(_drawn_scenes({"train": train, "val": validation, "test": test})):
        for folder, content in (
            ("images", pixels),
            ("masks", np.where(canvas > 1, 1 + canvas % 2, 0).astype(np.uint8)),
        ):
            (root / folder / split).mkdir(parents=True, exist_ok=True)
            Image.fromarray(content).save(root / folder / split / f"{number:03}.png")
    (root / "classes.txt").write_text("".join(f"{name}\n" for name in ("background", *SHAPES)))
    return root


def _drawn_scenes(counts: Mapping[str, int]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield a split, a canvas and the pixels of each picture. The objects of a canvas have the values 2 and 3: the one
    of class 0 an even value and the one of class 1 an odd value."""
    random = np.random.default_rng(0)
    for number, split in enumerate(split for split, count in counts.items() for _ in range(count)):
        height, width = 41 + 2 * (number % 5), 53 + 4 * (number % 3)
        canvas = np.zeros((height, width), np.uint8)
        for label in range(2 if number % 6 else 0):  # side by side, so that none covers the other
            size = random.integers(12, 22, 2).tolist()
            top = int(random.integers(0, height - size[0]))
            left = int(random.integers(0, width // 2 - size[1])) + label * (width // 2)
            canvas[top : top + size[0], left : left + size[1]] = 2 + label
        colours = np.array([[90, 90, 90], [0, 0, 0], [20, 30, 230], [230, 30, 20]])
        noise = random.integers(-15, 15, (height, width, 1))
        yield split, canvas, np.clip(colours[canvas] + noise, 0, 255).astype(np.uint8)


def make_idx_folder(root: Path, *, train: int = 200, test: int = 50) -> Path:
    """A folder of IDX files with the first images of the bundled set."""
    if root.exists():
        return root
    root.mkdir(parents=True)
    for split, prefix, count in (("train", "train", train), ("test", "t10k", test)):
        images, labels = (read_idx(path)[:count] for path in find_idx(BUNDLED, split) or ())
        (root / f"{prefix}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        (root / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    return root


def idx_bytes(array: np.ndarray) -> bytes:
    """An array of bytes in the IDX format."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def keys_of(source: Any) -> list[str] | None:
    """Return the keys of a source's samples, or None if there is no source."""
    return None if source is None else [source.key(index) for index in range(len(source))]


def targets_of(source: Any) -> list[Any]:
    """Return the targets of a source's samples."""
    return [source.target(index) for index in range(len(source))]


def write_tar(
    target: Path | BinaryIO, files: Iterable[tuple[str, bytes]], tar_format: int = tarfile.GNU_FORMAT
) -> None:
    """Write a tar of files with Python's own writer."""
    place: dict[str, Any] = {"name": target} if isinstance(target, Path) else {"fileobj": target}
    with tarfile.open(**place, mode="w", format=tar_format) as tar:
        for name, data in files:
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))


def mix_in(splits: Splits, more: tuple[str, ...]) -> Splits:
    """Return the splits with additional training data, such as "0.3:more/images"."""
    return OpenedData("", splits, open_mixed(splits, more)).splits(validation_share=0.0)


# --- boxes and masks


OBJECT_NAMES = ("cat", "dog", "黒 fox")


def dense_model(folder: Path, kind: str, **more: Any) -> Path:
    """Save an untrained model of boxes or masks."""
    config = ViTConfig(
        image_size=(32, 48),
        patch_size=(8, 8),
        width=16,
        depth=1,
        heads=2,
        mlp_width=16,
        num_classes=len(OBJECT_NAMES),
        head_kind=kind,
    )
    network = randomised(config, std=0.2)
    if kind == "pyramid":
        network.head.class_logits.bias.data.sub_(0.6)  # scores from about 0.45 to 0.75
    output: Any = "boxes" if kind == "pyramid" else "mask"
    images = Preprocess(image_size=(32, 48), resize="pad", crop_share=1.0)
    return Bundle(network, OBJECT_NAMES, images, output=output, **more).save(folder)


def coco_data(root: Path, ids: list[int]) -> Path:
    """Write images of a training and a test split with COCO's numbers."""
    for split, count in (("train", 12), ("test", 2)):
        (root / split).mkdir(parents=True)
        images = []
        for number in range(count):
            name = f"{split}{number}.png"
            Image.fromarray(np.full((20, 30, 3), 20 * number, np.uint8)).save(root / split / name)
            images.append({"id": 1000 - number, "file_name": name, "height": 20, "width": 30})
        objects = [
            {"id": n + 1, "image_id": one["id"], "category_id": ids[n % 3], "bbox": [2, 3, 10, 9]}
            for n, one in enumerate(images)
        ]
        categories = [{"id": number, "name": name} for number, name in zip(ids, OBJECT_NAMES, strict=True)]
        values = {"images": images, "annotations": objects, "categories": categories}
        (root / split / "_annotations.coco.json").write_text(json.dumps(values))
    return root
