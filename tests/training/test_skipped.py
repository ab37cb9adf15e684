"""Test of the messages about held-out images that cannot be decoded, which are told once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.listening import Display
from tests.make import make_colour_folder
from tests.training.curves import events_of
from vitrail.training.log import Log
from vitrail.training.run import train


@pytest.mark.slow
@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_run_names_the_broken_images_of_every_split(
    folder_config: Callable[..., Any], tmp_path: Path, split: str
) -> None:
    for name in ("train", "val", "test"):
        make_colour_folder(tmp_path / "data" / name, images=8)
    (tmp_path / "data" / ("val" if split == "validation" else split) / "red" / "01.png").write_bytes(b"")
    config, display = folder_config(tmp_path / "data", steps=4), Display()
    result = train(config, log=Log(display))
    assert [note for note in display.notes if "skipped" in note] == [
        f"skipped red/01.png of the {split} split: is empty (0 bytes)"
    ]
    events = events_of(result.folder, "skipped")
    assert [(event["split"], event["key"]) for event in events] == [(split, "red/01.png")]
