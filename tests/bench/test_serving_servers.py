"""Tests of the servers that are measured: the memory and the time of all their processes are counted."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from vitrail.bench import serving
from vitrail.bench.serving import SERVERS, ServerKind, check_pythons, cpu_seconds, memory_bytes, started
from vitrail.errors import ConfigError

SCRIPT = """
import subprocess, sys, time
if len(sys.argv) == 1:
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, "child"], stdin=subprocess.PIPE)
held = bytearray(50_000_000)
held[::4096] = b"x" * len(held[::4096])
begun = time.process_time()
while time.process_time() - begun < 0.2:
    pass
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_library_that_cannot_be_imported_is_named_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "litserve.py").write_text("print('a banner')\nraise ImportError('no such part')")
    monkeypatch.setattr(serving, "_environment", lambda: {"PYTHONPATH": str(tmp_path)})
    with pytest.raises(ConfigError, match="ImportError: no such part"):
        check_pythons(["litserve"], {})


@pytest.mark.slow
def test_all_processes_of_a_server_are_counted() -> None:
    script = f"SCRIPT = {SCRIPT!r}\n{SCRIPT}"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        assert memory_bytes(process.pid) > 100e6
        assert 0.4 <= cpu_seconds(process.pid) < 5
        process.stdin.close()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{process.pid}").exists():
        assert time.monotonic() < deadline
    assert memory_bytes(process.pid) == 0 == cpu_seconds(process.pid)


def test_what_a_server_prints_stays_out_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chatty.py").write_text(
        "import sys, time\nprint('a banner', flush=True)\n"
        "print('http://127.0.0.1:5', file=sys.stderr, flush=True)\ntime.sleep(60)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SERVERS, "chatty", ServerKind(("chatty.py",)))
    with started("chatty", tmp_path, "float32", {}) as (_, port):
        assert port == 5
    assert capfd.readouterr().out == ""
