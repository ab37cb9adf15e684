"""The common parts of tasks without labels. In some, a network predicts hidden patches of an image from its visible
patches. Others compare two or more views of each image."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from vitrail.data.augment.draws import Slot, keyed_uniform
from vitrail.data.augment.operations import GREY, on_device
from vitrail.data.batch import Batch, Skipped
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.evaluation.outputs import Outputs
from vitrail.models.compiled import compile_copy
from vitrail.models.network import shared_copy
from vitrail.models.variants import AnyConfig, transformer_config
from vitrail.models.vit_config import ViTConfig
from vitrail.processes.group import local
from vitrail.settings import raise_problems
from vitrail.tasks.pictures import (
    ROWS,
    Picture,
    PictureTable,
    decoded,
    neighbour_table,
    paste_patches,
    picture_of,
    spread,
)
from vitrail.tasks.task import (
    EVALUATION_SEED,
    HeadlessObjective,
    HeadlessTask,
    LossOutput,
    Objective,
    Position,
    TaskMetric,
    mean_losses,
    mean_of_counted,
    normalised_batches,
)
from vitrail.weights.bundle import Bundle

# Tasks in which a network predicts hidden patches of an image from its visible patches.


@dataclass(frozen=True, kw_only=True)
class PatchTask(HeadlessTask):
    """A task in which a Vision Transformer predicts hidden patches. The saved model is the network without a head."""

    loss_metric = "patch_loss"

    hidden: ClassVar[str]
    """Word for hidden patches in messages."""
    fraction: ClassVar[str]
    """Name of the field with the fraction of the patches that are hidden."""
    restored_note: ClassVar[str] = ""
    """Sentence about the predictions in the run's report."""

    def _problems(self) -> Iterator[str]:
        if not 0 < (fraction := getattr(self, self.fraction)) < 1:
            yield (
                f"{self.fraction}={fraction} is not between 0 and 1, so no patch would be predicted or none would be "
                f"visible; choose a fraction such as {type(self).__dataclass_fields__[self.fraction].default}"
            )
        yield from super()._problems()

    def check_network(self, network: AnyConfig | None) -> None:
        """Raise `ConfigError` unless the network is a transformer that has position embeddings, embeds every patch
        separately, and has at least one hidden and one visible patch in its images."""
        raise_problems(self._misfits(self.transformer(network)))

    def transformer(self, network: AnyConfig | None) -> ViTConfig:
        """Return the config of a network if the network is a transformer. Raise `ConfigError` for any other network."""
        config = transformer_config(network)
        if config is not None:
            return config
        kind = "a network of your own class" if network is None else "a ResNet"
        raise ConfigError(
            f"task={self.name!r} hides the embeddings of patches, which {kind} does not have; choose a Vision "
            "Transformer, such as variant='ViT-S/16'"
        )

    def _misfits(self, network: ViTConfig) -> Iterator[str]:
        needs = f"task={self.name!r}"
        if network.root is not None:
            yield (
                f"{needs} needs patches that do not overlap, but the tokens of a hybrid do, so that the neighbours of "
                f"a {self.hidden} patch would show its pixels; choose a variant without convolutions, such as "
                "'ViT-S/16'"
            )
        if network.positions == "none":
            yield (
                f"{needs} needs positions, because nothing else distinguishes {self.hidden} patches, but the network "
                "has positions='none'; choose positions='learned'"
            )
        yield from unfit_parts(network, needs)
        patches = math.prod(network.grid)
        if not 0 < (count := self.hidden_of(patches)) < patches:
            yield (
                f"{self.fraction}={getattr(self, self.fraction)} of {patches} patches ({network.grid[0]} x "
                f"{network.grid[1]}) leaves no {'visible' if count else self.hidden} patch; choose another fraction, a "
                "larger image_size or smaller patches"
            )

    def hidden_of(self, patches: int) -> int:
        """Return the number of hidden patches of an image with this many patches."""
        return round(getattr(self, self.fraction) * patches)

    @torch.no_grad()
    def pictures(self, objective: Objective, bundle: Bundle, source: Source) -> tuple[PictureTable, ...]:
        """Return images, their visible patches, and the images with restored patches."""
        assert isinstance(objective, PatchObjective)
        preprocess = bundle.preprocess
        samples, images = decoded(preprocess, source, spread(len(source), ROWS), bundle.device)
        if not samples:
            return ()
        count = len(samples)
        batch = Batch(
            images=images,
            labels=torch.full((count,), -1),
            valid=torch.ones(count, dtype=torch.bool),
            samples=torch.tensor(samples),
            epochs=torch.zeros(count, dtype=torch.int64),
        )
        places, patches = objective.restored(shared_copy(bundle.network), batch, preprocess, seed=EVALUATION_SEED)
        levels = preprocess.levels(images)
        empty = torch.full_like(patches, GREY)
        columns = {
            "image": levels,
            f"{self.hidden} patches": paste_patches(levels, places, empty),
            "restored": paste_patches(levels, places, patches),
        }
        rows = tuple(
            tuple(Picture(picture_of(pictures[row]), (name,)) for name, pictures in columns.items())
            for row in range(count)
        )
        text = (
            f"Each row shows a held-out image, the same image with its {self.hidden} patches in grey, and the image "
            f"with the network's predictions of these patches. {self.restored_note}".rstrip()
        )
        return (PictureTable("Restored patches", text, rows),)


Restored = tuple[Int64[Tensor, "b k"], Int64[Tensor, "b k c ph pw"]]
"""Predictions of hidden patches: their indices in row-major order of the grid, and their levels from 0 to 255."""


class PatchObjective(HeadlessObjective):
    """A network that predicts hidden patches through a decoder.

    The decoder is trained beside the network. It is in checkpoints, but not in the saved model. The targets are
    computed from the images of the batch, so they follow the augmentation.
    """

    measured: tuple[str, ...] = ("patch_loss",)
    """Names of the values that `losses` returns."""

    def forward(self, batch: Batch) -> LossOutput:
        found = self.losses(self.network, batch, self.preprocess, seed=self.seed)
        metrics = {
            name: mean_of_counted(values.detach(), batch.valid)
            for name, values in found.items()
            if name != "patch_loss"
        }
        return LossOutput(mean_of_counted(found["patch_loss"], batch.valid), metrics)

    @abstractmethod
    def losses(
        self, network: Any, batch: Batch, preprocess: Preprocess, *, seed: int
    ) -> Mapping[str, Float[Tensor, " b"]]:
        """Return the values that `measured` names for each image of a batch of normalised images.

        Each value is a mean over the hidden patches. `network` is the network in training or a copy of it.
        """

    @abstractmethod
    def restored(self, network: Any, batch: Batch, preprocess: Preprocess, *, seed: int) -> Restored:
        """Return the predictions of the patches that `losses` hides, as levels."""

    @torch.no_grad()
    def measure(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the means of the values that `losses` returns, with the counts `images` and `skipped`. The hidden
        patches of each image are the same in every measurement."""
        network, preprocess = shared_copy(outputs.bundle.network), outputs.bundle.preprocess
        losses = partial(self.losses, network, preprocess=preprocess, seed=EVALUATION_SEED)
        return mean_losses(outputs, held_out, self.measured, losses)


def unfit_parts(network: ViTConfig, needs: str) -> Iterator[str]:
    """Yield a message for each part of a network that a task of patches without a head does not train, and for patch
    dropout. `needs` names the task."""
    if network.patch_dropout:
        yield (
            f"patch_dropout={network.patch_dropout} removes patches that {needs} would predict; set it to 0, and leave "
            "early_patch_dropout out"
        )
    if network.pool == "map":
        yield (
            f"pool='map' has weights that {needs} does not train, because it trains no pooled vector; choose pool='gap'"
        )
    if network.projection:
        yield (
            f"projection={network.projection} is a matrix that {needs} does not train, and embeddings would pass "
            "through it; choose projection=0, and start from no model that has a projection"
        )
    if network.head_hidden:
        yield (
            f"head_hidden={network.head_hidden} is a layer that {needs} does not train, because the network has no "
            "head; set head_hidden to 0"
        )


def decoder_config(network: ViTConfig, *, width: int, depth: int, heads: int, registers: int = 0) -> ViTConfig:
    """Return the config of the blocks of a decoder that predicts the pixels of a network's patches. Raise `ConfigError`
    if its width and its number of heads do not fit together."""
    if width % heads or width % 4:
        raise ConfigError(
            f"decoder_width={width} with decoder_heads={heads} does not work, because the width must be divisible by 4 "
            "and by the number of heads; choose both"
        )
    return ViTConfig(
        image_size=network.image_size,
        patch_size=network.patch_size,
        cut_uneven=network.cut_uneven,
        channels=network.channels,
        width=width,
        depth=depth,
        heads=heads,
        mlp_width=4 * width,
        num_classes=0,
        pool="gap",
        registers=registers,
        positions="sincos-2d-mae",
        activation="gelu" if network.activation == "swiglu" else network.activation,
        norm_eps=network.norm_eps,
    )


def draw_order(batch: Batch, patches: int, *, seed: int) -> Int64[np.ndarray, "b n"]:
    """Return a random order of the patches of each image.

    The order is a pure function of the seed and of the image's epoch, sample and view.
    """
    uniform = keyed_uniform(seed, *batch_key(batch), draws=patches, first=Slot.PATCH_ORDER)
    return uniform.argsort(axis=1, kind="stable")


def batch_key(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the epochs, samples and views of a batch. The random numbers of its images depend on them."""
    # DLPack shares memory on the CPU only, so it cannot wait for a device.
    return np.from_dlpack(batch.epochs), np.from_dlpack(batch.samples), np.from_dlpack(batch.views)


def tokens_at(tokens: Float[Tensor, "b n width"], places: Int64[Tensor, "b k"]) -> Float[Tensor, "b k width"]:
    """Return the tokens of each image at these places."""
    return tokens.gather(1, places[:, :, None].expand(-1, -1, tokens.shape[2]))


# Tasks that compare two or more views of each image.


COLLAPSE = (
    TaskMetric("uniformity", higher_is_better=False, describes_model=False),
    TaskMetric("feature_rank", describes_model=False),
)
"""Metrics of the embeddings that show a collapse."""


@dataclass(frozen=True, kw_only=True)
class ViewTask(HeadlessTask):
    """A task that compares two views of each image. The saved model is the network without a head."""

    views = 2

    def check_data(self, splits: Splits) -> None:
        """Raise `ConfigError` if there are fewer than two training images, which leaves nothing to compare."""
        if len(splits.train) < 2:
            raise ConfigError(f"{splits.title} has fewer than two training images, so there is nothing to compare")

    def pictures(self, objective: Objective, bundle: Bundle, source: Source) -> tuple[PictureTable, ...]:
        """Return images with those whose embeddings are most similar."""
        found = neighbour_table(shared_copy(bundle.network), bundle.preprocess, source, bundle.device)
        return () if found is None else (found,)


class ViewObjective(HeadlessObjective):
    """A network that is trained to embed views of the same image alike.

    The two views of an image are in consecutive rows.
    """

    task: ViewTask

    def counted(self, batch: Batch) -> Bool[Tensor, " b"]:
        """Return a mask of the views that were decoded together with their partners."""
        return batch.valid.view(-1, 2).all(dim=1).repeat_interleave(2)

    @abstractmethod
    def compared(
        self, network: Any, one: Float[Tensor, "b c h w"], other: Float[Tensor, "b c h w"]
    ) -> Float[Tensor, "b ..."]:
        """Return values for each held-out image. `means` computes the metrics from them. `one` and `other` are its two
        views, and `network` is the saved network in evaluation mode."""

    @abstractmethod
    def means(self, rows: Float[Tensor, "n ..."]) -> dict[str, float]:
        """Return the metrics of held-out images. `rows` has the values that `compared` returned, in the order of the
        images."""

    @torch.no_grad()
    def measure(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the metrics of two fixed views of each image (`fixed_views`), those that show a collapse of the
        embeddings, and the counts `images` and `skipped`."""
        network = shared_copy(outputs.bundle.network)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        skipped: list[Skipped] = []
        for batch in normalised_batches(outputs, held_out, skipped):
            rows = self.compared(network, *fixed_views(batch.images, batch.samples)).cpu()
            whole, valid = network.embed(batch.images).float().cpu(), batch.valid.cpu()
            found.append((batch.samples[valid], rows[valid], whole[valid]))
        count_skipped = outputs.gather_skipped(skipped)
        found = [columns for part in outputs.processes.gather(found) for columns in part]
        count = float(sum(len(samples) for samples, _, _ in found))
        counts = {"images": count, "skipped": float(count_skipped)}
        if not count:
            return dict.fromkeys((metric.name for metric in self.task.metrics), 0.0) | counts
        samples, rows, embeddings = (torch.cat(column) for column in zip(*found, strict=True))
        order = samples.argsort()
        monitors = {"uniformity": uniformity(embeddings[order]), "feature_rank": effective_rank(embeddings[order])}
        return self.means(rows[order]) | monitors | counts


def fixed_views(
    images: Float[Tensor, "b c h w"], samples: Int64[Tensor, " b"]
) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b c h w"]]:
    """Return two views of each image, which depend on its sample alone: boxes of 30 to 100 % of its sides. The second
    one is mirrored."""
    views = []
    for view in range(2):
        numbers = torch.zeros_like(samples).numpy()
        key = numbers, np.from_dlpack(samples), np.full_like(numbers, view)
        uniform = torch.from_numpy(keyed_uniform(EVALUATION_SEED, *key, draws=4, first=Slot.CROP)).double()
        size = 0.3 + 0.7 * uniform[:, :2]  # of the sides
        centre = (1 - size) * (2 * uniform[:, 2:] - 1)
        theta = torch.zeros(len(images), 2, 3, dtype=torch.float64)
        theta[:, 0, 0], theta[:, 1, 1] = size[:, 0] * (-1 if view else 1), size[:, 1]
        theta[:, :, 2] = centre
        grid = F.affine_grid(on_device(theta.float().numpy(), images.device), list(images.shape), align_corners=False)
        views.append(F.grid_sample(images, grid, padding_mode="border", align_corners=False))
    return views[0], views[1]


def uniformity(embeddings: Float[Tensor, "n width"]) -> float:
    """Return the logarithm of the mean of exp(-2 d^2) over all pairs of the first 1,024 embeddings (2005.10242).

    Here d is the distance of two embeddings that are scaled to length 1. The value is 0 if all embeddings are equal,
    and about -4 if they are spread evenly over a sphere of many dimensions. A single embedding has the value 0.
    """
    points = F.normalize(embeddings[:1024].double(), dim=1)
    if len(points) < 2:
        return 0.0
    squares = (2 - 2 * points @ points.T).clamp(min=0)
    above = torch.ones_like(squares, dtype=torch.bool).triu(1)
    return float((-2 * squares[above]).exp().mean().log())


def effective_rank(embeddings: Float[Tensor, "n width"]) -> float:
    """Return the exponential of the entropy of the variances along the principal axes, which is the number of axes that
    the embeddings use. The value is 0 if all embeddings are equal."""
    centred = embeddings.double() - embeddings.double().mean(dim=0)
    variances = torch.linalg.eigvalsh(centred.T @ centred).clamp(min=0)
    if variances.sum() <= 1e-12 * embeddings.double().square().sum():
        return 0.0
    fractions = variances / variances.sum()
    return float(torch.special.entr(fractions).sum().exp())


# A running mean of the weights of a network in training, which is a network as well: a teacher that is never trained.
# The mean follows the trained weights after every step. Its momentum is the factor of the old mean.


AnyModule = TypeVar("AnyModule", bound=nn.Module)


def mean_of(module: AnyModule) -> AnyModule:
    """Return a copy of a module in evaluation mode that is not trained. Blocks that are compiled are compiled again."""
    made = copy.deepcopy(module).requires_grad_(False).eval()
    for part in made.modules():
        compile_copy(part)
    return made


@torch.no_grad()
def follow(mean: nn.Module, trained: nn.Module, momentum: float) -> None:
    """Multiply the weights of `mean` by the momentum, and add the trained weights, multiplied by 1 minus the
    momentum."""
    means, weights = ([local(weight.detach()) for weight in module.parameters()] for module in (mean, trained))
    torch._foreach_lerp_(means, weights, 1 - momentum)


def momentum_at(position: Position, start: float) -> float:
    """Return the momentum after a step, which rises from `start` to 1 along half a cosine wave."""
    return 1 - (1 - start) * 0.5 * (1 + math.cos(math.pi * position.step / position.steps))
