"""HTML pages from Jinja templates: every value is escaped, and pictures are embedded.

A template is a file beside the module that fills it. It extends `report/page.html`, which has the frame and the style
of all pages, and imports `report/parts.html`, which has tables, figures and charts.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup
from PIL import Image

from vitrail.errors import plural
from vitrail.files import saving, write_whole
from vitrail.report.drawing import colour_of

if TYPE_CHECKING:
    from jinja2 import Environment

PACKAGE = Path(__file__).parent.parent
"""Folder from which templates are named, such as `report/page.html`."""

SIDE = 96
"""Longest side of a thumbnail in pixels. Smaller images are enlarged by an integer factor to stay sharp."""

LONG_WORD = re.compile(r"\S{20,}")
"""Words that may be too long for a line of a caption."""

SEPARATOR = re.compile(r"([/_.-])(?=\w)")
"""Letters of a file name behind which a line may break."""

JOINERS = frozenset("\u200c\u200d\u200e\u200f\u061c")
"""Invisible characters that several scripts and emoji need inside a word: joiners and marks of direction."""

GENERATOR = '<meta name="generator" content="vitrail">'
"""Tag in the head of every page, as `page.html` has it. Vitrail recognises its pages by this tag."""


def write_page(what: str, path: Path, template: str, **values: Any) -> None:
    """Write a page in one step. Raise `SaveError`, whose message names it `what`. See `render` for the rest."""
    with saving(what, path):
        write_whole(path, render(template, **values).encode())


def render(template: str, **values: Any) -> str:
    """Return the text of a template that is filled with values. Text is escaped unless it is `Markup`.

    Every page needs a `title`, the plain text of its heading and of the window's title. With a `script`, which runs
    last, the page has a policy: no other script runs, and nothing is requested.
    """
    return environment().get_template(template).render(values)


@functools.cache
def environment() -> Environment:
    """Return the templates of all pages."""
    import jinja2  # only where a page is written, because it takes 30 ms

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PACKAGE),
        autoescape=True,
        finalize=_escaped,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "file": lambda name: Markup((PACKAGE / name).read_text(encoding="utf-8")),
        "plural": plural,
        "colour_of": colour_of,
        "script": "",
    }
    environment.filters |= {
        "thumbnail": thumbnail_address,
        "large": large_address,
        "breakable": _breakable_line,
        "sha256": lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode(),
    }
    return environment


def _escaped(value: Any) -> Any:
    """Return text as HTML, and other values as they are."""
    return Markup(escape(value)) if isinstance(value, str) and not isinstance(value, Markup) else value


def is_our_page(path: Path) -> bool:
    """Return True if a file is a page that `render` made."""
    return path.is_file() and GENERATOR in path.read_text(encoding="utf-8", errors="replace")[:2000]


def printable(name: str) -> str:
    """Return a name in which raw bytes and control characters are escaped, but not the `JOINERS`."""
    return "".join(
        letter if letter.isprintable() or letter in JOINERS else letter.encode("unicode_escape").decode("ascii")
        for letter in name
    )


def escape(text: str) -> str:
    """Return text escaped for HTML, between tags or in an attribute.

    The result is valid UTF-8 and contains neither markup nor characters that reverse the text direction.
    """
    return html.escape(printable(text))


def _breakable_line(line: str) -> Markup:
    """Return a line of a caption in which file names can break behind a separator."""
    return Markup(LONG_WORD.sub(lambda word: SEPARATOR.sub(r"\1<wbr>", word[0]), escape(line)))


def thumbnail_address(picture: Image.Image) -> Markup:
    """Return an address that contains a thumbnail of a picture (mode L or RGB)."""
    scale = SIDE / max(picture.size)
    if scale >= 2:
        picture = picture.resize((picture.width * int(scale), picture.height * int(scale)), Image.Resampling.NEAREST)
    return large_address(picture, SIDE)


def large_address(picture: Image.Image, side: int = 480) -> Markup:
    """Return an address that contains a picture (mode L or RGB), scaled down to at most `side` pixels."""
    picture = picture.copy()
    picture.thumbnail((side, side))
    return embedded(jpeg(picture), "jpeg")


def jpeg(picture: Image.Image, *, quality: int = 85) -> bytes:
    """Return a picture (mode L or RGB) as a JPEG file."""
    return picture_file(picture, "JPEG", quality=quality)


def picture_file(picture: Image.Image, form: str, **options: int) -> bytes:
    """Return a picture as a file of a form, such as `form="PNG"`, with Pillow's options of this form."""
    file = io.BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


def embedded(data: bytes, form: str) -> Markup:
    """Return an address that contains the file of a picture, such as `form="png"`."""
    return Markup(f"data:image/{form};base64,{base64.b64encode(data).decode('ascii')}")
