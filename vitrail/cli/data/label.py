"""`vitrail data label`: label images with a model, as data to train on."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional
from vitrail.cli.output.bars import images_bar
from vitrail.cli.output.label_tables import counts_table, label_sentence
from vitrail.data.sources import absolute_spec
from vitrail.data.sources.pseudo_labels import FILES, Pool, looks_like_pseudo_labels
from vitrail.errors import ConfigError
from vitrail.files import check_new_folder
from vitrail.machine import Precision
from vitrail.plain import to_plain
from vitrail.training.monitoring.stop import interrupted_by_signals
from vitrail.transfer.noisy_student.labelling import Labelling, label_images

__all__ = ["Label", "main"]


@dataclass(frozen=True, kw_only=True)
class Label:
    """Options of `vitrail data label`."""

    data: Annotated[str, Positional("SPEC")]
    """Images to label, in any form that `vitrail train --data` accepts, or a folder of images without classes. The
    training images are labelled; their own labels are not used."""
    teacher: str
    """Model that labels the images: a run, a model's folder or file, or a name on the hub."""
    out: Path
    """Folder for the labels. The images are not copied."""
    seed: int = 0
    """Random seed that chooses which images of scarce classes are repeated once more."""
    device: str = "auto"
    """Device to run on: auto, cpu, cuda or cuda:N."""
    precision: Precision = "auto"
    """Number format of matrix products. auto is bf16 if the processor has units for it, else float32."""
    overwrite: bool = False
    """Replace earlier labels in the folder."""
    json: bool = False
    """Print JSON instead of a table."""


COMMAND = Command(
    name="data label",
    summary="""Label images with a model, and write the labels as a data set: pseudo labels to train on. Only images of
    which the model is confident are used, equally many of each class.

    The folder refers to the images, which stay where they are. vitrail noisy-student labels and trains in rounds.""",
    examples=(
        Example("vitrail data label photos --teacher runs/flowers --out labels", "Label a folder of photographs."),
        Example("vitrail train --data flowers --mix 0.75:labels", "Train on both: three quarters are pseudo labels."),
        Example("vitrail data check labels", "Show the numbers of images per class."),
    ),
    options=(Label, Labelling),
    essential={
        "Labels": ("teacher", "pseudo_labels", "confidence", "images_per_class", "balance"),
        "Output": ("out", "overwrite", "json"),
        "Running": ("seed", "device", "precision"),
    },
)


def main(call: Call) -> int:
    own = {name: value for name, value in call.options.items() if name in Label.__dataclass_fields__}
    options = Label(**own)
    labelling = Labelling(**{name: value for name, value in call.options.items() if name not in own})
    if options.seed < 0:
        raise ConfigError(f"seed={options.seed} is less than 0")
    check_new_folder(options.out, FILES, overwrite=options.overwrite, recognise=looks_like_pseudo_labels)
    console = Console(stderr=options.json, highlight=False, soft_wrap=True)
    bar = images_bar(console)
    with interrupted_by_signals(), bar:
        task = bar.add_task("labelling", total=None)
        info = label_images(
            options.teacher, Pool(spec=absolute_spec(options.data)), labelling, options.out, seed=options.seed,
            device=options.device, precision=options.precision,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    if options.json:
        print(json.dumps(to_plain(info)))
        return 0
    console.print(counts_table(info), soft_wrap=False)
    console.print(label_sentence(info), markup=False)
    console.print(
        f"The labels are in {options.out}. Train on them: vitrail train --data LABELLED --mix "
        f"{shlex.quote(f'0.75:{options.out}')}",
        markup=False,
    )
    return 0
