"""Pseudo labels: a teacher predicts classes, and equally many confident images of each class are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from vitrail.data.batch import Batch
from vitrail.data.confidence import balanced_copies, is_confident
from vitrail.data.pipeline import Readers
from vitrail.data.source import Source, fingerprint
from vitrail.data.sources import open_pool
from vitrail.data.sources.pseudo_labels import (
    ClassCounts,
    LabelKind,
    LabelledRows,
    Pool,
    PseudoLabelInfo,
    write_pseudo_labels,
)
from vitrail.errors import BundleError, DataError, plural
from vitrail.evaluation.predictions.predict import each_batch
from vitrail.machine import Precision
from vitrail.models.cost.batch import prediction_batch
from vitrail.settings import at_least, one_of, raise_problems
from vitrail.tasks.teacher import check_classifier, load_teacher

__all__ = ["Labelling", "choose_rows", "label_images"]


@dataclass(frozen=True, kw_only=True)
class Labelling:
    """The choice of pseudo labels. Raises `ConfigError` if fields have invalid values. The message names all of
    them."""

    pseudo_labels: LabelKind = "soft"
    """Part of the teacher's predictions that is learned: all probabilities (soft), or the most likely class (hard)."""
    confidence: float = 0.3
    """Least probability of the teacher's most likely class. Images below it are not used."""
    balance: bool = True
    """Use equally many images of each predicted class. A class with too many keeps the most confident ones, and a class
    with too few repeats them."""
    images_per_class: int | None = None
    """Images of each predicted class, with repetitions. By default the mean over the classes. The paper has 130,000."""

    def __post_init__(self) -> None:
        problems = [*at_least(self, images_per_class=1), *one_of(self, pseudo_labels=LabelKind)]
        if not 0 <= self.confidence <= 1:
            problems.append(f"confidence={self.confidence} is not in [0, 1]")
        if self.images_per_class is not None and not self.balance:
            problems.append(
                f"images_per_class={self.images_per_class} has no effect without balance; leave one of them out"
            )
        raise_problems(problems)


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
    bundle = load_teacher(teacher, device)
    skipped = each_batch(
        bundle.network,
        source,
        bundle.preprocess,
        predicted.take,
        batch_size=prediction_batch(bundle.network, bundle.preprocess.image_size, bundle.device, precision),
        readers=readers,
        precision=precision,
        on_skip=None,
    )
    positions, probabilities = predicted.confident()
    rows = choose_rows(positions, probabilities, labelling, seed)
    info = PseudoLabelInfo(
        pool=pool, fingerprint=fingerprint(source), teacher=_place_of(teacher), teacher_sha256=facts.sha256,
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
    copies = np.ones(len(labels), np.int64)
    if labelling.balance:
        copies = balanced_copies(
            labels, confidences, classes=probabilities.shape[1], per_class=labelling.images_per_class, seed=seed
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


def _place_of(model: str) -> str:
    """Return the absolute path of a model on the disk, or its name."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model
