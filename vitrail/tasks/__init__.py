"""Tasks, one file each: what training needs of the data, its objective, its metrics and the model that it saves."""

from __future__ import annotations

from vitrail.tasks.classification import Classification
from vitrail.tasks.regression import Regression
from vitrail.tasks.task import Task

__all__ = ["TASKS", "Classification", "Regression", "Task"]

TASKS: dict[str, type[Task]] = {task.name: task for task in (Classification, Regression)}
"""Every task by its name."""
