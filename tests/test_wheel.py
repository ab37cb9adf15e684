"""Tests of the wheel: it contains the bundled images, their licence, the model `small` and the types, and little
else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import vitrail

ROOT = Path(vitrail.__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_is_whole_and_small(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("vitrail-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        data = ("/bundled/", "/shipped_models/")
        code = sum(
            file.compress_size for file in archive.infolist() if not any(folder in file.filename for folder in data)
        )
        notice = archive.read("vitrail/data/formats/bundled/LICENSE").decode()
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    assert "MIT License" in notice and "Zalando" in notice
    assert {
        f"vitrail/{path.relative_to(ROOT / 'vitrail').as_posix()}"
        for kind in ("*.py", "*.toml", "*.html", "*.js", "*.css")
        for path in (ROOT / "vitrail").rglob(kind)
    } <= names
    assert {"vitrail/py.typed", "vitrail/data/formats/bundled/train-images-idx3-ubyte.gz"} <= names
    small = "vitrail/weights/shipped_models/small"
    assert {f"{small}/model.json", f"{small}/model.safetensors"} <= names
    assert not any(name.startswith(("tests/", "docs/")) for name in names)
    assert code < 1_500_000 and wheel.stat().st_size < 10_000_000
    assert "Requires-Dist: torch>=2.11" in metadata and "Requires-Python: >=3.11" in metadata
