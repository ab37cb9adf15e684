"""Vision Transformers of other libraries with the sizes of our networks, and our networks in other runtimes. A library
is imported only when it is used."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import vitrail
from vitrail.errors import ConfigError, nearest
from vitrail.models.variants import AnyConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.exported import compile_openvino, onnx_session

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


def check_peers(names: Sequence[str], config: AnyConfig) -> None:
    """Raise `ConfigError` for an unknown library, and for a network that no library provides. Runtimes take all of
    ours."""
    for name in names:
        if name not in (*PEERS, *RUNTIMES):
            raise ConfigError(f"unknown library {name!r} in --against; {nearest(name, (*PEERS, *RUNTIMES))}")
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
            raise ConfigError(f"cannot load this network ({type(error).__name__}: {_first_line(error)})") from error


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
        raise ConfigError(f"cannot be imported ({type(error).__name__}: {_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


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
