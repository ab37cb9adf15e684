"""The choice of data: which data set to train on, how much of it, and what is held out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vitrail.data.source import Source
from vitrail.data.sources import OpenedData, open_mixed, open_whole
from vitrail.data.splits import Splits
from vitrail.settings import at_least, below_one, named, raise_problems

__all__ = ["DataConfig"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data of a run. Raises `ConfigError`, naming every field that does not fit, when it is made."""

    spec: str = field(default="bundled", metadata=named("data"))
    """Data set: a folder with a folder per class, a table, shards, or a name such as fashion-mnist. In full: a folder
    of class folders (with or without train/, val/, test/), a table (.csv, .tsv, .jsonl), tar shards, Parquet,
    hf:ORG/NAME, fractals:CLASSES:SAMPLES, a folder of IDX files, fashion-mnist or bundled. With [:1000] or [:10%]
    behind it, only that part of the training images is used."""
    numbers: tuple[str, ...] = ()
    """Numeric columns of a table that are learned, with --task regression. An empty cell is an unknown number."""
    mix: tuple[str, ...] = ()
    """More data to train on, each with its fraction of the images: 0.3:fractals:1000:100. Its held-out splits are not
    used."""
    per_class: int | None = None
    """Training images per class. By default all are used."""
    subset_seed: int = 0
    """Random seed of the choice of images for --per-class and for a part of the data."""
    validation_share: float = 0.1
    """Fraction of the training images that is held out if the data has no validation split; 0 for none."""
    max_skipped: float = 0.01
    """Fraction of the training images that may fail to decode before the run stops. At least three failures are
    tolerated unless this is 0 (of fewer than 30 images, a tenth)."""

    def __post_init__(self) -> None:
        problems = [*at_least(self, per_class=1, subset_seed=0), *below_one(self, "validation_share")]
        if not 0 <= self.max_skipped <= 1:
            problems.append(f"max_skipped={self.max_skipped} is not in [0, 1]")
        raise_problems(problems)

    def open(self, *, unlabelled: bool = False) -> Splits:
        """Return the splits, with everything of `mix` in the training split. Raises `DataError`.

        With `unlabelled`, data without classes is opened as well.
        """
        return self.cut(self.open_whole(unlabelled=unlabelled))

    def open_whole(self, *, unlabelled: bool = False) -> OpenedData:
        """Open the data and everything of `mix`, and leave the choice of splits to `cut`. Raises `DataError`."""
        opened = open_whole(self.spec, numbers=self.numbers, unlabelled=unlabelled)
        return replace(opened, mixed=open_mixed(opened.whole, self.mix))

    def cut(self, data: Source | Splits | OpenedData) -> Splits:
        """Return the splits of data that is open already, as `open` does for the data that `spec` names.

        Configs that differ only in the validation fraction and the amount of training images can share open data.
        """
        if not isinstance(data, OpenedData):
            whole = data if isinstance(data, Splits) else Splits(data, None, None)
            data = OpenedData("", whole, open_mixed(whole, self.mix))
        return data.splits(
            validation_share=self.validation_share, per_class=self.per_class, subset_seed=self.subset_seed
        )
