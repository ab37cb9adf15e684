"""The command line. It imports only the module of the command, and turns errors into a message and an exit code."""

from __future__ import annotations

import codecs
import errno
import importlib
import io
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail import __version__
from vitrail.errors import ConfigError, Interrupted, SaveError, UserError, VitrailError
from vitrail.errors import nearest as nearest_names  # a command is called nearest, and its module is in this package

if TYPE_CHECKING:
    from vitrail.cli.options import Command

__all__ = ["COMMANDS", "command_of", "main"]

COMMANDS = {
    "train": "train a network on the bundled images or on yours",
    "finetune": "adapt a pre-trained model to your images",
    "noisy-student": "learn from images that a teacher labels, in rounds",
    "evaluate": "measure a model on a data set",
    "optimize": "make a model's predictions faster",
    "predict": "predict the classes, objects or masks of images",
    "explain": "show which parts of an image a model attends to",
    "compare": "compare two models on the same images",
    "report": "report the metrics, layers and errors of a model",
    "embed": "save the features of every image of a data set",
    "nearest": "find the images that resemble given images",
    "convert": "convert models between Vitrail's and other libraries' formats",
    "export": "write a model for another runtime, and compare the answers",
    "serve": "serve models over HTTP",
    "data check": "find problems in a data set before training",
    "data pack": "write a data set as tar shards or in another format",
    "data label": "label images with a model, as data to train on",
    "study": "answer a question of the paper by a grid of training runs",
    "runs": "list runs with their state, metrics and differing settings",
    "runs compare": "compare the settings and metrics of runs",
    "recipes": "list training recipes, with the results that papers published",
    "models": "list network sizes with their parameters and cost",
    "bench": "measure training and inference speed on this machine",
    "bench data": "measure how fast images are read",
    "bench serve": "measure the HTTP server under load",
    "bench accuracy": "measure the time and operations to reach an accuracy",
}

MODULES = {
    "noisy-student": "noisy_student",
    "explain": "inside.EXPLAIN",
    "compare": "inside.COMPARE",
    "report": "inside.REPORT",
    "embed": "features.EMBED",
    "nearest": "features.NEAREST",
    "convert": "export.CONVERT",
    "data check": "data.CHECK",
    "data pack": "data.PACK",
    "data label": "noisy_student.LABEL",
    "runs compare": "runs.COMPARE",
    "recipes": "lists.RECIPES_LIST",
    "models": "lists.MODELS",
    "bench data": "bench_data",
    "bench serve": "bench_serve",
    "bench accuracy": "bench_accuracy",
}
"""Modules of commands, below this package, and names of commands where a module has several. All other commands have a
module of their own name."""

USAGE = """\
Train, fine-tune, evaluate and use Vision Transformers.

usage: vitrail COMMAND ...

{commands}

vitrail COMMAND --help      show the most important options
vitrail COMMAND --help-all  show every option
vitrail COMMAND --debug     show the traceback of an error

Runs are written to --run, or under their --name to runs/. Every other result is
written to --out.

Exit codes: 0 success, 1 failed (such as a full disk or an internal error), 2
wrong usage or input, 75 stopped on request (the command can be continued).
Start with `vitrail train`: it trains on bundled images in a few minutes.
"""

HELP = ("-h", "--help", "--help-all")

SEVERAL = ("train", "evaluate", "embed")
"""Commands that several processes can run together."""

OF_PATHS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
"""Errors of the operating system about a path that a user typed."""

OF_DISKS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.ENOTCONN)
"""Errors of the operating system about a disk, or a file system of the network."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `vitrail ARGUMENTS...` and return its exit code."""
    started = time.perf_counter()
    open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        codecs.register_error("vitrail", bytes_or_escape)
        sys.stdout.reconfigure(errors="vitrail")
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)  # rich prints nothing in lines of 0 columns
    typed = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in typed
    # The C++ messages of processes that lost each other have dozens of stack frames. The next error has the reason.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "WARNING" if debug else "FATAL")
    typed = [word for word in typed if word != "--debug"]
    with redirect_stdout(Output(sys.stdout)), redirect_stderr(Output(sys.stderr, is_error_output=True)):
        try:
            if not Path(__file__).parents[1].is_dir():
                raise ConfigError(
                    "Vitrail cannot run from an archive, because its pages are files; install it with pip"
                )
            try:
                here = str(Path.cwd())
            except FileNotFoundError:
                raise ConfigError("the current folder was deleted; change to another one") from None
            if arguments is None and Path(sys.argv[0]).name == "vitrail" and here not in sys.path:
                os.environ.setdefault("PYTHONSAFEPATH", "1")  # worker processes take no file here for a library
            code = _main(typed, started, debug)
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # `head` and other readers close a pipe early
            return 0
        except (ConfigError, SaveError) as error:  # of the folders, and of the standard output
            if debug:
                raise
            print(f"vitrail: {error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:  # also while modules are imported
            print("vitrail: interrupted", file=sys.stderr)
            return 130


def _main(typed: list[str], started: float, debug: bool) -> int:
    """Run a command without `--debug`, and return its exit code."""
    if typed[1:] and typed[0] in (*HELP, "help"):  # help about a command
        typed = [*typed[1:], typed[0] if typed[0] in HELP else "--help"]
    if not typed or typed[0] in (*HELP, "help"):
        print(USAGE.format(commands=_list_of(COMMANDS)), end="")
        return 0 if typed else 2
    if typed[0] in ("-V", "--version"):
        print(f"vitrail {__version__}")
        return 0
    name = next((name for name in (" ".join(typed[:2]), typed[0]) if name in COMMANDS), None)
    return _no_command(typed) if name is None else _run(name, typed[len(name.split()) :], started, debug)


@contextmanager
def _printing_once() -> Iterator[None]:
    """Discard what all processes but the first one print in the `with` block."""
    from vitrail.processes.launch import launch

    if not launch().rank:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def command_of(name: str) -> tuple[Command, Callable[..., int | None]]:
    """Return a command, and the function that runs it for a call and the command's own options. The function returns
    the exit code, or None for 0."""
    module_name, _, constant = MODULES.get(name, name).partition(".")
    module = importlib.import_module(f"vitrail.cli.{module_name}")
    if not constant:
        return module.COMMAND, module.main
    return getattr(module, constant), getattr(module, f"run_{constant.lower()}")


def _run(name: str, arguments: list[str], started: float, debug: bool) -> int:
    """Run a command, or print its help, and return the exit code."""
    given: dict[str, Any] = {}
    try:
        from vitrail.cli.options import Call
        from vitrail.processes.launch import launch

        command, run = command_of(name)
        given = command.parse([word for word in arguments if word not in HELP])
        if any(word in HELP for word in arguments):
            from vitrail.cli.help import help_page

            print(help_page(command, given, everything="--help-all" in arguments), end="")
            return 0
        command.check_required(given)
        if name not in SEVERAL and not os.environ.get("RANK"):
            os.environ.pop("WORLD_SIZE", None)  # batch scripts export it for other commands
        if name not in SEVERAL and (place := launch()).world > 1:
            error = ConfigError(
                f"vitrail {name} runs in one process, but {place.world} were started; start it without torchrun or srun"
            )
            error.is_reported = place.rank > 0
            raise error
        if "torch" in sys.modules:
            from vitrail.cores import share_cores

            share_cores()
        with _printing_once():
            return run(Call(tuple(arguments), given, started), *command.own_options(given)) or 0
    except VitrailError as error:
        if debug:
            raise
        message = command.message(error, given) if isinstance(error, UserError) else str(error)
        if not error.is_reported:
            print(f"vitrail: {message}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        is_of_path = error.errno in OF_PATHS and error.filename is not None
        if debug or not (is_of_path or error.errno in OF_DISKS):
            raise
        advice = "correct the path" if is_of_path else "check the disk, or find the place with --debug"
        print(f"vitrail: {error.filename or 'a file'} cannot be used: {error.strerror}; {advice}", file=sys.stderr)
        return UserError.exit_code if is_of_path else VitrailError.exit_code
    except ModuleNotFoundError as error:
        if debug or error.name is None or error.name.partition(".")[0] == "vitrail":
            raise
        print(
            f"vitrail: the package {error.name} is not installed in {sys.prefix}; activate the environment in which "
            f"Vitrail was installed, or install the package there",
            file=sys.stderr,
        )
        return UserError.exit_code
    except Interrupted as stop:
        again = shlex.join([*name.split(), *arguments, *stop.options])
        print(f"vitrail: {stop}\nContinue with: vitrail {again}", file=sys.stderr)
        return stop.exit_code


def _no_command(typed: list[str]) -> int:
    """Print the commands to choose from, because the typed command is missing, incomplete or unknown. Return the exit
    code."""
    if group := {name: text for name, text in COMMANDS.items() if name.split()[0] == typed[0]}:
        if len(typed) == 1 or typed[1] in HELP:
            print(f"usage: vitrail {typed[0]} COMMAND ...\n\n{_list_of(group)}")
            return 0 if len(typed) > 1 else 2
        typed = typed[:2]
    name = " ".join(typed[: 2 if group else 1])
    print(f"vitrail: unknown command {name!r}; {nearest_names(name, COMMANDS)} (see vitrail --help)", file=sys.stderr)
    return 2


def _list_of(commands: dict[str, str]) -> str:
    width = max(map(len, commands))
    return "\n".join(f"  {name:<{width}} {text}" for name, text in commands.items())


# The standard streams of a command that are closed, or whose reader or disk is gone.


def open_streams() -> None:
    """Open the standard streams that the caller has closed, so that what is printed is discarded.

    Otherwise the next file that is opened would get the number of a closed stream, and the messages of libraries.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open until the process ends)


def bytes_or_escape(error: Any) -> tuple[str | bytes, int]:
    """Return what is printed for a character that the standard output cannot encode: the byte of a file name that is
    not UTF-8, or the character's escape sequence in Python. It is a handler of errors for `codecs`."""
    character = error.object[error.start]
    handler = "surrogateescape" if "\udc80" <= character <= "\udcff" else "backslashreplace"
    return character.encode("ascii", handler), error.start + 1


CONTROLS = re.compile(r"(\x1b\[[\d;]*[AKm]|\x1b\[\?25[hl])|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Control characters. A terminal gets those of the group, which are colours and the movements of progress bars. It gets
Python's escape sequences in place of all others."""


class Output:
    """The standard output or the standard error output of a command, without the errors of a stream that is lost: the
    reader of a pipe has ended, a disk is full, or a terminal was closed. Everything that follows is discarded.

    A lost standard output ends the command as a closed terminal does. A command that can be continued therefore saves
    its state first, and a command under nohup goes on. Any other command raises `BrokenPipeError` or `SaveError`. If
    the standard error output is lost, the command goes on.

    A terminal gets no control characters of names of files and classes, which could change what it shows or does.
    """

    def __init__(self, stream: Any, *, is_error_output: bool = False) -> None:
        self._stream = stream
        self._is_error_output = is_error_output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        shown = CONTROLS.sub(lambda found: found[1] or repr(found[0])[1:-1], text) if self._stream.isatty() else text
        with self._discarding():
            self._stream.write(shown)
        return len(text)

    def flush(self) -> None:
        with self._discarding():
            self._stream.flush()

    def close(self) -> None:
        """Leave the stream open, which the process still uses: absl keeps this object and closes it after a command."""

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # where Python also writes what is left when it exits
            os.close(nowhere)
            if self._is_error_output:
                return
            message = f"the standard output cannot be written: {error.strerror}"
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
                print(f"vitrail: {message}", file=sys.stderr)
                signal.raise_signal(signal.SIGHUP)
            elif isinstance(error, BrokenPipeError):
                raise
            else:
                raise SaveError(message) from error
