"""Vision Transformers of other libraries with the sizes of our networks, our networks in other runtimes, and the
loaders of other libraries. A library is imported only when it is used."""

from __future__ import annotations

import importlib
import subprocess
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import vitrail
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError, check_known, nearest
from vitrail.models.variants import AnyConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import raise_problems
from vitrail.weights.exported import compile_openvino, onnx_session
from vitrail.weights.tensors import first_line

SIZES = ("image_size", "patch_size", "channels", "width", "depth", "heads", "mlp_width", "num_classes")
"""Fields that every library can set. All other fields must have the values of the paper, which every library uses."""

NO_MATTER = ("norm_eps", "head_bias", "position_std", "position_resize", "initial_weights")
"""Fields that may differ between libraries, because they do not change the number of operations."""


BENCHMARKS = Path(vitrail.__file__).parents[1] / "benchmarks"
"""Training loops and servers of other libraries. The folder is in the repository, and not in an installed package."""


def benchmark_script(name: str) -> Path:
    """Return a script of `benchmarks/`. Raises `ConfigError` where there is only the installed package."""
    if not (BENCHMARKS / name).exists():
        raise ConfigError(
            f"--against needs benchmarks/{name}, which only the repository has: clone it, and install Vitrail from "
            "there with pip install --editable ."
        )
    return BENCHMARKS / name


def parse_environments(pairs: Sequence[str]) -> dict[str, str]:
    """Return the Python of each library. Raise `ConfigError` for a text that is not LIBRARY=PATH."""
    found = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"environment={pair!r} is not LIBRARY=PATH; write for example timm=/opt/timm/bin/python")
        if name in found:
            raise ConfigError(f"environment: {name} is given twice; give each library once")
        found[name] = path
    return found


def run_python(
    python: str, library: str, words: Sequence[str], advice: str, variables: Mapping[str, str] | None = None
) -> str:
    """Run the Python of a library's environment with these arguments, and return what it printed.

    Raises `ConfigError` if it cannot be run or fails. The message has the last line that it printed, and then the
    advice.
    """
    try:
        done = subprocess.run([python, *words], capture_output=True, text=True, env=variables)
    except OSError as error:
        raise ConfigError(
            f"environment: {python} cannot be run as the Python of {library}: {error.strerror}; give the path of a "
            "Python"
        ) from None
    if done.returncode:
        lines = (done.stdout or done.stderr).strip().splitlines() or ["it printed nothing"]
        raise ConfigError(f"--against {library}: {lines[-1]}. {advice} with --environment {library}=PATH/bin/python")
    return done.stdout


def check_peers(names: Sequence[str], config: AnyConfig) -> None:
    """Raise `ConfigError` for an unknown library, and for a network that no library provides. Runtimes take all of
    ours."""
    known = (*PEERS, *RUNTIMES)
    unknown = [name for name in names if name not in known]
    raise_problems(f"unknown library {name!r} in --against; {nearest(name, known)}" for name in unknown)
    names = [name for name in names if name in PEERS]
    if names and config.architecture != "ViT":
        raise ConfigError("--against compares Vision Transformers; a BiT ResNet has no counterpart in other libraries")
    if names and not config.num_classes:
        raise ConfigError("num_classes=0 does not work with --against, because not every library can omit the head")


def build_peer(name: str, config: AnyConfig) -> nn.Module:
    """Return the library's network with the sizes in `config`. The network returns logits.

    Raises `ConfigError` if the library cannot build the network. The message continues a sentence that begins with the
    library's name.
    """
    check_peers([name], config)
    assert config.architecture == "ViT"
    if config.root is not None:
        raise ConfigError("cannot build this hybrid network")
    plain = ViTConfig(**{field: getattr(config, field) for field in SIZES})
    for field in fields(ViTConfig):
        value = getattr(config, field.name)
        if field.name not in NO_MATTER and value != getattr(plain, field.name):
            raise ConfigError(f"can only build the paper's ViT, which does not have {field.name}={value!r}")
    return PEERS[name](config)


def in_runtime(name: str, network: nn.Module, images: Tensor, precision: str) -> Callable[[Tensor], Any]:
    """Return a function that computes what our network does, in another runtime and for batches like `images`. Matrix
    products have this precision.

    Raises `ConfigError` if the runtime cannot do this. The message continues a sentence that begins with its name.
    """
    if images.device.type != "cpu":
        raise ConfigError("is measured on the CPU only")
    library = _import(name)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated calls in PyTorch's exporter
        try:
            program = torch.export.export(network.eval(), (images,))
            return RUNTIMES[name](library, program, precision)
        except ConfigError:
            raise
        except Exception as error:  # exporters and runtimes have no common class of exceptions
            raise ConfigError(f"cannot load this network ({type(error).__name__}: {first_line(error)})") from error


def _openvino(library: Any, program: torch.export.ExportedProgram, precision: str) -> Callable[[Tensor], Any]:
    model = compile_openvino(library.convert_model(program), precision)
    return lambda images: model(images.numpy())[0]


def _onnxruntime(library: Any, program: torch.export.ExportedProgram, precision: str) -> Callable[[Tensor], Any]:
    if precision != "float32":
        raise ConfigError("computes in float32 only")
    _import("onnxscript")  # with which PyTorch writes the file
    file: Any = torch.onnx.export(program, dynamo=True, verbose=False)
    session = onnx_session(library, file.model_proto.SerializeToString())
    (name,) = (each.name for each in session.get_inputs())
    return lambda images: session.run(None, {name: images.numpy()})[0]


RUNTIMES: dict[str, Callable[[Any, torch.export.ExportedProgram, str], Callable[[Tensor], Any]]] = {
    "openvino": _openvino,
    "onnxruntime": _onnxruntime,
}
"""Functions that load our network into the runtimes that `--against` accepts."""


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        its_own = (error.name or "").partition(".")[0] == name.partition(".")[0]
        missing = "" if its_own else f" ({error})"
        raise ConfigError(f"is not installed{missing}") from None
    except Exception as error:  # an incompatible build can raise any error at import
        raise ConfigError(f"cannot be imported ({type(error).__name__}: {first_line(error)})") from None


def _timm(config: ViTConfig) -> nn.Module:
    return _import("timm.models").VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size,
        in_chans=config.channels,
        num_classes=config.num_classes,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_width / config.width,
    )


class _Logits(nn.Module):
    """A wrapper that returns only the logits of a transformers model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).logits


def _transformers(config: ViTConfig) -> nn.Module:
    library = _import("transformers")
    settings = library.ViTConfig(
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_channels=config.channels,
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.heads,
        intermediate_size=config.mlp_width,
        num_labels=config.num_classes,
    )
    return _Logits(library.ViTForImageClassification(settings))


def _vit_pytorch(config: ViTConfig) -> nn.Module:
    return _import("vit_pytorch").ViT(
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_classes=config.num_classes,
        dim=config.width,
        depth=config.depth,
        heads=config.heads,
        mlp_dim=config.mlp_width,
        channels=config.channels,
        dim_head=config.width // config.heads,
    )


def _torchvision(config: ViTConfig) -> nn.Module:
    for name, size in (("images", config.image_size), ("patches", config.patch_size)):
        if size[0] != size[1]:
            raise ConfigError(f"supports only square {name}, not {size[0]} x {size[1]}")
    if config.channels != 3:
        raise ConfigError(f"supports only 3 channels, not {config.channels}")
    return _import("torchvision.models").VisionTransformer(
        image_size=config.image_size[0],
        patch_size=config.patch_size[0],
        num_layers=config.depth,
        num_heads=config.heads,
        hidden_dim=config.width,
        mlp_dim=config.mlp_width,
        num_classes=config.num_classes,
    )


PEERS: dict[str, Callable[[ViTConfig], nn.Module]] = {
    "timm": _timm,
    "transformers": _transformers,
    "vit-pytorch": _vit_pytorch,
    "torchvision": _torchvision,
}
"""Functions that build the networks of the libraries, by the names that `--against` accepts."""


# The loaders of libraries, which read JPEG files into batches with random crops and mirroring.


Batches = Iterable[Any]
"""The batches of one pass over all images. The first pass starts the worker processes, which stay."""


@dataclass(frozen=True)
class ToRead:
    """The images that all loaders read. They are stored twice: as files in a folder per class, and in tar shards."""

    folder: Path
    shards: Path
    preprocess: Preprocess
    batch_size: int
    workers: int
    """Processes that read and decode."""


def check_loaders(names: Sequence[str]) -> None:
    """Raise `ConfigError` for an unknown library and for one that cannot be imported."""
    for name in names:
        check_known(name, LOADERS, f"unknown loader {name!r} in --against")
        try:
            _import(name)
        except ConfigError as error:
            raise ConfigError(f"--against {name}: {name} {error}") from None


def _random_crops(reading: ToRead) -> Any:
    transforms = _import("torchvision.transforms")
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(reading.preprocess.image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(reading.preprocess.mean, reading.preprocess.std),
        ]
    )


def _torch_loader(reading: ToRead, images: Any, **options: Any) -> Batches:
    workers = reading.workers
    return DataLoader(
        images, reading.batch_size, num_workers=workers, drop_last=True, persistent_workers=workers > 0, **options
    )


def _torchvision_folder(reading: ToRead) -> Batches:
    folder = _import("torchvision.datasets").ImageFolder(reading.folder, _random_crops(reading))
    return _torch_loader(reading, folder, shuffle=True)


def _timm_folder(reading: ToRead) -> Batches:
    library, workers = _import("timm.data"), reading.workers
    return library.create_loader(
        library.create_dataset("", str(reading.folder)),
        (3, *reading.preprocess.image_size),
        reading.batch_size,
        is_training=True,
        re_prob=0.0,
        hflip=0.5,
        color_jitter=None,
        interpolation="bilinear",
        mean=reading.preprocess.mean,
        std=reading.preprocess.std,
        num_workers=workers,
        persistent_workers=workers > 0,
        device=torch.device("cpu"),
    )


def _datasets_folder(reading: ToRead) -> Batches:
    transform = _random_crops(reading)

    def seen(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {**rows, "image": [transform(image.convert("RGB")) for image in rows["image"]]}

    folder = _import("datasets").load_dataset(
        "imagefolder", data_dir=str(reading.folder), split="train", cache_dir=str(reading.shards.parent / "cache")
    )
    return _torch_loader(reading, folder.with_transform(seen), shuffle=True)


def _webdataset_shards(reading: ToRead) -> Batches:
    files = [str(path) for path in sorted(reading.shards.glob("*.tar"))]
    library, workers = _import("webdataset"), min(reading.workers, len(files))
    shards = library.WebDataset(files, shardshuffle=len(files)).shuffle(256).decode("pil")
    crops = shards.to_tuple("jpg", "json").map_tuple(_random_crops(reading), _label)
    return library.WebLoader(
        crops.batched(reading.batch_size, partial=False), batch_size=None, num_workers=workers,
        persistent_workers=workers > 0,
    )  # fmt: skip


def _label(description: dict[str, Any]) -> int:
    return int(description["label"])


LOADERS: dict[str, Callable[[ToRead], Batches]] = {
    "torchvision": _torchvision_folder,
    "timm": _timm_folder,
    "datasets": _datasets_folder,
    "webdataset": _webdataset_shards,
}
"""Functions that open the loaders of libraries, by the names of their packages. webdataset reads the shards, and the
others the folder. All make random crops of 8 to 100 % of the area, mirror half of them, and return normalised float32
batches."""
