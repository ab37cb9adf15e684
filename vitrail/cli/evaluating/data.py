"""Opening of the data for `vitrail evaluate`. The data is opened once for each set of classes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vitrail.cli.evaluating.common import USUAL_SHARE, CommonImages, cut_of, is_data_of
from vitrail.data.source import Source
from vitrail.data.sources import OpenedData, open_whole
from vitrail.data.splits import Splits
from vitrail.errors import DataError
from vitrail.evaluation.predictions.imagenet import ClassMap, MappedSource, map_classes
from vitrail.weights.bundle import Bundle

__all__ = ["Measured", "open_for_features", "open_for_head"]


@dataclass(frozen=True)
class Measured:
    """Opened data that one or more evaluators use."""

    sources: dict[str, Source]
    """The splits to measure, by name."""
    train: Source
    notes: tuple[str, ...]
    opened: OpenedData


def open_for_features(
    bundle: Bundle, spec: str, split: str, numbers: tuple[str, ...], common: CommonImages | None = None
) -> Measured:
    """Return the data with its own classes as targets, and the splits to measure.

    For regression the targets are the columns `numbers`, by default the columns that the model predicts. Images are
    held out for validation only if the validation split is measured. For any other split, a classifier can learn from
    all training images. `common` is the validation split, if several models are compared.
    """
    opened = open_whole(spec, numbers=numbers or _numbers_of(bundle))
    if common is not None:
        return _measured(bundle, opened, _common(common, opened, split), split, is_common=True)
    splits = _splits_of(bundle, opened, share=0.0)
    if split == "validation" or (split != "all" and splits.held_out is None):
        splits = _splits_of(bundle, opened)
    return _measured(bundle, opened, splits, split)


def open_for_head(
    bundle: Bundle,
    spec: str,
    split: str,
    class_names: str,
    own: Measured | None,
    common: CommonImages | None = None,
) -> Measured:
    """Return the data with the model's classes or numbers as targets. Raise `DataError` if they do not match.

    `class_names` is a file with the WordNet id and name of each model output, or "". `own` is the data with its own
    classes, if it is already open. `common` is the validation split, if several models are compared.
    """
    opened = None if own is None or class_names or own.opened.whole.classes != bundle.classes else own.opened
    class_map = None
    if opened is None and not class_names:
        try:
            classes = None if bundle.output == "numbers" else bundle.classes or None
            opened = open_whole(spec, classes=classes, numbers=_numbers_of(bundle), needs_training=False)
        except DataError:
            pass  # if the classes differ, they are mapped below; any other error is raised again there
    if opened is None:
        numbers = _numbers_of(bundle)
        opened = open_whole(spec, numbers=numbers, needs_training=False) if own is None else own.opened
        class_map = map_classes(bundle.classes, opened.whole.classes, mapping=class_names or None)
    if common is not None:
        splits = _common(common, opened, split)
    else:
        splits = opened.splits(validation_share=0.0) if split == "all" else _splits_of(bundle, opened)
    found = _measured(bundle, opened, splits, split, is_common=common is not None)
    return found if class_map is None else _mapped(found, class_map, bundle.classes)


def _measured(bundle: Bundle, opened: OpenedData, splits: Splits, split: str, *, is_common: bool = False) -> Measured:
    """Return the splits to measure, with notes for the user. Raise `DataError` if the data lacks the split."""
    named = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    existing = {name: source for name, source in named.items() if source is not None and len(source)}
    notes = list(splits.notes)
    if split == "held-out":
        assert splits.held_out is not None, "a validation split was cut if there was none"
        name, source = splits.held_out
        chosen = {name: source}
        usual = [*notes, "measuring the validation split; use --split all to measure every image"]
        notes = [] if name == "test" or is_common else usual
    elif split == "all":
        chosen = existing
    elif split in existing:
        chosen = {split: existing[split]}
    else:
        raise DataError(f"data {opened.spec!r} has no {split} split; choose one that it has: {', '.join(existing)}")
    known = bundle.provenance
    was_cut = opened.whole.validation is None or known.get("validation", "auto") != "auto"
    held_nothing_out = known.get("validation_share") == 0 and was_cut
    if "validation" in chosen and split != "all" and not is_common and held_nothing_out:
        notes.append(
            "this model was trained without held-out images; if it was trained on this data, the measured "
            "images were among its training images"
        )
    return Measured(chosen, splits.train, tuple(notes), opened)


def _mapped(found: Measured, class_map: ClassMap, classes: tuple[str, ...]) -> Measured:
    """Return the data with labels mapped to the model's classes."""
    sources: dict[str, Source] = {
        name: MappedSource(source, class_map, classes) for name, source in found.sources.items()
    }
    return replace(
        found,
        sources=sources,
        train=MappedSource(found.train, class_map, classes),
        notes=(class_map.note, *found.notes),
    )


def _splits_of(bundle: Bundle, opened: OpenedData, share: float | None = None) -> Splits:
    """Return the splits with the same held-out images as in the training of the model, if it was trained on this data.

    For other data the fraction of held-out images is the same. Images are held out even if training held out none.
    `share` replaces the fraction of the training.
    """
    known = bundle.provenance
    if not len(opened.whole.train):
        return opened.whole
    if share is None:
        share = float(known.get("validation_share") or USUAL_SHARE)
    return cut_of(known, opened, share=share, own=is_data_of(known, opened))


def _common(common: CommonImages, opened: OpenedData, split: str) -> Splits:
    """Return the splits for several models. Without a held-out split, all training images are in the training split."""
    return opened.splits(validation_share=0.0) if split in ("train", "all") else common.split(opened)


def _numbers_of(bundle: Bundle) -> tuple[str, ...]:
    return bundle.classes if bundle.output == "numbers" else ()
