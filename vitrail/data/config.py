"""The choice of data: which data set to train on, how much of it, and what is held out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vitrail.data.pixels.decode import allow_pixels
from vitrail.data.source import Source
from vitrail.data.sources import OpenedData, open_mixed, open_whole
from vitrail.data.splits import SLICE, CutMethod, Splits, check_validation
from vitrail.settings import Effect, problems, raise_problems, setting


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data of a run. Raises `ConfigError` if a field is invalid; the message names every invalid field."""

    spec: str = setting(
        "bundled", name="data", on_resume="its images and labels must be those of the run", metavar="SPEC"
    )
    """Data set: a folder with a folder per class, a table, shards, or a name such as fashion-mnist. All forms: a folder
    of class folders (with or without train/, val/, test/), a table (.csv, .tsv, .jsonl), tar shards, Parquet,
    hf:ORG/NAME, fractals:CLASSES:SAMPLES, scenes:SAMPLES, a folder of IDX files, fashion-mnist or bundled. The suffix
    [:1000] or [:10%] selects that number or percentage of the training images."""
    numbers: tuple[str, ...] = setting((), commas=True)
    """Numeric columns of a table that --task regression learns. An empty cell is an unknown number."""
    mix: tuple[str, ...] = ()
    """More training data, as FRACTION:SPEC. For example, 0.3:fractals:1000:100 draws 30 % of the training images from
    fractals. Only the training split of this data is used."""
    per_class: int | None = setting(None, least=1)
    """Training images per class. By default all are used."""
    subset_seed: int = setting(
        0,
        effect=Effect(
            lambda data: data.per_class is not None or data.spec.endswith("]"),
            "with --per-class or an amount such as [:1000] after --data",
            by_user=True,
        ),
        least=0,
    )
    """Random seed that selects the images for --per-class and for an amount such as [:1000]."""
    validation: str = "auto"
    """Images that select the weights. auto: the data's validation split, or a part of the training images if there is
    no such split. train: always a part of the training images; the data's own validation split is then the test split.
    A slice such as train[-10000:] or train[99%:] holds out the training images at these positions."""
    validation_share: float = setting(
        0.1,
        effect=Effect(
            lambda data: SLICE.fullmatch(data.validation) is None,
            "unless --validation is a slice of the training images",
            by_user=True,
        ),
        least=0,
        below=1,
    )
    """Fraction of the training images held out if there is no validation split; 0 for none."""
    cut_method: CutMethod = "stratified"
    """Method that holds out and selects training images by a hash of their names. stratified: exactly the requested
    number of images, and nearly the same fraction of every label. threshold: the method of earlier versions, with at
    least one image per class; if images are added, nearly all others stay in their splits."""
    max_skipped: float = setting(0.01, least=0, most=1)
    """Fraction of the training images that may fail to decode before the run stops. Unless this is 0, at least three
    failures are tolerated, or a tenth of the images if there are fewer than 30."""
    max_pixels: int | None = setting(None, least=1)
    """Largest number of pixels of an image that is decoded; larger images count as undecodable. The default is
    89478485, or the environment variable VITRAIL_MAX_PIXELS."""

    def __post_init__(self) -> None:
        raise_problems([*problems(self), *check_validation(self.validation)])

    def open(self, *, unlabelled: bool = False, texts: bool = False, tolerant: bool = False) -> Splits:
        """Return the splits. The training split includes the data of `mix`. Raises `DataError`.

        With `unlabelled`, data without classes is opened as well. With `texts`, texts are preferred to labels. With
        `tolerant`, faults in the structure of the data are collected in `Splits.faults`.
        """
        return self.cut(self.open_whole(unlabelled=unlabelled, texts=texts, tolerant=tolerant))

    def open_whole(self, *, unlabelled: bool = False, texts: bool = False, tolerant: bool = False) -> OpenedData:
        """Open the data and the data of `mix`, for `cut` to split. Raises `DataError`.

        From then on, `max_pixels` applies to this process and those that it starts.
        """
        self._allow_pixels()
        opened = open_whole(self.spec, numbers=self.numbers, unlabelled=unlabelled, texts=texts, tolerant=tolerant)
        return replace(opened, mixed=open_mixed(opened.whole, self.mix, unlabelled=unlabelled))

    def cut(self, data: Source | Splits | OpenedData, *, unlabelled: bool = False) -> Splits:
        """Return the splits of data that is already open, by the same rules as `open`. `unlabelled` is for the data of
        `mix`, which `OpenedData` has already.

        Configs that differ only in the validation fraction and the amount of training images can share open data.
        """
        self._allow_pixels()
        if not isinstance(data, OpenedData):
            whole = data if isinstance(data, Splits) else Splits(data, None, None)
            data = OpenedData("", whole, open_mixed(whole, self.mix, unlabelled=unlabelled))
        return data.splits(
            validation_share=self.validation_share,
            validation=self.validation,
            per_class=self.per_class,
            subset_seed=self.subset_seed,
            cut_method=self.cut_method,
        )

    def _allow_pixels(self) -> None:
        if self.max_pixels is not None:
            allow_pixels(self.max_pixels)
