"""The rounds of Noisy Student: a teacher labels images, a student learns from them, and becomes the next teacher.

The folder of all rounds has `noisy-student.json` (the settings), and for each round `round-N/labels` (pseudo labels as
a data set) and `round-N/run` (the student's run). Round 0 has only the run of the first teacher, unless the user names
a teacher. A stopped command continues from these folders: what is finished is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.formats.pseudo_labels import (
    ClassCounts,
    LabelKind,
    LabelledRows,
    Pool,
    PseudoLabelInfo,
    balanced_copies,
    is_confident,
    looks_like_pseudo_labels,
    open_pool,
    read_info,
    write_pseudo_labels,
)
from vitrail.data.pipeline import Readers
from vitrail.data.source import Source, fingerprint, shared_images
from vitrail.data.splits import Splits, absolute_spec, has_amount
from vitrail.errors import BundleError, ConfigError, DataError, RunError, plural
from vitrail.evaluation.outputs import Outputs
from vitrail.experiments.runner import complete_run, differences, experiment
from vitrail.files import expanded
from vitrail.machine import Precision
from vitrail.models.variants import AnyConfig, transformer_config
from vitrail.report.page import printable
from vitrail.settings import Checked, setting, to_plain
from vitrail.tasks.classification import Classification
from vitrail.tasks.distillation import (
    TeacherFacts,
    check_classifier,
    check_teacher,
    files_of,
    load_teacher,
    teacher_facts,
)
from vitrail.training.config import LENGTHS, TrainConfig
from vitrail.training.folder import read_record
from vitrail.training.job import prepare
from vitrail.training.log import Log
from vitrail.training.start import open_initial

RECORD = "noisy-student.json"

FORMAT = 1
"""Version of the record."""


@dataclass(frozen=True)
class Round:
    """A finished round. Round 0 is the first teacher."""

    number: int
    model: str
    """The round's model: a folder, or the teacher that the user named."""
    metrics: dict[str, float]
    """Metrics of the model on the held-out splits, such as `validation_accuracy`. The test split is measured by the
    last round only."""
    labels: PseudoLabelInfo | None = None
    """The pseudo labels that the model learned from."""


def run_rounds(
    config: NoisyStudentConfig,
    folder: Path,
    log: Log | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Round]:
    """Run all rounds in `folder`, and return them with the first teacher in front. Finished rounds are not repeated.
    `on_progress` receives the number of images that a teacher has labelled, and the number of all images.

    All settings are checked before anything is written. Raises `UserError` for settings, data and teachers that cannot
    work, and for a folder with rounds of other settings. Raises the errors of `train` and `label_images`.
    """
    log, (splits, pool) = log or Log(), _checked(config)
    record = {
        "format": FORMAT,
        "teacher": None if config.rounds.teacher is None else teacher_facts(config.rounds.teacher).sha256,
        "settings": config.to_plain(),
        "fingerprint": fingerprint(splits.train, splits.validation, splits.test, pool),
    }
    with experiment(folder / RECORD, record, "rounds of Noisy Student", "--run"):
        rounds: list[Round] = []
        for number in range(config.rounds.rounds + 1):
            if rounds:
                found = _round(config, folder, number, rounds[-1].model, log, on_progress)
            else:
                found = _first(config, folder, splits, log)
            if number or config.rounds.teacher is None:
                run = read_record(folder / f"round-{number}" / "run").config.run
                own, recorded = ({name: getattr(one, name) for name in LENGTHS} for one in (config.student.run, run))
                if changed := differences(own, recorded):
                    log.note(f"round {number}: its run was extended, unlike other rounds: {'; '.join(changed)}")
            log.say(f"round {number}: validation accuracy {found.metrics['validation_accuracy']:.2%}")
            rounds.append(found)
    return rounds


def _checked(config: NoisyStudentConfig) -> tuple[Splits, Source]:
    """Check the settings, the data and the teacher. Return the splits of the labelled data, and the images to label."""
    student = config.student
    setup = prepare(student, model=open_initial(student.start))
    splits = setup.splits
    if splits.target_kind != "class":
        raise DataError(
            f"{splits.title} has images with several labels, which Noisy Student cannot learn: a teacher predicts one "
            "class; choose data with one label per image"
        )
    if student.task.output != "softmax":
        raise ConfigError(
            f"loss={student.task.output!r} makes a teacher of several classes per image, but a pseudo label is one "
            "class; choose loss='softmax'"
        )
    if splits.validation is None:
        raise ConfigError(
            f"validation_share={student.data.validation_share}: Noisy Student compares its rounds on validation "
            "images, but the data has none; choose a fraction above 0"
        )
    assert setup.network is not None, "the config names a network"
    check_noise(student, setup.network)
    if (teacher := config.rounds.teacher) is not None:
        check_size(setup.network, check_teacher(teacher, splits.classes, splits.title), teacher)
    pool = open_pool(config.pool)
    for split, held_out in (("validation", splits.validation), ("test", splits.test)):
        # The rest of the same data may have copies of its held-out images, as the labelled images may.
        if held_out is not None and (shared := shared_images(pool, held_out, of_any_name=not config.pool.rest)):
            raise DataError(
                f"unlabelled={config.pool.spec!r} contains {plural(len(shared), 'image')} of the {split} split of "
                f"{splits.title}, such as {printable(held_out.key(shared[0]))}; held-out images must not be labelled: "
                "remove them, or name other images"
            )
    return splits, pool


def _first(config: NoisyStudentConfig, folder: Path, splits: Splits, log: Log) -> Round:
    """Return round 0: the teacher that the user named, or the student's network after training on labelled images."""
    if (teacher := config.rounds.teacher) is not None:
        assert splits.validation is not None, "the data was checked"
        return Round(0, teacher, {"validation_accuracy": _accuracy(teacher, splits.validation, config.student)})
    log.say("round 0: the first teacher learns")
    place = folder / "round-0" / "run"
    metrics, _ = complete_run(config.round_config(str(place), None), log=log, measure_test=False)
    return Round(0, str(place), metrics)


def _round(
    config: NoisyStudentConfig,
    folder: Path,
    number: int,
    teacher: str,
    log: Log,
    on_progress: Callable[[int, int], None],
) -> Round:
    """Return a round that `teacher` begins: an earlier one, the rest of one that was stopped, or a new one."""
    place = folder / f"round-{number}"
    labels = place / "labels"
    if not looks_like_pseudo_labels(labels):
        log.say(f"round {number}: {teacher} labels images")
        info = label_images(
            teacher, config.pool, config.labelling, labels, seed=config.student.run.seed,
            device=config.student.run.device, readers=config.student.run.readers,
            precision="float32" if config.student.run.precision == "float32" else "auto",
            on_progress=on_progress,
        )  # fmt: skip
    elif (
        (info := read_info(labels))
        and files_of(teacher, "model.json")  # the model of a finished round may be deleted
        and info.teacher_sha256 != check_classifier(teacher).sha256
    ):
        raise RunError(
            f"{labels} has labels of another teacher: the weights of {teacher} have changed; delete {place} to begin "
            "this round again"
        )
    log.say(f"round {number}: {label_sentence(info)}")
    log.say(f"round {number}: the student learns")
    run = config.round_config(str(place / "run"), str(labels))
    # The data is opened here, because a run that continues in a moved folder has recorded the old path of the labels.
    data = run.data.open_whole()
    metrics, _ = complete_run(run, data=data, log=log, measure_test=number == config.rounds.rounds)
    return Round(number, str(place / "run"), metrics, info)


def _accuracy(model: str, source: Source, config: TrainConfig) -> float:
    """Return the accuracy of a teacher on the images of a source that have a label."""
    bundle = load_teacher(model, config.run.device)
    found = Outputs(bundle, readers=config.run.readers).predictions(source).labelled()
    order = np.array([source.classes.index(name) for name in bundle.classes])
    return float(found.truth.hits(order[found.logits.argmax(axis=1)]).mean())


# Pseudo labels: a teacher predicts classes, and equally many confident images of each class are chosen.


@dataclass(frozen=True, kw_only=True)
class Labelling(Checked):
    """The choice of pseudo labels."""

    pseudo_labels: LabelKind = "soft"
    """Part of the teacher's predictions that is learned: all probabilities (soft), or the most likely class (hard)."""
    confidence: float = setting(0.3, least=0, most=1)
    """Least probability of the teacher's most likely class. Images below it are not used."""
    balance: bool = True
    """Use equally many images of each predicted class. A class with too many keeps the most confident ones, and a class
    with too few repeats them."""
    images_per_class: int | None = setting(None, least=1, most=1_000_000)
    """Images of each predicted class, with repetitions. By default the mean over the classes. The paper has 130,000."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.images_per_class is not None and not self.balance:
            yield f"images_per_class={self.images_per_class} has no effect without balance; leave one of them out"


def label_images(
    teacher: str,
    pool: Pool,
    labelling: Labelling,
    folder: Path,
    *,
    seed: int = 0,
    device: str = "auto",
    precision: Precision = "auto",
    readers: Readers = Readers(),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> PseudoLabelInfo:
    """Label the images of a pool, and write the chosen ones into `folder` as a data set. Return what was written.

    The teacher predicts without noise: in evaluation mode, and with its own preprocessing. Images that cannot be
    decoded are skipped. Raises `ConfigError` for a model that cannot be a teacher, `DataError` if no image is confident
    enough, `BundleError` if predictions are not finite, and `SaveError`.
    """
    facts = check_classifier(teacher)
    source = open_pool(pool)
    predicted = _Predicted(source, facts.classes, labelling.confidence, teacher, on_progress)
    outputs = Outputs(load_teacher(teacher, device), batch_size=None, readers=readers, precision=precision)
    skipped = outputs.each_batch(source, predicted.take)
    positions, probabilities = predicted.confident()
    rows = choose_rows(positions, probabilities, labelling, seed)
    place = expanded(teacher)
    info = PseudoLabelInfo(
        pool=pool, fingerprint=fingerprint(source),
        teacher=str(place.absolute()) if place.exists() else teacher, teacher_sha256=facts.sha256,
        labels=labelling.pseudo_labels, confidence=labelling.confidence, balance=labelling.balance,
        images_per_class=labelling.images_per_class, seed=seed, images=len(source), unreadable=len(skipped),
        counts=tuple(_counts(facts.classes, predicted.counts, probabilities, rows)),
    )  # fmt: skip
    write_pseudo_labels(folder, info, rows, source)
    return info


def choose_rows(
    positions: Int64[np.ndarray, " n"],
    probabilities: Float32[np.ndarray, "n classes"],
    labelling: Labelling,
    seed: int,
) -> LabelledRows:
    """Return the rows that are learned from confident predictions. `positions` are the images' indices in their pool,
    in rising order."""
    labels, confidences = probabilities.argmax(axis=1), probabilities.max(axis=1)
    copies = (
        balanced_copies(
            labels, confidences, classes=probabilities.shape[1], per_class=labelling.images_per_class, seed=seed
        )
        if labelling.balance
        else np.ones(len(labels), np.int64)
    )
    used = copies > 0
    soft = probabilities[used] if labelling.pseudo_labels == "soft" else None
    return LabelledRows(positions[used], labels[used], confidences[used], copies[used], soft)


class _Predicted:
    """Collects the confident predictions of a teacher from the batches of a source, which come in order."""

    def __init__(
        self,
        source: Source,
        classes: tuple[str, ...],
        confidence: float,
        teacher: str,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self.counts = np.zeros(len(classes), np.int64)
        self.least, self.highest = confidence, 0.0
        self._source, self._teacher, self._on_progress = source, teacher, on_progress
        self._done = 0
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []

    def take(self, batch: Batch, outputs: Tensor) -> None:
        """Add a batch. Raise `BundleError` if an output is not finite."""
        valid = batch.valid.cpu()
        logits = outputs.double().cpu()[valid]
        positions = batch.samples.cpu()[valid].numpy()
        if not (finite := torch.isfinite(logits).all(dim=1)).all():
            key = self._source.key(int(positions[int(finite.int().argmin())]))
            raise BundleError(
                f"teacher {self._teacher} has outputs that are not finite, such as for {key!r}; its weights are "
                "damaged, or its training diverged"
            )
        probabilities = logits.softmax(dim=1).float().numpy()
        self.counts += np.bincount(probabilities.argmax(axis=1), minlength=len(self.counts))
        self.highest = max(self.highest, float(probabilities.max(initial=0.0)))
        chosen = is_confident(probabilities, self.least)
        self._parts.append((positions[chosen], probabilities[chosen]))
        self._done += len(batch)
        self._on_progress(self._done, len(self._source))

    def confident(self) -> tuple[Int64[np.ndarray, " n"], Float32[np.ndarray, "n classes"]]:
        """Return the positions and the probabilities of the confident images. Raise `DataError` if there are none."""
        positions, probabilities = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        if not len(positions):
            raise DataError(
                f"confidence={self.least} is reached by none of {plural(len(self._source), 'image')}: the highest is "
                f"{self.highest:.3f}; choose a lower confidence, or a better teacher"
            )
        return positions, probabilities


def _counts(
    classes: tuple[str, ...],
    predicted: Int64[np.ndarray, " classes"],
    confident: Float32[np.ndarray, "n classes"],
    rows: LabelledRows,
) -> Iterator[ClassCounts]:
    """Yield the numbers of images of each class."""
    count = len(classes)
    columns = (
        predicted,
        np.bincount(confident.argmax(axis=1), minlength=count),
        np.bincount(rows.labels, minlength=count),
        np.bincount(rows.labels, rows.copies, minlength=count).astype(np.int64),
    )
    for label, *numbers in zip(classes, *(column.tolist() for column in columns), strict=True):
        yield ClassCounts(
            label=label, predicted=numbers[0], confident=numbers[1], different=numbers[2], chosen=numbers[3]
        )


def label_sentence(info: PseudoLabelInfo) -> str:
    """Return a sentence about the numbers of images."""
    confident, different, chosen = (
        sum(getattr(count, name) for count in info.counts) for name in ("confident", "different", "chosen")
    )
    unreadable = f"; {info.unreadable:,} cannot be decoded" if info.unreadable else ""
    empty = sum(not count.chosen for count in info.counts)
    classes = f"; {empty} of {len(info.counts)} classes have none" if empty else ""
    return (
        f"{confident:,} of {info.images:,} images have a class of probability {info.confidence:g} or more{unreadable}. "
        f"Chosen: {different:,} different images, {chosen:,} with repetitions{classes}"
    )


# The settings of Noisy Student: the student's run, the images without labels, and the rounds.


@dataclass(frozen=True, kw_only=True)
class Rounds(Checked):
    """The rounds of Noisy Student."""

    teacher: str | None = None
    """Model that labels images in the first round: a run, a model's folder or file, or a name on the hub. By default,
    the student's network is first trained on the labelled images alone."""
    unlabelled: str | None = None
    """Images to label, in any form of --data; their own labels are not used. By default the training images that an
    amount such as --data bundled[:500] or --per-class does not select."""
    rounds: int = setting(3, least=1)
    """Number of students. Each student is the teacher of the next one."""
    pseudo_ratio: float = setting(3.0, least=1e-5, most=100_000)
    """Images with pseudo labels per labelled image of a batch. The paper has 14 for its largest networks."""


@dataclass(frozen=True, kw_only=True)
class NoisyStudentConfig(Checked):
    """The whole config of Noisy Student. Raises `ConfigError` if its parts contradict each other."""

    student: TrainConfig
    """The run of each student, on the labelled images. Pseudo-labelled images are mixed in."""
    rounds: Rounds = field(default_factory=Rounds)
    labelling: Labelling = field(default_factory=Labelling)

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
    if not config.augment.is_random_for(config.images) and not any(rates):
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
