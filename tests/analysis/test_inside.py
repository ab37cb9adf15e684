"""Test that the examples of docs/inside.md run one after another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import vitrail


@pytest.mark.slow
def test_all_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    guide = (Path(vitrail.__file__).parent.parent / "docs" / "inside.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    assert len(examples) >= 6
    for example in examples:
        exec(example, names)
    assert (tmp_path / "distance.svg").read_text().startswith("<svg ")
    assert (tmp_path / "filters.png").read_bytes().startswith(b"\x89PNG")
