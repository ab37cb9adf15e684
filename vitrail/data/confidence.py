"""The choice of predicted labels to learn from: confident ones, with equally many images of each class.

The rules are those of Noisy Student (1911.04252).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int64


def is_confident(probabilities: Float[np.ndarray, "n classes"], least: float) -> Bool[np.ndarray, " n"]:
    """Return a mask of the images whose most likely class has at least the probability `least`."""
    return probabilities.max(axis=1, initial=0.0) >= least


def balanced_copies(
    labels: Int64[np.ndarray, " n"],
    confidences: Float[np.ndarray, " n"],
    *,
    classes: int,
    per_class: int | None = None,
    seed: int = 0,
) -> Int64[np.ndarray, " n"]:
    """Return how often each image is used, so that every class that has images gets `per_class` of them.

    A class with more images keeps the most confident ones, each once. If several images are equally confident, the
    earlier ones are kept. A class with fewer images repeats them: all equally often, and some of them once more. The
    latter are drawn at random, as a function of `seed`, the class and its number of images. A class without images
    stays without. By default, `per_class` is the mean number of images per class, rounded up, over all `classes`
    classes.
    """
    wanted = -(-len(labels) // classes) if per_class is None else per_class
    copies = np.zeros(len(labels), np.int64)
    for label in range(classes):
        rows = np.flatnonzero(labels == label)
        if len(rows) >= wanted:
            copies[rows[np.argsort(-confidences[rows], kind="stable")[:wanted]]] = 1
        elif len(rows):
            whole, more = divmod(wanted, len(rows))
            copies[rows] = whole
            copies[np.random.default_rng((seed, label)).permutation(rows)[:more]] += 1
    return copies
