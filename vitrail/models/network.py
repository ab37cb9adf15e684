"""The contract of networks and their configs: the methods and properties that the rest of the library uses. And copies
of networks."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.shortcuts import is_plain
from vitrail.settings import typed

AnyModule = TypeVar("AnyModule", bound=nn.Module)
AnyConfigClass = TypeVar("AnyConfigClass")


FootprintPrecision = Literal["float32", "bf16"]


class Footprint(NamedTuple):
    """The memory that a training step or a prediction needs. `config.footprint(size, precision)` returns it."""

    parameters: int
    """Number of weights. Each weight and its two moments in AdamW are float32 numbers."""
    activations: int
    """Bytes per image that the forward pass keeps for the backward pass."""
    first_weights: int
    """Bytes of the converted copies of weights at the beginning of the backward pass. A ResNet also has the temporary
    tensors in the backward pass of weight standardisation then."""
    last_weights: int
    """Bytes of weight gradients and of converted copies of weights at the end of the backward pass. A hybrid also has
    these temporary tensors then."""
    gaps: float
    """Unused bytes between tensors in the heap, as a fraction of the activations."""
    passing: int = 0
    """Peak extra bytes per image during the backward pass, beyond the kept activations."""
    remaining: int = 0
    """Bytes per image that are still in use at the end of the backward pass."""
    predicting: int = 0
    """Peak bytes per image during a forward pass without a backward pass, besides the image itself."""


def bytes_each(precision: FootprintPrecision) -> int:
    """Return the number of bytes of one element in a matrix product: 2 in bf16, 4 in float32."""
    return 4 if precision == "float32" else 2


def mlp_macs(config: Any) -> int:
    """Return the multiply-accumulates of the MLP of a block for one token, in a tower of images or of texts."""
    macs: int = (3 if config.activation == "swiglu" else 2) * config.width * config.mlp_width
    return macs


@dataclass(frozen=True)
class Features:
    """The tokens of a batch, after the final norm and before pooling, or after a chosen block."""

    cls: Float[Tensor, "b width"] | None
    """The class token, or None if the network has none."""
    registers: Float[Tensor, "b r width"]
    """Register tokens. The number r is 0 if the network has no registers."""
    patches: Float[Tensor, "b n width"]
    """Patch tokens, or the cells of a ResNet's feature map, in row-major order of the grid. If only some patches are
    kept (`ViTConfig.patch_dropout` in training, or `encode`), this field contains only the tokens of these patches."""
    grid: tuple[int, int]
    """Numbers of rows and columns of patches. If all patches are kept, the product of the two numbers is n."""
    queries: Float[Tensor, "b q width"] | None = None
    """The tokens that the head of the network has added, or None."""
    middle: Float[Tensor, "b n width"] | None = None
    """The patch tokens after the first half of the blocks, without a norm, or None if the head does not read them."""

    def with_middle(self, norm: nn.Module) -> Float[Tensor, "b n two_width"]:
        """Return the patch tokens with those of the middle of the network beside them, after a norm, for a head that
        reads both."""
        assert self.middle is not None, "the network gives them to a head with `reads_middle`"
        return torch.cat([self.patches, norm(self.middle).to(self.patches.dtype)], dim=2)


class Layers(NamedTuple):
    """All modules of a network that have weights or randomly drop values, from bottom to top. Each module occurs once.

    Layers are numbered as in BEiT (2106.08254), where the learning rate decays from the head down.
    """

    embedding: list[nn.Module]
    """Layer 0: everything below the first block, such as patches, positions, a hybrid's root or a ResNet's stem."""
    blocks: list[nn.Module]
    """Layers 1 to depth: blocks, or a ResNet's residual units."""
    summary: list[nn.Module]
    """The final norm and the pooling. Together with the head, they are layer depth + 1."""
    head: list[nn.Module]
    """The head, and the hidden layer before it if there is one."""

    def numbers(self) -> dict[int, int]:
        """Return the layer number of each parameter, by the parameter's `id`."""
        layers = [self.embedding, *([block] for block in self.blocks), [*self.summary, *self.head]]
        return {
            id(parameter): number
            for number, modules in enumerate(layers)
            for module in modules
            for parameter in module.parameters()
        }


@runtime_checkable
class HasLayers(Protocol):
    """A network that provides its layers for layer-wise learning rate decay and for freezing."""

    def layers(self) -> Layers:
        """Return the modules from bottom to top."""


class NetworkConfig(Protocol):
    """The contract of every network's config, which decides all shapes and the arithmetic. Members of `ViTConfig` and
    `ResNetConfig` without a docstring are documented here."""

    architecture: ClassVar[str]
    """Name of the architecture in files and messages: a key of `vitrail.models.variants.ARCHITECTURES`."""

    has_uniform_blocks: ClassVar[bool]
    """True if all blocks have the same shapes, so that one compiled graph serves them all."""
    recomputes_blocks: ClassVar[bool]
    """True if the network can compute its blocks again in the backward pass instead of keeping their activations."""
    adaptable: ClassVar[tuple[str, ...]]
    """Names of the weights in a block that LoRA can adapt."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels of the images that the network is made for."""

    @property
    def channels(self) -> int:
        """Number of image channels."""

    @property
    def num_classes(self) -> int:
        """Number of outputs of the head, or 0 for a network without a head."""

    @property
    def embed_width(self) -> int:
        """Length of the vector that `embed` returns."""

    @property
    def weights_depend_on_size(self) -> bool:
        """True if some weights, such as learned positions, are made for one image size and resized for others."""

    @property
    def head_inputs(self) -> int:
        """Number of inputs of the head's last layer."""

    @property
    def stream_width(self) -> int:
        """Width of the residual stream below the head. Learning rates are scaled by this width."""

    @property
    def summary(self) -> str:
        """The sizes that distinguish variants, for tables."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks, or of residual units."""

    @property
    def tokens(self) -> int:
        """Length of the sequence that the blocks process, or the number of cells of the last feature map."""

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the number of rows and columns of patches, or of cells of the last feature map. Raise `ConfigError` if
        the size does not fit."""

    def nearest_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the image size that is nearest to (height, width) among those that the network accepts."""

    def with_image_size(self, image_size: tuple[int, int]) -> NetworkConfig:
        """Return the same config for another image size. Raise `ConfigError` for a size that does not fit."""

    def with_head(self, num_classes: int, *, drop_hidden: bool = False) -> NetworkConfig:
        """Return the same config with a head of `num_classes` outputs. `drop_hidden` removes the hidden layer before
        the head."""

    def parameters(self) -> int:
        """Return the number of weights."""

    def macs(self, image_size: tuple[int, int] | None = None) -> int:
        """Return the multiply-accumulates of the forward pass of one image, as the literature counts them."""

    def inference_flops(self, image_size: tuple[int, int] | None = None) -> int:
        """Return the FLOPs that are computed to predict one image."""

    def training_flops(self, image_size: tuple[int, int] | None = None, trained_blocks: int | None = None) -> int:
        """Return the FLOPs that a training step computes per image. By default all blocks are trained, otherwise the
        last `trained_blocks` with the layers after them, or only the head (0)."""

    def footprint(self, image_size: tuple[int, int], precision: FootprintPrecision) -> Footprint:
        """Return the memory that a training step needs."""


class Network(Protocol):
    """The contract of a network, which `vitrail.testing.check_network` checks. Every network is an `nn.Module`.

    Images have the shape (b, channels, h, w) and any size that `config.grid_of` accepts. Other images raise
    `ConfigError`.
    """

    config: Any
    head: nn.Module | None

    def layers(self) -> Layers:
        """Return the modules from bottom to top."""

    def with_image_size(self, image_size: tuple[int, int]) -> Network:
        """Return the same weights in a network for another image size, with learned positions resized.

        All other tensors are shared. Raise `ConfigError` for a size that does not fit.
        """

    def with_head(self, num_classes: int, *, drop_hidden: bool = False) -> Network:
        """Return the same network with a new head of zeros.

        `drop_hidden` removes the hidden layer before the head. All other tensors are shared.
        """

    def __call__(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b ..."]:
        """Return logits, or the embedding if the network has no head. A head of boxes or masks returns several rows for
        each image."""

    def features(self, images: Float[Tensor, "b c h w"]) -> Features:
        """Return the tokens of the images."""

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b embed_width"]:
        """Return one vector for each image."""


def refuse_assignment(config: type[AnyConfigClass]) -> type[AnyConfigClass]:
    """Let assignments to a frozen config's attributes raise a `ConfigError` with a way on."""

    def refuse(self: Any, name: str, value: Any) -> None:
        raise ConfigError(
            f"config.{name}={value!r}: a network's config describes the weights that it has, so it cannot be changed; "
            "make another config with dataclasses.replace. If another library assigns to it, put the network into a "
            "module that has no config (docs/libraries.md)"
        )

    config.__setattr__ = refuse  # type: ignore[method-assign]
    return config


def check_images(images: Tensor, channels: int) -> None:
    """Raise `ConfigError` unless images are a tensor of shape (b, channels, height, width) and are normalised, which
    whole numbers cannot be."""
    if not isinstance(images, Tensor):
        raise ConfigError(
            f"images is a {type(images).__name__}; give a tensor of shape (b, {channels}, height, width), or images to "
            "Bundle.predict"
        )
    if images.ndim != 4 or images.shape[1] != channels:
        raise ConfigError(f"images of shape {tuple(images.shape)} are not of shape (b, {channels}, height, width)")
    if not images.is_floating_point():
        raise ConfigError(
            f"images of {images.dtype} are not normalised; convert pixels to floating point and normalise them, as "
            "the model's preprocessing does"
        )


def image_sides(images: Shaped[Tensor, "b c h w"]) -> tuple[int, int]:
    """Return height and width of images.

    `torch.jit.trace` passes tensors for sizes. They become numbers, so that a traced network refuses other sizes:
    positions and tables are constants of the trace.
    """
    height, width = images.shape[2:]
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return (int(height), int(width)) if is_traced else (height, width)


def weights_of(make: Callable[[], nn.Module | None]) -> int:
    """Return the number of weights of a new module. It is made without values, which takes less than a millisecond for
    a layer."""
    with torch.device("meta"):
        module = make()
    return 0 if module is None else sum(weight.numel() for weight in module.parameters())


def block_numbers(layers: Iterable[int], count: int, *, field: str = "layers", part: str = "block") -> list[int]:
    """Return block numbers that count from 0. Numbers in `layers` may also count backward from -1. `field` and `part`
    name other numbered parts, such as heads.

    Raise `ConfigError` for anything else than whole numbers, and for a block that does not exist.
    """
    numbers = typed(tuple[int, ...], [*layers] if isinstance(layers, Iterable) else layers, field)
    for layer in numbers:
        if not -count <= layer < count:
            raise ConfigError(
                f"{field}={numbers}: {part} {layer} does not exist; choose from 0 to {count - 1}, or from "
                f"{-count} to -1, counted from the end"
            )
    return [layer % count for layer in numbers]


def with_weights(network: AnyModule, config: Any, weights: dict[str, Tensor]) -> AnyModule:
    """Return a network of the same class with these weight tensors, which are not copied. All weights are trainable."""
    with torch.device("meta"):  # no random weights are drawn, because they are replaced
        new = type(network)(config)
    new.load_state_dict(weights, assign=True)
    return new.requires_grad_(True).train(network.training)


def with_new_head(network: AnyModule, num_classes: int, *, drop_hidden: bool = False) -> AnyModule:
    """Return the same network with a new head, whose weights are 0 and whose biases are the config's `head_bias`. The
    weights of a head of boxes or masks are random. The head has the device and the number format of the network's
    first weight.

    All other modules are copied with what the user has changed, such as activations, hooks and frozen weights. Raises
    `ConfigError` if a copy would use modules of this network.
    """
    old: Any = network.config
    made: Any = separate_copy(network)
    made.config = config = old.with_head(num_classes, drop_hidden=drop_hidden)
    if drop_hidden:
        made.head_hidden = None
    made.head = _part_of(network, config, "head")
    if made.head is not None:
        like = next(network.parameters())
        if isinstance(made.head, nn.Linear):
            weights = {
                "weight": like.new_zeros(num_classes, config.head_inputs),
                "bias": like.new_full((num_classes,), config.head_bias),
            }
            made.head.load_state_dict(weights, assign=True)
        else:
            made.head.to_empty(device=like.device).to(like.dtype).initialise()
        made.head.requires_grad_(True).train(network.training)
    return cast(AnyModule, made)


def with_resized_parts(network: AnyModule, config: Any, weights: Mapping[str, dict[str, Tensor]]) -> AnyModule:
    """Return the same network for another image size or number of channels. `weights` has the names of the modules
    that are made for one of them, with those of their weights that change.

    All other modules are copied with what the user has changed. Raises `ConfigError` if a module that is made anew has
    hooks or a replaced method, or is of another class, and if a copy would use modules of this network.
    """
    made: Any = separate_copy(network)
    made.config = config
    for name, resized in weights.items():
        old, new = network.get_submodule(name), _part_of(network, config, name)
        if new is None or not is_plain(old, type(new)):
            raise ConfigError(
                f"{name} is made anew for {config.channels} channels of {config.image_size}, but it was replaced or "
                "has hooks, which would be lost; change the network after its image size and channels"
            )
        frozen = {key for key, weight in old.named_parameters() if not weight.requires_grad}
        new.load_state_dict(old.state_dict() | resized, assign=True)
        for key, weight in new.named_parameters():
            weight.requires_grad_(key not in frozen)
        made.set_submodule(name, new.train(old.training))
    return cast(AnyModule, made)


def _part_of(network: nn.Module, config: Any, name: str) -> nn.Module | None:
    """Return a new module of a network of the same class and another config, without values."""
    with torch.device("meta"):
        part = attrgetter(name)(type(network)(config))
    return cast("nn.Module | None", part)


# --- copies that share the memory of all tensors with the network, and keep what a user has changed


def separate_copy(network: AnyModule) -> AnyModule:
    """Return a copy of a network whose tensors share the memory of the network's tensors, but can be frozen, moved and
    converted without changing the network.

    Modes, frozen weights, replaced modules and methods, hooks and parametrisations are kept. Raises `ConfigError` as
    `shared_copy` does.
    """
    made, known = shared_copy(network), dict[int, Tensor]()
    pairs = (module.named_modules(remove_duplicate=False) for module in (network, made))
    for (_, old), (_, new) in zip(*pairs, strict=True):
        new.training = old.training
        for name, weight in new._parameters.items():
            if weight is not None:
                own = nn.Parameter(weight.detach(), weight.requires_grad)
                new._parameters[name] = cast(nn.Parameter, known.setdefault(id(weight), own))
        for name, buffer in new._buffers.items():
            if buffer is not None:
                new._buffers[name] = known.setdefault(id(buffer), buffer.detach())
    return made


def shared_copy(network: AnyModule) -> AnyModule:
    """Return a copy of a network in evaluation mode that shares all tensors with the network.

    Modules of the copy can be replaced, and hooks can be added to them, without changing the network. Blocks of the
    copy are not compiled. Raises `ConfigError` if a replaced method or a hook is a function that uses a module of the
    network, because it would use the original module, which may be in training mode.
    """
    network = getattr(network, "_orig_mod", network)  # of torch.compile
    modules = {id(module) for module in network.modules()}
    is_simple = True
    for name, module in network.named_modules():
        known = type(module).__module__.startswith(("torch.nn.modules.", "vitrail.models."))
        is_simple = is_simple and known
        for method, function in _replaced(module):
            used = list(_used_objects(function, is_hook=method == "a hook"))
            is_simple = is_simple and not any(id(one) in modules for one, _ in used)
            if any(id(one) in modules and is_fixed for one, is_fixed in used):
                raise ConfigError(
                    f"{name or 'the network'}: {method} is a function that uses a module of the network, so a copy of "
                    "the network would use the original module; use types.MethodType(function, module) "
                    "and the function's first argument, or a subclass"
                )
    tensors = {id(tensor): tensor for tensor in itertools.chain(network.parameters(), network.buffers())}
    # Simple modules hold their submodules by name only, so copying one after the other is enough and fast. Others may
    # have references elsewhere.
    return cast(AnyModule, _copied(network)) if is_simple else copy.deepcopy(network, cast(Any, tensors)).eval()


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module and its submodules in evaluation mode, which shares all tensors."""
    made = type(module).__new__(type(module))
    for name, value in vars(module).items():
        made.__dict__[name] = value.copy() if isinstance(value, dict) else value
    made.__dict__["training"] = False
    made.__dict__.pop("_compiled_call_impl", None)  # a copied hook would call the original module
    made.__dict__["_modules"] = {
        name: None if part is None else _copied(part) for name, part in module._modules.items()
    }
    return made


def _replaced(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the methods that were replaced in a module, but not in its class, and the module's hooks, by their names.

    The compiled call of a module is not among them, because a copy is compiled anew.
    """
    for name, value in vars(module).items():
        if callable(getattr(type(module), name, None)):
            yield name, value
        elif name.endswith("_hooks") and isinstance(value, dict):
            yield from (("a hook", hook) for hook in value.values())


def _used_objects(function: Any, *, is_hook: bool) -> Iterator[tuple[Any, bool]]:
    """Yield the objects that a function uses: what it is bound to, its arguments with their defaults, and the variables
    around it. Collections among these are searched, and so are functions of the same file.

    If a callable object replaces a method, its attributes are yielded too. Those of a hook are not, because a hook may
    hold a network that it does not compute with.

    The second value is True if a copy of the function has the same object instead of its copy.
    """
    waiting, seen = [(function, False)], set[tuple[int, bool]]()
    while waiting:
        one, is_fixed = waiting.pop()
        yield one, is_fixed
        if (id(one), is_fixed) in seen or isinstance(one, nn.Module | Tensor):
            continue
        seen.add((id(one), is_fixed))
        if isinstance(one, MethodType):
            waiting += [(one.__self__, is_fixed), (one.__func__, is_fixed)]
        elif isinstance(one, functools.partial):
            waiting += [(part, is_fixed) for part in (one.func, *one.args, *one.keywords.values())]
        elif isinstance(one, FunctionType):
            names, defaults = inspect.getclosurevars(one), (one.__defaults__, one.__kwdefaults__)
            # Names of attributes are among the names of `getclosurevars` too.
            loaded = {step.argval for step in dis.get_instructions(one) if step.opname == "LOAD_GLOBAL"}
            around = [
                value
                for name, value in names.globals.items()
                if name in loaded and (not isinstance(value, FunctionType | type) or value.__module__ == one.__module__)
            ]
            waiting += [(value, True) for value in (*names.nonlocals.values(), *around, *vars(one).values(), *defaults)]
        elif isinstance(one, list | tuple | set | frozenset | dict):
            inside = one.values() if isinstance(one, dict) else one
            waiting += [(value, is_fixed) for value in inside if not isinstance(value, int | float | str | Tensor)]
        elif callable(one) and not is_fixed and not is_hook:
            waiting += [(value, False) for value in getattr(one, "__dict__", {}).values()]
