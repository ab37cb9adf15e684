"""The rounds of Noisy Student: a teacher labels images, a student learns from them, and becomes the next teacher.

The folder of all rounds has `noisy-student.json` (the settings), and for each round `round-N/labels` (pseudo labels as
a data set) and `round-N/run` (the student's run). Round 0 has only the run of the first teacher, unless the user names
a teacher. A stopped command continues from these folders: what is finished is not repeated.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.overlap import shared_images
from vitrail.data.source import Source
from vitrail.data.sources import open_pool
from vitrail.data.sources.pseudo_labels import PseudoLabelInfo, looks_like_pseudo_labels, read_info
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError, RunError, plural
from vitrail.evaluation.predictions.predict import predict_all
from vitrail.files import check_parent, saving, write_json
from vitrail.page import printable
from vitrail.tasks.teacher import check_teacher, load_teacher, teacher_facts
from vitrail.training.config import TrainConfig
from vitrail.training.finish import RunResult
from vitrail.training.records.lock import locked
from vitrail.training.reporting.display import Display
from vitrail.training.run import finished, resume, train
from vitrail.training.setup import prepare
from vitrail.training.start import open_initial
from vitrail.transfer.noisy_student.config import NoisyStudentConfig, check_noise, check_size
from vitrail.transfer.noisy_student.labelling import label_images

__all__ = ["Events", "Round", "run_rounds"]

RECORD = "noisy-student.json"

FORMAT = 1
"""Version of the record."""


@dataclass(frozen=True)
class Round:
    """A finished round. Round 0 is the first teacher."""

    number: int
    model: str
    """The round's model: a folder, or the teacher that the user named."""
    metrics: dict[str, float]
    """Metrics of the model on the held-out splits, such as `validation_accuracy`. The test split is measured by the
    last round only."""
    labels: PseudoLabelInfo | None = None
    """The pseudo labels that the model learned from."""


class Events:
    """Receives the events of rounds. This class shows nothing; subclasses override the events that they show."""

    display: Display = Display()
    """The display of each run."""

    def labelling(self, number: int, teacher: str) -> None:
        """Called before a teacher labels the images of a round."""

    def labelling_progress(self, done: int, total: int) -> None:
        """Receive the number of labelled images, and the number of all images."""

    def labelled(self, number: int, info: PseudoLabelInfo) -> None:
        """Receive the counts of a round's pseudo labels."""

    def training(self, number: int) -> None:
        """Called before the run of a round starts or continues."""

    def finished(self, result: Round) -> None:
        """Receive a finished round."""


def run_rounds(config: NoisyStudentConfig, folder: Path, events: Events | None = None) -> list[Round]:
    """Run all rounds in `folder`, and return them with the first teacher in front. Finished rounds are not repeated.

    All settings are checked before anything is written. Raises `UserError` for settings, data and teachers that cannot
    work, and for a folder with rounds of other settings. Raises the errors of `train` and `label_images`.
    """
    events = events or Events()
    splits = _checked(config)
    teacher_sha256 = None if config.rounds.teacher is None else teacher_facts(config.rounds.teacher).sha256
    _check_folder(folder, config, teacher_sha256)
    with saving("the rounds", folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        with saving("the settings", folder):
            write_json(folder / RECORD, {"format": FORMAT, "teacher": teacher_sha256, **_settings(config)})
        rounds = [_first(config, folder, splits, events)]
        events.finished(rounds[0])
        for number in range(1, config.rounds.rounds + 1):
            rounds.append(_round(config, folder, number, rounds[-1].model, events))
            events.finished(rounds[-1])
    return rounds


def _checked(config: NoisyStudentConfig) -> Splits:
    """Check the settings, the data and the teacher, and return the splits of the labelled data."""
    student = config.student
    setup = prepare(student, model=open_initial(student.start))
    splits = setup.splits
    if splits.target_kind != "class":
        raise DataError(
            f"{splits.title} has images with several labels, which Noisy Student cannot learn: a teacher predicts one "
            "class; choose data with one label per image"
        )
    if splits.validation is None:
        raise ConfigError(
            f"validation_share={student.data.validation_share}: Noisy Student compares its rounds on validation "
            "images, but the data has none; choose a fraction above 0"
        )
    assert setup.network is not None, "the config names a network"
    check_noise(student, setup.network)
    if (teacher := config.rounds.teacher) is not None:
        check_size(setup.network, check_teacher(teacher, splits.classes, splits.title), teacher)
    pool = open_pool(config.pool)
    for split, held_out in (("validation", splits.validation), ("test", splits.test)):
        if held_out is not None and (shared := shared_images(pool, held_out)):
            raise DataError(
                f"unlabelled={config.pool.spec!r} contains {plural(len(shared), 'image')} of the {split} split of "
                f"{splits.title}, such as {printable(held_out.key(shared[0]))}; held-out images must not be labelled: "
                "remove them, or name other images"
            )
    return splits


def _check_folder(folder: Path, config: NoisyStudentConfig, teacher_sha256: str | None) -> None:
    """Raise `RunError` if a folder is not empty and has no rounds with these settings."""
    if not folder.exists():
        check_parent(folder)
        return
    path = folder / RECORD
    if not path.is_file():
        if folder.is_dir() and not any(folder.iterdir()):
            return
        raise RunError(f"{str(folder)!r} exists and has no rounds of Noisy Student; choose another --run")
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        number, sha256 = before.pop("format"), before.pop("teacher")
    except (ValueError, KeyError, AttributeError) as error:
        raise RunError(f"{path} is damaged: {error}; choose another --run") from error
    if number != FORMAT:
        raise RunError(
            f"{path} has format {number}, but this version of Vitrail reads format {FORMAT}; install a newer version "
            "to continue these rounds"
        )
    if changed := list(_differences(before, json.loads(json.dumps(_settings(config))))):
        raise RunError(
            f"{str(folder)!r} has rounds with other settings: {'; '.join(changed[:5])}. Give the same settings to "
            "continue, or choose another --run"
        )
    if sha256 != teacher_sha256:
        raise RunError(
            f"{str(folder)!r} has rounds of a teacher with other weights than {config.rounds.teacher} has now; put the "
            "earlier model there again, or choose another --run"
        )


def _settings(config: NoisyStudentConfig) -> dict[str, Any]:
    return {"settings": config.to_plain()}


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yield a text for every value that differs between two trees of JSON values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), key)
    elif before != now:
        yield f"{name} was {before!r} and is {now!r}"


def _first(config: NoisyStudentConfig, folder: Path, splits: Splits, events: Events) -> Round:
    """Return round 0: the teacher that the user named, or the student's network after training on labelled images."""
    if (teacher := config.rounds.teacher) is not None:
        assert splits.validation is not None, "the data was checked"
        return Round(0, teacher, {"validation_accuracy": _accuracy(teacher, splits.validation, config.student)})
    events.training(0)
    place = folder / "round-0" / "run"
    result = _trained(config.round_config(str(place), None), events.display, measure_test=False)
    return Round(0, str(place), dict(result.metrics))


def _round(config: NoisyStudentConfig, folder: Path, number: int, teacher: str, events: Events) -> Round:
    """Return a round that `teacher` begins: an earlier one, the rest of one that was stopped, or a new one."""
    place = folder / f"round-{number}"
    labels = place / "labels"
    if not looks_like_pseudo_labels(labels):
        events.labelling(number, teacher)
        info = label_images(
            teacher, config.pool, config.labelling, labels, seed=config.student.run.seed,
            device=config.student.run.device, readers=config.student.run.readers,
            precision="float32" if config.student.run.precision == "float32" else "auto",
            on_progress=events.labelling_progress,
        )  # fmt: skip
    else:
        info = read_info(labels)
    events.labelled(number, info)
    events.training(number)
    run = config.round_config(str(place / "run"), str(labels))
    result = _trained(run, events.display, measure_test=number == config.rounds.rounds)
    return Round(number, str(place / "run"), dict(result.metrics), info)


def _trained(config: TrainConfig, display: Display, *, measure_test: bool) -> RunResult:
    """Return a finished run: an earlier one, the rest of one that was stopped, or a new one."""
    folder = Path(config.run.folder or "")
    if (folder / "run.json").exists():
        done = finished(folder)
        return done or resume(folder, measure_test=measure_test, max_time=config.run.max_time, display=display)
    shutil.rmtree(folder, ignore_errors=True)  # stopped before the run was recorded
    return train(config, measure_test=measure_test, display=display)


def _accuracy(model: str, source: Source, config: TrainConfig) -> float:
    """Return the accuracy of a teacher on the images of a source that have a label."""
    bundle = load_teacher(model, config.run.device)
    found = predict_all(bundle.network, source, bundle.preprocess, readers=config.run.readers).labelled()
    order = np.array([source.classes.index(name) for name in bundle.classes])
    return float(found.truth.hits(order[found.logits.argmax(axis=1)]).mean())
