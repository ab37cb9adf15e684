"""The studies: one module for each question, and the table of their names."""

from __future__ import annotations

from vitrail.studies.questions.attention import ATTENTION
from vitrail.studies.questions.augmentation import AUGMENTATION
from vitrail.studies.questions.compute import COMPUTE
from vitrail.studies.questions.data_size import DATA_SIZE
from vitrail.studies.questions.head import HEAD
from vitrail.studies.questions.optimizer import OPTIMIZER
from vitrail.studies.questions.positions import POSITIONS
from vitrail.studies.questions.shape import SHAPE
from vitrail.studies.questions.transfer import TRANSFER
from vitrail.studies.study import Study

__all__ = ["STUDIES"]

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        POSITIONS,
        DATA_SIZE,
        COMPUTE,
        SHAPE,
        HEAD,
        OPTIMIZER,
        ATTENTION,
        AUGMENTATION,
        TRANSFER,
    )
}
"""All studies by name."""
