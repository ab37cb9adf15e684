"""Tests of the parts that pages share: names stay text, pictures stay small, and nothing is fetched."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vitrail.report.page import SIDE, environment, escape, printable

PAGE = """{% extends "report/page.html" %}{% import "report/parts.html" as parts %}
{% block style %}p { color: red; }{% endblock %}{% block body %}<p>part</p>
{{ parts.table([name], [[name]]) }}{{ parts.figure(none, [name, name], name) }}{% endblock %}"""


def document(name: str) -> str:
    """Return a page that shows a name in its title, a table and a caption."""
    return environment().from_string(PAGE).render(title=name, name=name)


def part(name: str, *values: object) -> str:
    """Return the HTML of one of the parts that pages share."""
    return getattr(environment().get_template("report/parts.html").module, name)(*values)


EVIL = "</td><script>alert('1 & 2')</script>\u202e\x00\udcff"


def picture_in(tag: str) -> Image.Image:
    data = re.search(r'base64,([^"]*)"', tag)
    assert data is not None
    picture = Image.open(io.BytesIO(base64.b64decode(data[1], validate=True)))
    assert picture.format == "JPEG"
    return picture


@pytest.mark.slow
@given(st.text(st.characters()))
def test_any_name_is_text(read_page: Callable[[str], Any], name: str) -> None:
    text = document(name)
    page = read_page(text)
    shown = printable(name)
    # The window's title, the heading, the table's head and body, and two lines under the picture.
    assert page.text.count(shown) == (6 if shown else 0)
    assert {*page.names} - {"wbr"} == {
        "html", "head", "meta", "title", "style", "body", "h1", "div", "table", "thead", "tbody", "tr", "th", "td",
        "p", "figure", "figcaption", "br",
    }  # fmt: skip
    text.encode("utf-8")


def test_names_keep_their_letters() -> None:
    for name in ("naïve café", "漢字", "שלום", "a\\b", "🙂"):
        assert printable(name) == name
    assert printable(EVIL) == "</td><script>alert('1 & 2')</script>\\u202e\\x00\\udcff"
    assert escape("<&>\"'") == "&lt;&amp;&gt;&quot;&#x27;"
    assert escape("a\u202eb") == "a\\u202eb"


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((10, 7), (90, 63)),
        ((48, 20), (96, 40)),
        ((49, 20), (49, 20)),
        ((96, 96), (96, 96)),
        ((960, 96), (96, 10)),
        ((1, 5000), (1, 96)),
    ],
)
def test_thumbnails_are_small_and_sharp(size: tuple[int, int], expected: tuple[int, int]) -> None:
    picture = Image.new("RGB", size, (200, 30, 30))
    found = picture_in(part("thumbnail", picture, "x"))
    assert found.size == expected and max(found.size) <= SIDE
    assert picture.size == size, "the picture that was given is left as it is"
    assert np.abs(np.asarray(found.convert("RGB"), int) - (200, 30, 30)).max() <= 3


def test_a_grey_picture_and_none() -> None:
    assert picture_in(part("thumbnail", Image.new("L", (20, 30), 7), "x")).mode == "L"
    assert part("thumbnail", None, "x") == '<div class="none">no picture</div>'
    assert 'alt="&lt;b&gt;"' in part("thumbnail", Image.new("L", (2, 3)), "<b>")
