"""Self-distillation: "Emerging Properties in Self-Supervised Vision Transformers" (DINO, 2104.14294), with the masked
patches of iBOT (2111.07832) and the further losses of DINOv2 (2304.07193) as settings.

A teacher sees two global views of every image, and a student sees them and smaller local views. The student learns to
predict the teacher's output for another view of the same image. The teacher is a running mean of the student. Its
outputs are centred and sharpened, so that they do not collapse. In iBOT, the student's global views have masked
patches, and it also predicts the teacher's outputs for these. No labels are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vitrail.data.augment.draws import Slot, keyed_uniform
from vitrail.data.augment.operations import on_device
from vitrail.data.augment.settings import Augment
from vitrail.data.batch import Batch, LocalViews
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.models.cost import activation_bytes
from vitrail.models.network import FootprintPrecision, shared_copy
from vitrail.models.tokens import mask_tokens
from vitrail.models.variants import AnyConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.processes.group import Processes
from vitrail.settings import Effect, setting
from vitrail.tasks.masked_patches import draw_blocks
from vitrail.tasks.task import BatchObjective, LossOutput, Objective, Position, StepCost, TaskMetric, mean_of_counted
from vitrail.tasks.unlabelled import (
    COLLAPSE,
    ViewObjective,
    ViewTask,
    batch_key,
    follow,
    mean_of,
    momentum_at,
    tokens_at,
)

PUBLISHED_PROTOTYPES, PUBLISHED_HIDDEN = 65_536, 2_048
"""Sizes of the projection in the paper, for all sizes of the network."""

NARROW = 192
"""Width of embeddings below which the projection is smaller by default."""


WITH_PATCHES = Effect(lambda own: bool(own.patch_weight), "with --patch-weight")
WITH_LOCAL = Effect(lambda own: own.local_views > 0, "with --local-views")
WITH_WARMUP = Effect(lambda own: own.target_temperature_epochs > 0, "with --target-temperature-epochs")


@dataclass(frozen=True, kw_only=True)
class Dino(ViewTask):
    """Predict the outputs of a running mean of the network for other views of the same image, which needs no labels.

    The saved model is the running mean, which is the teacher, without a head.
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
    local_size: tuple[int, int] | None = setting(None, effect=WITH_LOCAL)
    """Height and width of the local views in pixels, multiples of the patch size. By default half the image size, also
    while --early-image-size applies."""
    local_crop_area: tuple[float, float] = setting((0.05, 0.4), effect=WITH_LOCAL)
    """Smallest and largest fraction of the image's area that a local view shows."""
    prototypes: int | None = setting(None, least=2, most=2**24)
    """Number of outputs of the projection, over which the softmax is computed. By default 65,536, or 4,096 if the
    network's embedding is shorter than 192."""
    projection_hidden: int | None = setting(None, least=1, most=2**24)
    """Hidden units of the projection that is trained beside the network. By default 2,048, or 512 if the network's
    embedding is shorter than 192."""
    bottleneck: int = setting(256, least=1, most=2**24)
    """Length of the vectors that are compared with the prototypes. They are scaled to length 1."""
    unit_prototypes: bool = True
    """True to give all prototypes the length 1. Without it, their lengths are trained, which can be unstable."""
    frozen_epochs: float = setting(1.0, least=0)
    """Number of epochs at the beginning in which the prototypes of the student stay as they are."""
    student_temperature: float = setting(0.1, above=0, below=math.inf)
    """Number that divides the student's outputs before the softmax."""
    target_temperature: float = setting(0.04, above=0, below=math.inf)
    """Number that divides the teacher's outputs before the softmax. A smaller number makes sharper targets."""
    target_temperature_start: float = setting(0.04, effect=WITH_WARMUP, above=0, below=math.inf)
    """Value of the teacher's temperature at the beginning of the run."""
    target_temperature_epochs: float = setting(
        0.0,
        effect=Effect(
            lambda own: (
                not own.target_temperature_epochs
                or own.target_temperature_start != own.target_temperature
                or own.patch_temperature_start != own.patch_temperature
            ),
            "if --target-temperature-start or --patch-temperature-start is another temperature",
        ),
        least=0,
    )
    """Number of epochs in which the teacher's temperature changes linearly from its start. The last of them has the
    final temperature."""
    target_temperature_by: Literal["epoch", "step"] = setting("epoch", effect=WITH_WARMUP)
    """Interval after which the teacher's temperature changes: an epoch (DINO, iBOT) or a step (DINOv2)."""
    teacher_momentum: float = setting(0.996, least=0, below=1)
    """Fraction of the teacher's weights that each step keeps at the beginning. It rises to 1 along half a cosine wave.
    Small batches need a higher fraction, such as 0.9995 for 256 images."""
    centring: Literal["mean", "masked-mean", "sinkhorn"] = setting(
        "mean",
        effect=Effect(
            lambda own: own.centring != "masked-mean" or own.patch_weight > 0, "with --patch-weight, if masked-mean"
        ),
    )
    """Centre that is subtracted from the teacher's outputs. mean: their running mean (DINO); that of patches is over
    all patches (iBOT). masked-mean: the same, but over the masked patches. sinkhorn: the centre of the whole batch by
    the Sinkhorn-Knopp algorithm (DINOv2)."""
    centre_momentum: float = setting(
        0.9,
        effect=Effect(lambda own: own.centring != "sinkhorn", "unless --centring is sinkhorn"),
        least=0,
        below=1,
    )
    """Fraction of the centre that each step keeps, if it is a running mean."""
    koleo_weight: float = setting(0.0, least=0, below=math.inf)
    """Weight of the KoLeo loss of DINOv2, which spreads the embeddings of the images that a process computes together.
    DINOv2 has 0.1."""
    patch_weight: float = setting(0.0, least=0, below=math.inf)
    """Weight of the loss of masked patches, which iBOT and DINOv2 add with weight 1. With 0, no patches are masked."""
    mask_probability: float = setting(0.5, effect=WITH_PATCHES, above=0, most=1)
    """Probability that a global view of the student has masked patches."""
    mask_fraction: tuple[float, float] = setting((0.1, 0.5), effect=WITH_PATCHES)
    """Smallest and largest fraction of the patches that are masked in such a view, in blocks."""
    smallest_block: int = setting(4, effect=WITH_PATCHES, least=1)
    """Smallest area of a block of masked patches: 4 patches in DINOv2, and 16 in iBOT for 14 x 14 patches."""
    patch_temperature: float | None = setting(None, effect=WITH_PATCHES, above=0, below=math.inf)
    """Temperature of the targets of patches, like --target-temperature. By default that of views."""
    patch_temperature_start: float | None = setting(
        None,
        effect=Effect(
            lambda own: own.patch_weight > 0 and own.target_temperature_epochs > 0,
            "with --patch-weight and --target-temperature-epochs",
        ),
        above=0,
        below=math.inf,
    )
    """First temperature of the targets of patches, like --target-temperature-start. By default that of views."""
    separate_patch_head: bool = setting(False, effect=WITH_PATCHES)
    """True to give patches a projection of their own, as DINOv2's large models have. By default they share that of
    views."""
    patch_bottleneck: int = setting(
        256, effect=Effect(lambda own: own.separate_patch_head, "with --separate-patch-head"), least=1, most=2**24
    )
    """Width of the bottleneck in the projection of patches, like --bottleneck."""

    def _problems(self) -> Iterator[str]:
        low, high = self.local_crop_area
        if not 0 < low <= high <= 1:
            yield f"local_crop_area={self.local_crop_area} is not two fractions in (0, 1], the smaller first"
        if not 0 < self.mask_fraction[0] <= self.mask_fraction[1] <= 1:
            yield f"mask_fraction={self.mask_fraction} is not two fractions in (0, 1], the smaller first"
        yield from super()._problems()

    def check_network(self, network: AnyConfig | None) -> None:
        """Raise `ConfigError` as `HeadlessTask.check_network`, and if the network cannot process the local views."""
        super().check_network(network)
        if self.patch_weight and not (
            isinstance(network, ViTConfig)
            and network.pool == "cls"
            and network.final_norm == "tokens"
            and not (network.projection or network.patch_dropout)
        ):
            raise ConfigError(
                f"patch_weight={self.patch_weight} needs the class token and the patches of a Vision Transformer with "
                "pool='cls', final_norm='tokens', no projection and no patch dropout; choose such a network, or "
                "patch_weight=0"
            )
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

    def head(self, network: AnyConfig, *, of_patches: bool = False) -> DinoHead:
        """Return a new projection for a network."""
        width = network.embed_width
        is_narrow = width < NARROW
        return DinoHead(
            width,
            self.projection_hidden or (512 if is_narrow else PUBLISHED_HIDDEN),
            self.patch_bottleneck if of_patches else self.bottleneck,
            self.prototypes or (4_096 if is_narrow else PUBLISHED_PROTOTYPES),
            unit=self.unit_prototypes,
        )

    def most_masked(self, patches: int) -> int:
        """Return the largest number of masked patches of a view."""
        return max(int(self.mask_fraction[1] * patches), 1)

    def step_cost(self, network: AnyConfig, precision: FootprintPrecision) -> StepCost:
        """Return the cost of a step. The student processes all views, and the teacher processes the two global ones.

        Of every global view, as many patches are projected as the largest mask has, and by the teacher all patches if
        the centre is their mean.
        """
        with torch.device("meta"):
            head = self.head(network)
            heads = [head, self.head(network, of_patches=True)] if self.has_patch_head else [head]
        rows = 1 + self.local_views / 2  # of the student, per global view
        parameters = sum(weight.numel() for one in heads for weight in one.parameters())
        fixed = 4 * sum(one.prototypes.weight.numel() for one in heads)
        flops, compared, held = (2 + 6 * rows) * head.macs, rows * head.kept_bytes, 0.0
        if self.local_views:
            size = self.size_of_local(network.image_size)
            flops += self.local_views / 2 * network.with_image_size(size).training_flops()
            held = self.local_views / 2 * activation_bytes(network, size, precision)
        if self.patch_weight:
            assert isinstance(network, ViTConfig)
            network = replace(network, pool="gap", class_token=True)  # no token is skipped
            patches = math.prod(network.grid)
            masked, parameters = self.most_masked(patches), parameters + network.width
            taught = patches if self.centring == "mean" else masked
            flops += (2 * taught + 6 * masked) * heads[-1].macs
            compared += masked * heads[-1].kept_bytes
            compared += 4 * taught * heads[-1].prototypes.out_features if self.centring == "mean" else 0
        flops += network.inference_flops(network.image_size)
        of_batch = self.centring == "sinkhorn"
        return StepCost(
            network,
            parameters=parameters,
            # The teacher, and of the prototypes their unit vectors, two gradients, and a copy while they are frozen.
            fixed_bytes=4 * (network.parameters() + parameters + fixed),
            image_bytes=int(held if of_batch else held + compared),
            batch_bytes=int(compared) if of_batch else 0,
            flops=int(flops),
        )

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        return (SinkhornObjective if self.centring == "sinkhorn" else DinoObjective)(network, self)

    @property
    def has_patch_head(self) -> bool:
        """True if patches have a projection of their own."""
        return bool(self.patch_weight) and self.separate_patch_head

    @property
    def final_temperatures(self) -> tuple[float, float]:
        """Temperatures of the teacher after the warm-up, for views and for patches."""
        return self.target_temperature, self.patch_temperature or self.target_temperature

    def target_temperatures(self, position: Position) -> tuple[float, float]:
        """Return the temperatures of the teacher in a step, for views and for patches."""
        epochs, by_epoch, warmed = self.target_temperature_epochs, self.target_temperature_by == "epoch", 1.0
        if position.epoch < epochs:
            passed = int(position.epoch) if by_epoch else position.step
            count = epochs if by_epoch or not passed else epochs * position.step / position.epoch
            warmed = min(passed / max(count - 1, 1), 1.0)
        starts = self.target_temperature_start, self.patch_temperature_start or self.target_temperature_start
        first, second = (
            start + warmed * (end - start) for start, end in zip(starts, self.final_temperatures, strict=True)
        )
        return first, second


class DinoObjective(ViewObjective):
    """A student with a projection, and running means of both, which are the teacher.

    The teacher changes after every step, and so does the centre of its outputs. With gradient accumulation and with
    several processes, all parts of a batch have the same centre, so that their gradients add up to the gradient of the
    whole batch.
    """

    saved_part = "teacher"

    def __init__(self, network: Any, task: Dino) -> None:
        super().__init__(network)
        self.task: Dino = task
        self.head = task.head(network.config)
        self.teacher = mean_of(self.network)
        self.teacher_head = mean_of(self.head)
        self.centre = Centre(self.head.prototypes.out_features)
        self.temperatures = task.final_temperatures
        if task.patch_weight:
            self.mask_embedding = nn.Parameter(torch.zeros(network.config.width))
            self.patch_centre = Centre(self.head.prototypes.out_features)
        if task.has_patch_head:
            self.patch_head = task.head(network.config, of_patches=True)
            self.teacher_patch_head = mean_of(self.patch_head)

    def train(self, mode: bool = True) -> DinoObjective:
        """Set the mode of the student. The teacher is always in evaluation mode."""
        super().train(mode)
        for teacher, _ in self.means_of():
            teacher.eval()
        return self

    def means_of(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return the modules of the teacher, each with the student's module whose running mean it is."""
        pairs: list[tuple[nn.Module, nn.Module]] = [(self.teacher, self.network), (self.teacher_head, self.head)]
        return [*pairs, (self.teacher_patch_head, self.patch_head)] if self.task.has_patch_head else pairs

    def centres(self) -> list[Centre]:
        """Return the centres of the teacher's outputs."""
        return [self.centre, self.patch_centre] if self.task.patch_weight else [self.centre]

    def before_step(self, position: Position) -> None:
        """Set the teacher's temperatures, and begin to add up its outputs."""
        self.temperatures = self.task.target_temperatures(position)
        for centre in self.centres():
            centre.sums.zero_()

    def frozen(self, position: Position) -> list[nn.Parameter]:
        """Return the prototypes in the first epochs."""
        if position.epoch >= self.task.frozen_epochs:
            return []
        heads = [self.head, self.patch_head] if self.task.has_patch_head else [self.head]
        return [weight for head in heads for weight in head.prototypes.parameters()]

    def forward(self, batch: Batch) -> LossOutput:
        return self.compare(self.fixed_features(batch) | self.features(batch), self.counted(batch), Processes())

    @torch.no_grad()
    def fixed_features(self, batch: Batch) -> dict[str, Tensor]:
        """Return the teacher's embeddings, and the masked patches with the teacher's tokens."""
        if not self.task.patch_weight:
            return {"taught": self.teacher.embed(batch.images)}
        found = self.teacher.features(batch.images)
        masked = draw_masks(self.task, batch, found.grid, seed=self.seed)
        order = (~masked).argsort(axis=1, kind="stable")[:, : self.task.most_masked(masked.shape[1])]
        is_masked, device = np.take_along_axis(masked, order, axis=1), batch.images.device
        return {
            "taught": found.cls,
            "taught_patches": found.patches,
            "places": on_device(order, device),
            "is_masked": on_device(is_masked, device),
        }

    def features(self, batch: Batch) -> dict[str, Tensor]:
        """Return the student's embeddings of all views, and its tokens of the patches that may be masked."""
        found = {}
        if self.task.patch_weight:
            grid = self.network.config.grid_of(*batch.images.shape[2:])
            masked = on_device(draw_masks(self.task, batch, grid, seed=self.seed), batch.images.device)
            encoded = self.network.encode(batch.images, replace=mask_tokens(self.mask_embedding, masked))
            found = {"own": encoded.cls, "patches": encoded.patches}
        else:
            found = {"own": self.network.embed(batch.images)}
        if batch.local is not None:
            local = self.network.embed(batch.local.images).reshape(len(batch) // 2, 1, -1)
            found["local"] = F.pad(local, (0, 0, 0, 1)).flatten(0, 1)  # a row per global view, of which the second is 0
        return found

    def compare(self, features: dict[str, Tensor], counted: Bool[Tensor, " b"], processes: Processes) -> LossOutput:
        """Return the loss of all views, which is that of DINO plus those of iBOT and of KoLeo, times their weights."""
        task, embeddings = self.task, torch.stack([features["own"][view::2] for view in range(2)], dim=1)
        samples = len(embeddings)
        with torch.no_grad():
            taught = self.teacher_head(features["taught"])
            targets = self.targets(self.centre, taught, counted, self.temperatures[0], processes)
        if "local" in features:
            local = features["local"][::2].reshape(samples, -1, embeddings.shape[2])
            embeddings = torch.cat([embeddings, local], dim=1)
        own = self.head(embeddings.flatten(0, 1)).unflatten(0, (samples, -1))
        found = view_losses(targets.view(samples, 2, -1), (own / task.student_temperature).log_softmax(dim=2))
        loss, entropy, divergence = (mean_of_counted(values, counted[::2]) for values in found)
        metrics = {"teacher_entropy": entropy.detach(), "divergence": divergence.detach()}
        if task.patch_weight:
            patch_loss = mean_of_counted(self.patch_losses(features, counted, processes), counted)
            loss, metrics["patch_loss"] = loss + task.patch_weight * patch_loss, patch_loss.detach()
        if task.koleo_weight:
            views = embeddings[:, :2].float().unbind(dim=1)
            spread = torch.stack([mean_of_counted(koleo(view, counted[::2]), counted[::2]) for view in views]).sum()
            loss, metrics["koleo"] = loss + task.koleo_weight * spread, spread.detach()
        return LossOutput(loss, metrics)

    def patch_losses(
        self, features: dict[str, Tensor], counted: Bool[Tensor, " b"], processes: Processes
    ) -> Float[Tensor, " b"]:
        """Return the mean loss of the masked patches of each view."""
        task, places, is_masked = self.task, features["places"], features["is_masked"]
        head, teacher = (
            (self.patch_head, self.teacher_patch_head) if task.has_patch_head else (self.head, self.teacher_head)
        )
        with torch.no_grad():
            if task.centring == "mean":
                every = teacher(features["taught_patches"])
                targets = self.softmax(tokens_at(every, places), self.patch_centre.value, self.temperatures[1])
                self.patch_centre.add(every.mean(dim=1), counted)
            else:
                taught = teacher(tokens_at(features["taught_patches"], places))
                rows = (is_masked & counted[:, None]).flatten()
                targets = self.targets(self.patch_centre, taught.flatten(0, 1), rows, self.temperatures[1], processes)
                targets = targets.view_as(taught)
        own = head(tokens_at(features["patches"], places))
        return patch_losses(targets, (own / task.student_temperature).log_softmax(dim=2), is_masked)

    def targets(
        self,
        centre: Centre,
        outputs: Float[Tensor, "n outputs"],
        counted: Bool[Tensor, " n"],
        temperature: float,
        processes: Processes,
    ) -> Float[Tensor, "n outputs"]:
        """Return the targets that follow from the teacher's outputs, and add these to the centre. With Sinkhorn-Knopp,
        the centre is a running mean of those of the batches, with which held-out images are measured."""
        if self.task.centring != "sinkhorn":
            targets = self.softmax(outputs, centre.value, temperature)
            centre.add(outputs, counted)
            return targets
        of_batch = sinkhorn_centre(outputs, counted, temperature, processes)
        centre.add(of_batch[None], counted.any()[None])
        return self.softmax(outputs, of_batch, temperature)

    def softmax(
        self, outputs: Float[Tensor, "*b outputs"], centre: Float[Tensor, " outputs"], temperature: float
    ) -> Float[Tensor, "*b outputs"]:
        """Return the softmax of the teacher's outputs after centring."""
        return ((outputs - centre) / temperature).softmax(dim=-1)

    @torch.no_grad()
    def after_step(self, position: Position, processes: Processes) -> None:
        """Update the teacher by the student, and the centres by the outputs of the whole batch."""
        momentum = momentum_at(position, self.task.teacher_momentum)
        for teacher, student in self.means_of():
            follow(teacher, student, momentum)
        for centre in self.centres():
            centre.update(self.task.centre_momentum, processes)

    def compared(
        self, network: Any, one: Float[Tensor, "b c h w"], other: Float[Tensor, "b c h w"]
    ) -> Float[Tensor, "b 3"]:
        """Return the loss of views, entropy and divergence of each image, with the final temperature of the teacher."""
        student = shared_copy(self.network)
        taught, own = (
            torch.stack([head(encoder.embed(views)) for views in (one, other)], dim=1)
            for encoder, head in ((network, self.teacher_head), (student, self.head))
        )
        targets = self.softmax(taught, self.centre.value, self.task.target_temperature)
        losses = view_losses(targets, (own / self.task.student_temperature).log_softmax(dim=2))
        return torch.stack(losses, dim=1)

    def means(self, rows: Float[Tensor, "n 3"]) -> dict[str, float]:
        """Return the mean loss, entropy and divergence."""
        loss, entropy, divergence = rows.double().mean(dim=0).tolist()
        return {"dino_loss": loss, "teacher_entropy": entropy, "divergence": divergence}


class SinkhornObjective(DinoObjective, BatchObjective):
    """The same with Sinkhorn-Knopp, whose targets depend on all images of a batch."""


def draw_masks(task: Dino, batch: Batch, grid: tuple[int, int], *, seed: int) -> Bool[np.ndarray, "b n"]:
    """Return a mask of patches for each view of a batch.

    The mask is a pure function of the seed and of the image's epoch, sample and view. It is empty unless the view is
    chosen. Its size is then uniform between the smallest and the largest fraction, or a little smaller if the blocks do
    not fit.
    """
    uniform = keyed_uniform(seed, *batch_key(batch), draws=2, first=Slot.PATCH_SOURCE)
    low, high = task.mask_fraction
    fractions = np.where(uniform[:, 0] < task.mask_probability, low + (high - low) * uniform[:, 1], 0.0)
    counts = (fractions * math.prod(grid)).astype(np.int64)
    return draw_blocks(batch, grid, counts, seed=seed, smallest=task.smallest_block).reshape(len(counts), -1)


# The projection to prototypes and the losses, as in the published codes. A teacher's outputs, after centring and a
# softmax, are the targets of a student's outputs.


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
