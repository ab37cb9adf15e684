"""The events of a run: its journal, and the programs that show its metrics, TensorBoard and Weights & Biases."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vitrail.errors import ConfigError, nearest
from vitrail.files import saving
from vitrail.registry import optional_module

Listener = Callable[[Mapping[str, Any]], None]
"""A function that receives the events of a run by their name, "event", and their values."""


class Log:
    """The events of a run. The journal `path`, if there is one, keeps those that are told, one per line, with their
    times in seconds since 1970. Lines are only ever appended. The listeners receive all events.

    One of several processes keeps the journal of all; the log of the others has no path and no listeners.
    """

    def __init__(self, *listeners: Listener, path: Path | None = None) -> None:
        self.listeners = list(listeners)
        self.path = path

    def tell(self, event: str, shown: Mapping[str, Any] = MappingProxyType({}), /, **values: Any) -> None:
        """Append an event to the journal, and pass it to the listeners. `shown` are values that the journal does not
        keep. Raises `SaveError`."""
        content = {"event": event, "time": round(time.time(), 3), **values}
        if self.path is not None:
            _append(self.path, content)
        self._pass({**content, "shown": shown})

    def show(self, event: str, **values: Any) -> None:
        """Pass an event to the listeners only."""
        self._pass({"event": event, **values})

    def say(self, text: str) -> None:
        """Show a message to the user."""
        self.show("say", text=text)

    def note(self, text: str) -> None:
        """Show a message that needs the user's attention."""
        self.show("note", text=text)

    def extracting(self, done: int, total: int) -> None:
        """Show the number of images whose features or predictions are computed, and the number of all images."""
        self.show("extracting", done=done, total=total)

    def _pass(self, content: Mapping[str, Any]) -> None:
        for listener in self.listeners:
            listener(content)


def _append(path: Path, content: Mapping[str, Any]) -> None:
    data = (json.dumps(content, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
    with saving("the journal", path), path.open("ab+") as file:
        if file.tell() and file.seek(-1, os.SEEK_END) is not None and file.read(1) != b"\n":
            data = b"\n" + data  # the previous line is incomplete; it stays in the file
        file.write(data)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the events of a run. If a run that was resumed or rolled back repeated steps, only the events of the
    repetition are returned. If a finished run was extended, the events of its earlier end are not returned.

    Incomplete lines, which a power failure can leave, and lines without an event are skipped. A run without a journal
    has no events.
    """
    if not path.exists():
        return []
    events: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict) or "event" not in event:
            continue
        if event["event"] in ("resumed", "rolled back"):
            ends = ("finished", "ended early") if "extends" in event else ("finished",)  # that hold no longer
            events = [
                old
                for old in events
                if old.get("step", 0) <= event["step"] and not old.get("kept") and old["event"] not in ends
            ]
        events.append(event)
    return events


def end_of(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the event with the metrics and times of a finished run, or None if the run is not finished."""
    return next((event for event in events if event["event"] == "finished"), None)


def numbers_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics among the values of an event."""
    return {name: value for name, value in event.items() if isinstance(value, float) and name != "time"}


def kept_result(path: Path) -> dict[str, float]:
    """Return all metrics of the finished model on the validation split, with its loss. Return an empty dictionary if
    the run has not measured its finished model on any validation image."""
    for event in reversed(read_journal(path)):
        if event.get("kept") and event["split"] == "validation" and event["images"]:
            return numbers_of(event)
    return {}


# Programs that show the metrics of a run during training: TensorBoard, and Weights & Biases. They receive the
# journal's events.


class TensorBoard:
    """Writes event files for TensorBoard into the folder `tensorboard` of the run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        writer: Any = optional_module("torch.utils.tensorboard.writer", "tensorboard")
        place = folder / "tensorboard"
        with saving("the curves", place):  # a resumed run hides the steps that it repeats
            self._writer = writer.SummaryWriter(str(place), purge_step=step + 1 if step else None, flush_secs=10)
        if not step:
            self._writer.add_text("settings", f"```\n{json.dumps(settings, indent=1)}\n```")

    def receive(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "rolled back":
            self._writer.close()  # the next number opens a file that hides the steps that are repeated
            self._writer.purge_step = event["step"] + 1
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event["step"], walltime=event["time"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Sends numbers to Weights & Biases. Its own environment variables set the account and the project, and
    `WANDB_MODE=offline` writes them to the folder `wandb` of the run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], step: int) -> None:
        wandb: Any = optional_module("wandb", "wandb")
        place = folder / "wandb"
        identity = place / "run-id.txt"
        with saving("the curves", place):
            place.mkdir(exist_ok=True)
            if not identity.exists():
                identity.write_text(secrets.token_hex(4), encoding="utf-8")
            name = identity.read_text(encoding="utf-8")
        with _answering():
            quiet = wandb.Settings(console="off", silent=True)
            self._run = wandb.init(
                dir=folder, id=name, name=folder.name, resume="allow", config=dict(settings), settings=quiet
            )
        self._run.define_metric("*", step_metric="training_step")  # its own steps cannot go back to a checkpoint

    def receive(self, event: Mapping[str, Any]) -> None:
        if values := scalars(event):
            self._run.log({"training_step": event["step"], **values})

    def close(self) -> None:
        self._run.finish()


UNSENT = ("offline", "dryrun", "disabled")
"""Values of `WANDB_MODE` that need no account."""


@contextmanager
def _answering() -> Iterator[None]:
    """Raise `ConfigError` for an error of Weights & Biases inside the `with` block, which has a dozen types."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"track='wandb' failed: {' '.join(str(error).split())}; log in with wandb login, set WANDB_MODE=offline, "
            "or leave wandb out"
        ) from error


TRACKERS: dict[str, type[TensorBoard | WeightsAndBiases]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
"""The programs by their names. A name is also that of the module, and of the extra that installs the program."""


def tracker_problems(track: str) -> list[str]:
    """Return messages about names of `track` that are not in the table, and about a text that names none or one
    twice."""
    names = _names(track)
    if track and (not names or len(set(names)) < len(names)):
        return [f"track={track!r} does not name different programs; choose from {', '.join(TRACKERS)}"]
    return [
        f"track={track!r}: unknown program {name!r}; {nearest(name, TRACKERS)}"
        for name in names
        if name not in TRACKERS
    ]


def check_trackers(track: str) -> None:
    """Raise `ConfigError` if a program of `track` is not installed, or if Weights & Biases has no login."""
    for name in _names(track):
        module: Any = optional_module(name, name)
        if name == "wandb" and os.environ.get("WANDB_MODE") not in UNSENT:
            with _answering():
                module.login()


@contextmanager
def tracking(track: str, folder: Path, settings: Mapping[str, Any], log: Log, step: int) -> Iterator[None]:
    """Send the events inside the `with` block to the programs that `track` names. `step` is the number of steps that a
    resumed run has taken."""
    with ExitStack() as stack:
        for name in _names(track) if log.path is not None else ():
            tracker = TRACKERS[name](folder, settings, step)
            stack.callback(tracker.close)
            log.listeners.append(tracker.receive)
        yield


def scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an event by their names: "train/loss", "validation/accuracy", "probe/knn_1". Those of the
    finished model begin with "final/", and those of the weights in training, if averaged ones are measured beside them,
    with "trained/"."""
    kind = event["event"]
    if kind not in ("step", "evaluation", "probe"):
        return {}
    start = {"step": "train", "probe": "probe"}.get(kind) or event["split"]
    if event.get("kept"):
        start = f"final/{start}"
    elif kind == "evaluation" and "best" not in event:
        start = f"trained/{start}"
    return {
        f"{start}/{name}": float(value)
        for name, value in event.items()
        if name not in ("step", "time") and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _names(track: str) -> list[str]:
    return [name.strip() for name in track.split(",") if name.strip()]
