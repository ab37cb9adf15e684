"""Distillation: a network learns labels and the predictions of a teacher, as in DeiT (2012.12877)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeGuard, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, UserError, listed
from vitrail.models.cost import prediction_bytes
from vitrail.models.network import FootprintPrecision
from vitrail.models.variants import AnyConfig, transformer_config
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import Effect, setting
from vitrail.tasks.classification import Classification, ClassificationObjective, balanced_weights
from vitrail.tasks.task import LossOutput, Objective, StepCost, mean_of_counted
from vitrail.weights.answers import OutputKind
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.exported import ExportedNetwork
from vitrail.weights.load import load


@dataclass(frozen=True, kw_only=True)
class Distillation(Classification):
    """Learn the classes of images from labels and from the predictions of a teacher."""

    name = "distillation"

    teacher: str | None = None
    """Model whose predictions are learned: a run, a model's folder or file, or a name on the hub. It must have the
    classes of the data."""
    teacher_labels: Literal["hard", "soft"] = "hard"
    """Part of the teacher's predictions that is learned: the most likely class (hard), or all probabilities (soft)."""
    label_smoothing: float = setting(
        0.0, effect=Effect(lambda own: own.teacher_weight < 1, "with --teacher-weight below 1"), least=0, below=1
    )
    """Fraction of the target that is spread over all classes. The targets of the teacher are not smoothed."""
    teacher_weight: float = setting(0.5, above=0, most=1)
    """Weight of the loss with the teacher's predictions. The weight of the loss with the labels is 1 minus this. The
    default is DeiT's for hard labels; for soft labels, its paper has 0.1 and its code 0.5."""
    teacher_temperature: float = setting(
        3.0,
        effect=Effect(lambda own: own.teacher_labels == "soft", "with --teacher-labels soft"),
        above=0,
        most=1e9,
    )
    """Number by which the logits of teacher and network are divided, for soft labels only. The default is that of
    DeiT's paper; its code has 1."""

    def _problems(self) -> Iterator[str]:
        if self.loss == "sigmoid":
            yield "loss='sigmoid' cannot be distilled, because the teacher predicts one class; choose loss='softmax'"
        if self.teacher_weight == 1 and self.class_weights != "none":
            yield (
                f"class_weights={self.class_weights!r} weights the loss with the labels, which counts nothing with "
                "teacher_weight=1; leave one of them out"
            )
        yield from super()._problems()

    def check_data(self, splits: Splits) -> None:
        """Raise `DataError` and `ConfigError` as classification does, and `ConfigError` if the teacher cannot be loaded
        or has other classes than the data."""
        if splits.target_kind == "classes":
            raise ConfigError(
                f"{splits.title} has images with several labels, which the task {self.name} cannot learn; choose "
                "task='classification' with loss='sigmoid'"
            )
        super().check_data(splits)
        check_teacher(self._teacher, splits.classes, splits.title)

    @property
    def _teacher(self) -> str:
        if self.teacher is None:
            raise ConfigError(
                f"teacher: the task {self.name} needs a trained model to learn from; name one, such as runs/flowers"
            )
        return self.teacher

    def check_network(self, network: AnyConfig | None) -> None:
        """Raise `ConfigError` if the network has a distillation token, but layers mix it with the class token."""
        if not _has_token(network):
            return
        for field, value, is_mixed in (
            ("final_norm", network.final_norm, network.final_norm == "pooled"),
            ("head_hidden", network.head_hidden, network.head_hidden > 0),
        ):
            if is_mixed:
                raise ConfigError(
                    f"{field}={value!r} mixes the class token with the distillation token, which pool='cls+dist' keeps "
                    f"apart for task={self.name!r}; leave {field} out"
                )

    def step_cost(self, network: AnyConfig, precision: FootprintPrecision) -> StepCost:
        """Return the cost of a step, in which the teacher predicts the images as well."""
        facts = teacher_facts(self._teacher)
        return StepCost(
            network,
            parameters=network.num_classes if _has_token(network) else 0,
            fixed_bytes=facts.fixed_bytes(precision),
            image_bytes=facts.image_bytes(precision),
            flops=facts.network.inference_flops(facts.preprocess.image_size),
        )

    def models(self) -> dict[str, str]:
        return {"teacher": teacher_facts(self._teacher).sha256}

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        teacher = Teacher(self._teacher, splits.classes)
        weights = balanced_weights(splits.train) if self.class_weights == "balanced" else None
        return DistillationObjective(network, self, teacher, weights)


class DistillationObjective(ClassificationObjective):
    """Cross-entropy with labels, and a loss between the network's and a teacher's predictions.

    If the network pools by "cls+dist", the class token has a head for the labels, and the first register, which is the
    distillation token, has a head for the teacher. The two heads are the two halves of the head's matrix, because the
    network halves both tokens. The network's own output is therefore the mean of both heads. Their biases are the
    network's bias plus and minus `bias_difference`, which is trained beside the network. With any other network, both
    losses are those of the same logits.
    """

    def __init__(
        self, network: nn.Module, task: Distillation, teacher: Teacher, class_weights: Float[Tensor, " classes"] | None
    ) -> None:
        super().__init__(network, label_smoothing=task.label_smoothing, class_weights=class_weights)
        self.task = task
        self.teacher = teacher
        self.provenance = {"teacher": task.teacher, "teacher_sha256": teacher.sha256}
        self.has_token = _has_token(getattr(network, "config", None))
        if self.has_token:
            self.bias_difference = nn.Parameter(torch.zeros(self.network.config.num_classes))

    def begin(self, preprocess: Preprocess, seed: int) -> None:
        """Prepare the teacher for images with this normalisation, on the device of the network."""
        super().begin(preprocess, seed)
        self.teacher.begin(preprocess, next(self.parameters()).device)

    def forward(self, batch: Batch) -> LossOutput:
        taught = self.teacher.logits(batch.images)
        own, distilled = self.two_logits(batch.images)
        weight, counted = self.task.teacher_weight, self.counted(batch)
        losses = (1 - weight) * self.losses(own, batch) + weight * self.teacher_losses(distilled, taught)
        agrees = (distilled.detach().argmax(dim=1) == taught.argmax(dim=1)).float()
        metrics = {
            "accuracy": mean_of_counted(self.hits((own + distilled) / 2, batch), counted),
            "teacher_agreement": mean_of_counted(agrees, counted),
        }
        return LossOutput(mean_of_counted(losses, counted), metrics)

    def two_logits(
        self, images: Float[Tensor, "b c h w"]
    ) -> tuple[Float[Tensor, "b classes"], Float[Tensor, "b classes"]]:
        """Return the logits for the labels and those for the teacher's predictions."""
        if not self.has_token:
            logits = self.network(images).float()
            return logits, logits
        head = cast(nn.Linear, self.network.head)
        halves = zip((2 * self.network.embed(images)).chunk(2, dim=1), head.weight.chunk(2, dim=1), strict=True)
        own, distilled = (F.linear(token, weight).float() + head.bias for token, weight in halves)
        return own + self.bias_difference, distilled - self.bias_difference

    def teacher_losses(
        self, logits: Float[Tensor, "b classes"], taught: Float[Tensor, "b classes"]
    ) -> Float[Tensor, " b"]:
        """Return the loss of each image between the network's and the teacher's logits.

        For hard labels, the loss is the cross-entropy with the teacher's most likely class. For soft labels, it is the
        squared temperature times the Kullback-Leibler divergence of the softened probabilities (1503.02531), as in
        DeiT's paper. DeiT's code also divides it by the number of classes, which is a thousandth on ImageNet.
        """
        if self.task.teacher_labels == "hard":
            return F.cross_entropy(logits, taught.argmax(dim=1), reduction="none")
        temperature = self.task.teacher_temperature
        own, target = (F.log_softmax(each / temperature, dim=1) for each in (logits, taught))
        return temperature**2 * F.kl_div(own, target, reduction="none", log_target=True).sum(dim=1)


def _has_token(network: AnyConfig | None) -> TypeGuard[ViTConfig]:
    vit = transformer_config(network)
    return vit is not None and vit.pool == "cls+dist"


# Teachers: trained models whose predictions other networks learn, in a training step or as pseudo labels.


class TeacherFacts(NamedTuple):
    """The properties of a teacher that are checked before training."""

    classes: tuple[str, ...]
    network: AnyConfig
    preprocess: Preprocess
    output: OutputKind
    sha256: str
    """SHA-256 of the weights, or an empty text for an exported model."""

    def image_bytes(self, precision: FootprintPrecision) -> int:
        """Return the bytes that the teacher needs for an image."""
        one, two = (prediction_bytes(self.network, count, self.preprocess.image_size, precision) for count in (1, 2))
        return two - one

    def fixed_bytes(self, precision: FootprintPrecision) -> int:
        """Return the bytes that the teacher needs for its weights."""
        return prediction_bytes(self.network, 0, self.preprocess.image_size, precision)


def teacher_facts(model: str) -> TeacherFacts:
    """Return the properties of a model. They are cached until its files change, so that a large model is not read for
    every check. Raise `ConfigError` if the model cannot be loaded."""
    return _facts(model, str(Path.cwd()), files_of(model, "model*"))


@functools.lru_cache(maxsize=4)
def _facts(model: str, folder: str, files: tuple[tuple[str, int, int], ...]) -> TeacherFacts:
    """Return the properties of a model. A relative path is looked up in `folder`, the current one. `files`
    distinguishes versions of the model."""
    bundle = load_teacher(model)
    is_exported = isinstance(bundle.network, ExportedNetwork)
    sha256 = "" if is_exported else weights_sha256(bundle.network)
    return TeacherFacts(bundle.classes, bundle.network.config, bundle.preprocess, bundle.output, sha256)


def files_of(model: str, pattern: str) -> tuple[tuple[str, int, int], ...]:
    """Return name, time and size of each file of a model that matches a shell pattern, or nothing for a model that is
    not on this machine's disk."""
    path = Path(model)
    files = sorted(path.rglob(pattern)) if path.is_dir() else [path]
    found = [(file, file.stat()) for file in files if file.is_file()]
    return tuple((str(file), state.st_mtime_ns, state.st_size) for file, state in found)


def check_classifier(model: str) -> TeacherFacts:
    """Return the properties of a model that can be a teacher of classes. Raise `ConfigError` for any other model."""
    facts = teacher_facts(model)
    if not facts.sha256:
        raise ConfigError(
            f"teacher={model!r} is an exported model, which cannot be a teacher; name the model that it was exported "
            "from"
        )
    if not facts.classes:
        raise ConfigError(
            f"teacher={model!r} has no classes, so it cannot be a teacher; name a model that was trained on labels"
        )
    if facts.output != "softmax":
        raise ConfigError(
            f"teacher={model!r} has the outputs {facts.output!r}, but a teacher needs probabilities that add up to 1; "
            "choose a model that was trained with loss='softmax'"
        )
    return facts


def check_teacher(model: str, classes: tuple[str, ...], title: str) -> TeacherFacts:
    """Return the properties of a model that can be a teacher of these classes of the data `title`. Raise `ConfigError`
    for any other model."""
    facts = check_classifier(model)
    if set(facts.classes) != set(classes):
        known, wanted = set(facts.classes), set(classes)
        missing = [name for name in classes if name not in known]
        further = [name for name in facts.classes if name not in wanted]
        parts = [f"it lacks {listed(missing, 20)}"] if missing else []
        parts += [f"it also has {listed(further, 20)}"] if further else []
        raise ConfigError(
            f"teacher={model!r} has other classes than {title}: {', and '.join(parts)}; choose a teacher that was "
            "trained for the same classes"
        )
    return facts


class Teacher:
    """A trained network in evaluation mode. It is no part of an objective's modules, so that it is neither trained nor
    saved in checkpoints."""

    def __init__(self, model: str, classes: tuple[str, ...]) -> None:
        """`classes` are the classes of the data, in whose order the teacher's outputs are returned."""
        bundle = load_teacher(model)
        self.network = bundle.network.eval().requires_grad_(False)
        self.preprocess = bundle.preprocess
        self.order = torch.tensor([bundle.classes.index(name) for name in classes])
        self.sha256 = weights_sha256(bundle.network)

    def begin(self, preprocess: Preprocess, device: torch.device) -> None:
        """Move the teacher to a device, and keep the normalisation of the images there."""
        self.network.to(device)
        self.order = self.order.to(device)
        self.convert = Conversion(preprocess, self.preprocess, device)

    @torch.no_grad()
    def logits(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Return the teacher's logits of normalised images.

        The teacher sees the same views with its own normalisation. If its image size differs from that of the views,
        they are resized. If it has another number of channels, grey is repeated as three channels, and colours become
        grey.
        """
        return self.network(self.convert(images)).float()[:, self.order]


def load_teacher(model: str, device: str = "cpu") -> Bundle:
    """Load a teacher. Raise `ConfigError` if this fails."""
    try:
        return load(model, device=device)
    except UserError as error:
        raise ConfigError(f"teacher={model!r} cannot be loaded: {error}") from None


# Images of a run as another model sees them, such as a teacher or a tokenizer.


LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey, which decoders of images use."""


class Conversion:
    """Turns normalised images of one preprocessing into those of another one.

    The image size, the normalisation and the number of channels are those of the other preprocessing. Grey is repeated
    as three channels, and colours become grey.
    """

    def __init__(self, made: Preprocess, wanted: Preprocess, device: torch.device) -> None:
        """`made` is the preprocessing of the images, and `wanted` is that of the result."""
        self.wanted = wanted
        self.mean, self.std, self.own_mean, self.own_std = (
            torch.tensor(values, device=device).view(-1, 1, 1)
            for values in (made.mean, made.std, wanted.mean, wanted.std)
        )
        self.luma = torch.tensor(LUMA, device=device).view(-1, 1, 1)

    def __call__(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        levels = images.float() * self.std + self.mean
        if levels.shape[1] == 3 and self.wanted.channels == 1:
            levels = (levels * self.luma).sum(dim=1, keepdim=True)
        elif levels.shape[1] == 1:
            levels = levels.expand(-1, self.wanted.channels, -1, -1)
        if self.wanted.image_size != tuple(levels.shape[2:]):
            levels = F.interpolate(levels, self.wanted.image_size, mode="bilinear", antialias=True)
        return (levels - self.own_mean) / self.own_std
