"""The contract of a task, such as classification or regression.

A task provides the objective, the validation metrics and the model to save. The training loop, the evaluation between
steps and the run have no code for any particular task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vitrail.data.augment.settings import Augment
from vitrail.data.batch import Batch, LocalViews, Skipped
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source, parts_of
from vitrail.data.splits import Splits
from vitrail.data.targets import TargetKind
from vitrail.data.texts import TextTokenizer
from vitrail.errors import ConfigError, nearest
from vitrail.evaluation.evaluators import Evaluator
from vitrail.evaluation.outputs import Outputs
from vitrail.models.network import FootprintPrecision
from vitrail.models.variants import AnyConfig
from vitrail.processes.group import Processes
from vitrail.settings import Checked, Effect, setting
from vitrail.tasks.own_model import OwnModel, has_known_architecture
from vitrail.tasks.pictures import PictureTable
from vitrail.weights.answers import OutputKind
from vitrail.weights.bundle import Bundle
from vitrail.weights.words import Words

EVALUATION_SEED = 0
"""Seed of the draws for held-out images, such as their hidden patches. It is fixed, so that the losses of all runs can
be compared."""


class LossOutput(NamedTuple):
    """The loss and the metrics of a batch, as means over the samples that `Objective.counted` marks. The values stay on
    the device. If `counted` has several amounts for a sample, each value has an addend for each of them."""

    loss: Float[Tensor, "*amounts"]
    metrics: dict[str, Float[Tensor, "*amounts"]]


class Position(NamedTuple):
    """The position of a step in its run."""

    step: int
    """Number of the step, counted from 0."""
    steps: int
    """Number of steps of the run."""
    epoch: float
    """Number of epochs before the step, with the fraction of the current one."""


class Objective(nn.Module, ABC):
    """A network with its loss. An objective may own more modules, such as a decoder or a teacher.

    All parameters that require gradients are trained. All parameters and persistent buffers are in checkpoints. Buffers
    that follow from the settings or the data can be non-persistent. An objective must have its network in the attribute
    `network`.
    """

    saved_part: ClassVar[str] = "network"
    """Name of the module with the weights of `saved_network`. The weights of all other modules are kept beside the
    model."""

    text_tokenizer: TextTokenizer | None = None
    """Tokenizer of the texts in batches. By default batches have no texts."""

    provenance: Mapping[str, Any] = MappingProxyType({})
    """Facts about the origin of the weights that the saved model states, such as the teacher."""

    preprocess: Preprocess
    """Preprocessing of the run's images. Its mean and its standard deviation are the same in all phases of a run, but
    the image size can change."""

    seed: int = 0
    """Seed of the run, for keyed random numbers."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network

    def receive(self, words: Words) -> None:
        """Receive the text tower with which the run begins, if the task has one (`Task.words`)."""

    def begin(self, preprocess: Preprocess, seed: int) -> None:
        """Store the preprocessing of the run's images and the seed of the run, before the first step. A module of the
        objective must not be called `preprocess` or `seed`."""
        self.preprocess, self.seed = preprocess, seed

    def before_step(self, position: Position) -> None:
        """Prepare for a step. An objective whose loss depends on the position in the run overrides this method."""

    def frozen(self, position: Position) -> Sequence[nn.Parameter]:
        """Return the weights that are not trained yet in this step. The optimizer changes neither them nor its means of
        their gradients. By default there are none."""
        return ()

    @abstractmethod
    def forward(self, batch: Batch) -> LossOutput:
        """Return the loss of a batch whose images are normalised. This method must not wait for the device."""

    def after_step(self, position: Position, processes: Processes) -> None:
        """Change modules that the optimizer does not train, after its update.

        An objective with a running mean of weights, or of outputs, overrides this method. All processes call it
        together. It must not wait for the device. What it changes must be parameters or persistent buffers, because a
        resumed run continues with those.
        """

    def counted(self, batch: Batch) -> Bool[Tensor, " b"] | Float[Tensor, " b"] | Float[Tensor, "b amounts"]:
        """Return a mask of the samples over which the loss is averaged, or how much each of them counts. By default
        these are the decoded samples. The addends of a loss that are averaged over other amounts have a column each.

        With gradient accumulation, each part of a batch is weighted by its sum of these values, so that the
        gradients add up to the gradient of the whole batch. An objective that skips other samples besides the
        undecodable ones overrides this method.
        """
        return batch.valid

    def saved_network(self) -> Any:
        """Return the network that is evaluated and saved.

        By default, this is the module `saved_part`. If the saved network must have other outputs, this is a copy with a
        changed head, which shares all other parameters with the network in training.
        """
        return getattr(self, self.saved_part)


class BatchObjective(Objective):
    """An objective whose loss compares all samples of a batch with each other.

    The loss and its gradients are those of the whole batch, also with gradient accumulation and with several processes.
    With accumulation, the features of all parts are computed first and compared once. Then each part is computed again
    to get its gradients, so that the memory of the network is that of one part (2101.06983).
    """

    @abstractmethod
    def features(self, batch: Batch) -> dict[str, Float[Tensor, "b ..."]]:
        """Return values for each row of a batch that are compared. They depend on this row alone."""

    def fixed_features(self, batch: Batch) -> dict[str, Float[Tensor, "b ..."]]:
        """Return further values for each row, which have no gradients and are computed once, such as those of a
        teacher. By default there are none."""
        return {}

    @abstractmethod
    def compare(
        self, features: dict[str, Float[Tensor, "b ..."]], counted: Bool[Tensor, " b"], processes: Processes
    ) -> LossOutput:
        """Return the loss of this process's rows, which are compared with the rows of all processes.

        `features` has the values that `features` and `fixed_features` returned. Modules whose outputs depend on several
        rows, such as batch norms, are called here. `Processes.gather_rows` and `Processes.sum_with_gradients` exchange
        values with other processes.
        """

    def forward(self, batch: Batch) -> LossOutput:
        return self.compare(self.fixed_features(batch) | self.features(batch), self.counted(batch), Processes())


class StepCost(NamedTuple):
    """The cost of a training step, for forecasts of its memory and its time."""

    network: AnyConfig
    """The network's config with the tokens that the step computes. If the task hides patches from the network, this
    config has patch dropout."""
    parameters: int = 0
    """Number of weights that are trained beside the network, such as those of a decoder."""
    fixed_bytes: int = 0
    """Bytes that do not depend on the number of images, such as those of the weights of a teacher."""
    image_bytes: int = 0
    """Peak bytes per image and view that the step needs beside those of the network."""
    batch_bytes: int = 0
    """Further peak bytes per image and view of the whole batch, which accumulation does not reduce."""
    flops: int = 0
    """FLOPs per image and view that the step computes beside those of the network."""

    @property
    def all_flops(self) -> int:
        """FLOPs per image and view."""
        return self.network.training_flops() + self.flops


@dataclass(frozen=True)
class TaskMetric:
    """A metric of a task's evaluator, and how to display it."""

    name: str
    """Name of the metric in the journal."""
    higher_is_better: bool = True
    is_fraction: bool = False
    """True if the metric lies in [0, 1] and is shown in percent."""
    describes_model: bool = True
    """True if the metric is also shown to the user and saved with the model, not only written to the journal."""
    label: str = ""
    """Name of the metric in texts and charts. By default `name` with spaces instead of underscores."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.name.replace("_", " "))

    def text(self, value: float, digits: int = 2) -> str:
        """Return the name and the value, such as "accuracy 89.30%". Percentages have `digits` decimals."""
        return f"{self.label} {value:.{digits}%}" if self.is_fraction else f"{self.label} {value:.4g}"


@dataclass(frozen=True, kw_only=True)
class Task(Checked, ABC):
    """The settings of a task, and the methods that depend on the task. The command line and run.json can name a task
    only if it is in `TASKS`."""

    name: ClassVar[str]
    """The task's name in `TASKS`, on the command line and in run.json."""
    targets: ClassVar[tuple[TargetKind, ...]]
    """Kinds of targets that the task can learn from. With "none", it also learns from images without any target."""
    head_kinds: ClassVar[tuple[str, ...]] = ("pooled",)
    """Kinds of heads that the task trains (`ViTConfig.head_kind`). The first one is used unless the user chooses."""
    views: ClassVar[int] = 1
    """Number of augmented views of each image in a batch."""
    least_batch: ClassVar[int] = 1
    """Smallest number of images per step."""
    averages_weights: ClassVar[bool] = False
    """True if the saved model is a running mean of the trained weights, which the objective keeps."""
    output_noun: ClassVar[str]
    """Noun that messages use for one output of the network, such as "class"."""
    metrics: ClassVar[tuple[TaskMetric, ...]]
    """Metrics of the evaluator that can choose the best weights."""
    loss_metric: ClassVar[str]
    """Metric of the evaluator that detects diverged weights. If the weights are not finite, the metric is not
    finite."""

    select: str | None = setting(
        None,
        effect=Effect(
            lambda run: run.run.keep == "best" or run.run.patience is not None,
            "with --keep best or --patience",
            of_run=True,
        ),
    )
    """Metric on the validation split that chooses the best weights. By default the task's main metric."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        names = [metric.name for metric in self.metrics]
        if self.select is not None and self.select not in names:
            yield (f"select={self.select!r} is not a metric of the task {self.name}; {nearest(self.select, names)}")

    @property
    def wanted(self) -> dict[str, bool]:
        """The arguments with which the data of the task is opened."""
        return {"unlabelled": "none" in self.targets, "texts": "texts" in self.targets}

    @property
    def trains_network(self) -> bool:
        """False if the task keeps the weights of the network and trains others beside it."""
        return True

    @property
    @abstractmethod
    def output(self) -> OutputKind:
        """Meaning of the outputs of the saved model."""

    @abstractmethod
    def check_data(self, splits: Splits) -> None:
        """Raise `DataError` or `ConfigError` if the task cannot be learned from this data."""

    def check_network(self, network: AnyConfig | None) -> None:
        """Raise `ConfigError` if the task cannot train this network.

        `network` is the config of the network, or None for a network of the user's own class. If phases of a run differ
        in image size or patch dropout, the method is called with the settings of each phase. By default every network
        is accepted, unless the task trains other heads than those of a pooled vector.
        """
        if "pooled" not in self.head_kinds and getattr(network, "head_kind", None) not in self.head_kinds:
            raise ConfigError(
                f"network: the task {self.name} needs a Vision Transformer of this package with a head of the kind "
                f"{' or '.join(map(repr, self.head_kinds))}; make one with vitrail.create(..., head_kind=...)"
            )

    def reads_outlines(self, network: AnyConfig | None) -> bool:
        """Return True if the task learns the outlines of objects with a network of this config. By default it does
        not."""
        return False

    def step_cost(self, network: AnyConfig, precision: FootprintPrecision) -> StepCost:
        """Return the cost of a training step with images of `network.image_size`. By default only the network costs
        something."""
        return StepCost(network)

    def models(self) -> dict[str, str]:
        """Return the SHA-256 of the weights of each model that is learned from, by the name of its setting. Raise
        `ConfigError` if one cannot be loaded."""
        return {}

    def local_views_of(self, images: Preprocess, augment: Augment, seed: int) -> LocalViews | None:
        """Return the local views of each image, which have another size than the `views`, or None if there are none.

        `images` is the preprocessing of the run's images. Raise `ConfigError` if it does not fit the settings.
        """
        return None

    def words(self, model: Bundle | None, network: Any, splits: Splits) -> Words | None:
        """Return the text tower with which a run begins, from the model to start from or a new one. By default the task
        learns from no texts."""
        return None

    def of_words(self, words: Words, typed: Collection[str]) -> Task:
        """Return the task for an initial model with the text tower `words`. `typed` are the names of the settings that
        the user gave; the other settings are those of a recipe. By default the task stays as it is."""
        return self

    @abstractmethod
    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        """Return the network with its loss."""

    @abstractmethod
    def evaluator(self, objective: Objective) -> Evaluator:
        """Return the evaluator that measures the model on the validation and the test split.

        Most evaluators measure the outputs of the saved model. An evaluator that needs other modules than the network
        takes them from the objective. Several processes compute sharded weights together, so an evaluator that calls
        the network itself calls `outputs.settle()` before it exchanges anything with `outputs.processes`.
        """

    def main_metric(self, splits: Splits) -> str:
        """Return the name of the metric that chooses the best weights if `select` is None. By default it is the first
        of `metrics`."""
        return self.metrics[0].name

    def output_names(self, splits: Splits) -> tuple[str, ...]:
        """Return the names of the network's outputs, or () for a network without a head."""
        return splits.classes

    def load_head(self, network: nn.Module, splits: Splits) -> None:
        """Change the head of a saved model into the form that the objective trains. By default the head is not
        changed."""

    def bundle(
        self, objective: Objective, names: tuple[str, ...], preprocess: Preprocess, provenance: dict[str, Any]
    ) -> Bundle:
        """Return the model as it would be saved now. If the network is of the user's own class, only its weights can be
        saved.
        """
        network = objective.saved_network()
        kind = Bundle if has_known_architecture(network) else OwnModel
        return kind(network, names, preprocess, output=self.output, provenance=provenance | {**objective.provenance})

    def pictures(self, objective: Objective, bundle: Bundle, source: Source) -> tuple[PictureTable, ...]:
        """Return pictures of what the finished model `bundle` has learned, from held-out images, for the run's report.
        By default there are none."""
        return ()

    def selection(self, splits: Splits) -> TaskMetric:
        """Return the metric that chooses the best weights."""
        name = self.select or self.main_metric(splits)
        return next(metric for metric in self.metrics if metric.name == name)

    def texts(self, values: Mapping[str, float], digits: int = 2) -> list[str]:
        """Return texts with the name and the value of each metric in `values` that describes a model."""
        known = (metric for metric in self.metrics if metric.describes_model and metric.name in values)
        return [metric.text(values[metric.name], digits) for metric in known]

    def texts_of(self, split: str, values: Mapping[str, float]) -> list[str]:
        """Return the texts of the metrics of a split, whose names in `values` begin with the name of the split."""
        start = f"{split}_"
        return self.texts({name.removeprefix(start): one for name, one in values.items() if name.startswith(start)})

    def summary(self, result: dict[str, float]) -> dict[str, float]:
        """Return the metrics that describe the model, by name. If no image was evaluated, return an empty
        dictionary."""
        if not result["images"]:
            return {}
        names = (metric.name for metric in self.metrics if metric.describes_model)
        return {name: result[name] for name in names if name in result}


@dataclass(frozen=True, kw_only=True)
class HeadlessTask(Task):
    """A task whose saved model is a network without a head. Unless it states other targets, it learns from all images,
    with and without targets."""

    targets: ClassVar[tuple[TargetKind, ...]] = ("none", "class", "classes", "numbers")
    output_noun = "output"
    output = "softmax"  # without meaning, because there are no outputs

    def check_data(self, splits: Splits) -> None:
        """Accept all images."""

    def check_network(self, network: AnyConfig | None) -> None:
        """Raise `ConfigError` for a network without embeddings, and for a layer that would not be trained."""
        if network is None:
            raise ConfigError(
                f"task={self.name!r} trains the embedding of a network, which a network of your own class need not "
                "have; choose a network of this package, such as variant='ViT-S/16'"
            )
        if hidden := getattr(network, "head_hidden", 0):
            raise ConfigError(
                f"head_hidden={hidden} is a layer that task={self.name!r} does not train, because the network has no "
                "head; set head_hidden to 0"
            )

    def output_names(self, splits: Splits) -> tuple[str, ...]:
        return ()

    def evaluator(self, objective: Objective) -> Evaluator:
        """Return the method by which the objective measures held-out images."""
        assert isinstance(objective, HeadlessObjective)
        return objective.measure


class HeadlessObjective(Objective):
    """The objective of a task without a head, whose metrics need more than the saved network."""

    @abstractmethod
    def measure(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the task's metrics on held-out images, with the counts `images` and `skipped`."""


def mean_of_counted(values: Float[Tensor, " b"], counted: Bool[Tensor, " b"]) -> Float[Tensor, ""]:
    """Return the mean over the counted samples, or 0 if no sample is counted."""
    weights = counted.float()
    return (values * weights).sum() / weights.sum().clamp(min=1)


def normalised_batches(outputs: Outputs, source: Source, skipped: list[Skipped]) -> Iterator[Batch]:
    """Yield the batches of a source that this process computes, with normalised images, on the device of the model.
    Samples that cannot be decoded are added to `skipped`."""
    for batch in outputs.batches(source):
        skipped += batch.skipped
        yield batch.to(outputs.bundle.device).with_images(outputs.bundle.preprocess.normalise)


def mean_losses(
    outputs: Outputs,
    held_out: Source,
    names: Sequence[str],
    losses: Callable[[Batch], Mapping[str, Float[Tensor, " b"]]],
) -> dict[str, float]:
    """Return the means over held-out images of the values with these names that `losses` returns for each image of a
    batch, with the counts `images` and `skipped`."""
    totals = torch.zeros(len(names) + 1, dtype=torch.float64, device=outputs.bundle.device)  # the last one: of images
    skipped: list[Skipped] = []
    for batch in normalised_batches(outputs, held_out, skipped):
        found = losses(batch)
        rows = torch.stack([*(found[name] for name in names), torch.ones_like(found[names[0]])]).double()
        totals += torch.where(batch.valid, rows, 0.0).sum(dim=1)
    count_skipped = outputs.gather_skipped(skipped)
    *sums, count = outputs.processes.sum(totals).tolist()
    means = {name: value / max(count, 1) for name, value in zip(names, sums, strict=True)}
    return means | {"images": count, "skipped": float(count_skipped)}


def drawn_samples(source: Source) -> Iterator[tuple[int, float]]:
    """Yield the index of every sample with the frequency at which training draws it. The frequencies add up to 1."""
    for first, length, fraction in parts_of(source):
        for index in range(first, first + length):
            yield index, fraction / length
