"""The studies: one module for each question, and the table of their names."""

from __future__ import annotations

from vitrail.studies.questions.head import HEAD
from vitrail.studies.questions.positions import POSITIONS
from vitrail.studies.study import Study

__all__ = ["STUDIES"]

STUDIES: dict[str, Study] = {study.name: study for study in (POSITIONS, HEAD)}
"""All studies by name."""
