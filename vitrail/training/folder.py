"""The folder of a run: its lock, its record `run.json`, and what lists of runs read from it."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import shlex
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitrail.errors import ConfigError, RunError
from vitrail.files import check_parent, expanded, lock, partial_path, saving, write_json, write_whole
from vitrail.machine import pick_device
from vitrail.models.variants import ModelConfig
from vitrail.settings import bare_names, facts, raise_problems
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.log import numbers_of, read_journal
from vitrail.training.start import Origin
from vitrail.weights.saved import check_format, read_object

FORMAT = 2
"""Version of the format, the first that a release writes."""


class Record(NamedTuple):
    """The part of `run.json` that resuming needs."""

    config: TrainConfig
    fingerprint: str
    """A hash of the keys and targets of all samples."""
    images: int
    """Number of training images."""
    classes: tuple[str, ...]
    """Names of the classes, to which the targets of the samples are indices."""
    origin: Origin | None
    """The model that the run started from, or None."""
    objects: tuple[str, ...] = ()
    """Names of the Python objects that the run was started with: "data", "network", both or none."""
    models: tuple[tuple[str, str], ...] = ()
    """SHA-256 of the weights of each model that the run learns from, after the name of its setting."""


def read_record(folder: Path) -> Record:
    """Read `run.json` from the folder of a run.

    Raises `RunError` if the folder has no `run.json`, or if that file is damaged or has another format.
    """
    path = folder / "run.json"
    if not path.is_file():
        near = Path("runs") / folder
        hint = f"; did you mean {str(near)!r}?" if (near / "run.json").is_file() else ""
        raise RunError(f"{str(folder)!r} is not the folder of a run: it has no run.json{hint}")
    values = read_object(path, RunError)
    check_format(_field(path, values, "format"), FORMAT, path, RunError, "train the run again")
    config, data = (_field(path, values, name, is_object=True) for name in ("config", "data"))
    try:
        return Record(
            TrainConfig.from_plain(config),
            str(_field(path, data, "data.fingerprint")),
            int(_field(path, data, "data.train")),
            tuple(_field(path, data, "data.classes")),
            Origin.from_plain(values.get("init")),
            tuple(values.get("objects", ())),
            tuple((name, str(sha256)) for name, sha256 in dict(values.get("models", {})).items()),
        )
    except (ConfigError, TypeError, KeyError) as error:
        raise RunError(f"{path} is damaged, or of another version of Vitrail: {error}") from error


def replace_config(folder: Path, config: TrainConfig, **further: Any) -> None:
    """Replace the config and `further` fields in the `run.json` of a run's folder. Raises `SaveError`."""
    path = folder / "run.json"
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    with saving("the run", folder):
        write_json(path, {**values, "config": config.to_plain(), **further})


def _field(path: Path, values: dict[str, Any], name: str, *, is_object: bool = False) -> Any:
    """Return the value of the field whose name is the last part of the dotted `name`. Raises `RunError` if the field is
    missing, or is not an object of named fields although it must be one."""
    if (last := name.rpartition(".")[2]) not in values:
        raise RunError(f"{path} is damaged: the field {name!r} is missing")
    if is_object and not isinstance(values[last], dict):
        raise RunError(f"{path} is damaged: {name!r} is not an object of named fields")
    return values[last]


# The link from the report of a run to the page on which `vitrail report` looks inside its model.


INSIDE = "inside"
"""Folder in a run's folder for the page of `vitrail report` on its model."""

PAGE = f"{INSIDE}/report.html"
"""Path of the page of `vitrail report` in a run's folder."""

PLACE = re.compile(rb'<p id="inside">.*?</p>', re.DOTALL)
"""The paragraph of a run's report that has the link."""


def has_current(run: Path, page: str) -> bool:
    """Return True if a run has a page that is not older than its model."""
    path, model = run / page, run / "model" / "model.json"
    return path.is_file() and not (model.is_file() and model.stat().st_mtime > path.stat().st_mtime)


def outdate_pages(run: Path) -> None:
    """Make the pages on an earlier model of a run older than every model, however the clock is set in between."""
    for page in (run / "report.html", run / PAGE):
        with contextlib.suppress(OSError):  # there is none, or it belongs to another user
            os.utime(page, (0, 0))


def inside_link(run: Path) -> str:
    """Return the paragraph with the link. It is empty unless the run has a page that is newer than its model."""
    text = f'<a href="{PAGE}">Look inside the model</a>: its layers, saliency maps, embeddings and errors.'
    return f'<p id="inside">{text if has_current(run, PAGE) else ""}</p>'


def link_inside(run: Path) -> None:
    """Put the link into the report of a run, if there is one. Raise `SaveError` if it cannot be written."""
    path = run / "report.html"
    if not path.is_file():
        return
    with saving("the report", path):
        before = path.read_bytes()
        after = PLACE.sub(lambda _: inside_link(run).encode(), before, count=1)
        if after != before:
            write_whole(path, after)


# The lock of a run's folder. Only the process that holds it may train the run or replace the folder.


LOCK = "run.lock"
"""Name of the file in the run's folder that is locked. The file names the process that holds the lock."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder inside the `with` block. The folder is made if it does not exist. The operating
    system releases the lock if the process ends in any other way.

    Raises `RunError` if another process or thread holds the lock. On a file system without locks, nothing is locked.
    """
    path = folder / LOCK
    with saving("the lock", path):
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if not _acquire(file):
            raise RunError(_in_use(folder))
        with contextlib.suppress(OSError):  # the lock holds even if the disk is too full for this text
            os.ftruncate(file, 0)
            os.write(file, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
    finally:
        os.close(file)


def is_locked(folder: Path) -> bool:
    """Return True if a process holds the lock of a run's folder."""
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _acquire(file)
    finally:
        os.close(file)


def _acquire(file: int) -> bool:
    """Acquire the lock of an open file. Return False if it is held elsewhere, or if its holder has deleted the file."""
    return lock(file) and os.fstat(file).st_nlink > 0


def _in_use(folder: Path) -> str:
    """Return the message about a run that another process trains."""
    try:
        holder = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        process, host = int(holder["process"]), str(holder["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return (
            f"run {folder} is in use: another process trains it, and two processes must not train one run; wait until "
            "that process ends"
        )
    there = "" if host == socket.gethostname() else f" on {host}"
    return (
        f"run {folder} is in use: process {process}{there} trains it, and two processes must not train one run; wait "
        f"until that process ends, or stop it with kill {process}{there}"
    )


# The folder of a run: its path, and the rules for replacing an existing one.


ENTRIES = (
    "run.json", LOCK, "journal.jsonl", "progress.html", "report.html", "checkpoints", "checkpoints/*",
    "model", "model/model.*", "model/tokenizer.*", "model/text.safetensors", "words.json",
    "tokenizer.json", "tokenizer.model", "beside.safetensors", ".best-*",
    "examples", "examples/*.png",
    INSIDE, *(f"{INSIDE}/{name}" for name in ("report.html", "report.json", "*.csv", "*.svg", "*.png", "*.parquet")),
    "tensorboard", "tensorboard/*", "wandb", "wandb/*", "*.vitrail-partial", "*.vitrail-replaced",
)  # fmt: skip
"""All files that a run writes into its folder, as shell patterns. A folder with any other file is not deleted."""


def new_folder(config: TrainConfig) -> Path:
    """Make the run's folder, and return its path. Raises `RunError` if the folder exists and may not be replaced."""
    folder = place_of(config)
    check_place(folder, config)
    if (folder / "run.json").is_file():
        with saving("the run", folder):
            for entry in sorted(folder.iterdir(), key=lambda entry: entry.name == "run.json"):  # last: it names the run
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    with saving("the run", folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_place(folder: Path, config: TrainConfig) -> None:
    """Raise `RunError` if the folder exists and the run may not replace it, and `DestinationError` if it cannot be
    made. A folder in which a process was killed before it recorded its run is new."""
    if not folder.exists() or (is_unrecorded(folder) and any(folder.iterdir()) and not is_locked(folder)):
        check_parent(folder)
        return
    if not config.run.overwrite:
        further = f", continue it with --resume {shlex.quote(str(folder))}, or replace it with --overwrite"
        is_run = (folder / "run.json").is_file()
        raise RunError(f"run folder {str(folder)!r} exists; choose another --run{further if is_run else ''}")
    if not (folder / "run.json").is_file():
        raise RunError(
            f"{str(folder)!r} is not the folder of a run (it has no run.json), so it is not overwritten; choose "
            "another --run"
        )
    entries = (entry.relative_to(folder).as_posix() for entry in folder.rglob("*"))
    if foreign := sorted(name for name in entries if not any(fnmatch.fnmatchcase(name, one) for one in ENTRIES)):
        raise RunError(
            f"run folder {str(folder)!r} also holds files that a run does not write ({', '.join(foreign[:3])}), "
            "so it is not overwritten; move them elsewhere, or choose another --run"
        )
    if is_locked(folder):
        raise RunError(_in_use(folder))


def is_unrecorded(folder: Path) -> bool:
    """Return True if a folder has nothing but what a process leaves that is killed before it records its run."""
    return folder.is_dir() and {*folder.iterdir()} <= {folder / LOCK, partial_path(folder / "run.json")}


def run_of(model: Path) -> Path | None:
    """Return the folder of the run whose model a path names, or None. The path is that of the run or of its model."""
    folders = (folder for folder in (model, model.parent) if (folder / "run.json").is_file())
    return next((folder for folder in folders if folder == model or model.name == "model"), None)


def check_request(config: TrainConfig) -> None:
    """Check what needs neither the initial model nor the data: the device, the optimizer, settings of frozen blocks,
    and the run's folder. Runs that began with settings that are refused now are continued.

    Raises `ConfigError`, `RunError` or `DestinationError`.
    """
    pick_device(config.run.device)
    raise_problems(config.new_problems())
    for name in ("dropout", "stochastic_depth", "skip_dropped") if config.start.train_blocks == 0 else ():
        if value := config.model.overrides.get(name):
            raise ConfigError(
                f"{name}={value} is for blocks that are trained, but all of them are frozen; leave it out"
            )
    check_place(place_of(config), config)


def place_of(config: TrainConfig) -> Path:
    """Return the folder that `--run` names. By default return the first of runs/NAME, runs/NAME-2, ... that does not
    exist.
    """
    if config.run.folder is not None:
        return expanded(config.run.folder)
    data = Path(config.data.spec.partition("?")[0])  # without the choice of splits or columns
    name = re.sub(r"[^\w.-]+", "-", config.run.name or data.resolve().name).strip("-.") or "run"
    numbers = (f"{name}-{number}" if number > 1 else name for number in range(1, 1_000_000))
    return next(path for path in (Path("runs") / numbered for numbered in numbers) if not path.exists())


# Summaries of runs, from the files in their folders: state, metrics, and the settings in which they differ.


RunState = Literal["training", "finished", "stopped", "failed", "interrupted", "unreadable"]
"""State of a run. A run that was stopped saved its state on request. A run that was interrupted ended without recording
why, for example because the machine was switched off."""

ENDS: dict[str, RunState] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}
"""State of a run whose last event is the key, while no process trains it."""

DEPTH = 3
"""Number of levels of folders in which runs are looked for."""


@dataclass(frozen=True)
class RunSummary:
    """A run as its folder describes it."""

    folder: Path
    state: RunState
    problem: str = ""
    """Reason why the run cannot be read, or why it failed."""
    config: TrainConfig | None = None
    step: int = 0
    """Optimizer steps that were done."""
    steps: int = 0
    """Optimizer steps of the whole run."""
    started: float | None = None
    """Time of the first event, in seconds since 1970."""
    changed: float | None = None
    """Time of the last event, in seconds since 1970."""
    metrics: dict[str, float] | None = None
    """Metrics of the saved model such as "validation_accuracy", or of the best evaluation so far, with the number of
    images that were measured, such as "validation_images". None without any."""
    fingerprint: str = ""
    """Hash of the names and targets of all images, or "" if it is unknown."""

    def texts(self, split: str) -> list[str]:
        """Return the metrics of a split as texts with their names."""
        return [] if self.config is None else self.config.task.texts_of(split, self.metrics or {})

    def images(self, split: str) -> int | None:
        """Return the number of images of a split on which the metrics were measured, or None if it is unknown."""
        found = (self.metrics or {}).get(f"{split}_images")
        return None if found is None else int(found)


def find_runs(folder: Path, depth: int = DEPTH, deeper: list[Path] | None = None) -> Iterator[Path]:
    """Yield the folders of runs in a folder, in alphabetical order. The folder itself can be a run. The folders that
    are not searched because they are deeper than `depth` levels are appended to `deeper`.

    Folders inside a run, hidden folders and folders that cannot be opened hold no runs.
    """
    if (folder / "run.json").is_file():
        yield folder
        return
    try:
        inside = sorted(
            folder / entry.name
            for entry in os.scandir(folder)  # which knows the type of a file that is no link
            if not entry.name.startswith(".")
            and ((folder / entry.name).is_dir() if entry.is_symlink() else entry.is_dir())
        )
    except OSError:
        return
    if depth == 0 and deeper is not None:
        deeper += inside
    for path in inside if depth else ():
        yield from find_runs(path, depth - 1, deeper)


def summarise(folder: Path) -> RunSummary:
    """Return the summary of the run in a folder. A run that cannot be read has the state "unreadable"."""
    try:
        record = read_record(folder)
        events = read_journal(folder / "journal.jsonl")
    except (RunError, OSError) as error:
        return RunSummary(folder, "unreadable", str(error))
    last = events[-1] if events else {}
    state = "training" if is_locked(folder) else ENDS.get(last.get("event", ""), "interrupted")
    begun = [event for event in events if event["event"] in ("started", "resumed")]
    return RunSummary(
        folder,
        state,
        str(last.get("reason", "")) if state == "failed" else "",
        record.config,
        step=max((int(event.get("step", 0)) for event in events), default=0),
        steps=int(begun[-1]["steps"]) if begun else record.config.total_steps(record.images),
        started=events[0]["time"] if events else None,
        changed=last.get("time"),
        metrics=_metrics(events),
        fingerprint=record.fingerprint,
    )


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Return the settings of a config by their bare names, with the values that are in effect. Settings of the machine,
    and fields of the network that the config leaves to the variant, are not included."""
    found = ["task"]
    for section in fields(config):
        value = getattr(config, section.name)
        found += ["variant", *value.overrides] if isinstance(value, ModelConfig) else bare_names(type(value))
    of_machine = facts(RunConfig, "of_machine")
    return {name: config.in_effect(name) for name in found if name not in of_machine}


def value_text(value: Any) -> str:
    """Return the value of a setting as a cell of a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def settings_beside(configs: Sequence[TrainConfig]) -> list[dict[str, Any]]:
    """Return the settings of each config that one of them has (`settings_of`), by their bare names. A setting that a
    config does not have, or that has no effect in it, is None."""
    names = dict.fromkeys(name for config in configs for name in settings_of(config))
    return [{name: config.in_use(name) for name in names} for config in configs]


def differing_settings(configs: Sequence[TrainConfig]) -> list[dict[str, Any]]:
    """Return the settings of each config that are not the most frequent ones among the configs, by their bare names.

    Of equally frequent values, the first one counts as the usual value. A setting that a config does not have is None.
    """
    settings = settings_beside(configs)
    names = settings[0] if settings else ()
    usual = {name: Counter(repr(one[name]) for one in settings).most_common(1)[0][0] for name in names}
    return [{name: value for name, value in one.items() if repr(value) != usual[name]} for one in settings]


def notes_on_data(runs: Sequence[RunSummary]) -> Iterator[str]:
    """Yield a note for each data set that had other images, labels or splits in some of the runs, although its name
    and the settings of its splits are the same."""
    groups: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        if run.config is not None and run.fingerprint:
            groups.setdefault(repr(run.config.data), {}).setdefault(run.fingerprint, []).append(run.folder.name)
    specs = {repr(run.config.data): run.config.data.spec for run in runs if run.config is not None}
    for data, found in groups.items():
        if len(found) > 1:
            runs_of_each = "; ".join(", ".join(names) for names in found.values())
            yield (
                f"the images, labels or splits of data {specs[data]!r} changed between these runs, so their metrics "
                f"are not comparable: {runs_of_each}"
            )


def _metrics(events: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Return the metrics of the saved model, or those of the best evaluation on the validation split so far."""
    for event in reversed(events):
        if event["event"] == "finished":
            return {f"{one['split']}_images": one["images"] for one in events if one.get("kept")} | event["metrics"]
        if event["event"] == "evaluation" and event.get("best"):
            return {f"validation_{name}": value for name, value in numbers_of(event).items()}
    return None
