"""Tests of the parts that pages of analyses share."""

from __future__ import annotations

from vitrail.analysis.pages.figure import MAX_SKIPPED, skipped_part
from vitrail.data.batch import Skipped


def test_skipped_images_are_listed_with_their_reasons() -> None:
    assert not list(skipped_part([]))
    text = "".join(skipped_part([Skipped("a<b>.jpg", "is cut off")]))
    assert "1 image could not be decoded. The numbers do not include it.</p>" in text
    assert "a&lt;b&gt;.jpg" in text and "is cut off" in text


def test_the_list_of_skipped_images_is_short() -> None:
    text = "".join(skipped_part([Skipped(f"{number}.jpg", "is empty") for number in range(MAX_SKIPPED + 1)]))
    assert "21 images could not be decoded. The numbers do not include them. These are the first 20." in text
    assert text.count("is empty") == MAX_SKIPPED
