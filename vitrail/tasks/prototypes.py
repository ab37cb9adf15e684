"""The projection to prototypes and the losses of DINO (2104.14294), iBOT (2111.07832) and DINOv2 (2304.07193).

A teacher's outputs, after centring and a softmax, are the targets of a student's outputs. All functions are those of
the published codes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vitrail.processes.group import Processes

SINKHORN_ITERATIONS = 3
"""Number of iterations of the Sinkhorn-Knopp algorithm."""

TINY = 1e-8
"""Number that DINOv2 adds to differences and to distances between embeddings."""


class Prototypes(nn.Linear):
    """A linear layer without bias whose weights have length 1 for each output, or trained lengths that start at 1."""

    lengths: nn.Parameter | None

    def __init__(self, width: int, outputs: int, *, unit: bool) -> None:
        super().__init__(width, outputs, bias=False)
        self.register_parameter("lengths", None if unit else nn.Parameter(torch.ones(outputs, 1)))

    def forward(self, vectors: Float[Tensor, "*b width"]) -> Float[Tensor, "*b outputs"]:
        """Return the product of each vector with each prototype.

        The products are not computed in bfloat16, because a low temperature multiplies their rounding errors.
        """
        with torch.autocast(vectors.device.type, enabled=False):
            weight = F.normalize(self.weight, dim=1)
            return F.linear(vectors.to(weight.dtype), weight if self.lengths is None else self.lengths * weight)


class DinoHead(nn.Module):
    """Dense layers with GELU to a bottleneck of length 1, and its products with prototypes."""

    def __init__(self, width: int, hidden: int, bottleneck: int, outputs: int, *, unit: bool) -> None:
        super().__init__()
        self.hidden = hidden
        self.layers = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.prototypes = Prototypes(bottleneck, outputs, unit=unit)

    def forward(self, embeddings: Float[Tensor, "*b width"]) -> Float[Tensor, "*b outputs"]:
        return self.prototypes(F.normalize(self.layers(embeddings).to(self.prototypes.weight.dtype), dim=-1))

    @property
    def macs(self) -> int:
        """Number of multiply-accumulates per embedding."""
        return sum(weight.numel() for name, weight in self.named_parameters() if name.endswith("weight"))

    @property
    def kept_bytes(self) -> int:
        """Number of bytes per embedding that a step holds for the backward pass and the loss."""
        return 4 * (4 * self.hidden + 3 * self.prototypes.in_features + 3 * self.prototypes.out_features)


class Centre(nn.Module):
    """A running mean of the teacher's outputs. All parts of a batch have the same centre, so that their gradients add
    up to the gradient of the whole batch."""

    value: Tensor
    sums: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(outputs))
        self.register_buffer("sums", torch.zeros(outputs + 1), persistent=False)

    @torch.no_grad()
    def add(self, outputs: Float[Tensor, "n outputs"], counted: Bool[Tensor, " n"]) -> None:
        """Add the counted outputs of a part of the batch to the sums of the step."""
        rows = torch.cat([outputs, torch.ones_like(outputs[:, :1])], dim=1)
        self.sums += torch.where(counted[:, None], rows, 0.0).sum(dim=0)

    @torch.no_grad()
    def update(self, momentum: float, processes: Processes) -> None:
        """Update the centre by the mean of the outputs that were added."""
        sums = processes.sum(self.sums)
        moved = self.value.lerp(sums[:-1] / sums[-1].clamp(min=1), 1 - momentum)
        self.value.copy_(torch.where(sums[-1] > 0, moved, self.value))


@torch.no_grad()
def sinkhorn_centre(
    outputs: Float[Tensor, "n outputs"], counted: Bool[Tensor, " n"], temperature: float, processes: Processes
) -> Float[Tensor, " outputs"]:
    """Return the centre with which the softmax gives the targets of the Sinkhorn-Knopp algorithm: each prototype gets
    about the same weight over the counted rows of all processes.

    The algorithm divides exp(outputs / temperature) in turns by the sums of its columns and of its rows. Dividing a
    column by a number is subtracting its logarithm, times the temperature, from the outputs. The last division of rows
    is the softmax.
    """
    logits = outputs / temperature
    rows = torch.where(counted, 0.0, -torch.inf).to(logits.dtype)
    columns = torch.zeros_like(logits[0])
    for _ in range(SINKHORN_ITERATIONS):
        sums = processes.sum((logits + rows[:, None]).logsumexp(dim=0).double().exp())
        columns = torch.where(sums > 0, sums.log(), 0.0).to(logits.dtype)
        rows = torch.where(counted, -(logits - columns).logsumexp(dim=1), -torch.inf)
    return temperature * columns


def view_losses(
    targets: Float[Tensor, "b 2 outputs"], predicted: Float[Tensor, "b v outputs"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Return the mean cross-entropy of each image, and its two terms: the entropy of the targets, and the
    Kullback-Leibler divergence of the predictions from the targets.

    `targets` are probabilities for the first two views, and `predicted` are logarithms of probabilities for all views.
    The mean is over all pairs of a target and a prediction for another view.
    """
    crossed = -torch.einsum("bto,bvo->btv", targets, predicted)
    pairs = 2 * predicted.shape[1] - 2
    loss = (crossed.sum(dim=(1, 2)) - crossed.diagonal(dim1=1, dim2=2).sum(dim=1)) / pairs
    entropy = torch.special.entr(targets).sum(dim=2).mean(dim=1)
    return loss, entropy, loss - entropy


def patch_losses(
    targets: Float[Tensor, "b n outputs"], predicted: Float[Tensor, "b n outputs"], masked: Bool[Tensor, "b n"]
) -> Float[Tensor, " b"]:
    """Return the mean cross-entropy of the masked patches of each view, or 0 if none is masked.

    `targets` are probabilities, and `predicted` are logarithms of probabilities.
    """
    crossed = -(targets * predicted).sum(dim=2)
    return torch.where(masked, crossed, 0.0).sum(dim=1) / masked.sum(dim=1).clamp(min=1)


def koleo(embeddings: Float[Tensor, "n width"], counted: Bool[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return the negative logarithm of the distance of each embedding, scaled to length 1, from its nearest counted
    neighbour (1806.03198)."""
    points = F.normalize(embeddings, dim=1, eps=TINY)
    with torch.no_grad(), torch.autocast(points.device.type, enabled=False):
        cosines = (points @ points.T).masked_fill(~counted, -2)
        nearest = cosines.fill_diagonal_(-1).argmax(dim=1)
    return -((points - points[nearest] + TINY).norm(dim=1) + TINY).log()
