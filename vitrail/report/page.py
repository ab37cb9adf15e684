"""Common parts of HTML reports: style, tables, thumbnails and escaping."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image

SIDE = 96
"""Longest side of a thumbnail in pixels. Smaller images are enlarged by an integer factor to stay sharp."""

STYLE = """
:root { color-scheme: light dark; --line: #d4d4d0; --soft: #f4f4f1; --dim: #5c5c58;
  --error: #b3261e; --warning: #8a5a00; --note: #2d5d8a; }
@media (prefers-color-scheme: dark) { :root { --line: #44443f; --soft: #262624; --dim: #aeaea6;
  --error: #ff8a80; --warning: #ffc166; --note: #9cc8f2; } }
* { box-sizing: border-box; }
body { background: Canvas; color: CanvasText; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 64rem; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
.dim, figcaption { color: var(--dim); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .4rem 0 1rem; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { font-weight: 600; color: var(--dim); }
article { border-left: 4px solid var(--tone); background: var(--soft); padding: .7rem 1rem; margin: 1rem 0; }
article h3 { font-size: 1rem; margin: 0; overflow-wrap: anywhere; }
.error { --tone: var(--error); } .warning { --tone: var(--warning); } .note { --tone: var(--note); }
.tag { color: var(--tone); font-weight: 700; }
.strip { display: flex; flex-wrap: wrap; gap: .6rem; margin-top: .7rem; }
.group { display: flex; flex-wrap: wrap; gap: .4rem; border: 1px solid var(--line); padding: .4rem;
  width: max-content; max-width: 100%; }
figure { margin: 0; width: 8.5rem; }
figure img, .none { display: block; width: 6rem; height: 6rem; object-fit: contain; background: var(--line); }
.none { display: grid; place-items: center; color: var(--dim); font-size: .8rem; }
figcaption { font-size: .72rem; line-height: 1.25; overflow-wrap: anywhere; margin-top: .2rem; }
.beside { display: grid; gap: 0 2.5rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
@media (max-width: 30rem) { table { font-size: .9rem; } th, td { white-space: normal; padding-right: .6rem; } }
"""
"""Style sheet with light and dark colours, chosen by the reader's system. Variables at the top define the colours."""


LONG_WORD = re.compile(r"\S{20,}")
"""Words that may be too long for a line of a caption."""

SEPARATOR = re.compile(r"([/_.-])(?=\w)")
"""Letters of a file name behind which a line may break."""

GENERATOR = '<meta name="generator" content="vitrail">'
"""Tag in the head of every page that Vitrail writes. Vitrail recognises its pages by this tag."""


def is_our_page(path: Path) -> bool:
    """Return True if a file is a page that `document` made."""
    return path.is_file() and GENERATOR in path.read_text(encoding="utf-8", errors="replace")[:2000]


def document(title: str, parts: Iterable[str], *, style: str = "", script: str = "") -> str:
    """Return an HTML document with a heading followed by the parts.

    `title` is the plain text of the heading and of the window's title. `parts` are HTML. `style` is appended to
    `STYLE`. With a `script`, which runs last, the page has a policy: no other script runs, and nothing is requested.
    """
    name, style = escape(title), STYLE + style
    head = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{name}</title>',
        GENERATOR,
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        *([_policy(style, script)] if script else []),
        f"<style>{style}</style>\n</head>\n<body>\n<h1>{name}</h1>",
    ]
    last = [f"<script>{script}</script>"] if script else []
    return "\n".join([*head, *parts, *last]) + "\n</body>\n</html>\n"


def _policy(style: str, script: str) -> str:
    """Return tags that allow this style, this script and embedded pictures only."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    rules = (
        "default-src 'none'", "img-src data:", f"style-src 'sha256-{hashes[0]}'", f"script-src 'sha256-{hashes[1]}'",
        "base-uri 'none'", "form-action 'none'",
    )  # fmt: skip
    policy = f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">'
    return f'{policy}\n<link rel="icon" href="data:,">'


def printable(name: str) -> str:
    """Return a file name in which raw bytes and control characters are escaped."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in name
    )


def escape(text: str) -> str:
    """Return text escaped for HTML, between tags or in an attribute.

    The result is valid UTF-8 and contains neither markup nor characters that reverse the text direction.
    """
    return html.escape(printable(text))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table whose cells are plain text. If it is wider than the window, it has its own scroll
    bar."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def figure(picture: str, lines: Iterable[str]) -> str:
    """Return an HTML figure: a thumbnail above lines of text. File names can break behind a separator."""
    caption = "<br>".join(LONG_WORD.sub(_breakable, escape(line)) for line in lines)
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def _breakable(word: re.Match[str]) -> str:
    return SEPARATOR.sub(r"\1<wbr>", word[0])


def thumbnail(picture: Image.Image | None, name: str) -> str:
    """Return an `img` tag with an embedded thumbnail of a picture (mode L or RGB). For None, return an empty frame."""
    if picture is None:
        return '<div class="none">no picture</div>'
    scale = SIDE / max(picture.size)
    if scale >= 2:
        picture = picture.resize((picture.width * int(scale), picture.height * int(scale)), Image.Resampling.NEAREST)
    else:
        picture = picture.copy()
        picture.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return f'<img alt="{escape(name)}" src="data:image/jpeg;base64,{data}">'
