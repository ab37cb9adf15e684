"""The images of data on which models are measured: those that no model learned from, unless others are asked for."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.data.cuts import Unlimited, cut
from vitrail.data.source import Samples, Source, fingerprint, key_hash, samples_of, subset
from vitrail.data.sources import KINDS, OpenedData, open_whole
from vitrail.data.splits import Splits
from vitrail.data.targets import PLACED
from vitrail.errors import DataError, UserError, plural
from vitrail.evaluation.imagenet import ClassMap, map_classes
from vitrail.files import expanded
from vitrail.weights.answers import DENSE, OUTPUT_NOUNS
from vitrail.weights.bundle import Bundle

USUAL_SHARE = 0.1
"""Fraction of images to hold out if no model records the fraction that its training held out."""


@dataclass(frozen=True)
class CommonImages:
    """The validation split on which all models are measured."""

    keys: frozenset[str] | None
    """Keys of the training images of the data that form the validation split. If None, the data has a held-out split
    of its own, or generates its images."""
    share: float
    """Fraction of generated images to hold out."""
    note: str
    """Sentence for the user about the choice, or an empty text."""

    def split(self, opened: OpenedData) -> Splits:
        """Return the splits of the data with this validation split. All other training images are for training."""
        if self.keys is None:
            return opened.splits(validation_share=self.share)
        train = opened.whole.train
        held_out = [index for index in range(len(train)) if train.key(index) in self.keys]
        rest = [index for index in range(len(train)) if train.key(index) not in self.keys]
        whole = replace(opened.whole, train=subset(train, rest), validation=subset(train, held_out))
        return replace(opened, whole=whole).splits(validation_share=0.0)


def common_images(
    bundles: Mapping[str, Bundle], spec: str, split: str, share: float | None, *, texts: bool = False
) -> CommonImages:
    """Return the images on which the models, by name, can be compared as the split "held-out" or "validation". Other
    splits of the data are measured as they are.

    They are the data's own test or validation split, if it has one. Otherwise they are a part of the training images:
    those that all models that were trained on this data held out, and of these only the fraction `share` that training
    would hold out, if `share` is given. Models that were trained on other data do not restrict the choice. With
    `texts`, texts are the targets of data that has both texts and labels.

    Raise `DataError` if the models have no held-out image in common.
    """
    opened_for = functools.cache(lambda numbers: open_whole(spec, numbers=numbers, texts=texts, needs_training=False))
    opened = {
        name: opened_for(bundle.classes if bundle.output == "numbers" else ()) for name, bundle in bundles.items()
    }
    whole = next(iter(opened.values())).whole
    for own, source in (("test", whole.test), ("validation", whole.validation)):
        if source is not None and split in (own, "held-out"):
            note = f"--validation-share has no effect, because the {own} split of data {spec!r} is measured"
            return CommonImages(None, 0.0, note * (share is not None))
    if split not in ("held-out", "validation"):
        return CommonImages(None, 0.0, "")
    train = whole.train
    if isinstance(train, Unlimited):
        return CommonImages(None, share or USUAL_SHARE, "")
    held_out: dict[str, frozenset[str]] = {}
    for name, bundle in bundles.items():
        data = opened[name]
        if cuts := [_held_out_by(known, data) for known in _trainings(bundle) if is_data_of(known, data)]:
            held_out[name] = frozenset.intersection(*cuts)
    if share is not None or not held_out:
        wanted = _keys(cut(train, USUAL_SHARE if share is None else share)[1])
        keys = frozenset.intersection(wanted, *held_out.values())
    else:
        keys = frozenset.intersection(*held_out.values())
    for name, bundle in bundles.items():
        if (doubt := doubt_about(bundle, opened[name])) is not None:
            raise DataError(
                f"{name}: {doubt}, so no image is known that it did not learn from; measure other data or the data's "
                "own test split. --split all measures every image, and with it those that the models learned from"
            )
    counts = ", ".join(f"{name} held out {len(each):,}" for name, each in held_out.items())
    if not keys:
        raise DataError(
            f"data {spec!r} has no image that all models held out of training ({counts or 'too few images'}); measure "
            "them on other data, or train them with the same --validation-share and --validation. --split all measures "
            "every image, and with it those that the models learned from"
        )
    which = f", that no model learned from ({counts})" if held_out else "; no model records that it learned from them"
    note = f"measuring {plural(len(keys), 'image')} of {len(train):,} in {spec!r}{which}"
    return CommonImages(keys, 0.0, note)


def cut_of(known: Mapping[str, Any], opened: OpenedData, *, share: float | None = None, own: bool) -> Splits:
    """Return the splits of a training whose bundle has the provenance `known`, or with another fraction `share`.

    If the training was not on this data (`own` is False), its choice of the validation split is not repeated.
    """
    return opened.splits(
        validation_share=float(known.get("validation_share") or 0.0) if share is None else share,
        validation=known.get("validation", "auto") if own else "auto",
        cut_method=known.get("cut_method", "threshold" if "validation_share" in known else "stratified"),
    )


def doubt_about(bundle: Bundle, opened: OpenedData) -> str | None:
    """Return why images that are held out of this data now may be among those that a model learned from, or None."""
    for known in _trainings(bundle):
        if any(_is_same_place(known, spec, opened.spec) for spec in _specs(known)[1:]):
            return f"the model learned from all of {opened.spec!r}, which was mixed into its training images"
        recorded = known.get("validation_keys")
        # A cut by a hash of the names holds out the same images whatever is added.
        if recorded is None or known.get("cut_method") == "threshold" or not is_data_of(known, opened):
            continue
        validation = cut_of(known, opened, own=True).validation
        if validation is not None and key_hash(validation) != recorded:
            return f"{opened.spec!r} has changed since the model was trained on it, so that other images are held out"
    return None


def overlap_note(bundle: Bundle, opened: OpenedData, held_out: Source) -> str | None:
    """Return a note if the images `held_out`, which are a part of the training images of this data, are known or
    suspected to be among those from which a model, or a model that it was fine-tuned from, learned."""
    try:
        if (doubt := doubt_about(bundle, opened)) is not None:
            return f"{doubt}: the measured images may be among those that it learned from"
        if isinstance(opened.whole.train, Unlimited):
            return None
        cuts = [_held_out_by(known, opened) for known in _trainings(bundle) if is_data_of(known, opened)]
    except UserError as error:  # the cut of an earlier training, such as train[9:], does not exist in this data
        return f"the measured images may have trained this model; those that it held out are not known: {error}"
    measured = _keys(held_out)
    learned = len(measured) - len(measured.intersection(*cuts))
    if not learned and not cuts and any(opened.spec in _specs(known) for known in _trainings(bundle)):
        return (
            f"the model was trained on data that was also called {opened.spec!r}, in another folder; if this is that "
            "data in a new place, the measured images may be among those that it learned from"
        )
    if not learned:
        return None
    return (
        f"{learned:,} of the {plural(len(measured), 'measured image')} have trained this model or one from which it "
        "was fine-tuned, so the metrics are better than on new images"
    )


def is_data_of(known: Mapping[str, Any], opened: OpenedData) -> bool:
    """Return True if a training with the provenance `known` learned from this data, or from a part of it.

    The data is recognised by its place or name, and by the hash of its samples if the folder was moved.
    """
    trained_on = str(known.get("data", ""))
    if not trained_on:
        return False
    if _is_same_place(known, trained_on, opened.spec):
        return True
    if (recorded := known.get("data_fingerprint")) is None:
        return False
    try:
        splits = cut_of(known, opened, own=True)
    except DataError:  # a cut that this data does not allow is not a cut of this data
        return False
    return fingerprint(splits.train, splits.validation, splits.test) == recorded


def _specs(known: Mapping[str, Any]) -> list[str]:
    """Return the data that a training with the provenance `known` learned from, and then the data of its mixture."""
    return [str(known.get("data", "")), *(str(text).partition(":")[2] for text in known.get("mix", ()))]


def _trainings(bundle: Bundle) -> Iterator[Mapping[str, Any]]:
    """Yield the provenance of a model, and of the models that it was fine-tuned from. A model of an earlier version
    records only the place of its initial model, which is read if it is still there."""
    known: Any = bundle.provenance
    places: set[str] = set()
    while known and isinstance(known, Mapping):
        yield known
        place = str(known.get("init"))
        known = known.get("initial") or (None if place in places else _provenance_in(expanded(place)))
        places.add(place)


def _provenance_in(folder: Path) -> Any:
    for path in (folder / "model.json", folder / "model" / "model.json"):
        with suppress(OSError, ValueError, AttributeError):
            return json.loads(path.read_text(encoding="utf-8")).get("provenance")
    return None


def _held_out_by(known: Mapping[str, Any], opened: OpenedData) -> frozenset[str]:
    """Return the keys of the images that a training on this data held out for validation."""
    validation = cut_of(known, opened, own=True).validation
    return frozenset() if validation is None else _keys(validation)


def _keys(source: Source) -> frozenset[str]:
    return frozenset(source.key(index) for index in range(len(source)))


def place_hash(spec: str) -> str:
    """Return a hash of the absolute path of data, or an empty text if the data is not on the disk. A model records the
    hash, because the path itself can hold names that are not to be published."""
    path = expanded(_location(spec)).resolve()
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16] if _exists(path) else ""


def _is_same_place(known: Mapping[str, Any], recorded: str, spec: str) -> bool:
    """Return True if data that a training with the provenance `known` records is in the same place as `spec`, whatever
    the amount. A training of an earlier version records no places, and its paths are those of the current folder. An
    absolute path is the same place on every machine, even if it leads through other links there."""
    first, second = _location(recorded), _location(spec)
    place = known.get("places", {}).get(recorded)
    if place and not (first == second and expanded(first).is_absolute()):
        return bool(place == place_hash(spec))
    return first == second or expanded(first).resolve() == expanded(second).resolve()


def _location(spec: str) -> str:
    """Return a data specification without an amount such as [:10%], and without a choice of its columns and splits."""
    is_amount = spec.endswith("]") and "[:" in spec and not _exists(spec)
    whole = spec[: spec.rindex("[:")] if is_amount else spec
    base, mark, _ = whole.rpartition("?")
    is_choice = mark and (base.startswith("hf:") or (_exists(base) and not _exists(whole)))
    return base if is_choice else whole


# Opening of the data. It is opened once for each set of classes.


@dataclass(frozen=True)
class EvaluatedData:
    """Opened data that one or more evaluators use."""

    sources: dict[str, Source]
    """The splits to measure, by name."""
    train: Source
    notes: tuple[str, ...]
    opened: OpenedData


def open_images(
    bundle: Bundle,
    spec: str,
    split: str,
    *,
    by_features: bool | None = None,
    numbers: tuple[str, ...] = (),
    class_names: str = "",
    own: EvaluatedData | None = None,
    common: CommonImages | None = None,
    needs_training: bool = True,
    needs_labels: bool = True,
    texts: bool = False,
) -> EvaluatedData:
    """Return the data with the splits to measure: for the model's own head, or `by_features`, which is the default for
    a model without a head. `common` is the validation split, if several models are compared.

    For features, training images are needed unless `needs_training` is False. The targets are the data's own classes,
    or the columns `numbers` (by default the columns that the model predicts), or with `texts` the texts of data that
    has both texts and labels. Unless `needs_labels` is True, data whose labels cannot be read is opened without them,
    and a note says why. Images are held out for validation only if the validation split is measured. For any other
    split, a classifier can learn from all training images.

    For the head, the targets are the model's classes or numbers. `class_names` is a file with the WordNet id and name
    of each model output, or "". `own` is the data with its own classes, if it is already open. Raise `DataError` if
    data and model do not match.
    """
    if by_features is None:
        by_features = not bundle.classes
    class_map = None
    notes: tuple[str, ...] = ()
    if by_features:
        try:
            wanted = numbers or _numbers_of(bundle)
            opened = open_whole(spec, numbers=wanted, texts=texts, needs_training=needs_training)
        except DataError as reason:
            if needs_labels:
                raise
            opened = open_whole(spec, unlabelled=True, needs_training=needs_training)
            notes = (f"the images are read without labels: {reason}",)
    else:
        opened, class_map = _opened_for_head(bundle, spec, class_names, own)
    if common is not None and split not in ("train", "all"):
        splits = common.split(opened)
    elif common is not None or (split == "all" and not by_features):
        splits = opened.splits(validation_share=0.0)
    else:
        splits = _splits_of(bundle, opened, share=0.0)
        needs_cut = split == "validation" or (split == "train" and not by_features)
        if needs_cut or (split != "all" and splits.held_out is None):
            try:
                splits = _splits_of(bundle, opened)
            except DataError as error:
                raise DataError(
                    f"{opened.whole.title} has no split to measure, and none of its {len(opened.whole.train):,} "
                    f"training images can be held out; choose data with a validation split"
                    f"{', or measure all images with --split all' if split == 'held-out' and not by_features else ''}"
                ) from error
    found = _measured(bundle, opened, splits, split, is_common=common is not None)
    found = replace(found, notes=(*notes, *found.notes))
    if class_map is None:
        return found
    renumbered = functools.partial(Samples.renumbered, places=class_map.columns, names=bundle.classes)
    sources: dict[str, Source] = {name: renumbered(samples_of(source)) for name, source in found.sources.items()}
    train = renumbered(samples_of(found.train))
    return replace(found, sources=sources, train=train, notes=(class_map.note, *found.notes))


def _opened_for_head(
    bundle: Bundle, spec: str, class_names: str, own: EvaluatedData | None
) -> tuple[OpenedData, ClassMap | None]:
    """Return the opened data, and the matching of its classes to the model's outputs if they differ."""
    if own is not None and not class_names and own.opened.whole.classes == bundle.classes:
        return own.opened, None
    numbers = _numbers_of(bundle)
    if not class_names:
        try:
            classes = None if bundle.output == "numbers" else bundle.classes or None
            opened = open_whole(spec, classes=classes, numbers=numbers, needs_training=False)
            _check_kind(bundle, opened)
            return opened, None
        except DataError:
            pass  # if the classes differ, they are mapped below; any other error is raised again there
    opened = open_whole(spec, numbers=numbers, needs_training=False) if own is None else own.opened
    _check_kind(bundle, opened)
    return opened, map_classes(bundle.classes, opened.whole.classes, mapping=class_names or None)


def _check_kind(bundle: Bundle, opened: OpenedData) -> None:
    """Raise `DataError` if the data has boxes or masks and the model predicts something else, or the other way
    round."""
    kind = opened.whole.target_kind
    if kind != bundle.output and (kind in PLACED or bundle.output in DENSE):
        raise DataError(
            f"data {opened.spec!r} has {KINDS[kind]}, but the model predicts {OUTPUT_NOUNS[bundle.output]}; choose "
            "other data, or a model that was trained on such data"
        )


def _measured(
    bundle: Bundle, opened: OpenedData, splits: Splits, split: str, *, is_common: bool = False
) -> EvaluatedData:
    """Return the splits to measure, with notes for the user. Raise `DataError` if the data lacks the split."""
    existing = {name: source for name, source in splits.sources.items() if len(source)}
    notes = list(splits.notes)
    if split == "held-out":
        assert splits.held_out is not None, "a validation split was cut if there was none"
        name, source = splits.held_out
        chosen = {name: source}
        usual = [*notes, "measuring the validation split; use --split all to measure every image"]
        notes = list(opened.whole.notes) if name == "test" or is_common else usual
    elif split == "all":
        chosen = existing
    elif split in existing:
        chosen = {split: existing[split]}
    else:
        raise DataError(f"data {opened.spec!r} has no {split} split; choose one that it has: {', '.join(existing)}")
    known = bundle.provenance
    was_cut = opened.whole.validation is None or known.get("validation", "auto") != "auto"
    if "validation" in chosen and split != "all" and not is_common and was_cut:
        if (note := overlap_note(bundle, opened, chosen["validation"])) is not None:
            notes.append(note)
        elif known.get("validation_share") == 0:
            notes.append(
                "this model was trained without held-out images; if it was trained on this data, the measured "
                "images were among its training images"
            )
    return EvaluatedData(chosen, splits.train, tuple(notes), opened)


def _splits_of(bundle: Bundle, opened: OpenedData, share: float | None = None) -> Splits:
    """Return the splits with the same held-out images as in the training of the model, if it was trained on this data.

    For other data the fraction of held-out images is the same, unless it is less than one image. Images are held out
    even if training held out none. `share` replaces the fraction of the training.
    """
    known = bundle.provenance
    if not len(opened.whole.train):
        return opened.whole
    if share is None:
        share = float(known.get("validation_share") or USUAL_SHARE)
        if share * len(opened.whole.train) <= 0.5 and not is_data_of(known, opened):
            share = max(share, USUAL_SHARE)
    return cut_of(known, opened, share=share, own=is_data_of(known, opened))


def _numbers_of(bundle: Bundle) -> tuple[str, ...]:
    return bundle.classes if bundle.output == "numbers" else ()


def _exists(path: str | Path) -> bool:
    return os.path.exists(expanded(path))  # noqa: PTH110 (raises no error, such as for the long query of a URL)
