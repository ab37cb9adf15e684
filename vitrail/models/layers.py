"""The modules of a block besides attention: MLPs, LayerScale and stochastic depth. Also the initialisers of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.models.linear.dense import Linear
from vitrail.models.linear.kernels import fuses
from vitrail.models.shortcuts import is_plain, skippable

Activation = Literal["gelu", "gelu-tanh", "swiglu"]


class Mlp(nn.Module):
    """Two dense layers with a GELU between them (paper section 3.1). Dropout follows each layer."""

    def __init__(self, width: int, hidden: int, *, tanh: bool = False, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = Linear(width, hidden, bias=bias)
        self.activation = nn.GELU(approximate="tanh" if tanh else "none")
        self.dropout = nn.Dropout(dropout)
        self.down = Linear(hidden, width, bias=bias)

    def forward(self, x: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        hidden = self.up(x)
        if fuses(hidden) and self._can_skip_calls():
            return self.down.after_gelu(hidden, "tanh" if self.activation.approximate == "tanh" else "none")
        return self.dropout(self.down(self.dropout(self.activation(hidden))))

    def _can_skip_calls(self) -> bool:
        return (
            is_plain(self.down, Linear)
            and is_plain(self.activation, nn.GELU)
            and is_plain(self.dropout, nn.Dropout)
            and not (self.dropout.training and self.dropout.p)
        )

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
    return Mlp(width, hidden, tanh=activation == "gelu-tanh", bias=bias, dropout=dropout)


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


def in_format_of(norm: nn.Module, x: Tensor) -> Tensor:
    """Return `x` in the number format of a norm's weight. A norm without a weight, such as `nn.Identity`, takes any."""
    weight = getattr(norm, "weight", None)
    return x.to(weight.dtype) if isinstance(weight, Tensor) else x


def lecun_normal_(weight: Tensor) -> None:
    """Fill a weight with random numbers from a normal distribution that is truncated at two standard deviations. The
    variance after truncation is 1 / fan_in."""
    std = weight[0].numel() ** -0.5 / 0.87962566103423978  # the standard deviation of a unit normal cut at +-2
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
