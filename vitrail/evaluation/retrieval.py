"""Evaluators of models with a text tower: retrieval, and zero-shot classification.

Retrieval finds the texts of an image among all texts, and the image of a text among all images. Zero-shot
classification reads the names of the classes and learns from no image."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from vitrail.data.source import Source, check_known, target_kind
from vitrail.errors import DataError
from vitrail.evaluation.evaluators import COUNTS, Bootstrapped
from vitrail.evaluation.head import ByAccuracy
from vitrail.evaluation.metrics.intervals import interval_or_wilson, resampled_means, with_intervals
from vitrail.evaluation.outputs import Outputs
from vitrail.weights.zero_shot import NUMBER, read_templates, zero_shot

KS = (1, 5, 10)

METRICS = {
    "mean_recall": "mean recall",
    **{f"image_to_text_{k}": f"image to text R@{k}" for k in KS},
    **{f"text_to_image_{k}": f"text to image R@{k}" for k in KS},
}
"""Names of the metrics, and their names in texts. R@k is the fraction of images (or texts) for which a right text (or
image) is among the k most similar ones. The mean recall is the mean of all six."""

BLOCK = 1024
"""Number of rows of similarities that are computed together."""


@dataclass(frozen=True)
class ByRetrieval(Bootstrapped):
    """R@1, R@5 and R@10 in both directions, with intervals. Each of several texts of an image is right, and equal texts
    count as one. Of equally similar ones, those that are wrong come first."""

    def check(self, outputs: Outputs, train: Source, held_out: Source) -> None:
        """Raise `ConfigError` for a model without a text tower, and `DataError` for data without texts."""
        outputs.bundle.reader_of_texts()
        if target_kind(held_out) != "texts":
            raise DataError(
                "retrieval needs images with texts, and this data has none; use data with a column such as text or "
                "caption, choose one by adding ?text=COLUMN, or measure classes by zeroshot. If the data has texts "
                "beside other targets, measure retrieval alone"
            )

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the metrics of `METRICS`, and the counts `images`, `texts` and `skipped`. Without an image with a
        text, only the counts are returned. Raise the errors of `check`."""
        self.check(outputs, train, held_out)
        return self.of(embedded(outputs, held_out))

    def of(self, pairs: EmbeddedPairs) -> dict[str, float]:
        """Return the metrics of embeddings."""
        images, texts, owners, places = pairs.images, pairs.texts, pairs.owners, pairs.places
        counts = {"images": float(len(images)), "texts": float(len(texts)), "skipped": float(pairs.skipped)}
        if not len(images):
            return counts
        of_images = best_ranks(images, texts, owners, places)
        of_texts = best_ranks(texts, images, places, owners)
        first_owner = np.zeros(len(texts), np.int64)
        first_owner[places[::-1]] = owners[::-1]

        def per_image(values: np.ndarray) -> np.ndarray:
            return np.bincount(first_owner, weights=values, minlength=len(images))

        columns = [of_images < k for k in KS] + [per_image(of_texts < k) for k in KS] + [per_image(of_texts >= 0)]
        values = np.stack(columns, axis=1).astype(np.float64)
        means = resampled_means(values, resamples=self.bootstrap, seed=0).reshape(-1, len(columns))
        recalls = zip(METRICS, _recalls(values.mean(axis=0)[None])[0].tolist(), _recalls(means).T, strict=True)
        found = {name: interval_or_wilson(value, resampled, len(images)) for name, value, resampled in recalls}
        return {**with_intervals(found), **counts}


def _recalls(means: Float64[np.ndarray, "n 7"]) -> Float64[np.ndarray, "n 7"]:
    """Return the metrics of `METRICS` from the means over images of the hits of images and of texts, and of the number
    of texts."""
    each = np.concatenate([means[:, :3], means[:, 3:6] / means[:, 6:].clip(min=1e-12)], axis=1)
    return np.concatenate([each.mean(axis=1, keepdims=True), each], axis=1)


@dataclass(frozen=True)
class EmbeddedPairs:
    """The embeddings of images with texts, and those of their different texts. All have length 1."""

    images: Float[Tensor, "n width"]
    texts: Float[Tensor, "t width"]
    owners: Int64[np.ndarray, " p"]
    """The image of each pair of an image and one of its texts, in the order of the images."""
    places: Int64[np.ndarray, " p"]
    """The text of each pair."""
    skipped: int


def embedded(outputs: Outputs, held_out: Source) -> EmbeddedPairs:
    """Return the embeddings of all images that can be decoded and have a text. A note says which texts are cut."""
    features = outputs.features(held_out)
    known = np.flatnonzero(features.truth.known)
    truth = features.truth.rows(known)
    assert truth.texts is not None and truth.starts is not None, "the targets are texts"
    images = F.normalize(torch.from_numpy(np.ascontiguousarray(features.features[known])), dim=1)
    rows, places = np.unique(truth.values, return_inverse=True)
    texts = images[:0]
    if len(rows):
        texts, notes = outputs.bundle.reader_of_texts().embed([truth.texts[row] for row in rows.tolist()])
        for note in notes:
            outputs.note(note)
    owners = np.repeat(np.arange(len(known)), np.diff(truth.starts))
    return EmbeddedPairs(images, texts, owners, places.astype(np.int64), len(features.skipped))


def best_ranks(
    queries: Float[Tensor, "q width"],
    answers: Float[Tensor, "a width"],
    query_of: Int64[np.ndarray, " n"],
    answer_of: Int64[np.ndarray, " n"],
) -> Int64[np.ndarray, " q"]:
    """Return, for each query, the number of wrong answers that are at least as similar as the best right one. Pair i is
    the query `query_of[i]` with the right answer `answer_of[i]`."""
    ranks = torch.empty(len(queries), dtype=torch.int64)
    order = np.argsort(query_of, kind="stable")
    ends = np.searchsorted(query_of[order], np.arange(len(queries) + 1))
    for start in range(0, len(queries), BLOCK):
        likeness = queries[start : start + BLOCK] @ answers.T
        chosen = order[ends[start] : ends[min(start + BLOCK, len(queries))]]
        right = torch.zeros(likeness.shape, dtype=torch.bool)
        right[torch.from_numpy(query_of[chosen] - start), torch.from_numpy(answer_of[chosen])] = True
        best = likeness.masked_fill(~right, -torch.inf).amax(dim=1, keepdim=True)
        ranks[start : start + BLOCK] = (~right & ~(likeness < best)).sum(dim=1)
    return ranks.numpy()


@dataclass(frozen=True)
class ByZeroShot(Bootstrapped):
    """Metrics of a classifier whose head is made from the names of the data's classes (`vitrail.weights.zero_shot`)."""

    templates: str = "usual"
    """Texts around the name of a class: usual (a photo of a {}.), imagenet (80), short (7), or a file with a text that
    contains {} in each line. The embeddings of all texts of a class are averaged."""

    def __post_init__(self) -> None:
        super().__post_init__()
        read_templates(self.templates)

    def check(self, outputs: Outputs, train: Source, held_out: Source) -> None:
        """Raise `ConfigError` for a model without a text tower, and `DataError` if the data has no classes."""
        outputs.bundle.reader_of_texts()
        if check_known(held_out, "zeroshot").kind == "numbers" or not held_out.classes:
            raise DataError("zeroshot needs classes with names, but the targets of this data have none")

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the metrics of `ByAccuracy`, such as `zeroshot_accuracy`. Raise the errors of `check`."""
        self.check(outputs, train, held_out)
        if all(map(NUMBER.fullmatch, held_out.classes)):
            outputs.note(
                f"zeroshot: the names of the classes are only numbers, such as {held_out.classes[0]!r}, so texts with "
                "them do not say what the images show; name the classes in words"
            )
        bundle = zero_shot(outputs.bundle, held_out.classes, templates=self.templates, readable=True)
        for note in bundle.notes[len(outputs.bundle.notes) :]:
            outputs.note(note)
        found = ByAccuracy(bootstrap=self.bootstrap)(replace(outputs, bundle=bundle), train, held_out)
        return {name if name in COUNTS else f"zeroshot_{name}": value for name, value in found.items()}
