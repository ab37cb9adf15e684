"""Traces: attention weights, queries, keys, block outputs and gradients of chosen layers.

The usual forward pass runs on a copy of the network that shares its weights, and only stores the inputs of the chosen
blocks. The attention weights of all rows are then computed from these inputs, a few images at a time. The forward pass
itself uses the fast kernels everywhere, so tracing does not change the logits.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence, Sized
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.errors import BundleError, ConfigError
from vitrail.machine import autocast, resolve_precision
from vitrail.models.attention.base import AttentionLayer
from vitrail.models.blocks import Block
from vitrail.models.network import block_numbers, shared_copy
from vitrail.models.positions.embedding import AttentionPositions
from vitrail.models.variants import transformer
from vitrail.models.vit import VisionTransformer
from vitrail.settings import problem_of, raise_problems, typed
from vitrail.weights.exported import ExportedNetwork

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def detached_copy(network: AnyModule) -> AnyModule:
    """Return a copy of a network in evaluation mode whose weights share the memory of the network's weights and need no
    gradients. A backward pass then keeps only the activations that gradients of the input need."""
    copied = shared_copy(network)
    for module in copied.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach(), requires_grad=False)
    return copied


def with_all_tokens(copied: VisionTransformer) -> VisionTransformer:
    """Return a copy of a network that does not merge or prune tokens."""
    copied.config = replace(copied.config, reduction=None)
    return copied


def explainable(network: VisionTransformer, outputs: Float[Tensor, "b ..."]) -> Float[Tensor, "b answers"]:
    """Return the outputs of which one can be explained: the logits of classes or numbers, and for a head of boxes or
    masks the logits of the classes of each row, one row after the other."""
    head = network.config.dense_head
    return outputs if head is None else head.row_logits(outputs).flatten(1)


class GradientPass:
    """Computes gradients with respect to attention weights, with dense attention in the chosen layers."""

    def __init__(self, network: VisionTransformer, layers: tuple[int, ...]) -> None:
        self.network = with_all_tokens(detached_copy(network))
        self.layers = layers
        self.dense: dict[int, _DenseAttention] = {}
        for layer in {*layers}:
            block = _block(self.network, layer)
            self.dense[layer] = block.attention = _DenseAttention(block.attention)

    def __call__(self, images: Tensor, targets: Tensor) -> Float[Tensor, "b layers heads n n"]:
        """Return the gradients of one of the `explainable` outputs of each image."""
        with torch.inference_mode(False), torch.enable_grad():
            logits = explainable(self.network, self.network(images))
            chosen = logits.gather(1, targets[:, None]).float().sum()
            maps = [self.dense[layer].map for layer in self.layers]
            gradients = torch.autograd.grad(chosen, [map_ for map_ in maps if map_ is not None])
        for dense in self.dense.values():
            dense.map = None
        return torch.stack(gradients, dim=1)


class _DenseAttention(AttentionLayer):
    """Computes what the given layer computes, by a map of weights that stays available for gradients."""

    def __init__(self, layer: AttentionLayer) -> None:
        super().__init__()
        self.layer = layer
        self.map: Tensor | None = None

    def forward(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None, read: int | None = None
    ) -> Float[Tensor, "b m width"]:
        q, k, v, bias = self.layer.operands(tokens, positions)
        self.map = attention_map(q, k, bias)
        if not self.map.requires_grad:
            self.map.requires_grad_()
        return self.layer.combine((self.map[:, :, :read] @ v.to(self.map.dtype)).to(v.dtype))


def attention_map(
    q: Float[Tensor, "b heads n d"], k: Float[Tensor, "b heads n d"], bias: Float[Tensor, "*images heads n n"] | None
) -> Float[Tensor, "b heads n n"]:
    """Return the attention weights in float32, or in float64 if the queries are."""
    exact = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        logits = (q.to(exact) * q.shape[-1] ** -0.5) @ k.to(exact).transpose(-1, -2)
        return (logits if bias is None else logits + bias).softmax(dim=-1)


Kept = Literal["attention", "queries", "keys", "outputs", "gradients"]
"""Tensors that a trace can contain."""

TracePrecision = Literal["auto", "bf16", "float32"]
"""Number format of matrix products. "auto" is bf16 if the processor has matrix units for it, else float32."""

ATTENTION_ONLY: tuple[Kept, ...] = ("attention",)

BATCH = 8
"""Default number of images in a forward pass."""

PIECE_BYTES = 2**28
"""Largest size of the tensors of one trace that `traces` yields, unless a single image needs more."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Tensors of chosen layers and heads for some images. Tensors that were not asked for are None."""

    layers: tuple[int, ...]
    """Numbers of the blocks, from 0, in the order of the tensors."""
    heads: tuple[int, ...]
    """Numbers of the heads, from 0, in the order of the tensors."""
    grid: tuple[int, int]
    """Numbers of rows and columns of patches."""
    patch: tuple[int, int]
    """Height and width of a patch in pixels."""
    prefix: int
    """Number of tokens before the patches: the class token, if there is one, and then the registers."""
    has_class_token: bool
    logits: Float[Tensor, "b ..."]
    """Logits, bitwise equal to those without tracing for batches of the same size."""
    attention: Float[Tensor, "b layers heads n n"] | None = None
    """Attention weights in float32, or in float64 if the network is. Rows are the tokens that attend, and columns are
    the tokens that they attend to."""
    queries: Float[Tensor, "b layers heads n d"] | None = None
    """Queries after normalisation and rotation."""
    keys: Float[Tensor, "b layers heads n d"] | None = None
    """Keys after normalisation and rotation."""
    outputs: Float[Tensor, "b layers n width"] | None = None
    """Tokens after each block, without the final norm."""
    gradients: Float[Tensor, "b layers heads n n"] | None = None
    """Gradient of the target's logit with respect to the attention weights."""
    targets: Int64[Tensor, " b"] | None = None
    """The explained output of each image (`explainable`), such as its class. Gradients are those of its logit."""


def trace(
    network: nn.Module,
    images: Float[Tensor, "b c h w"],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    keep: Collection[Kept] = ATTENTION_ONLY,
    targets: Int64[Tensor, " b"] | None = None,
    precision: TracePrecision = "float32",
    batch_size: int = BATCH,
) -> Trace:
    """Return the chosen tensors of all images.

    `layers` and `heads` count from 0, or backward from -1. By default, all of them are traced. `keep` names the
    tensors. "gradients" are those of the logit of `targets`, one class per image (or another output of `explainable`),
    which by default is the predicted class. The network is not changed: neither its mode, nor its hooks, nor its
    gradients. It runs in evaluation mode, and `batch_size` images at a time. A network that merges or prunes tokens is
    traced with all its tokens; its logits and its predicted classes are those of the usual forward pass.

    The result takes `images * layers * heads * tokens**2 * 4` bytes. `traces` yields it in pieces of bounded size.

    Raises `ConfigError` for a network without attention, for attention without a dense map of weights, and for a layer
    or head that does not exist.
    """
    pieces = traces(
        network,
        images,
        layers=layers,
        heads=heads,
        keep=keep,
        targets=targets,
        precision=precision,
        batch_size=batch_size,
    )
    joined: dict[str, Any] = {}
    first, start = None, 0
    for piece in pieces:
        first = piece if first is None else first
        for name, part in _tensors(piece).items():
            if name not in joined:
                joined[name] = part.new_empty((len(images), *part.shape[1:]))
            joined[name][start : start + len(part)] = part
        start += len(piece.logits)
    assert first is not None
    return replace(first, **joined)


@torch.inference_mode(False)
def traces(
    network: nn.Module,
    images: Float[Tensor, "b c h w"],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    keep: Collection[Kept] = ATTENTION_ONLY,
    targets: Int64[Tensor, " b"] | None = None,
    precision: TracePrecision = "float32",
    batch_size: int = BATCH,
) -> Iterator[Trace]:
    """Return an iterator over the traces of consecutive images. Each trace holds a few images.

    The memory does not grow with the number of images. If a batch does not fit into the memory of the device, the
    batch size is halved with a warning. For the arguments, see `trace`.
    """
    vit = transformer_of(network)
    if len(images) == 0:
        raise ConfigError("images is empty; give at least one image")
    for one in keep:
        typed(Kept, one, "keep")
    for field, numbers in (("layers", layers), ("heads", heads)):
        if isinstance(numbers, Sized) and not len(numbers):
            raise ConfigError(f"{field} is empty; name at least one, or leave it out to trace all of them")
    chosen = chosen_blocks(vit, layers)
    tracer = _Tracer(vit, tuple(chosen), heads, frozenset(keep), precision)
    # No gradient passes through a tensor of inference mode.
    images = images.clone() if isinstance(images, Tensor) and images.is_inference() else images
    return _all_pieces(tracer, images, checked_targets(vit, images, targets), checked_count(batch_size))


def checked_count(count: int, name: str = "batch_size") -> int:
    """Return a number of images or of other things. Raise `ConfigError` unless it is a whole number above 0."""
    raise_problems([problem_of(name, typed(int, count, name), int, {"least": 1})])
    return count


def checked_targets(network: VisionTransformer, images: Tensor, targets: Any) -> Int64[Tensor, " b"] | None:
    """Return the classes to explain, on the device of the images. Raise `ConfigError` unless there is a class of the
    network for each image."""
    if targets is None:
        return None
    found = torch.as_tensor(targets, device=images.device)
    if found.shape != (len(images),) or found.is_floating_point():
        raise ConfigError(
            f"targets of shape {tuple(found.shape)} and type {found.dtype} are not one whole number for each of "
            f"{len(images)} images"
        )
    if network.config.dense_head is None:
        check_range(found, network.config.num_classes)
    return found.clone().long()


def check_range(targets: Tensor, classes: int) -> None:
    """Raise `ConfigError` unless all targets are among the classes of a network, or among the classes of all rows of a
    head of boxes or masks."""
    if (wrong := targets[(targets < 0) | (targets >= classes)]).numel():
        raise ConfigError(f"targets={int(wrong[0])} is not a class of this network; choose from 0 to {classes - 1}")


def transformer_of(network: nn.Module) -> VisionTransformer:
    """Return the network if it is a Vision Transformer or a hybrid. Raise `ConfigError` for any other network, and
    `BundleError` for an exported file."""
    vit = transformer(network)
    if vit is not None:
        return vit
    if isinstance(network, ExportedNetwork):
        network.refuse("its blocks cannot be looked into")
    config = getattr(network, "config", None)
    name = getattr(config, "architecture", type(network).__name__)
    raise ConfigError(
        f"a network of the architecture {name!r} has no attention to look into; choose a Vision Transformer or a hybrid"
    )


def chosen_blocks(network: nn.Module, layers: Sequence[int] | None) -> list[int]:
    """Return the numbers of blocks, counted from 0: those in `layers`, or all if it is None. Raise `ConfigError` for a
    block that does not exist."""
    count: int = network.config.num_blocks  # type: ignore[union-attr, assignment]
    return block_numbers(range(count) if layers is None else layers, count)


def check_maps(network: nn.Module, keep: Collection[Kept]) -> None:
    """Raise `ConfigError` if the attention of a network does not have the tensors that `keep` names, and the errors of
    `transformer_of`."""
    vit = transformer_of(network)
    config, layer = vit.config, type(_block(vit, 0).attention)
    if layer.weights is AttentionLayer.weights:
        raise ConfigError(f"attention={config.attention!r} has no dense map of weights, so it cannot be traced")
    if config.dense_head is not None and config.dense_head.adds_tokens:
        raise ConfigError(
            f"head_kind={config.head_kind!r} adds tokens before the last blocks, so that the maps of the blocks "
            "have different sizes; they cannot be traced"
        )
    lacking = sorted({*keep} & {"queries", "keys", "gradients"})
    if layer.operands is AttentionLayer.operands and lacking:
        raise ConfigError(f"attention={config.attention!r} has no queries and keys, so keep={lacking[0]!r} is empty")


def has_maps(network: nn.Module) -> bool:
    """Return True if the network has attention whose weights and gradients can be traced."""
    try:
        check_maps(network, ["gradients"])
    except (ConfigError, BundleError):
        return False
    return True


def _block(network: VisionTransformer, layer: int) -> Block:
    block = network.blocks[layer]
    assert isinstance(block, Block)
    return block


def _all_pieces(tracer: _Tracer, images: Tensor, targets: Tensor | None, batch_size: int) -> Iterator[Trace]:
    start = 0
    while start < len(images):
        end = start + batch_size
        try:
            for piece in tracer.pieces(images[start:end], None if targets is None else targets[start:end]):
                yield piece
                start += len(piece.logits)
        except torch.OutOfMemoryError:
            if batch_size == 1:
                raise
            batch_size //= 2
            warnings.warn(f"the device is out of memory; tracing continues with batch_size={batch_size}", stacklevel=2)


def _tensors(piece: Trace) -> dict[str, Tensor]:
    values = {field.name: getattr(piece, field.name) for field in fields(piece)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


class _Tracer:
    """Traces batches of images with a copy of a network."""

    def __init__(
        self,
        network: VisionTransformer,
        layers: tuple[int, ...],
        heads: Sequence[int] | None,
        keep: frozenset[Kept],
        precision: TracePrecision,
    ) -> None:
        self.network = with_all_tokens(shared_copy(network))
        self.predicting = self.network if network.config.reduction is None else shared_copy(network)
        self.layers = layers
        self.keep = keep
        self.device = network.norm.weight.device
        typed(TracePrecision, precision, "precision")
        is_bf16 = resolve_precision(precision, self.device) == "bf16"
        self.precision: Literal["bf16", "float32"] = "bf16" if is_bf16 else "float32"
        check_maps(network, keep)
        if "gradients" in keep and not network.config.num_classes:
            raise ConfigError("keep='gradients' needs the logit of a class, but this network has no head")
        every = range(network.config.heads)
        self.heads = tuple(block_numbers(every if heads is None else heads, len(every), field="heads", part="head"))
        self._inputs: dict[int, tuple[Tensor, AttentionPositions | None]] = {}
        self._outputs: dict[int, Tensor] = {}
        for layer in {*layers}:
            _block(self.network, layer).register_forward_hook(self._remember(layer))
        self._gradients = GradientPass(network, layers) if "gradients" in keep else None

    def pieces(self, images: Tensor, targets: Tensor | None) -> Iterator[Trace]:
        """Yield the traces of one batch."""
        config = self.network.config
        with torch.inference_mode(False), torch.no_grad(), autocast(self.precision, self.device):
            logits = self.network(images)
            if self.predicting is not self.network:
                logits = self.predicting(images)
            answers = explainable(self.network, logits)
            chosen = answers.argmax(dim=1) if targets is None else targets
            check_range(chosen, answers.shape[1])
        grid = config.grid_of(images.shape[2], images.shape[3])
        size = self._piece_size(grid)
        for start in range(0, len(images), size):
            part = slice(start, start + size)
            with torch.inference_mode(False), torch.no_grad(), autocast(self.precision, self.device):
                found = self._found(part)
            if self._gradients is not None:
                with autocast(self.precision, self.device):
                    gradients = self._gradients(images[part], chosen[part])
                found["gradients"] = gradients[:, :, list(self.heads)]
            if self._gradients is not None or targets is not None:
                found["targets"] = chosen[part]
            yield Trace(
                layers=self.layers,
                heads=self.heads,
                grid=grid,
                patch=config.patch_pixels,
                prefix=config.prefix,
                has_class_token=config.has_class_token,
                logits=logits[part],
                **found,
            )
        self._inputs.clear()
        self._outputs.clear()

    def _remember(self, layer: int) -> Any:
        def hook(block: nn.Module, arguments: tuple[Any, ...], output: Tensor | tuple[Tensor, Tensor]) -> None:
            self._inputs[layer] = arguments[0], arguments[1]
            if "outputs" in self.keep:
                self._outputs[layer] = output if isinstance(output, Tensor) else (output[0] + output[1]) / 2

        return hook

    def _piece_size(self, grid: tuple[int, int]) -> int:
        """Return the number of images of a piece, so that its tensors stay within `PIECE_BYTES`."""
        config = self.network.config
        tokens = grid[0] * grid[1] + config.prefix
        maps = len(self.keep & {"attention", "gradients"}) * len(self.heads) * tokens**2
        vectors = len(self.keep & {"queries", "keys", "outputs"}) * tokens * config.width
        working = 3 * config.heads * tokens**2
        if "gradients" in self.keep:
            working += config.num_blocks * (3 * config.heads * tokens**2 + 30 * tokens * config.width)
        return max(1, PIECE_BYTES // (4 * (len(self.layers) * (maps + vectors) + working)))

    def _found(self, part: slice) -> dict[str, Any]:
        """Return the tensors of some images of the batch, without gradients."""
        found: dict[str, Tensor] = {}
        heads = list(self.heads)

        def put(place: int, name: str, values: Tensor) -> None:
            if name not in found:  # one tensor for all layers, because a stack of them would need twice the memory
                found[name] = values.new_empty((len(values), len(self.layers), *values.shape[1:]))
            found[name][:, place] = values

        for place, layer in enumerate(self.layers):
            block, (tokens, inside) = _block(self.network, layer), self._inputs[layer]
            tokens = tokens[part]
            normed = block.norm1(tokens)
            if self.keep & {"attention", "queries", "keys"}:
                if type(block.attention).operands is AttentionLayer.operands:
                    put(place, "attention", block.attention.weights(normed, inside)[:, heads])
                else:
                    operands = block.attention.operands(normed, inside)
                    q, k = operands.queries[:, heads], operands.keys[:, heads]
                    bias = None if operands.bias is None else operands.bias[..., heads, :, :]
                    if "attention" in self.keep:
                        put(place, "attention", attention_map(q, k, bias))
                    if "queries" in self.keep:
                        put(place, "queries", q)
                    if "keys" in self.keep:
                        put(place, "keys", k)
            if "outputs" in self.keep:
                output = self._outputs[layer][part]
                complete = output.shape[1] == tokens.shape[1]  # the last block may skip what the head does not read
                put(place, "outputs", output if complete else block(tokens, inside))
        return dict(found)
