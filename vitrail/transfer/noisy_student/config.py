"""The settings of Noisy Student: the student's run, the images without labels, and the rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vitrail.data.sources import absolute_spec, has_amount
from vitrail.data.sources.pseudo_labels import Pool
from vitrail.errors import ConfigError
from vitrail.models.variants import AnyConfig, transformer_config
from vitrail.plain import to_plain
from vitrail.settings import above_zero, at_least, raise_problems
from vitrail.tasks import Classification
from vitrail.tasks.teacher import TeacherFacts
from vitrail.training.config import TrainConfig
from vitrail.transfer.noisy_student.labelling import Labelling

__all__ = ["NoisyStudentConfig", "Rounds", "check_noise", "check_size"]


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The rounds of Noisy Student. Raises `ConfigError` if fields have invalid values. The message names all of
    them."""

    teacher: str | None = None
    """Model that labels images in the first round: a run, a model's folder or file, or a name on the hub. By default,
    the student's network is first trained on the labelled images alone."""
    unlabelled: str | None = None
    """Images to label, in any form of --data; their own labels are not used. By default the training images that an
    amount such as --data bundled[:500] or --per-class does not select."""
    rounds: int = 3
    """Number of students. Each student is the teacher of the next one."""
    pseudo_ratio: float = 3.0
    """Images with pseudo labels per labelled image of a batch. The paper has 14 for its largest networks."""

    def __post_init__(self) -> None:
        raise_problems([*at_least(self, rounds=1), *above_zero(self, "pseudo_ratio")])


@dataclass(frozen=True, kw_only=True)
class NoisyStudentConfig:
    """The whole config of Noisy Student. Raises `ConfigError` if its parts contradict each other."""

    student: TrainConfig
    """The run of each student, on the labelled images. Pseudo-labelled images are mixed in."""
    rounds: Rounds = field(default_factory=Rounds)
    labelling: Labelling = field(default_factory=Labelling)

    def __post_init__(self) -> None:
        raise_problems(self._problems())

    def _problems(self) -> Iterator[str]:
        task, data = self.student.task, self.student.data
        if task.name != Classification.name:
            yield f"task={task.name!r} has no pseudo labels; Noisy Student needs task={Classification.name!r}"
        if self.rounds.unlabelled is None and data.per_class is None and not has_amount(data.spec):
            yield (
                f"unlabelled: data {data.spec!r} is labelled and used whole, so there are no other images; name images "
                "to label, or select a part of the data, such as [:10%]"
            )

    @property
    def pool(self) -> Pool:
        """The images to label."""
        data = self.student.data
        if self.rounds.unlabelled is not None:
            return Pool(spec=absolute_spec(self.rounds.unlabelled))
        return Pool(
            spec=absolute_spec(data.spec), rest=True, per_class=data.per_class, subset_seed=data.subset_seed,
            validation=data.validation, validation_share=data.validation_share, cut_method=data.cut_method,
        )  # fmt: skip

    def round_config(self, folder: str, labels: str | None) -> TrainConfig:
        """Return the config of a round's run in `folder`. `labels` is the folder of its pseudo labels, or None for the
        first teacher."""
        own = self.student.override(run=folder, name="", overwrite=False)
        if labels is None:
            return own
        ratio = self.rounds.pseudo_ratio
        others = 1 - sum(float(text.partition(":")[0]) for text in own.data.mix)
        fraction = others * ratio / (1 + ratio)
        return own.override(mix=(*own.data.mix, f"{fraction:.6f}:{labels}"))

    def to_plain(self) -> dict[str, Any]:
        """Return the settings that all rounds share as plain JSON values, without the number of rounds and the time
        after which a process stops."""
        student = self.student.override(run=None, name="", overwrite=False, max_time=None).to_plain()
        rounds = {name: value for name, value in to_plain(self.rounds).items() if name != "rounds"}
        return {"student": student, "rounds": rounds, "labelling": to_plain(self.labelling)}


def check_noise(config: TrainConfig, network: AnyConfig) -> None:
    """Raise `ConfigError` if nothing is random in the training of a student."""
    transformer = transformer_config(network)
    rates = () if transformer is None else (transformer.dropout, transformer.stochastic_depth)
    if not config.augment.is_random and not any(rates):
        raise ConfigError(
            "the student learns without noise, so it would only repeat its teacher; give augmentation such as "
            "randaugment_layers=2, or dropout=0.1, or stochastic_depth=0.1"
        )


def check_size(network: AnyConfig, teacher: TeacherFacts, model: str) -> None:
    """Raise `ConfigError` if the student's network is smaller than its teacher. Heads and image sizes do not count."""
    height, width = teacher.preprocess.image_size
    student, other = (
        config.with_head(0).with_image_size(config.nearest_size(height, width)).parameters()
        for config in (network, teacher.network)
    )
    if student < other:
        raise ConfigError(
            f"teacher={model!r} has {other:,} weights without its head, and the student has only {student:,}, but a "
            "student of Noisy Student is as large as its teacher or larger: choose a larger network, or distil the "
            "teacher with vitrail train --task distillation"
        )
