"""The evaluator of zero-shot classification, which reads the names of the classes and learns from no image."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vitrail.data.source import Source, check_known
from vitrail.errors import DataError
from vitrail.evaluation.evaluators import COUNTS
from vitrail.evaluation.head import ByAccuracy
from vitrail.evaluation.outputs import Outputs
from vitrail.settings import problems, raise_problems, setting
from vitrail.weights.zero_shot import read_templates, zero_shot


@dataclass(frozen=True)
class ByZeroShot:
    """Metrics of a classifier whose head is made from the names of the data's classes (`vitrail.weights.zero_shot`)."""

    templates: str = "usual"
    """Texts around the name of a class: usual (a photo of a {}.), imagenet (80), short (7), or a file with a text that
    contains {} in each line. The embeddings of all texts of a class are averaged."""
    bootstrap: int = setting(1000, least=0, most=1_000_000)
    """Number of bootstrap resamples for each 95 % confidence interval. 0 computes no intervals."""

    def __post_init__(self) -> None:
        raise_problems(problems(self))
        read_templates(self.templates)

    def check(self, outputs: Outputs, train: Source, held_out: Source) -> None:
        """Raise `ConfigError` for a model without a text tower, and `DataError` if the data has no classes."""
        outputs.bundle.reader_of_texts()
        if check_known(held_out, "zeroshot").kind == "numbers" or not held_out.classes:
            raise DataError("zeroshot needs classes with names, but the targets of this data have none")

    def __call__(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the metrics of `ByAccuracy`, such as `zeroshot_accuracy`. Raise the errors of `check`."""
        self.check(outputs, train, held_out)
        bundle = zero_shot(outputs.bundle, held_out.classes, templates=self.templates, readable=True)
        for note in bundle.notes[len(outputs.bundle.notes) :]:
            outputs.note(note)
        found = ByAccuracy(bootstrap=self.bootstrap)(replace(outputs, bundle=bundle), train, held_out)
        return {name if name in COUNTS else f"zeroshot_{name}": value for name, value in found.items()}
