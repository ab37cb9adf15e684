"""The data of a study: it is opened once, and checked before the first cell runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from vitrail.data.colour import colours_in, images_of
from vitrail.data.source import fingerprint
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError, plural
from vitrail.studies.small import data_config
from vitrail.studies.study import Point, Scale, Settings

__all__ = ["StudyData", "check_subsets", "open_study_data"]

AMOUNT = re.compile(r".*\[[^\[\]]*\]", re.S)

COUNT = re.compile(r"\[:(\d+)\]$")


class StudyData(NamedTuple):
    """The data of a study, and the settings that follow from it."""

    settings: Settings
    splits: Splits
    fingerprint: str


def open_study_data(spec: str, scale: Scale) -> StudyData:
    """Open the data of a study.

    Raises `ConfigError` if the spec has an amount of its own, and `DataError` for data without one class per image or
    without a test split.
    """
    if AMOUNT.fullmatch(spec):
        raise ConfigError(f"data={spec!r} selects an amount, but the study selects its subsets; leave the brackets out")
    splits = data_config(spec).open()
    if splits.target_kind != "class":
        raise DataError(f"data {spec!r} has no single class for each image; a study needs classes to predict")
    if splits.test is None or splits.validation is None:
        raise DataError(
            f"data {spec!r} has no test split; a study reports results on test images, so add a folder test/ or files "
            "whose names begin with test"
        )
    settings = Settings(
        scale=scale,
        data=spec,
        images=len(splits.train),
        classes=len(splits.classes),
        channels=3 if any(colours_in(images_of(splits.train))) else 1,
    )
    return StudyData(settings, splits, fingerprint(splits.train, splits.validation, splits.test))


def check_subsets(points: Sequence[Point], data: StudyData) -> None:
    """Raise `DataError` if the training images of a point are fewer than the classes, or miss a class."""
    for config in dict.fromkeys(stage.config.data for point in points for stage in point.stages):
        count = COUNT.search(config.spec)
        if count is None or not config.spec.startswith(data.settings.data):
            continue
        images, classes = int(count[1]), data.settings.classes
        if images < classes:
            raise DataError(
                f"data {config.spec!r}: a subset of {plural(images, 'image')} is smaller than its {classes} classes; "
                f"choose data of more images, or fewer classes"
            )
        chosen = config.open().train
        present = {chosen.target(index) for index in range(len(chosen))}
        if missing := [name for label, name in enumerate(chosen.classes) if label not in present]:
            raise DataError(
                f"data {config.spec!r}: a subset of {images} images has none of the class {missing[0]!r}; choose data "
                "of more images for each class"
            )
