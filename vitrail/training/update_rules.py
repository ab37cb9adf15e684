"""Update rules: Adam, SGD, Adafactor, LARS and LAMB for large batches, and Muon for the weight matrices of blocks.

Muon is by Jordan (https://kellerjordan.github.io/posts/muon). The size of its update is that of Moonlight (2502.16982).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from vitrail.models.attention.base import AttentionLayer
from vitrail.models.blocks import SwiGlu
from vitrail.models.linear.lora import LowRank
from vitrail.models.network import HasLayers, Layers
from vitrail.models.resnet import HybridRoot, SmallRoot
from vitrail.models.tokens import AttentionPool, PatchEmbedding

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 in a step of the Newton-Schulz iteration. They bring singular values near 1 quickly,
but not exactly to 1: after five steps, most of them are between 0.7 and 1.2."""

STEPS = 5

SCALE = 0.2
"""Root mean square of the update of a matrix, which is the usual one of Adam (2502.16982, section 2.2). Learning rates
and weight decays of AdamW therefore suit Muon too."""

STACK_ELEMENTS = 2**24
"""Number of elements from which a stack of matrices is divided, to save memory. Large matrices gain no speed from a
stack."""


class Muon(Adam):
    """Orthogonalises the momentum of matrices, and updates all other weights as Adam does.

    The momentum is a running mean of the gradients, with Nesterov's rule: `m = momentum * m + (1 - momentum) * g`, and
    the update is `momentum * m + (1 - momentum) * g`, orthogonalised and multiplied by 0.2 * sqrt(longer side).

    A weight can be a stack of several matrices, which are orthogonalised separately. Queries, keys and values are three
    maps of the tokens with gradients of different sizes. In one orthogonalised matrix, the largest of the three
    gradients would take most of the update.

    `torch.optim.Muon` computes the same update of one matrix in bfloat16. This class also divides stacked weights,
    computes all matrices of one shape together, and leaves the other weights to Adam in the same optimizer.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        stacks: Mapping[int, Stack],
        *,
        momentum: float,
        momentum_format: MomentumFormat = "float32",
        products: torch.dtype = torch.float32,
        coupled: bool = False,
        **settings: Any,
    ) -> None:
        """`stacks` maps the id of each weight that Muon updates to a number of matrices, rows and columns. `products`
        is the number format of the iteration's matrix products. `settings` are those of `torch.optim.Adam`."""
        super().__init__(groups, fused=True, decoupled_weight_decay=not coupled, **settings)
        self.stacks = stacks
        self.momentum = momentum
        self.coupled = coupled
        self.products = products
        self.stored_as = torch.bfloat16 if momentum_format == "bfloat16" else torch.float32

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient. A closure is not supported."""
        assert closure is None, "Muon takes no closure"
        matrices = [
            (weight, group)
            for group in self.param_groups
            for weight in group["params"]
            if weight.grad is not None and id(weight) in self.stacks
        ]
        gradients = [weight.grad for weight, _ in matrices]
        if matrices:
            self._update([weight for weight, _ in matrices], gradients, [group for _, group in matrices])
        for weight, _ in matrices:
            weight.grad = None  # Adam skips weights without a gradient
        super().step()
        for (weight, _), gradient in zip(matrices, gradients, strict=True):
            weight.grad = gradient

    def _update(self, weights: list[Tensor], gradients: list[Tensor], groups: list[dict[str, Any]]) -> None:
        """Update the matrices of all groups."""
        if self.coupled:
            gradients = [
                gradient.add(weight, alpha=group["weight_decay"]) if group["weight_decay"] else gradient
                for weight, gradient, group in zip(weights, gradients, groups, strict=True)
            ]
        means = [
            self.state[weight]["momentum"].float() if "momentum" in self.state[weight] else torch.zeros_like(weight)
            for weight in weights
        ]
        torch._foreach_lerp_(means, gradients, 1 - self.momentum)
        for weight, mean in zip(weights, means, strict=True):
            state = self.state[weight]
            state["momentum"] = mean.to(self.stored_as)
            state["step"] = state.get("step", torch.zeros((), device=weight.device)) + 1  # Adam loads no state without
        mixed = torch._foreach_lerp(gradients, means, self.momentum)
        stacks = [each.reshape(self.stacks[id(weight)]) for weight, each in zip(weights, mixed, strict=True)]
        for weight, group, update in zip(weights, groups, self._orthogonalised(stacks), strict=True):
            if group["weight_decay"] and not self.coupled:
                weight.mul_(1 - group["lr"] * group["weight_decay"])
            scale = SCALE * max(update.shape[1:]) ** 0.5
            weight.add_(update.reshape(weight.shape), alpha=-group["lr"] * scale)

    def _orthogonalised(self, stacks: list[Tensor]) -> list[Tensor]:
        """Orthogonalise every matrix of the stacks. Matrices of one shape are computed together."""
        found: dict[int, Tensor] = {}
        for members in _by_shape(stacks):
            own = [stacks[each] for each in members]
            wide = [stack.mT if stack.shape[1] > stack.shape[2] else stack for stack in own]  # at least as wide as high
            results = torch.split(orthogonalised(torch.cat(wide), self.products), [len(each) for each in wide])
            found |= dict(zip(members, results, strict=True))
        return [
            found[each] if found[each].shape == stack.shape else found[each].mT for each, stack in enumerate(stacks)
        ]


def orthogonalised(
    matrices: Float[Tensor, "stack rows columns"], products: torch.dtype = torch.float32
) -> Float[Tensor, "stack rows columns"]:
    """Return matrices with the same singular vectors, whose singular values are all near 1.

    The function computes five steps of a Newton-Schulz iteration, which needs only matrix products. They are computed
    in the number format `products`. A matrix of zeros stays zero. The work is least if rows do not outnumber columns.
    """
    a, b, c = COEFFICIENTS
    x = matrices / torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp(min=1e-7)
    x = x.to(products)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _by_shape(stacks: Sequence[Tensor]) -> Iterator[list[int]]:
    """Divide stacks into lists of the same shape, apart from transposition. Yield their indices."""
    members: dict[tuple[int, ...], list[int]] = {}
    for index, stack in enumerate(stacks):
        members.setdefault(tuple(sorted(stack.shape[1:])), []).append(index)
    for found in members.values():
        together, elements = list[int](), 0
        for index in found:
            if together and elements + stacks[index].numel() > STACK_ELEMENTS:
                yield together
                together, elements = [], 0
            together.append(index)
            elements += stacks[index].numel()
        yield together


# The weight matrices of a network's blocks, for optimizers that update whole matrices.


Stack = tuple[int, ...]
"""A weight read as a stack of matrices: number of matrices, rows and columns."""


def layers_of(module: nn.Module) -> Layers:
    """Return the layers of the network in an objective."""
    network: HasLayers = next(part for part in module.modules() if isinstance(part, HasLayers))
    return network.layers()


def stacks_of(module: nn.Module) -> dict[int, Stack]:
    """Return the stack of every weight matrix in the blocks of a module's network, by the parameter's id. The residual
    units below a hybrid's blocks are blocks, too.

    Convolutions are read as matrices of (outputs, inputs x height x width). A weight of queries, keys and values is
    three matrices, and a weight of SwiGLU's gate and value is two. Each factor of an adapter is a matrix. Patch
    embedding, positions, head, norms and biases are not part of the result.
    """
    found: dict[int, Stack] = {}
    layers = layers_of(module)
    roots = [part.stages for part in layers.embedding if isinstance(part, HybridRoot | SmallRoot)]
    for block in (*roots, *layers.blocks):
        parts = dict(_packed(block))
        for layer in block.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                weight = layer.get_parameter("weight")
                rows, count = weight.shape[0], parts.get(id(weight), 1)
                found[id(weight)] = (count, rows // count, weight[0].numel())
            elif isinstance(layer, LowRank):
                found |= {id(factor): tuple(factor.shape) for factor in (layer.a, layer.b)}
    return found


def _packed(block: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield the id of each weight whose rows belong to several matrices, and the number of these matrices."""
    for layer in block.modules():
        if isinstance(layer, AttentionLayer):
            for dense, names in layer.projections():
                yield id(dense.weight), len(names)
        elif isinstance(layer, SwiGlu):
            yield id(layer.up.weight), 2


# The shapes of each layer's weights in the original code, for optimizers whose updates depend on the shapes.


@dataclass(frozen=True)
class Table:
    """A weight of this package, read as one or several arrays of the original code.

    The original has the inputs of a dense layer before its outputs, separate arrays for queries, keys and values, and
    an axis for the heads of attention. A fused weight of queries, keys and values of shape (3 D, D) is read as three
    arrays of shape (D, heads, D / heads).
    """

    shape: tuple[int, ...]
    """Shape of the view of the weight, before its axes are reordered."""
    order: tuple[int, ...]
    """Argument of `permute` that brings the axes of the view into the order of the original code."""
    is_stack: bool = False
    """True if the reordered view stacks several arrays of the original code along its first axis."""

    def read(self, tensor: Tensor) -> Tensor:
        """Return a view of a tensor of the weight's shape. The first axis of the view is the index of the original's
        arrays."""
        arrays = tensor.reshape(self.shape).permute(self.order)
        return arrays if self.is_stack else arrays[None]

    def write(self, arrays: Tensor) -> Tensor:
        """Reverse the reordering of axes by `read`, and return a tensor of the shape `shape`."""
        inverse = sorted(range(len(self.order)), key=lambda axis: self.order[axis])
        return (arrays if self.is_stack else arrays[0]).permute(inverse)


def tables_of(module: nn.Module) -> dict[int, Table]:
    """Return the table of every parameter of a module, by the parameter's id.

    Parameters of layers that the original code does not have keep their shape and order of axes.
    """
    found = {id(one): Table(tuple(one.shape), tuple(range(one.ndim))) for one in module.parameters()}
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            found[id(layer.weight)] = Table(tuple(layer.weight.shape), (1, 0))
        elif isinstance(layer, nn.Conv2d):
            found[id(layer.weight)] = Table(tuple(layer.weight.shape), (2, 3, 1, 0))
    for layer in module.modules():
        found |= {id(weight): table for weight, table in _of_layer(layer)}
    return found


def _of_layer(layer: nn.Module) -> Iterator[tuple[Tensor, Table]]:
    """Yield the weights inside a layer whose tables depend on the class of the layer, with their tables."""
    if isinstance(layer, PatchEmbedding):
        weight = layer.projection.weight
        width, values = weight.shape
        channels = values // (layer.patch_size[0] * layer.patch_size[1])
        yield weight, Table((width, channels, *layer.patch_size), (2, 3, 1, 0))
    elif isinstance(layer, AttentionLayer) and isinstance(heads := getattr(layer, "heads", None), int):
        for dense, parts in layer.projections():
            yield from _attention(dense, heads, len(parts), is_output=parts == ("out",))
    elif isinstance(layer, AttentionPool):
        yield from _attention(layer.query, layer.heads, 1, is_output=False)
        yield from _attention(layer.key_value, layer.heads, 2, is_output=False)
        yield from _attention(layer.out, layer.heads, 1, is_output=True)


def _attention(dense: nn.Linear, heads: int, parts: int, *, is_output: bool) -> Iterator[tuple[Tensor, Table]]:
    """Yield the weight and the bias of a projection with their tables. The original's weights have the shape (heads,
    channels, width) for the output projection, and (width, heads, channels) for each of the other projections."""
    rows, columns = dense.weight.shape
    if is_output:
        yield dense.weight, Table((rows, heads, columns // heads), (1, 2, 0))
        return
    channels = rows // (parts * heads)
    yield dense.weight, Table((parts, heads, channels, columns), (0, 3, 1, 2), is_stack=True)
    if dense.bias is not None:
        yield dense.bias, Table((parts, heads, channels), (0, 1, 2), is_stack=True)


# SGD and Adam with the rules of weight decay and the momentum formats of the papers' code. With PyTorch's own rule of
# weight decay and a float32 momentum, PyTorch's fused optimizers compute the same updates faster.


MomentumFormat = Literal["float32", "bfloat16"]


class UpdateRule(Optimizer, ABC):
    """Base class of optimizers that subtract `lr * (update + weight_decay * weight)` from each weight.

    Subclasses compute the update from the gradient. With `coupled`, `weight_decay * weight` is instead added to the
    gradient from which the update is computed.

    Groups have the entries `lr` and `weight_decay`. As in optax, the update is computed from the running mean in
    float32, and then the mean is stored in the momentum's format. The decay rate of the mean is rounded to the same
    format: in bfloat16, 0.9 becomes 0.8984375.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        momentum_format: MomentumFormat = "float32",
        coupled: bool = False,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.momentum = momentum
        self.coupled = coupled
        self.stored_as = torch.bfloat16 if momentum_format == "bfloat16" else torch.float32
        self.kept = torch.tensor(momentum, dtype=self.stored_as).item()
        """The decay rate of the momentum, rounded to the momentum's format."""

    @abstractmethod
    def updates(self, weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Return the update of each weight, and change the state of the weights."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient. A closure is not supported."""
        assert closure is None, "an update rule takes no closure"
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients, rate, decay = [weight.grad for weight in weights], group["lr"], group["weight_decay"]
            if self.coupled and decay:
                gradients = list(torch._foreach_add(gradients, weights, alpha=decay))
            self.apply(weights, self.updates(weights, gradients), rate, decay)

    def apply(self, weights: list[Tensor], updates: list[Tensor], rate: float, decay: float) -> None:
        """Change the weights by their updates, with the learning rate and the weight decay of their group."""
        if decay and not self.coupled:
            torch._foreach_mul_(weights, 1 - rate * decay)
        torch._foreach_add_(weights, updates, alpha=-rate)

    def state_of(self, weights: list[Tensor], name: str) -> list[Tensor]:
        """Return the tensor `name` from the state of each weight, in float32. Before the first step, return zeros."""
        return [
            self.state[weight][name].float() if name in self.state[weight] else torch.zeros_like(weight)
            for weight in weights
        ]

    def keep_momentum(self, weights: list[Tensor], name: str, momentum: list[Tensor]) -> None:
        """Store the momentum of each weight in the momentum's format."""
        for weight, tensor in zip(weights, momentum, strict=True):
            self.state[weight][name] = tensor.to(self.stored_as)

    def next_steps(self, weights: list[Tensor]) -> list[Tensor]:
        """Add 1 to the step count of each weight. Return the counts, which start at 1, as tensors on the weights'
        device."""
        steps = [
            self.state[weight]["step"] + 1 if "step" in self.state[weight] else torch.ones((), device=weight.device)
            for weight in weights
        ]
        for weight, step in zip(weights, steps, strict=True):
            self.state[weight]["step"] = step
        return steps


class OptaxMomentum(UpdateRule):
    """SGD with momentum: `m = g + momentum * m`, and the update is `m` (`optax.sgd`, big_vision's `momentum_hp`)."""

    def updates(self, weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        updates = self.state_of(weights, "momentum_buffer")
        updates = list(torch._foreach_add(gradients, torch._foreach_mul(updates, self.kept)))
        self.keep_momentum(weights, "momentum_buffer", updates)
        return updates


class OptaxAdam(UpdateRule):
    """Adam (1412.6980) as `optax.scale_by_adam`. `momentum` is beta 1."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, beta2: float, eps: float = 1e-8, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self.beta2 = beta2
        self.eps = eps

    def updates(self, weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        steps = self.next_steps(weights)
        means, squares = self.state_of(weights, "exp_avg"), self.state_of(weights, "exp_avg_sq")
        means = list(torch._foreach_mul(means, self.kept))
        torch._foreach_add_(means, gradients, alpha=1 - self.momentum)
        squares = list(torch._foreach_mul(squares, self.beta2))
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - self.beta2)
        self.keep_momentum(weights, "exp_avg", means)
        for weight, square in zip(weights, squares, strict=True):
            self.state[weight]["exp_avg_sq"] = square
        divisors = list(torch._foreach_sqrt(torch._foreach_div(squares, _corrections(self.beta2, steps))))
        torch._foreach_add_(divisors, self.eps)
        return list(torch._foreach_div(torch._foreach_div(means, _corrections(self.momentum, steps)), divisors))


def _corrections(beta: float, steps: list[Tensor]) -> list[Tensor]:
    """Return the sum of the weights of the steps in a running mean that starts at 0: 1 - beta^step."""
    return [1 - beta**step for step in steps]


# LARS and LAMB, which scale the update of each weight tensor by the length of the tensor.


TRUST = 1e-3
"""Length of LARS's scaled gradient relative to the length of the weight, in all published code."""

MomentumOf = Literal["gradients", "changes"]


class Lars(UpdateRule):
    """SGD with layer-wise adaptive rates (1708.03888), as in the code of MoCo v3 and MAE.

    The gradient of each weight tensor with two or more axes, with its weight decay, is scaled to 0.001 times the length
    of the tensor before it enters the momentum. Norms and biases have one axis, and are updated as by SGD.

    With `momentum_of="changes"`, the momentum sums gradients times the learning rate of their step, as in SimCLR's
    code. The two differ while the learning rate changes.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], *, momentum_of: MomentumOf = "gradients", **settings: Any):
        super().__init__(groups, **settings)
        self.momentum_of = momentum_of

    def updates(self, weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        ratios = trust_ratios(weights, gradients, TRUST)
        return [
            gradient * ratio if weight.ndim > 1 else gradient
            for weight, gradient, ratio in zip(weights, gradients, ratios, strict=True)
        ]

    def apply(self, weights: list[Tensor], updates: list[Tensor], rate: float, decay: float) -> None:
        inside, outside = (rate, 1.0) if self.momentum_of == "changes" else (1.0, rate)
        changes = list(torch._foreach_mul(self.state_of(weights, "momentum_buffer"), self.kept))
        torch._foreach_add_(changes, updates, alpha=inside)
        self.keep_momentum(weights, "momentum_buffer", changes)
        super().apply(weights, changes, outside, decay * inside)


class Lamb(OptaxAdam):
    """Adam whose update of each decaying weight tensor, with the decay, is scaled to the length of the tensor
    (1904.00962), as in apex, which trained DeiT III. Weights without decay are updated as by Adam."""

    def apply(self, weights: list[Tensor], updates: list[Tensor], rate: float, decay: float) -> None:
        if decay and not self.coupled:
            updates = list(torch._foreach_add(updates, weights, alpha=decay))
        if decay:
            updates = list(torch._foreach_mul(updates, trust_ratios(weights, updates)))
        torch._foreach_add_(weights, updates, alpha=-rate)


def trust_ratios(weights: list[Tensor], updates: list[Tensor], coefficient: float = 1.0) -> list[Tensor]:
    """Return `coefficient` times the length of each weight divided by that of its update, or 1 if one of them is 0."""
    return [
        torch.where((length > 0) & (size > 0), coefficient * length / size, torch.ones_like(size))
        for length, size in zip(torch._foreach_norm(weights), torch._foreach_norm(updates), strict=True)
    ]


# Adafactor (1804.04235) in the variant of big_vision (2106.04560).


SMALLEST_SIDE = 32
"""Length that the second longest axis of an array must have for the array to be factored."""

EXPONENT = 0.8
"""Exponent of the decay rate of the mean squared gradient. The rate in step t, counted from 1, is 1 - t^-0.8, but at
most beta 2."""

EPS = 1e-30


class Adafactor(UpdateRule):
    """Divides gradients by the root of their running mean square. For large arrays, only two factors of the mean square
    are stored.

    The two factors are the means of the mean square over each of the array's two longest axes. Every array has the
    shape that it has in the original code (`Table`). A running mean of the updates is multiplied by the learning rate
    and subtracted from the weights. In every step, the mean becomes `momentum * mean + (1 - momentum) * update`. The
    mean starts at 0, without a bias correction. Updates are not scaled by the size of the weights.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        tables: Mapping[int, Table],
        *,
        beta2: float,
        update_clip: float = 0.0,
        **settings: Any,
    ) -> None:
        """`tables` maps the id of each weight to its table. `update_clip` is the largest root mean square of the update
        of an array, or 0 for no limit."""
        super().__init__(groups, **settings)
        self.tables = tables
        self.beta2 = beta2
        self.update_clip = update_clip

    def updates(self, weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        steps = self.next_steps(weights)
        scaled = [self._scaled(*each) for each in zip(weights, gradients, steps, strict=True)]
        updates = list(torch._foreach_mul(self.state_of(weights, "momentum"), self.kept))
        torch._foreach_add_(updates, scaled, alpha=1 - self.momentum)
        self.keep_momentum(weights, "momentum", updates)
        return updates

    def _scaled(self, weight: Tensor, gradient: Tensor, step: Tensor) -> Tensor:
        """Update the mean square with the gradient. Return the gradient divided by the root of the mean square."""
        table, state = self.tables[id(weight)], self.state[weight]
        arrays = table.read(gradient)
        squares = arrays * arrays + EPS
        share = 1 - (1 - step**-EXPONENT).clamp(max=self.beta2)
        axes = factored_axes(arrays.shape[1:])
        if axes is None:
            mean = _averaged(state, "square", squares, share)
            update = arrays * mean.rsqrt()
        else:
            second, longest = (axis + 1 for axis in axes)
            rows = _averaged(state, "rows", squares.mean(dim=longest, keepdim=True), share)
            columns = _averaged(state, "columns", squares.mean(dim=second, keepdim=True), share)
            update = arrays * (rows / rows.mean(dim=second, keepdim=True)).rsqrt() * columns.rsqrt()
        if self.update_clip:
            inner = tuple(range(1, update.ndim))
            size = update.square().mean(dim=inner, keepdim=True).sqrt()
            update = update / (size / self.update_clip).clamp(min=1)
        return table.write(update).reshape(weight.shape)


def factored_axes(shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the second longest and the longest axis of an array, or None if the array is not factored.

    Of axes of equal length, the last one counts as the longest, as in `numpy.argsort`.
    """
    by_length = sorted(range(len(shape)), key=lambda axis: shape[axis])
    if len(shape) < 2 or shape[by_length[-2]] < SMALLEST_SIDE:
        return None
    return by_length[-2], by_length[-1]


def _averaged(state: dict[str, Tensor], name: str, values: Tensor, share: Tensor) -> Tensor:
    """Update the running mean `name` in `state`, and return it. The new values have the weight `share`."""
    mean = values * share if name not in state else state[name] * (1 - share) + values * share
    state[name] = mean.contiguous()
    return mean
