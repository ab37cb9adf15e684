"""Search in the features that `vitrail embed` wrote: the images that resemble an image or a text most."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Float32

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.classifiers.nearest import lengths_of, nearest
from vitrail.evaluation.features.extract import FeatureSet
from vitrail.evaluation.features.feature_files import about_features, feature_folders, load_features
from vitrail.settings import from_plain, to_plain, typed
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.exported import ExportedNetwork

IDENTITY = ("weights_sha256", "config", "preprocess")
"""Entries of the description of features that tell their model from others."""

UNUSED = frozenset(
    {"num_classes", "head_bias", "initial_weights", "position_std", "position_resize", "dropout", "patch_dropout",
     "stochastic_depth", "skip_dropped"}
)  # fmt: skip
"""Settings of networks that do not change the features of an image, so that another layout may store other values."""

Difference = Literal["weights", "settings", "preprocessing"]
"""Part in which a model differs from the one that computed features. Its settings are those of its network."""


class Similar(NamedTuple):
    """A stored image that resembles a query."""

    row: int
    """Its place among the stored features."""
    image: str
    """Its path, or its key if it is not a file."""
    cosine: float
    label: Any
    """The name of its class, the names of its classes, its numbers by name, or None."""


@dataclass(frozen=True, eq=False)
class FeatureIndex:
    """The features of the images of all splits. Every search is exact: it computes the cosines with all of them.

    index = FeatureIndex.open("features")
    model = vitrail.load("clip")
    index.check(model)
    (found,) = index.search(model.embed_texts(["a red car at night"]).numpy(), top=5)
    """

    path: Path
    """Folder of the features."""
    features: Float32[np.ndarray, "n d"]
    images: tuple[str, ...]
    """Paths of the images, or their keys if they are not files."""
    labels: tuple[Any, ...]
    about: Mapping[str, Any]
    """Description that `vitrail embed` wrote beside the features: the model, its weights and its preprocessing."""

    @classmethod
    def open(cls, path: str | Path) -> FeatureIndex:
        """Return the features in an output of `vitrail embed`, or in the folder of one of its splits. Raise `DataError`
        if there are none, and if those of the splits are of different models."""
        folders = feature_folders(path)
        parts = [(load_features(folder), about_features(folder)) for folder in folders]
        rule = "name the folder of one split"
        widths = sorted({part.width for part, _ in parts})
        if len(widths) > 1:
            raise DataError(
                f"{folders[0].parent} holds features of different widths ({', '.join(map(str, widths))}), so of "
                f"different models; {rule}"
            )
        about = parts[0][1]
        for folder, (_, other) in zip(folders, parts, strict=True):
            if any(other.get(name) != about.get(name) for name in IDENTITY):
                raise DataError(f"{folder} and {folders[0]} hold features of different models; {rule}")
        images = [_path(other.get("folder"), key) for part, other in parts for key in part.keys]
        if not images:
            raise DataError(f"{folders[0]} holds the features of no image")
        labels = [_label(part, row) for part, _ in parts for row in range(len(part))]
        features = parts[0][0].features if len(parts) == 1 else np.concatenate([part.features for part, _ in parts])
        return cls(folders[0], features, tuple(images), tuple(labels), about)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def weights_sha256(self) -> str | None:
        """Hash of the weights that computed the features, or None if it was not recorded."""
        return self.about.get("weights_sha256")

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width for which the model computed the features, or None if they were not recorded."""
        size = self.about.get("image_size")
        return (int(size[0]), int(size[1])) if isinstance(size, list) and len(size) == 2 else None

    @functools.cached_property
    def preprocess(self) -> Preprocess:
        """Preprocessing with which the features were computed."""
        return from_plain(Preprocess, self.about["preprocess"])

    @functools.cached_property
    def _lengths(self) -> Float32[np.ndarray, " n"]:
        return lengths_of(self.features)

    def difference(self, bundle: Bundle, sha256: str | None = None) -> Difference | None:
        """Return the first part in which a model differs from the one that computed the features, or None. `sha256` is
        the hash of the model's weights, if it is known. Nothing is compared that the features do not record."""
        if self.weights_sha256 not in (None, weights_sha256(bundle.network) if sha256 is None else sha256):
            return "weights"
        if "config" in self.about:
            config = bundle.network.config
            recorded = to_plain(from_plain(type(config), self.about["config"]))
            if any(value != recorded[name] for name, value in to_plain(config).items() if name not in UNUSED):
                return "settings"
        network: Any = bundle.network
        is_text_tower = isinstance(network, ExportedNetwork) and network.interface.reads_texts  # it takes no images
        if "preprocess" in self.about and bundle.preprocess != self.preprocess and not is_text_tower:
            return "preprocessing"
        return None

    def check(self, bundle: Bundle, name: str = "the model", *, any_preprocess: bool = False) -> None:
        """Raise `ConfigError` for another model than the one that computed the features, as `difference` tells. With
        `any_preprocess`, the model may prepare images in another way, because the caller changes that."""
        found = self.difference(bundle)
        if found is not None and not (found == "preprocessing" and any_preprocess):
            raise ConfigError(
                f"{name} has other {found} than the model that computed the features in {self.path}, so their cosines "
                "cannot be compared; name that model with --model, or compute the features again with vitrail embed"
            )

    def search(self, vectors: Float[np.ndarray, "m d"], top: int = 5) -> list[list[Similar]]:
        """Return the `top` images that resemble each vector most, the most similar one first. Images that are equally
        similar are in the order in which they are stored. Raise `DataError` for vectors of another width and for an
        array that is not made of rows, and `ConfigError` for a `top` that is not a number from 1 on."""
        vectors, top = np.asarray(vectors), typed(int, top, "top")
        if vectors.ndim != 2:
            raise DataError(f"vectors of shape {vectors.shape} must be rows, (number of queries, width)")
        return [
            [
                Similar(row, self.images[row], cosine, self.labels[row])
                for row, cosine in zip(rows, cosines, strict=True)
            ]
            for part in nearest(self.features, vectors, min(top, len(self)), lengths=self._lengths)
            for rows, cosines in zip(part.indices.tolist(), part.similarities.tolist(), strict=True)
        ]


def _path(folder: Any, key: str) -> str:
    return str(Path(folder) / key) if isinstance(folder, str) else key


def _label(features: FeatureSet, row: int) -> Any:
    """Return the class, the classes or the numbers of a stored image by their names, its texts, or None."""
    value: Any = features.truth.plain(row)
    names = features.classes
    if value is None or features.truth.kind == "texts":
        return value
    if features.truth.kind == "numbers":
        return dict(zip(names, value, strict=True))
    return [names[number] for number in value] if isinstance(value, list) else names[value]
