"""Options and steps that `vitrail report` and `vitrail compare` share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

from vitrail.analysis.cka import SMALLEST_BATCH
from vitrail.cli.evaluating.common import common_images
from vitrail.cli.evaluating.data import open_for_features, open_for_head
from vitrail.cli.options.command import Command
from vitrail.data.batch import Skipped
from vitrail.data.source import Mixture, Source
from vitrail.errors import ConfigError
from vitrail.evaluation.outputs import Outputs
from vitrail.files import check_new_folder
from vitrail.weights.bundle import Bundle

__all__ = ["OpenedModel", "SummaryOptions"]

LEAST = {"images": SMALLEST_BATCH, "examples": 0, "bootstrap": 0, "batch_size": 1}
"""Smallest value of each option that is a number."""


@dataclass(frozen=True)
class OpenedModel:
    """A model with the images to measure it on."""

    name: str
    bundle: Bundle
    source: Source
    train: Source | None
    """The training images, or None if there are none, or if they are among the images to measure."""


@dataclass(frozen=True, kw_only=True)
class SummaryOptions:
    """Options of `vitrail report` and `vitrail compare`."""

    data: str = ""
    """Data set, in any form that `vitrail train` accepts."""
    split: Literal["held-out", "train", "validation", "test", "all"] = "held-out"
    """Split to measure. held-out is the test split if there is one, else images that no model learned from. all
    measures every image, including training images."""
    out: Path
    """Folder to write to."""
    images: int = 64
    """Number of images whose features and attention are computed. The accuracy is measured on all images of the
    split."""
    examples: int
    """Number of example images on the page."""
    bootstrap: int = 1000
    """Number of bootstrap resamples for each 95 % confidence interval. 0 computes no intervals."""
    batch_size: int | None = None
    """Images per forward pass. The default follows from the model's cost."""
    device: str = "auto"
    """Device to run on: auto, cpu, cuda or cuda:N."""
    overwrite: bool = False
    """Replace earlier results in the folder."""
    json: bool = False
    """Print all numbers as JSON."""

    def check(self, files: Sequence[str], **least: int) -> None:
        """Raise `ConfigError` for options that are out of range, before a model or data is read.

        `files` are the files of the results. If a folder has the first one, it holds earlier results. `least` has the
        smallest values of a command's own options.
        """
        if not self.data:
            raise ConfigError("--data is missing: name a data set with the classes of the model")
        for name, bound in (LEAST | least).items():
            if (number := getattr(self, name)) is not None and number < bound:
                raise ConfigError(f"{name}={number}: give at least {bound}")
        check_new_folder(
            self.out, files, overwrite=self.overwrite, recognise=lambda folder: (folder / files[0]).is_file()
        )

    def console(self) -> Console:
        """Return the console for messages. With --json, standard output is for the numbers alone."""
        return Console(stderr=self.json, highlight=False, soft_wrap=True)

    def open(self, bundles: dict[str, Bundle], command: Command, console: Console) -> list[OpenedModel]:
        """Open the data for each model, by name, and print notes. Several models are measured on the same images."""
        common = common_images(bundles, self.data, self.split, None) if len(bundles) > 1 else None
        opened, notes = [], {}
        for name, bundle in bundles.items():
            if bundle.classes:
                found = open_for_head(bundle, self.data, self.split, "", None, common)
            else:
                found = open_for_features(bundle, self.data, self.split, (), common)
            train = found.train if len(found.train) and "train" not in found.sources else None
            opened.append(OpenedModel(name, bundle, _joined(tuple(found.sources.values())), train))
            notes[name] = [command.note(note) for note in (*bundle.notes, *found.notes)]
        if common is not None and common.note:
            console.print(common.note, style="yellow", markup=False, soft_wrap=not console.is_terminal)
        for note in _named(notes):
            console.print(note, style="yellow", markup=False, soft_wrap=not console.is_terminal)
        return opened

    def outputs(self, opened: OpenedModel, bar: Progress) -> Outputs:
        """Return the outputs of a model, whose progress `bar` shows."""
        task = bar.add_task(opened.name, total=None)
        return Outputs(
            opened.bundle,
            batch_size=self.batch_size,
            precision=opened.bundle.precision,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )

    def show(
        self, console: Console, sentence: str, page: str, plain: dict[str, Any], skipped: Iterable[Skipped]
    ) -> None:
        """Print the skipped images, and then the numbers as JSON, or a sentence and the path of the page."""
        for item in skipped:
            console.print(f"skipped {item.key}: {item.reason}", style="yellow", markup=False)
        if self.json:
            print(json.dumps(plain))
            return
        console.print(sentence, markup=False)
        console.print(str(self.out / page), markup=False)


def _joined(sources: tuple[Source, ...]) -> Source:
    """Return all splits as one source. If there are several, each key begins with the number of its split."""
    return sources[0] if len(sources) == 1 else Mixture(sources, [1 / len(sources)] * len(sources))


def _named(notes: dict[str, list[str]]) -> list[str]:
    """Return the notes about models without repetitions. A note that is not about all models begins with the name."""
    every = list(notes.values())
    shared = [note for note in every[0] if all(note in each for each in every)]
    own = [f"{name}: {note}" for name, each in notes.items() for note in each if note not in shared]
    return list(dict.fromkeys([*shared, *own]))
