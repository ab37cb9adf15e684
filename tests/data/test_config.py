"""Tests of the choice of data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from vitrail.cli import main
from vitrail.data.config import DataConfig
from vitrail.data.pixels.decode import decode, pixel_limit
from vitrail.errors import UndecodableImage


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two classes with ten images of 34 x 21 or 20 pixels each. The limit on pixels is restored after the
    test."""
    monkeypatch.setenv("VITRAIL_MAX_PIXELS", "")
    for name in ("red", "blue"):
        (tmp_path / name).mkdir()
        for number in range(10):
            Image.new("RGB", (34, 21 - number % 2), name).save(tmp_path / name / f"{number}.png")
    return tmp_path


def test_the_limit_on_pixels_is_a_setting_of_the_data(photos: Path) -> None:
    whole = DataConfig(spec=str(photos), validation_share=0.0)
    small, large = replace(whole, max_pixels=679), replace(whole, max_pixels=34 * 21)
    image = small.open().train[0].image
    with pytest.raises(UndecodableImage, match="--max-pixels"):
        decode(image, 3)
    train = large.open().train
    assert [decode(train[index].image, 3).shape[1] for index in range(len(train))] == [34] * len(train)


def test_without_the_setting_the_limit_stays() -> None:
    before = pixel_limit()
    DataConfig(spec="bundled").open()
    assert pixel_limit() == before


def test_commands_without_a_run_have_the_option_too(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "check", str(photos), "--page", "None", "--max-skipped", "1", "--max-pixels"]
    main([*arguments, "700"])
    assert "34 x 21 pixels (width x height), more than the limit of 700" in capsys.readouterr().out
    assert main([*arguments, "714"]) == 0
    assert "more than the limit" not in capsys.readouterr().out
    assert main([*arguments, "0"]) == 2
    assert "--max-pixels: 0 " in capsys.readouterr().err
