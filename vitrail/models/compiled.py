"""Compilation of a transformer block by block (torch.compile). All blocks share one graph, so the compile time does not
grow with depth.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn

from vitrail.errors import ConfigError
from vitrail.models.blocks import StochasticDepth
from vitrail.models.variants import AnyConfig
from vitrail.models.vit import VisionTransformer

Compile = Literal["auto", "on", "off", "graphs"]
"""Compilation of blocks. "auto" is "on" on a GPU and "off" elsewhere. With "graphs", a GPU also replays each block as
one CUDA graph, which saves kernel launches."""
Compiled = Literal["on", "off", "graphs"]

GRAPHS = 64
"""Maximum number of times that the compiler may compile a block in one process. PyTorch's default is 8, but a run needs
up to 12. The last block has a separate graph if only its class token is read. Training and evaluation have different
graphs. Each graph is compiled again for other batch or image sizes."""


OPTIONS = "compile_options"
"""Name of the attribute that stores the compile options of a compiled block."""


def resolve_compile(compile: Compile, device: torch.device, config: AnyConfig) -> Compiled:  # noqa: A002
    """Return `compile`, with "auto" replaced by its value for this device and config. Raise `ConfigError` if the device
    or the config does not support the value."""
    if compile == "off" or (compile == "auto" and device.type != "cuda"):
        return "off"
    lacks = _lacks(device)
    refusals = (
        (not config.has_uniform_blocks, "compiles a transformer's blocks, but a ResNet has none. Choose 'off'"),
        (
            compile == "graphs" and device.type != "cuda",
            f"needs CUDA, but this device is {device.type!r}; choices: 'auto', 'on', 'off'",
        ),
        (
            getattr(config, "skip_dropped", False),
            "makes one graph for all blocks, but with skip_dropped every block has another number of images; choose "
            "'off', or leave out skip_dropped",
        ),
        (
            getattr(config, "reversible", False),
            "compiles the call of a block, but with reversible=True the backward pass computes its branches one by "
            "one; choose 'off', or leave out reversible",
        ),
        (lacks is not None, f"needs {lacks}, which is not installed here; choices: 'auto', 'off'"),
    )
    reason = next((text for is_refused, text in refusals if is_refused), None)
    if compile == "auto":
        return "on" if reason is None else "off"
    if reason is not None:
        raise ConfigError(f"compile={compile!r} {reason}")
    return compile


def compile_blocks(
    network: nn.Module,
    compile: Compiled,  # noqa: A002
    *,
    backend: str | Callable[..., Any] = "inductor",
) -> None:
    """Compile each block of a transformer when the block is first called.

    The names of weights do not change. A hybrid's root is not compiled: its stages differ in shape, so each unit would
    need a graph of its own.
    """
    if compile == "off" or not getattr(getattr(network, "config", None), "has_uniform_blocks", False):
        return
    transformer = cast(VisionTransformer, network)
    import torch._dynamo.config as settings  # a slow import

    settings.recompile_limit = max(settings.recompile_limit, GRAPHS)
    # Float32 means float32: TensorFloat32, which this warning of the compiler recommends, has 10 bits of precision.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
    skips = [module for module in transformer.blocks.modules() if isinstance(module, StochasticDepth)]
    draws = any(skip.draws for skip in skips)
    for skip in skips:
        skip.draws = draws  # also for the first block, whose rate is 0; it would otherwise get a separate graph
    options = {"backend": backend, "mode": "reduce-overhead"} if compile == "graphs" else {"backend": backend}
    for block in transformer.blocks:
        _compile(block, options)
    if compile == "graphs":
        # All ways of calling the network embed patches before the first block.
        transformer.patches.register_forward_pre_hook(partial(_begin_step, transformer.blocks))


def compile_copy(module: nn.Module) -> None:
    """If `module` is a copy of a compiled block, compile it with the options that `compile_blocks` used for the
    original. Otherwise, do nothing."""
    options = vars(module).get(OPTIONS)
    if options is not None:
        _compile(module, options)


def uncompiled(module: nn.Module) -> None:
    """Let a block, and its copies, compute without compilation."""
    vars(module).pop(OPTIONS, None)
    module._compiled_call_impl = None


def _compile(module: nn.Module, options: dict[str, Any]) -> None:
    module.compile(**options)
    setattr(module, OPTIONS, options)


def _begin_step(blocks: nn.Module, *patches_and_images: Any) -> None:
    """Tell CUDA graphs that they may overwrite the memory that they wrote in the last step, including gradients.

    With gradient accumulation, all parts of a batch belong to one step, because their gradients are added up.
    """
    if all(parameter.grad is None for parameter in blocks.parameters()):
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def _lacks(device: torch.device) -> str | None:
    """Return the missing tool that compiling for the device needs, or None."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton"
    wanted = ("CC", "gcc", "cc", "clang") if device.type == "cuda" else ("CXX", "g++", "clang++")
    names = os.environ.get(wanted[0], ""), *wanted[1:]
    if any(name and shutil.which(name) for name in names):
        return None
    return f"a {'C' if device.type == 'cuda' else 'C++'} compiler ({', '.join(wanted[1:])} or ${wanted[0]})"
