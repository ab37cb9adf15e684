"""The command line: finds the verb, imports its module alone, turns errors into a message and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence

from vitrail import __version__
from vitrail.errors import VitrailError, nearest

__all__ = ["VERBS", "main"]

VERBS = {
    "train": "train a network, on the bundled images or on yours",
    "finetune": "teach a pre-trained model your classes",
    "evaluate": "measure a model on a data set",
    "predict": "name what is on images",
    "embed": "write the features of every image of a data set, for other tools",
    "convert": "write a model in another library's layout, or another's in ours",
    "data": "check a data set before training, or pack it into shards",
    "models": "list the sizes of networks, with parameters and cost",
    "bench": "measure speed and memory on this machine, against its limits",
}

USAGE = """\
Vision Transformers, whole: pre-train, transfer, look inside, serve.

usage: vitrail VERB ...

{verbs}

`vitrail VERB --help` shows every option of a verb with its default; --debug shows the traceback of an error.
Exit codes: 0 done; 1 an error of ours; 2 wrong usage or input; 75 stopped on request, resumable.
Start with `vitrail train`: it trains on bundled images and takes a few minutes.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `vitrail ARGUMENTS...` and returns its exit code."""
    started = time.perf_counter()
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE.format(verbs="\n".join(f"  {verb:<10} {text}" for verb, text in VERBS.items())), end="")
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"vitrail {__version__}")
        return 0
    verb, *rest = words
    if verb not in VERBS:
        print(f"vitrail: unknown verb {verb!r}; {nearest(verb, VERBS)} (see vitrail --help)", file=sys.stderr)
        return 2
    try:
        code: int = importlib.import_module(f"vitrail.cli.{verb}").main(rest, started)
        sys.stdout.flush()
        return code
    except VitrailError as error:
        if debug:
            raise
        print(f"vitrail: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("vitrail: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
