"""The blocks of a Vision Transformer: equations 2 and 3 of the paper, with their MLPs and initial weights.

Reversible blocks have a backward pass that computes the inputs of blocks from their outputs (1707.04585), so that no
activations are kept. The memory for activations does not grow with the number of blocks. The backward pass computes
each block once more, as if blocks were checkpointed, and draws the same random numbers. Rounding changes the computed
inputs a little.

Reversible blocks with hooks or in wrappers, and those whose own methods were replaced, are called as in an ordinary
network, which keeps their activations. Their outputs may not determine their inputs, and hooks may read activations for
a loss of their own. So are blocks inside function transforms (`torch.func`), which cannot transform this backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from vitrail.models.attention import AttentionLayer, AttentionPositions
from vitrail.models.linear.dense import Linear
from vitrail.models.reduction import Removal, size_bias
from vitrail.models.shortcuts import has_hooks, is_plain, skippable
from vitrail.models.vit_config import Activation, ViTConfig


class QuickGelu(nn.Module):
    """The approximation of GELU in OpenAI's CLIP: `x sigmoid(1.702 x)`."""

    def forward(self, x: Float[Tensor, "b n hidden"]) -> Float[Tensor, "b n hidden"]:
        return x * torch.sigmoid(1.702 * x)


class Mlp(nn.Module):
    """Two dense layers with a GELU between them (paper section 3.1). Dropout follows each layer."""

    def __init__(
        self, width: int, hidden: int, activation: Activation = "gelu", *, bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.up = Linear(width, hidden, bias=bias)
        is_quick, is_tanh = activation == "quick-gelu", activation == "gelu-tanh"
        self.activation = QuickGelu() if is_quick else nn.GELU(approximate="tanh" if is_tanh else "none")
        self.dropout = nn.Dropout(dropout)
        self.down = Linear(hidden, width, bias=bias)

    def forward(self, x: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        return self.dropout(self.down(self.dropout(self.activation(self.up(x)))))

    @torch.no_grad()
    def initialise(self) -> None:
        _initialise_dense(self.up, self.down)


class SwiGlu(nn.Module):
    """`down(silu(gate) * value)`, with gate and value from one matrix product (2002.05202).

    This is the MLP of DINOv2's largest model. The first half of the rows of `up.weight` computes the gate.
    """

    def __init__(self, width: int, hidden: int, *, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = Linear(width, 2 * hidden, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.down = Linear(hidden, width, bias=bias)

    def forward(self, x: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.dropout(self.down(self.dropout(F.silu(gate) * value)))

    @torch.no_grad()
    def initialise(self) -> None:
        _initialise_dense(self.up, self.down)


def _initialise_dense(*layers: nn.Linear) -> None:
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.normal_(layer.bias, std=1e-6)


def make_mlp(width: int, hidden: int, activation: Activation, *, bias: bool = True, dropout: float = 0.0) -> nn.Module:
    """Return the MLP that `activation` names."""
    if activation == "swiglu":
        return SwiGlu(width, hidden, bias=bias, dropout=dropout)
    return Mlp(width, hidden, activation, bias=bias, dropout=dropout)


class LayerScale(nn.Module):
    """Multiplies each channel of a branch by a learned factor (2103.17239). Small initial values stabilise deep
    networks.
    """

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, branch: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        return branch * self.gamma.to(branch.dtype)

    @torch.no_grad()
    def initialise(self) -> None:
        nn.init.constant_(self.gamma, self.start)


@skippable
class StochasticDepth(nn.Module):
    """In training, drops a branch for some images of a batch, and scales the branch of the other images so that the
    expected value does not change (1603.09382).

    By default the branch is computed for all images, and each image drops it independently. With `skips`, a fixed
    number of images keeps the branch, and it is computed for these images only (2304.07193, section 5).
    """

    keep: Float[Tensor, ""]
    """Probability that a branch is kept. It is a tensor because the compiler would make a separate graph for each value
    of a Python number. It is not a buffer, because no file holds it, and `to_empty` leaves buffers without values."""

    def __init__(self, rate: float, *, skips: bool = False) -> None:
        super().__init__()
        self.skips = skips
        self.keep = torch.ones((), device="cpu")
        self.rate = rate

    @property
    def rate(self) -> float:
        """Probability that a branch is dropped."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._rate = rate
        self.draws = rate > 0
        self.keep = torch.tensor(1 - rate, dtype=torch.float32, device=self.keep.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply `fn` to all tensors, as `to` and `to_empty` do. The probability follows to the device and keeps its
        value and format."""
        self.keep = torch.tensor(1 - self.rate, dtype=torch.float32, device=fn(self.keep).device)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, branch: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        if not (self.training and self.draws):
            return branch
        kept = torch.rand(branch.shape[0], 1, 1, device=branch.device) < self.keep
        return branch * (kept / self.keep).to(branch.dtype)

    def draw(self, images: int, device: torch.device) -> Int64[Tensor, " kept"] | None:
        """Return the indices of the images for which a branch is computed, at least one of them. Return None if it is
        computed for all images."""
        count = max(1, round(images * (1 - self.rate)))
        if count == images or not (self.training and self.skips):
            return None
        return torch.randperm(images, device=device)[:count].sort().values


def lecun_normal_(weight: Tensor) -> None:
    """Fill a weight with random numbers from a normal distribution that is truncated at two standard deviations. The
    variance after truncation is 1 / fan_in."""
    std = weight[0].numel() ** -0.5 / 0.87962566103423978  # the standard deviation of a unit normal cut at +-2
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


OF_ONE_TOKEN = {
    nn.Dropout, nn.GELU, nn.Identity, nn.LayerNorm, nn.Linear, nn.ReLU, nn.RMSNorm, nn.Sequential, nn.SiLU, nn.Tanh,
}  # fmt: skip
"""Modules of PyTorch that compute each token without the others."""


class Block(nn.Module):
    """One encoder layer: attention and an MLP, each after a layer norm and added to the residual stream."""

    def __init__(
        self,
        *,
        width: int,
        attention: AttentionLayer,
        mlp: nn.Module,
        norm_eps: float,
        dropout: float = 0.0,
        layer_scale: float = 0.0,
        stochastic_depth: float = 0.0,
        skip_dropped: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.attention = attention
        self.dropout = nn.Dropout(dropout)
        self.scale1 = LayerScale(width, layer_scale) if layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = mlp
        self.scale2 = LayerScale(width, layer_scale) if layer_scale else nn.Identity()
        self.skip = StochasticDepth(stochastic_depth, skips=skip_dropped)

    def forward(
        self, z: Float[Tensor, "b n width"], inside: AttentionPositions | None = None, read: int | None = None
    ) -> Float[Tensor, "b m width"]:
        """Return the tokens after this block. With `read`, return only the first `read` tokens, which still attend to
        all tokens."""
        if self.training and is_plain(self.skip, StochasticDepth) and self.skip.skips:
            return self._forward_of_kept(z, inside, read)
        mixed = self.attention(self.norm1(z), inside, read)
        z = z[:, :read] + self.skip(self.scale1(self.dropout(mixed)))  # equation 2
        if inside is not None and inside.removal is not None:
            z = inside.removal.remaining(z)
        return z + self.skip(self.scale2(self.mlp(self.norm2(z))))  # equation 3

    @property
    def treats_tokens_alone(self) -> bool:
        """True if everything besides attention computes each token without the others. Tokens whose output is not used
        can then be left out. It is False for a user's own modules and methods, which may mix tokens."""
        others = (self.norm1, self.dropout, self.scale1, self.skip, self.norm2, self.scale2, *self.mlp.modules())
        return all(
            "forward" not in part.__dict__
            and (type(part) in OF_ONE_TOKEN or type(part).__module__.startswith("vitrail.models."))
            for part in others
        )

    def _forward_of_kept(
        self, z: Float[Tensor, "b n width"], inside: AttentionPositions | None, read: int | None
    ) -> Float[Tensor, "b m width"]:
        """Compute each branch only for the images that stochastic depth keeps."""
        kept = self.skip.draw(len(z), z.device)
        tokens = z if kept is None else z[kept]
        inside = inside if kept is None or inside is None else inside.of_images(kept)
        mixed = self.scale1(self.dropout(self.attention(self.norm1(tokens), inside, read)))
        z = _added(z[:, :read], mixed, kept)
        kept = self.skip.draw(len(z), z.device)
        tokens = z if kept is None else z[kept]
        return _added(z, self.scale2(self.mlp(self.norm2(tokens))), kept)

    def projections(self) -> Iterator[tuple[Linear, tuple[str, ...]]]:
        """Yield each dense layer with the names of its projections. The rows of the layer's weight are divided equally
        among these projections, in this order."""
        yield from self.attention.projections()
        for name in ("up", "down"):
            yield cast(Linear, self.mlp.get_submodule(name)), (name,)


class ReversibleBlock(Block):
    """A block of two residual streams, from whose outputs its inputs can be computed (1707.04585, 2001.04451).

    y_1 = x_1 + MSA(LN(x_2))
    y_2 = x_2 + MLP(LN(y_1))
    """

    def forward(  # type: ignore[override]
        self,
        z: Float[Tensor, "b n width"],
        inside: AttentionPositions | None = None,
        *,
        first: Float[Tensor, "b n width"],
    ) -> tuple[Float[Tensor, "b n width"], Float[Tensor, "b n width"]]:
        """Return both streams after this block. `first` is the first stream before it, and `z` the second, which
        attention reads."""
        first = first + self.mixed(z, inside)
        return first, z + self.transformed(first)

    def mixed(self, z: Float[Tensor, "b n width"], inside: AttentionPositions | None) -> Float[Tensor, "b n width"]:
        """Return the branch of attention."""
        return self.skip(self.scale1(self.dropout(self.attention(self.norm1(z), inside))))

    def transformed(self, z: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        """Return the branch of the MLP."""
        return self.skip(self.scale2(self.mlp(self.norm2(z))))


class PostNormBlock(Block):
    """An encoder layer of the first Transformers and of BERT (1706.03762, 1810.04805): attention and an MLP, each added
    to the residual stream, and each followed by a layer norm of the sum.

    y = LN(x + MSA(x))
    z = LN(y + MLP(y))
    """

    def forward(
        self, z: Float[Tensor, "b n width"], inside: AttentionPositions | None = None, read: int | None = None
    ) -> Float[Tensor, "b m width"]:
        mixed = self.attention(z, inside, read)
        z = self.norm1(z[:, :read] + self.skip(self.scale1(self.dropout(mixed))))
        return self.norm2(z + self.skip(self.scale2(self.mlp(z))))


def _added(
    z: Float[Tensor, "b n width"], branch: Float[Tensor, "k n width"], kept: Int64[Tensor, " k"] | None
) -> Float[Tensor, "b n width"]:
    """Add a branch to the tokens of the images for which it was computed, scaled so that the expected value is that of
    a branch of all images."""
    if kept is None:
        return z + branch
    return z.index_add(0, kept, branch.to(z.dtype), alpha=len(z) / len(kept))


def make_blocks(config: ViTConfig) -> Blocks:
    """Return new blocks for a network of this config."""
    width, dropout = config.width, config.dropout
    made = (
        (ReversibleBlock if config.reversible else Block)(
            width=width,
            attention=config.attention_in(layer).build(),
            mlp=make_mlp(width, config.mlp_width, config.activation, bias=config.dense_bias, dropout=dropout),
            norm_eps=config.norm_eps,
            dropout=dropout,
            layer_scale=config.layer_scale,
            stochastic_depth=config.depth_rate(layer),
            skip_dropped=config.skip_dropped,
        )
        for layer in range(config.num_blocks)
    )
    return Blocks(made, reversible=config.reversible)


Visit = Callable[[int, Tensor, AttentionPositions | None, Tensor], None]
"""A function that is called after each block with (layer, input tokens, positions inside attention, output tokens)."""


class Blocks(nn.ModuleList):
    """The blocks of a transformer, from bottom to top. They are called in one of four ways: one after the other, with
    activations that the backward pass computes again, with two residual streams, or with fewer tokens after each."""

    def __init__(self, blocks: Iterable[nn.Module] = (), *, reversible: bool = False) -> None:
        super().__init__(blocks)
        self.reversible = reversible

    def forward(
        self,
        z: Float[Tensor, "b n width"],
        insides: Sequence[AttentionPositions | None] | None = None,
        read: int | None = None,
        *,
        between: Callable[[Tensor, int], Tensor] | None = None,
        visit: Visit | None = None,
        checkpoints: bool = False,
    ) -> Float[Tensor, "b m width"]:
        """Return the tokens after the last block, or only the first `read` of them.

        `insides` are the positions inside the attention of each block. `between(z, layer)` returns the input of every
        block but the first. With `checkpoints`, only the inputs of blocks are kept for the backward pass.
        """
        insides = [None] * len(self) if insides is None else insides
        if self.reversible:
            return self._two_streams(z, insides, read, visit)
        for layer, block in enumerate(self):
            if layer and between is not None:
                z = between(z, layer)  # it can change `insides`
            inside = insides[layer]
            before, arguments = z, (z, inside, read if layer == len(self) - 1 else None)
            if checkpoints and self.training:
                z = checkpoint(block, *arguments, use_reentrant=False)
            else:
                z = block(*arguments)
            if visit is not None:
                visit(layer, before, inside, z)
        return z

    def reduced(
        self, z: Float[Tensor, "b n width"], removal: Removal, counts: Sequence[int], *, reads_first: bool
    ) -> Float[Tensor, "b m width"]:
        """Return the tokens that are left after every block has removed as many as `counts` says. With `reads_first`,
        the last block removes none and computes only the first token if it can."""
        for layer, (block, removal.count) in enumerate(zip(self, counts, strict=True)):
            is_last = reads_first and layer == len(self) - 1
            inside = AttentionPositions(size_bias(removal.sizes), removal=None if is_last else removal)
            # Compiled blocks would be compiled again for each number of tokens. `_call_impl` is the call without that.
            z = block._call_impl(z, inside, self.needed(1) if is_last else None)  # type: ignore[no-untyped-call]
        return z

    def needed(self, read: int) -> int | None:
        """Return the number of tokens that the last block has to compute if only the first `read` are read: `read`, or
        None for all of them if the block may mix tokens after attention."""
        last = self[-1]
        return read if isinstance(last, Block) and last.treats_tokens_alone else None

    def _two_streams(
        self,
        z: Float[Tensor, "b n width"],
        insides: Sequence[AttentionPositions | None],
        read: int | None,
        visit: Visit | None,
    ) -> Float[Tensor, "b m width"]:
        """Return the first `read` tokens of the mean of both streams after the last block. Both streams begin as the
        same tokens."""
        first = second = z
        if self.training and torch.is_grad_enabled() and visit is None:
            first, second = reversible(list(self), insides, first, second)
            return (first[:, :read] + second[:, :read]) / 2
        for layer, (block, inside) in enumerate(zip(self, insides, strict=True)):
            before = second
            first, second = block(second, inside, first=first)
            if visit is not None:
                visit(layer, before, inside, (first + second) / 2)
        return (first[:, :read] + second[:, :read]) / 2


def reversible(
    blocks: Sequence[nn.Module],
    insides: Sequence[AttentionPositions | None],
    first: Float[Tensor, "b n width"],
    second: Float[Tensor, "b n width"],
) -> tuple[Float[Tensor, "b n width"], Float[Tensor, "b n width"]]:
    """Return both streams after all blocks. Only they are kept for the backward pass, which ends at the first block
    that is trained if the streams have no gradients."""
    own = [block for block in blocks if _is_invertible(block)]
    if torch._C._are_functorch_transforms_active() or len(own) < len(blocks):
        for block, inside in zip(blocks, insides, strict=True):
            first, second = block(second, inside, first=first)
        return first, second
    with torch.no_grad():
        while own and not first.requires_grad and not any(True for _ in _all(own[0], insides[0])):
            first, second = own[0](second, insides[0], first=first)
            own, insides = own[1:], insides[1:]
    if not own:
        return first, second
    sources = dict.fromkeys(part for block, inside in zip(own, insides, strict=True) for part in _all(block, inside))
    return _Reversible.apply(own, insides, first, second, *sources)  # type: ignore[no-untyped-call]


def _is_invertible(block: nn.Module) -> TypeGuard[ReversibleBlock]:
    """Return True if a block's inputs can be computed from its outputs, and nothing else uses its activations. A module
    that wraps a block is not a block."""
    return (
        type(block) is ReversibleBlock
        and not {"forward", "mixed", "transformed"} & vars(block).keys()
        and not any(map(has_hooks, block.modules()))
    )


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        blocks: Sequence[ReversibleBlock],
        insides: Sequence[AttentionPositions | None],
        first: Tensor,
        second: Tensor,
        *sources: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.blocks, ctx.insides, ctx.sources = blocks, insides, sources
        ctx.autocast = _autocast_of(first.device)
        ctx.random = []
        with ctx.autocast():
            for block, inside in zip(blocks, insides, strict=True):
                before = _RandomState(first)
                first = first + block.mixed(second, inside)
                between = _RandomState(first)
                second = second + block.transformed(first)
                ctx.random.append((before, between))
        ctx.save_for_backward(first, second)
        return first, second

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_first: Tensor, of_second: Tensor) -> tuple[Any, ...]:
        first, second = ctx.saved_tensors
        sums: dict[Tensor, Tensor] = {}
        steps = zip(reversed(ctx.blocks), reversed(ctx.insides), reversed(ctx.random), strict=True)
        for block, inside, (before, between) in steps:
            with torch.enable_grad(), ctx.autocast(), between.again():
                given = first.detach().requires_grad_()
                branch = block.transformed(given)
            second = second - branch.detach()
            of_first = of_first + _gradient(branch, given, _trained(block, "norm2", "mlp", "scale2"), of_second, sums)
            with torch.enable_grad(), ctx.autocast(), before.again():
                given = second.detach().requires_grad_()
                branch = block.mixed(given, inside)
            first = first - branch.detach()
            sources = [*_trained(block, "norm1", "attention", "scale1"), *_tensors(inside)]
            of_second = of_second + _gradient(branch, given, sources, of_first, sums)
        return None, None, of_first, of_second, *(sums.get(source) for source in ctx.sources)


class _RandomState:
    """The state of the random generators of the CPU and of a tensor's device, such as dropout uses them."""

    def __init__(self, tensor: Tensor) -> None:
        self.cpu = torch.get_rng_state()
        self.devices = get_device_states(tensor)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same random numbers inside the `with` block, which leaves the generators as they were."""
        numbers, states = self.devices
        with torch.random.fork_rng(numbers):
            torch.set_rng_state(self.cpu)
            set_device_states(numbers, states)
            yield


def _gradient(
    branch: Tensor, given: Tensor, sources: Sequence[Tensor], of_branch: Tensor, sums: dict[Tensor, Tensor]
) -> Tensor:
    """Return the gradient of a branch's input, and add those of its other sources to `sums`."""
    own, *others = torch.autograd.grad(branch, [given, *sources], of_branch.to(branch.dtype), allow_unused=True)
    for source, found in zip(sources, others, strict=True):
        if found is not None:
            sums[source] = sums[source] + found if source in sums else found
    return own


def _all(block: ReversibleBlock, inside: AttentionPositions | None) -> Iterator[Tensor]:
    """Yield all tensors that get gradients from a block: its weights, and those of positions and of the context."""
    yield from (parameter for parameter in block.parameters() if parameter.requires_grad)
    yield from _tensors(inside)


def _trained(block: ReversibleBlock, *names: str) -> list[Tensor]:
    """Return the weights of parts of a block that are trained."""
    return [weight for name in names for weight in block.get_submodule(name).parameters() if weight.requires_grad]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with a gradient in nested tuples."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)


def _autocast_of(device: torch.device) -> Any:
    """Return a function that makes a context with the automatic casts of now.

    Converted weights are not cached: those of the forward pass have no gradients.
    """
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return partial(torch.autocast, kind, dtype, enabled=enabled, cache_enabled=False)
