"""The runner of experiments: runs that are trained, continued or left as they are, cells, each a training run with what
is measured of it, in processes of their own, and pilots, short runs that measure the speed of training.

An experiment has a folder with a record of the settings that all its cells share, and a folder `cells/NAME` for each
cell with `cell.json` (what to run), `run/` (the training run), `log.txt` (the output of its process) and `result.json`
(written last). If an experiment was stopped or killed, the same command continues it: finished cells are not repeated.
Other settings are refused with what differs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from vitrail.data.source import fingerprint, subset
from vitrail.data.sources import OpenedData
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, RunError, Stopped, VitrailError, check_known
from vitrail.files import check_parent, partial_path, recover_folder, replaced_path, saving, write_json
from vitrail.processes.group import join_processes
from vitrail.settings import from_plain
from vitrail.tasks.pictures import spread
from vitrail.training.config import RESOLVED, TrainConfig
from vitrail.training.folder import LOCK, is_unrecorded, locked, read_record
from vitrail.training.log import Log, end_of, read_journal
from vitrail.training.run import RunResult, resume, train
from vitrail.training.state import pixels_fit
from vitrail.weights.bundle import Bundle, weights_sha256

CELLS, CELL, RESULT, LOG = "cells", "cell.json", "result.json", "log.txt"

POLL_SECONDS = 0.05

SHOWN_LINES = 8
"""Number of lines of the log that the message of a failed cell shows."""

HASHES = {
    "fingerprint": "the images, labels or splits",
    "teacher": "the weights of the teacher",
    "weights": "the weights of the initial model",
}
"""Contents of settings that are hashes, which say nothing to a reader."""


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Return a text for every value that differs between two trees of JSON values."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [text for key in {**before, **now} for text in differences(before.get(key), now.get(key), key)]
    if before == now:
        return []
    return [f"{HASHES[name]} have changed" if name in HASHES else f"{name} was {before!r} and is {now!r}"]


def check_folder(path: Path, settings: Mapping[str, Any], content: str, option: str) -> None:
    """Raise `RunError` if the folder of an experiment holds another one, or other files. `path` is that of the record
    with its settings, and `content` says what the folder holds. `option` is the one that names the folder."""
    folder = path.parent
    if not folder.exists():
        check_parent(folder)
    elif path.is_file():
        try:
            recorded = json.loads(path.read_text(encoding="utf-8"))
            before = {name: recorded[name] for name in settings}
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} is damaged: {error!r}; choose another {option}") from error
        if changed := differences(before, json.loads(json.dumps(settings))):
            raise RunError(
                f"{folder} holds {content} with other settings: {'; '.join(changed[:5])}. Give the same settings to "
                f"continue, or choose another {option}"
            )
    elif not folder.is_dir() or not {*folder.iterdir()} <= {partial_path(path), folder / LOCK}:
        raise RunError(f"{folder} exists and does not hold {content}: it has no {path.name}; choose another {option}")


@contextmanager
def experiment(path: Path, settings: Mapping[str, Any], content: str, option: str) -> Iterator[None]:
    """Hold the folder of an experiment inside the `with` block, with its settings in the file `path`. A cell whose
    repetition was killed has its earlier result again. Raises the errors of `check_folder`, and `RunError` if another
    process works in the folder."""
    check_folder(path, settings, content, option)
    with locked(path.parent):
        check_folder(path, settings, content, option)  # another process may have begun here in the meantime
        start, end = replaced_path(Path("*")).name.split("*")
        for earlier in (path.parent / CELLS).glob(f"{start}*{end}"):
            _end_repetition(earlier.with_name(earlier.name.removeprefix(start).removesuffix(end)))
        with saving(content, path.parent):
            write_json(path, settings)
        yield


def _end_repetition(place: Path) -> None:
    """Delete the earlier result of a cell that was repeated. Without a new result, take it back, with the new log."""
    earlier = replaced_path(place)
    if not (place / RESULT).exists():
        if (place / LOG).exists():
            (place / LOG).replace(earlier / LOG)
        shutil.rmtree(place, ignore_errors=True)
        recover_folder(place)
    shutil.rmtree(earlier, ignore_errors=True)


def complete_run(
    config: TrainConfig,
    *,
    data: OpenedData | None = None,
    initial: Bundle | None = None,
    log: Log | None = None,
    measure_test: bool = True,
    replaces: bool = False,
) -> tuple[dict[str, float], RunResult | None]:
    """Train the run in the folder that `config` names, or continue it if it was stopped or killed. Return its metrics,
    and its result. The result is None if the run was finished before, because nothing is computed again.

    `data` and `initial` are the opened data and the initial model of the config. If they are given, an existing run
    with other settings, images or weights is replaced if `replaces` is true; otherwise `RunError` says what differs.
    The errors of `train` are raised as well.
    """
    folder = Path(config.run.folder or "")
    if (folder / "run.json").is_file():
        changed = [] if data is None or initial is None else _changes(config, folder, data, initial)
        if changed and not replaces:
            raise RunError(
                f"{folder} contains a run with other settings: {'; '.join(changed[:5])}; choose another --name, or "
                "delete that folder"
            )
        if not changed:
            if (event := end_of(read_journal(folder / "journal.jsonl"))) is not None:
                return dict(event["metrics"]), None
            changes = {"max_time": config.run.max_time}
            run = resume(folder, data=data, measure_test=measure_test, changes=changes, log=log)
            return run.metrics, run
        config = config.override(overwrite=True)
    elif is_unrecorded(folder):
        shutil.rmtree(folder, ignore_errors=True)
    run = train(config, data=data, initial=initial, log=log, measure_test=measure_test)
    return run.metrics, run


def _changes(config: TrainConfig, folder: Path, data: OpenedData, initial: Bundle) -> list[str]:
    """Return a text for everything in which an existing run differs from these settings, images and weights."""
    record, splits = read_record(folder), config.data.cut(data)
    # The accumulation depends on the free memory and does not change the result. Nor do the threads that read the
    # images, which a run can choose, permission to overwrite, and the place of the run, which can be moved.
    kept = ("accumulation", "threads", "overwrite", *RESOLVED)
    before = {name: getattr(record.config.run, name) for name in kept}
    max_pixels = config.data.max_pixels or record.config.data.max_pixels
    same = config.override(run=record.config.run.folder, max_pixels=max_pixels, **before)
    return differences(
        {
            "config": record.config.to_plain(),
            "fingerprint": record.fingerprint,
            "weights": None if record.origin is None else record.origin.sha256,
        },
        {
            "config": same.to_plain(),
            "fingerprint": fingerprint(splits.train, splits.validation, splits.test),
            "weights": weights_sha256(initial.network),
        },
    )


@dataclass(frozen=True, kw_only=True)
class Cell(ABC):
    """One training run of an experiment, and what is measured of it. Subclasses add their settings, as JSON values."""

    start: str | None = None
    """Name of the cell whose model this cell starts from."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the cell's folder."""


C = TypeVar("C", bound=Cell)
R = TypeVar("R")


def read_cell(folder: Path, kind: type[C]) -> C:
    """Read the cell of a folder. Raises `RunError` if the name of the folder is not the name of its cell."""
    try:
        cell = from_plain(kind, json.loads((folder / CELL).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise RunError(f"{folder} has no readable cell: {error}; delete the folder to run the cell again") from error
    if cell.name != folder.name:
        raise RunError(
            f"{folder} has the cell {cell.name}, which is not the name of the folder: {CELL} was changed; delete the "
            "folder to run the cell again"
        )
    return cell


def read_result(folder: Path, kind: type[R]) -> R | None:
    """Return the result of a finished cell, or None. Raises `RunError` if its file is damaged."""
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        return from_plain(kind, json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}; delete the folder {folder} to run the cell again") from error


def write_result(folder: Path, result: Any) -> None:
    """Write the result, a dataclass, which marks the cell as finished. Raises `SaveError`."""
    with saving("the result", folder):
        write_json(folder / RESULT, asdict(result))


@dataclass(frozen=True, kw_only=True)
class Pool(Generic[C, R]):
    """Runs the cells of an experiment, each in a process of its own, a number of them at a time."""

    folder: Path
    """Folder of the experiment."""
    cell: type[C]
    result: type[R]
    command: Callable[[C], Sequence[str]]
    """Returns the command of a cell's process. The folder of the cell is added to it. The process is expected to call
    `end_with_parent`: it then ends as soon as this process ends its cells or dies."""
    jobs: int = 1
    """Number of processes at a time."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the processes."""
    restarts: bool = False
    """True if a cell that was killed runs again from the beginning, so that its times are those of one run."""
    on_cell: Callable[[str, R], None] = lambda label, result: None
    """Called with the label of every cell that has run, and its result."""

    def run(self, cells: Sequence[tuple[str, C]]) -> dict[str, R]:
        """Return the result of each cell by name. `cells` are pairs of a label and a cell. Equal cells run once, and
        finished cells are not run again. A cell runs after the cell that it starts from, which is in `cells` or has run
        before.

        Raises `RunError` if a cell was measured with other settings or has the name of another one, and `VitrailError`
        if a process fails, after the other running cells have ended. If this process ends, the processes of the cells
        end too.
        """
        results: dict[str, R] = {}
        waiting: dict[str, tuple[str, C]] = {}
        for label, cell in cells:
            found = self._finished(label, cell)
            if found is not None:
                results[cell.name] = found
            elif waiting.setdefault(cell.name, (label, cell))[1] != cell:
                raise RunError(f"{label} and {waiting[cell.name][0]} are different cells of one name, {cell.name}")
        running: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        failure = ""
        try:
            while running or (waiting and not failure):
                for name in [] if failure else [*waiting]:
                    label, cell = waiting[name]
                    if len(running) < self.jobs and cell.start not in waiting and cell.start not in running:
                        del waiting[name]
                        running[name] = label, self._start(cell)
                ended = [name for name, (_, process) in running.items() if process.poll() is not None]
                for name in ended:
                    label, process = running.pop(name)
                    end_process(process)
                    result = read_result(self.place(name), self.result)
                    if process.returncode or result is None:
                        failure = failure or self._failure(label, name, process.returncode)
                        continue
                    results[name] = result
                    self.on_cell(label, result)
                if not ended:
                    time.sleep(POLL_SECONDS)
        finally:
            for _, process in running.values():
                end_process(process)
        if failure:
            raise VitrailError(failure)
        return results

    def cell_named(self, name: str) -> C:
        """Return a cell of the folder. Raise `ConfigError` for an unknown name."""
        names = sorted(path.name for path in (self.folder / CELLS).glob("[!.]*") if path.is_dir())
        if not names:
            raise ConfigError(f"cell {name!r} cannot be repeated, because {self.folder / CELLS} has no cells")
        check_known(name, names, f"cell {name!r} is not in {self.folder / CELLS}")
        return read_cell(self.place(name), self.cell)

    def repeat(self, cell: C) -> R:
        """Run a cell of the folder again, alone, and return its new result. If this fails, the folder of the cell keeps
        its earlier result, beside the log of the failure."""
        place = self.place(cell.name)
        earlier = replaced_path(place)
        with saving("the cell", place):
            shutil.rmtree(earlier, ignore_errors=True)
            place.rename(earlier)
        try:
            return self.run([(f"cell {cell.name}", cell)])[cell.name]
        finally:
            _end_repetition(place)

    def place(self, name: str) -> Path:
        """Return the folder of a cell."""
        return self.folder / CELLS / name

    def _finished(self, label: str, cell: C) -> R | None:
        place = self.place(cell.name)
        result = read_result(place, self.result)
        if result is None or not (place / CELL).exists():
            return result
        if changed := differences(_plain(read_cell(place, self.cell)), _plain(cell)):
            raise RunError(
                f"{place} was measured with other settings of {label}: {'; '.join(changed[:5])}; delete this folder, "
                "or choose another --out"
            )
        return result

    def _start(self, cell: C) -> subprocess.Popen[bytes]:
        place = self.place(cell.name)
        if self.restarts:
            shutil.rmtree(place, ignore_errors=True)
        with saving("the cell", place):
            place.mkdir(parents=True, exist_ok=True)
            write_json(place / CELL, _plain(cell))
        with (place / LOG).open("wb") as output:
            return subprocess.Popen(  # in a session of its own, so that Ctrl-C reaches only this process
                [*self.command(cell), str(place)], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", **self.variables},
            )  # fmt: skip

    def _failure(self, label: str, name: str, code: int) -> str:
        log = self.place(name) / LOG
        end = "\n".join(f"  {line}" for line in log.read_text("utf-8", "replace").splitlines()[-SHOWN_LINES:])
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return (
            f"the process of cell {name} ({label}) {how}; the same command continues with this cell. The whole "
            f"output is in {log}:\n{end}"
        )


def _plain(cell: Cell) -> Any:
    return json.loads(json.dumps(asdict(cell)))  # tuples become lists, as when the cell is read again


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End the process of a cell, unless it has ended already."""
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def run_process(measure: Callable[[Path], Any]) -> int:
    """Measure the cell of the folder that is the last argument of this process, and write its result. Return the exit
    code. The process ends with its parent."""
    end_with_parent()
    folder = Path(sys.argv[-1])
    try:
        write_result(folder, measure(folder))
    except VitrailError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def end_with_parent() -> None:
    """End this process at once when the process that started it closes this process's standard input, or dies."""

    def watch() -> None:
        while os.read(0, 1):  # sys.stdin has a lock, which would be held when Python ends
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# Pilots: short runs that measure how fast this machine trains with given settings. Nothing of them is kept.


FIRST_STEPS = 4
"""Number of steps of the first pilot, which determines the length of the others."""

MIN_SEEN_SECONDS = 1.0
"""A pilot sees at least as many images as the machine trains in this time. To shuffle n < 65,536 images, Grain needs
about 26 / n ms per image. With 130 images, this was a third of a pilot's time, and the speed seemed too low."""


def training_speeds(configs: Sequence[TrainConfig], splits: Splits, seconds: float, budget: float) -> list[float]:
    """Return the images per second of a run that takes `budget` seconds, for each config.

    Pilots on the training images measure it, with reading, augmentation and the optimizer. They take about `seconds` in
    all, but at least a few steps. Later epochs of a run can be faster than the first one, because the pixels stay in
    memory if they fit. A pilot then sees as few images as it needs to have as many epochs as the run, but at least as
    many as the machine trains in a second. If there is too little time to compare the configs, all have the speed of
    the first one.
    """
    processes = join_processes()
    first = processes.from_first(_pilot(configs[0], splits, FIRST_STEPS))
    batch, images = configs[0].run.batch_size, len(splits.train)
    affordable = int(seconds * first / batch)
    compared = configs if affordable // len(configs) > 2 * FIRST_STEPS else configs[:1]
    steps = affordable // len(compared)
    if steps <= FIRST_STEPS:
        return [first] * len(configs)
    seen, preprocess = images, configs[0].images
    if processes.from_first(pixels_fit(images * preprocess.channels * math.prod(preprocess.image_size), processes)):
        epochs = max(1.0, budget * first / images)
        seen = min(images, max(batch, math.ceil(MIN_SEEN_SECONDS * first), math.ceil(steps * batch / epochs)))
    # Samples at equal distances, so that sorted data keeps all classes.
    few = splits if seen == images else replace(splits, train=subset(splits.train, spread(images, seen)))
    speeds = [_pilot(config, few, steps) for config in compared]
    return speeds * (len(configs) // len(compared))


def _pilot(config: TrainConfig, splits: Splits, steps: int) -> float:
    """Return the images per second of a run of a few steps."""
    alone = replace(splits, validation=None, test=None)
    with tempfile.TemporaryDirectory() as place:
        of_run = {"run": str(Path(place) / "run"), "evaluations": 0, "checkpoints": 1, "keep": "last", "probe": ""}
        of_length = {"steps": steps, "warmup": 0.1, "cooldown": 0.0, "patience": None, "max_time": None}
        # Few images can by chance have more undecodable ones than the rule allows. The run itself applies the rule.
        of_data = {"validation": "auto", "validation_share": 0.0, "per_class": None, "mix": (), "max_skipped": 1.0}
        short = config.override(overwrite=False, **of_run, **of_length, **of_data)
        try:
            return train(short, data=OpenedData("", alone)).summary["images_per_second"]
        except Stopped:  # this run cannot be resumed
            raise KeyboardInterrupt from None
