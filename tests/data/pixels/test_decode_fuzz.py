"""Tests that mutated files give pixels or `UndecodableImage`, without a crash, a hang, another exception or output."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import features

KINDS = (
    "jpeg", "progressive", "png", "webp", "lossless", "bmp", "gif", "tiff",
    *(("avif",) if features.check("avif") else ()), *(("heic",) if importlib.util.find_spec("pillow_heif") else ()),
)  # fmt: skip

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and time are those of Linux")


def check(count: int, *kinds: str) -> None:
    """Run `fuzz_files.py`. A file that takes too much time or memory kills the process."""
    script = Path(__file__).parent / "fuzz_files.py"
    done = subprocess.run([sys.executable, str(script), str(count), *kinds], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert list(report) == list(kinds)
    for kind, found in report.items():
        assert found.pop("faults") == []
        assert sum(found.values()) == count and min(found["pixels"], found["refused"]) > count // 50, (kind, found)


@pytest.mark.slow
def test_mutated_files_of_all_formats() -> None:
    check(100, *KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutated_files(kind: str) -> None:
    check(10_000, kind)
