"""Regression: one or several numbers per image."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.source import Source, truth_of
from vitrail.data.splits import Splits, check_numbers
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.evaluators import Evaluator
from vitrail.evaluation.metrics.numbers import StreamingErrors
from vitrail.evaluation.outputs import Outputs
from vitrail.settings import setting
from vitrail.tasks.task import LossOutput, Objective, Task, TaskMetric, drawn_samples, mean_of_counted

UNITS = ("mean_absolute_error", "root_mean_squared_error")
"""Metrics in the unit of a number."""


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """Learn one or several numbers per image, such as an age or a price. Unknown numbers are skipped.

    The network learns standardised numbers: the mean of the training split is subtracted, and the difference is divided
    by the standard deviation. In the saved model, the mean and the standard deviation are folded into the head, so that
    outputs are in the units of the data.
    """

    name = "regression"
    targets = ("numbers",)
    output_noun = "number"
    output = "numbers"
    metrics = (
        TaskMetric("r2", label="R²"),
        TaskMetric("standardised_error", higher_is_better=False),
        TaskMetric("mean_absolute_error", higher_is_better=False),
        TaskMetric("root_mean_squared_error", higher_is_better=False),
    )
    """The errors in the units of the data exist for a single number. R² and the standardised error are means over all
    numbers."""
    loss_metric = "standardised_error"

    loss: Literal["squared", "huber"] = "squared"
    """Loss function: squared error, or huber, which grows linearly beyond --delta so that outliers count less."""
    delta: float | None = setting(None, above=0, below=math.inf)
    """Error at which the Huber loss becomes linear, in standard deviations of the training numbers. By default 1."""

    def _problems(self) -> Iterator[str]:
        if self.delta is not None and self.loss != "huber":
            yield f"delta={self.delta} needs loss='huber'"
        yield from super()._problems()

    def check_data(self, splits: Splits) -> None:
        """Raise `DataError` if the targets are not numbers, or if one of the numbers is unknown for all training
        images."""
        check_numbers(splits)
        mean, _ = moments(splits.train)
        if unknown := [name for name, value in zip(splits.classes, mean.tolist(), strict=True) if math.isnan(value)]:
            raise DataError(
                f"{splits.title}: no training image has a known number in {', '.join(unknown)}; leave the column out, "
                "or fill it in"
            )

    def selection(self, splits: Splits) -> TaskMetric:
        """Return the metric that chooses the best weights. Raise `ConfigError` if it has a unit and the data has
        several numbers, because a mean over different units has no meaning."""
        found = super().selection(splits)
        if found.name in UNITS and len(splits.classes) > 1:
            raise ConfigError(
                f"select={found.name!r} has the unit of a number, but this data has {len(splits.classes)} numbers; "
                "choose r2 or standardised_error, the error in standard deviations"
            )
        return found

    def texts(self, values: Mapping[str, float], digits: int = 2) -> list[str]:
        """Return texts of the metrics. Several numbers have one mean absolute error each; a single number needs no
        standardised error."""
        each = [(name.rpartition(":"), value) for name, value in values.items() if ":" in name]
        errors = [f"{name}: {metric.replace('_', ' ')} {value:.4g}" for (name, _, metric), value in each]
        return super().texts(_described(values), digits) + errors

    def summary(self, result: dict[str, float]) -> dict[str, float]:
        """Return the metrics that describe the model, by name. Several numbers have one mean absolute error each."""
        found = super().summary(_described(result))
        return found and found | {name: value for name, value in result.items() if ":" in name}

    def evaluator(self, objective: Objective) -> Evaluator:
        return NumberErrors()

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        delta = 1.0 if self.delta is None else self.delta
        return RegressionObjective(network, *moments(splits.train), delta=delta if self.loss == "huber" else None)

    def load_head(self, network: nn.Module, splits: Splits) -> None:
        """Change a saved head, whose outputs are in the units of the data, so that its outputs are standardised
        numbers."""
        mean, deviation = moments(splits.train)
        head = network.get_submodule("head")
        assert isinstance(head, nn.Linear), "networks of this package have a dense layer as their head"
        _rescale(head, 1 / deviation, -mean / deviation)


class RegressionObjective(Objective):
    """Squared or Huber loss between the network's outputs and standardised numbers.

    The loss of an image is the mean over its known numbers. The metric is the absolute error in standard deviations of
    the training split, averaged like the loss. A single number also has the error in its own unit.
    """

    mean: Float[Tensor, " k"]
    deviation: Float[Tensor, " k"]

    def __init__(
        self,
        network: nn.Module,
        mean: Float[Tensor, " k"],
        deviation: Float[Tensor, " k"],
        *,
        delta: float | None = None,
    ) -> None:
        """`mean` and `deviation` are the mean and the standard deviation of each number in the training split. With
        `delta`, the loss is the Huber loss."""
        super().__init__(network)
        self.delta = delta
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("deviation", deviation, persistent=False)

    def forward(self, batch: Batch) -> LossOutput:
        assert batch.targets is not None, "the task checks that the data has numbers"
        outputs = self.network(batch.images).float()
        known = ~batch.targets.isnan()
        targets = torch.where(known, (batch.targets - self.mean) / self.deviation, outputs.detach())
        if self.delta is None:
            losses = F.mse_loss(outputs, targets, reduction="none")
        else:
            losses = F.huber_loss(outputs, targets, reduction="none", delta=self.delta)
        counted = self.counted(batch)
        errors = (outputs.detach() - targets).abs()
        numbers = known.sum(dim=1).clamp(min=1)
        loss, error = (mean_of_counted(each.sum(dim=1) / numbers, counted) for each in (losses, errors))
        metrics = {"standardised_error": error}
        if len(self.deviation) == 1:
            metrics["mean_absolute_error"] = error * self.deviation[0]
        return LossOutput(loss, metrics)

    def counted(self, batch: Batch) -> Bool[Tensor, " b"]:
        """Return a mask of the samples that were decoded and have a known number."""
        return batch.counted

    @torch.no_grad()
    def saved_network(self) -> Any:
        """Return a network whose outputs are in the units of the data.

        The returned network shares all weights except the head's. A network without a dense layer named `head` is
        wrapped in `Rescaled`.
        """
        if not isinstance(getattr(self.network, "head", None), nn.Linear):
            return Rescaled(self.network, self.mean, self.deviation)
        network = copy.copy(self.network)
        network._modules = dict(self.network._modules)
        network.head = copy.deepcopy(self.network.head)
        _rescale(network.head, self.deviation, self.mean)
        return network


class Rescaled(nn.Module):
    """A network whose outputs are multiplied by a deviation and then increased by a mean."""

    mean: Float[Tensor, " k"]
    deviation: Float[Tensor, " k"]

    def __init__(self, network: nn.Module, mean: Float[Tensor, " k"], deviation: Float[Tensor, " k"]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b k"]:
        return self.network(images).float() * self.deviation + self.mean


def moments(source: Source) -> tuple[Float[Tensor, " k"], Float[Tensor, " k"]]:
    """Return the mean and the standard deviation of each number over the samples of a source. No image is read.

    Unknown numbers are skipped. The mean of a number that is never known is NaN. The deviation of a constant number
    is 1.
    """
    weights, rows = [], []
    for index, weight in drawn_samples(source):
        if (target := source.target(index)) is not None:
            weights.append(weight)
            rows.append(target)
    values = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(source.classes))
    known = ~values.isnan()
    frequency = torch.tensor(weights, dtype=torch.float64)[:, None] * known
    total = frequency.sum(dim=0)
    mean = (frequency * values.nan_to_num()).sum(dim=0) / total
    variance = (frequency * (values - mean).nan_to_num() ** 2).sum(dim=0) / total
    constant = variance.sqrt() <= 1e-9 * mean.abs()  # rounding alone gives equal numbers a variance above 0
    return mean.float(), torch.where(constant | (variance == 0), 1.0, variance.sqrt()).float()


def _described(values: Mapping[str, float]) -> dict[str, float]:
    """Return metrics without the standardised error if there is an error in the unit of a single number."""
    return {
        name: value
        for name, value in values.items()
        if name != "standardised_error" or "mean_absolute_error" not in values
    }


@torch.no_grad()
def _rescale(head: nn.Linear, factor: Float[Tensor, " k"], offset: Float[Tensor, " k"]) -> None:
    """Change a head in place so that its outputs are multiplied by `factor` and then increased by `offset`."""
    factor, offset = factor.to(head.weight.device), offset.to(head.weight.device)
    head.weight.mul_(factor[:, None])
    head.bias.mul_(factor).add_(offset)


@dataclass(frozen=True)
class NumberErrors:
    """R², mean absolute error and root mean squared error."""

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the metrics of `StreamingErrors`, and the counts `images` and `skipped`. If no number is known, only
        the counts are returned.
        """
        found: list[tuple[Tensor, Tensor, Tensor]] = []  # samples, valid, predicted; on the device

        def take(batch: Batch, predicted: Tensor) -> None:
            found.append((batch.samples, batch.valid, predicted))

        skipped = outputs.each_batch(held_out, take)
        errors, images = StreamingErrors(), 0
        for samples, valid, predicted in found:
            decoded = valid.cpu()
            truth = truth_of(held_out, samples[decoded].tolist())
            errors.add(predicted.cpu()[decoded].numpy(), truth)
            images += int(truth.known.sum())
        return {**errors.result(), "images": float(images), "skipped": float(len(skipped))}
