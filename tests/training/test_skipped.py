"""Tests of the messages about held-out images that cannot be decoded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.listening import Display
from vitrail.training.log import Log, read_journal
from vitrail.training.run import train


def test_each_image_of_a_split_is_shown_once() -> None:
    display = Display()
    for split in ("validation", "test", "validation"):
        Log(display).show("skipped", split=split, key="a.png", reason="is empty")
    assert display.notes == [f"skipped a.png of the {split} split: is empty" for split in ("validation", "test")]


def test_of_many_images_ten_are_shown() -> None:
    display = Display()
    for number in (*range(25), *range(25)):
        Log(display).show("skipped", split="test", key=f"{number}.png", reason="is empty")
    assert len(display.notes) == 11 and "more images of the test split" in display.notes[-1]


@pytest.mark.slow
@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_run_names_the_broken_images_of_every_split(
    folder_config: Callable[..., Any], colour_folder: Path, split: str
) -> None:
    for name in ("train", "val", "test"):
        for folder in ("blue", "red"):
            (colour_folder / name / folder).mkdir(parents=True)
            for number, path in enumerate(sorted((colour_folder / folder).glob("*.png"))[:8]):
                (colour_folder / name / folder / f"{number}.png").write_bytes(path.read_bytes())
    for path in colour_folder.iterdir():
        if path.name not in ("train", "val", "test"):
            path.rename(colour_folder.with_name(path.name))
    (colour_folder / ("val" if split == "validation" else split) / "red" / "1.png").write_bytes(b"")
    config, display = folder_config(colour_folder, steps=4), Display()
    result = train(config, log=Log(display))
    assert [note for note in display.notes if "skipped" in note] == [
        f"skipped red/1.png of the {split} split: is empty (0 bytes)"
    ]
    events = [event for event in read_journal(result.folder / "journal.jsonl") if event["event"] == "skipped"]
    assert [(event["split"], event["key"]) for event in events] == [(split, "red/1.png")]
