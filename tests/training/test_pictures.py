"""Tests of the report of a run without labels."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from vitrail.errors import SaveError
from vitrail.report.page import is_our_page
from vitrail.tasks.pictures import Picture, PictureTable
from vitrail.training.page import write_pictures

ROW = tuple(Picture(Image.new("L", (4, 3), number), (f"picture {number}", "<b>")) for number in range(3))


def test_a_page_has_metrics_and_every_picture(tmp_path: Path) -> None:
    tables = [PictureTable("Restored patches", "One & two.", (ROW, ROW)), PictureTable("More", "Text.", (ROW,))]
    path = write_pictures(tmp_path, "A <network>", {"validation_patch_loss": 0.123456}, tables)
    assert path == tmp_path / "report.html" and is_our_page(path)
    page = path.read_text(encoding="utf-8")
    assert page.count("<img ") == 9 and page.count('<div class="strip">') == 3 and "A &lt;network&gt;" in page
    assert "validation patch loss" in page and "0.1235" in page and "&lt;b&gt;" in page and "One &amp; two." in page
    assert [page.index(text) for text in ("validation patch loss", "Restored patches", "More")] == sorted(
        page.index(text) for text in ("validation patch loss", "Restored patches", "More")
    )
    assert not list(tmp_path.glob("*partial*"))


def test_without_pictures_there_is_no_page(tmp_path: Path) -> None:
    assert write_pictures(tmp_path, "A network", {"loss": 1.0}, ()) is None and not list(tmp_path.iterdir())


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="the report"):
        write_pictures(tmp_path / "missing", "A network", {}, [PictureTable("More", "Text.", (ROW,))])
