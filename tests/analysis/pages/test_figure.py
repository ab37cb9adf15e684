"""Tests of the list of images that could not be decoded on the pages of analyses."""

from __future__ import annotations

from vitrail.report.page import environment


def skipped(images: list[tuple[str, str]]) -> str:
    return environment().get_template("report/parts.html").module.skipped(images)


def test_the_first_skipped_images_are_listed_with_their_reasons() -> None:
    assert not skipped([])
    text = skipped([("a<b>.jpg", "is cut off"), *((f"{number}.jpg", "is empty") for number in range(20))])
    assert "21 images could not be decoded" in text and "a&lt;b&gt;.jpg" in text and "is cut off" in text
    assert text.count("is empty") == 19
