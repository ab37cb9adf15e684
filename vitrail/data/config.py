"""The choice of data: which data set to train on, how much of it, and what is held out."""

from __future__ import annotations

from dataclasses import dataclass, field

from vitrail.data.source import Source
from vitrail.data.sources import OpenedData, mix_in, open_data
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
        splits = open_data(
            self.spec,
            validation_share=self.validation_share,
            per_class=self.per_class,
            subset_seed=self.subset_seed,
            numbers=self.numbers,
            unlabelled=unlabelled,
        )
        return mix_in(splits, self.mix)

    def cut(self, data: Source | Splits) -> Splits:
        """Return the splits of data that is open already, as `open` does for the data that `spec` names."""
        whole = data if isinstance(data, Splits) else Splits(data, None, None)
        splits = OpenedData("", whole).splits(
            validation_share=self.validation_share, per_class=self.per_class, subset_seed=self.subset_seed
        )
        return mix_in(splits, self.mix)
