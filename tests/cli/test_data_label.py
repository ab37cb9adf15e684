"""Tests of `vitrail data label`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vitrail.cli import main
from vitrail.data.sources import open_data


@pytest.mark.slow
def test_labels_are_written_shown_and_replaced_on_request(
    model: Path, some_images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "labels"
    command = ["data", "label", f"{some_images}[:100]", "--teacher", str(model), "--out", str(out), "--device", "cpu"]
    assert main([*command, "--confidence", "0"]) == 0
    shown = capsys.readouterr().out
    assert "100 of 100 images have a class of probability 0 or more. Chosen: " in shown and "confident" in shown
    assert f"Train on them: vitrail train --data LABELLED --mix 0.75:{out}" in shown
    assert len(open_data(str(out), validation_share=0.0).train) >= 10
    assert main(command) == 2
    assert "exists already; choose another folder, or replace it with --overwrite" in capsys.readouterr().err
    assert main([*command, "--confidence", "0", "--overwrite", "--no-balance", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["images"] == 100 and sum(count["chosen"] for count in info["counts"]) == 100
    (out / "mine.txt").write_text("mine")
    assert main([*command, "--overwrite"]) == 2
    assert "holds files that Vitrail did not write (mine.txt)" in capsys.readouterr().err
