"""Distillation: a network learns labels and the predictions of a teacher, as in DeiT (2012.12877)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeGuard, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.models.network import FootprintPrecision
from vitrail.models.variants import AnyConfig, transformer_config
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import Effect, setting
from vitrail.tasks.classification import Classification, ClassificationObjective, balanced_weights
from vitrail.tasks.task import LossOutput, Objective, StepCost, mean_of_counted
from vitrail.tasks.teacher import Teacher, check_teacher, teacher_facts


@dataclass(frozen=True, kw_only=True)
class Distillation(Classification):
    """Learn the classes of images from labels and from the predictions of a teacher.

    The constructor raises `ConfigError` if fields have invalid values. The message names all of them.
    """

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
        most=1e30,
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
