"""Tests of `vitrail data label`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from vitrail.data.sources import open_data


@pytest.mark.slow
def test_labels_are_written_shown_and_replaced_on_request(
    model: Path, some_images: Path, tmp_path: Path, cli: Cli
) -> None:
    out = tmp_path / "labels"
    command = ["data", "label", f"{some_images}[:100]", "--teacher", str(model), "--out", str(out), "--device", "cpu"]
    shown = cli.shows(*command, "--confidence", "0")
    assert "100 of 100 images have a class of probability 0 or more. Chosen: " in shown and "confident" in shown
    assert f"Train on them: vitrail train --data LABELLED --mix 0.75:{out}" in shown
    assert len(open_data(str(out), validation_share=0.0).train) >= 10
    assert "exists already; choose another folder, or replace it with --overwrite" in cli.refuses(*command)
    info = cli.json(*command, "--confidence", "0", "--overwrite", "--no-balance")
    assert info["images"] == 100 and sum(count["chosen"] for count in info["counts"]) == 100
    (out / "mine.txt").write_text("mine")
    assert "holds files that Vitrail did not write (mine.txt)" in cli.refuses(*command, "--overwrite")
