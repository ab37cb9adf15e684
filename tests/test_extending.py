"""Tests that run the examples of docs/extending.md one after another."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import vitrail

GUIDE = (Path(vitrail.__file__).parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_all_examples_run(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert len(examples) >= len(re.findall(r"^## ", GUIDE, flags=re.MULTILINE))
    script = tmp_path / "examples.py"
    script.write_text("\n".join(examples), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_files_that_it_names_exist() -> None:
    root = Path(vitrail.__file__).parent.parent
    named = re.findall(r"`(vitrail/[\w/.]+)`", GUIDE)
    assert len(named) > 5 and not [name for name in named if not (root / name).exists()]
