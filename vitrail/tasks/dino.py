"""Self-distillation: "Emerging Properties in Self-Supervised Vision Transformers" (DINO, 2104.14294).

A teacher sees two global views of every image, and a student sees them and smaller local views. The student learns to
predict the teacher's output for another view of the same image. The teacher is a running mean of the student. Its
outputs are centred and sharpened, so that they do not collapse. No labels are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.data.augment.settings import Augment
from vitrail.data.batch import Batch, LocalViews
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.models.copies import shared_copy
from vitrail.models.cost import activation_bytes
from vitrail.models.network import FootprintPrecision
from vitrail.models.variants import AnyConfig
from vitrail.processes.group import Processes
from vitrail.settings import setting
from vitrail.tasks.task import LossOutput, Objective, Position, StepCost, TaskMetric, mean_of_counted
from vitrail.tasks.views import COLLAPSE, ViewObjective, ViewTask, follow, mean_of, momentum_at

PUBLISHED_PROTOTYPES, PUBLISHED_HIDDEN = 65_536, 2_048
"""Sizes of the projection in the paper, for all sizes of the network."""

NARROW = 192
"""Width of embeddings below which the projection is smaller by default."""


@dataclass(frozen=True, kw_only=True)
class Dino(ViewTask):
    """Predict the outputs of a running mean of the network for other views of the same image, which needs no labels.

    The saved model is the running mean, which is the teacher, without a head. The constructor raises `ConfigError` if
    fields have invalid values. The message names all of them.
    """

    name = "dino"
    metrics = (
        TaskMetric("dino_loss", higher_is_better=False),
        TaskMetric("teacher_entropy", describes_model=False),
        TaskMetric("divergence", higher_is_better=False, describes_model=False),
        *COLLAPSE,
    )
    loss_metric = "dino_loss"
    averages_weights = True

    local_views: int = setting(8, least=0)
    """Number of small views of each image that only the student sees, besides the two views that both networks see."""
    local_size: tuple[int, int] | None = None
    """Height and width of the local views in pixels, multiples of the patch size. By default half the image size, also
    while --early-image-size applies."""
    local_crop_area: tuple[float, float] = (0.05, 0.4)
    """Smallest and largest fraction of the image's area that a local view shows."""
    prototypes: int | None = setting(None, least=2)
    """Number of outputs of the projection, over which the softmax is computed. By default 65,536, or 4,096 if the
    network's embedding is shorter than 192."""
    projection_hidden: int | None = setting(None, least=1)
    """Hidden units of the projection that is trained beside the network. By default 2,048, or 512 if the network's
    embedding is shorter than 192."""
    bottleneck: int = setting(256, least=1)
    """Length of the vectors that are compared with the prototypes. They are scaled to length 1."""
    unit_prototypes: bool = True
    """True to give all prototypes the length 1. Without it, their lengths are trained, which can be unstable."""
    frozen_epochs: float = setting(1.0, least=0)
    """Number of epochs at the beginning in which the prototypes of the student stay as they are."""
    student_temperature: float = setting(0.1, above=0, below=math.inf)
    """Number that divides the student's outputs before the softmax."""
    target_temperature: float = setting(0.04, above=0, below=math.inf)
    """Number that divides the teacher's outputs before the softmax. A smaller number makes sharper targets."""
    target_temperature_start: float = setting(0.04, above=0, below=math.inf)
    """Value of the teacher's temperature at the beginning of the run."""
    target_temperature_epochs: float = setting(0.0, least=0)
    """Number of epochs in which the teacher's temperature changes linearly from its start. The last of them has the
    final temperature."""
    target_temperature_by: Literal["epoch", "step"] = "epoch"
    """Interval after which the teacher's temperature changes: an epoch (DINO, iBOT) or a step (DINOv2)."""
    teacher_momentum: float = setting(0.996, least=0, below=1)
    """Fraction of the teacher's weights that each step keeps at the beginning. It rises to 1 along half a cosine wave.
    Small batches need a higher fraction, such as 0.9995 for 256 images."""
    centre_momentum: float = setting(0.9, least=0, below=1)
    """Fraction of the centre that each step keeps. The centre is a running mean of the teacher's outputs, which is
    subtracted from them."""

    def _problems(self) -> Iterator[str]:
        low, high = self.local_crop_area
        if not 0 < low <= high <= 1:
            yield f"local_crop_area={self.local_crop_area} is not two fractions in (0, 1], the smaller first"
        yield from super()._problems()

    def check_network(self, network: AnyConfig | None) -> None:
        """Raise `ConfigError` as `ViewTask.check_network`, and if the network cannot process the local views."""
        super().check_network(network)
        if network is not None and self.local_views:
            size = self.size_of_local(network.image_size)
            try:
                network.with_image_size(size)
            except ConfigError as error:
                raise ConfigError(
                    f"local_size={size} does not fit the network: {error}. Choose another local_size, or local_views=0"
                ) from None

    def size_of_local(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the local views of images of this size."""
        return self.local_size or (max(image_size[0] // 2, 1), max(image_size[1] // 2, 1))

    def local_views_of(self, images: Preprocess, augment: Augment, seed: int) -> LocalViews | None:
        if not self.local_views:
            return None
        if augment.crop_from is not None:
            raise ConfigError(
                f"crop_from={augment.crop_from} cuts boxes of the network's image size, but the local views of "
                f"task={self.name!r} have another size; choose crop_area, or local_views=0"
            )
        small = replace(images, image_size=self.size_of_local(images.image_size))
        return LocalViews(
            self.local_views, augment.training_preprocess(small), augment.crop_of(seed, self.local_crop_area)
        )

    def head(self, network: AnyConfig) -> DinoHead:
        """Return a new projection for a network."""
        width = network.embed_width
        is_narrow = width < NARROW
        return DinoHead(
            width,
            self.projection_hidden or (512 if is_narrow else PUBLISHED_HIDDEN),
            self.bottleneck,
            self.prototypes or (4_096 if is_narrow else PUBLISHED_PROTOTYPES),
            unit=self.unit_prototypes,
        )

    def step_cost(self, network: AnyConfig, precision: FootprintPrecision) -> StepCost:
        """Return the cost of a step. The student processes all views, and the teacher processes the two global ones."""
        with torch.device("meta"):
            head = self.head(network)
        rows = 1 + self.local_views / 2  # of the student, per global view
        flops = network.inference_flops(network.image_size) + (2 + 6 * rows) * head.macs
        held = rows * head.kept_bytes
        if self.local_views:
            size = self.size_of_local(network.image_size)
            flops += self.local_views / 2 * network.with_image_size(size).training_flops()
            held += self.local_views / 2 * activation_bytes(network, size, precision)
        parameters = sum(weight.numel() for weight in head.parameters())
        return StepCost(
            network,
            parameters=parameters,
            # The teacher, and of the prototypes their unit vectors, two gradients, and a copy while they are frozen.
            fixed_bytes=4 * (network.parameters() + parameters + 4 * head.prototypes.weight.numel()),
            image_bytes=int(held),
            flops=int(flops),
        )

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        """Return the student and its teacher. Raise `ConfigError` as `check_network`."""
        self.check_network(getattr(network, "config", None))
        return DinoObjective(network, self)

    def target_temperature_at(self, position: Position) -> float:
        """Return the temperature of the teacher in a step."""
        start, end, epochs = self.target_temperature_start, self.target_temperature, self.target_temperature_epochs
        if position.epoch >= epochs:
            return end
        by_epoch = self.target_temperature_by == "epoch"
        passed = int(position.epoch) if by_epoch else position.step
        count = epochs if by_epoch or not passed else epochs * position.step / position.epoch
        return start + min(passed / max(count - 1, 1), 1) * (end - start)


class DinoObjective(ViewObjective):
    """A student with a projection, and running means of both, which are the teacher.

    The teacher changes after every step, and so does the centre of its outputs. With gradient accumulation and with
    several processes, all parts of a batch have the same centre, so that their gradients add up to the gradient of the
    whole batch.
    """

    saved_part = "teacher"
    centre: Tensor
    sums: Tensor

    def __init__(self, network: Any, task: Dino) -> None:
        super().__init__(network)
        self.task: Dino = task
        self.head = task.head(network.config)
        self.teacher = mean_of(self.network)
        self.teacher_head = mean_of(self.head)
        outputs = self.head.prototypes.out_features
        self.register_buffer("centre", torch.zeros(outputs))
        self.register_buffer("sums", torch.zeros(outputs + 1), persistent=False)
        self.temperature = task.target_temperature

    def train(self, mode: bool = True) -> DinoObjective:
        """Set the mode of the student. The teacher is always in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        self.teacher_head.eval()
        return self

    def saved_network(self) -> Any:
        """Return the teacher's network."""
        return self.teacher

    def before_step(self, position: Position) -> None:
        """Set the teacher's temperature."""
        self.temperature = self.task.target_temperature_at(position)
        self.sums.zero_()

    def frozen(self, position: Position) -> list[nn.Parameter]:
        """Return the prototypes in the first epochs."""
        return list(self.head.prototypes.parameters()) if position.epoch < self.task.frozen_epochs else []

    def forward(self, batch: Batch) -> LossOutput:
        samples, counted = len(batch) // 2, self.counted(batch)
        with torch.no_grad():
            taught = self.teacher_head(self.teacher.embed(batch.images))
            rows = torch.cat([taught, torch.ones_like(taught[:, :1])], dim=1)
            self.sums += torch.where(counted[:, None], rows, 0.0).sum(dim=0)
        embeddings = self.network.embed(batch.images).unflatten(0, (samples, 2))
        if batch.local is not None:
            local = self.network.embed(batch.local.images).unflatten(0, (samples, -1))
            embeddings = torch.cat([embeddings, local], dim=1)
        own = self.head(embeddings.flatten(0, 1)).unflatten(0, (samples, -1))
        found = self.losses(taught.unflatten(0, (samples, 2)), own, self.temperature)
        loss, entropy, divergence = (mean_of_counted(values, counted[::2]) for values in found)
        return LossOutput(loss, {"teacher_entropy": entropy.detach(), "divergence": divergence.detach()})

    def losses(
        self, taught: Float[Tensor, "b 2 outputs"], own: Float[Tensor, "b v outputs"], temperature: float
    ) -> Losses:
        """Return the losses of the student's outputs with the teacher's, before centring and softmax."""
        targets = ((taught - self.centre) / temperature).softmax(dim=2)
        return view_losses(targets, (own / self.task.student_temperature).log_softmax(dim=2))

    @torch.no_grad()
    def after_step(self, position: Position, processes: Processes) -> None:
        """Update the teacher by the student, and the centre by the mean output of the whole batch."""
        momentum = momentum_at(position, self.task.teacher_momentum)
        follow(self.teacher, self.network, momentum)
        follow(self.teacher_head, self.head, momentum)
        sums = processes.sum(self.sums)
        moved = self.centre.lerp(sums[:-1] / sums[-1].clamp(min=1), 1 - self.task.centre_momentum)
        self.centre.copy_(torch.where(sums[-1] > 0, moved, self.centre))

    def compared(
        self, network: Any, one: Float[Tensor, "b c h w"], other: Float[Tensor, "b c h w"]
    ) -> Float[Tensor, "b 3"]:
        """Return loss, entropy and divergence of each image, with the final temperature of the teacher."""
        student = shared_copy(self.network)
        taught, own = (
            torch.stack([head(encoder.embed(views)) for views in (one, other)], dim=1)
            for encoder, head in ((network, self.teacher_head), (student, self.head))
        )
        return torch.stack(self.losses(taught, own, self.task.target_temperature), dim=1)

    def means(self, rows: Float[Tensor, "n 3"]) -> dict[str, float]:
        """Return the mean loss, entropy and divergence."""
        loss, entropy, divergence = rows.double().mean(dim=0).tolist()
        return {"dino_loss": loss, "teacher_entropy": entropy, "divergence": divergence}


Losses = tuple[Float[Tensor, " b"], Float[Tensor, " b"], Float[Tensor, " b"]]


def view_losses(targets: Float[Tensor, "b 2 outputs"], predicted: Float[Tensor, "b v outputs"]) -> Losses:
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


# The projection of DINO: three dense layers, and cosine similarities with learned prototypes.


class Prototypes(nn.Linear):
    """A linear layer without bias whose weights have length 1 for each output, or trained lengths that start at 1."""

    lengths: nn.Parameter | None

    def __init__(self, width: int, outputs: int, *, unit: bool) -> None:
        super().__init__(width, outputs, bias=False)
        self.register_parameter("lengths", None if unit else nn.Parameter(torch.ones(outputs, 1)))

    def forward(self, vectors: Float[Tensor, "b width"]) -> Float[Tensor, "b outputs"]:
        """Return the product of each vector with each prototype.

        The products are computed in float32, because a low temperature multiplies their rounding errors.
        """
        with torch.autocast(vectors.device.type, enabled=False):
            weight = F.normalize(self.weight, dim=1)
            return F.linear(vectors.float(), weight if self.lengths is None else self.lengths * weight)


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

    def forward(self, embeddings: Float[Tensor, "b width"]) -> Float[Tensor, "b outputs"]:
        return self.prototypes(F.normalize(self.layers(embeddings).float(), dim=1))

    @property
    def macs(self) -> int:
        """Number of multiply-accumulates per embedding."""
        return sum(weight.numel() for name, weight in self.named_parameters() if name.endswith("weight"))

    @property
    def kept_bytes(self) -> int:
        """Number of bytes per embedding that a step holds for the backward pass and the loss."""
        return 4 * (4 * self.hidden + 3 * self.prototypes.in_features + 3 * self.prototypes.out_features)
