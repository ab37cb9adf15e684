"""Tests of the list of images that could not be decoded on the pages of analyses."""

from __future__ import annotations

from vitrail.report.page import environment


def skipped(images: list[tuple[str, str]]) -> str:
    return environment().get_template("report/parts.html").module.skipped(images)


def test_skipped_images_are_listed_with_their_reasons() -> None:
    assert not skipped([])
    text = skipped([("a<b>.jpg", "is cut off")])
    assert "1 image could not be decoded. The numbers do not include it.</p>" in text
    assert "a&lt;b&gt;.jpg" in text and "is cut off" in text


def test_the_list_of_skipped_images_is_short() -> None:
    text = skipped([(f"{number}.jpg", "is empty") for number in range(21)])
    assert "21 images could not be decoded. The numbers do not include them. These are the first 20." in text
    assert text.count("is empty") == 20
