"""A report as one HTML file that needs no other: figures, findings, and thumbnails of what they are about."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from PIL import Image

from vitrail.data.check.labels import named_sources
from vitrail.data.check.report import Example, Finding, Report, example, plural
from vitrail.data.decode import to_pil
from vitrail.data.source import Source, take_per_class
from vitrail.data.splits import Splits
from vitrail.errors import DataError

__all__ = ["page"]

SIDE = 96
"""Longest side of a thumbnail in pixels. Smaller images are enlarged by whole numbers, so that they stay sharp."""

MOST_GROUPS = 12
MOST_MEMBERS = 4
MOST_CLASSES = 24
OF_EACH_CLASS = 5

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
figure { margin: 0; width: 6.5rem; }
figure img, .none { display: block; width: 6rem; height: 6rem; object-fit: contain; background: var(--line); }
.none { display: grid; place-items: center; color: var(--dim); font-size: .8rem; }
figcaption { font-size: .72rem; line-height: 1.25; overflow-wrap: anywhere; margin-top: .2rem; }
"""


def page(report: Report, splits: Splits, title: str) -> str:
    """The HTML. Images are read again, at most a few hundred, and become part of it."""
    sources = named_sources(splits)
    name = html.escape(title)
    counts = {one: sum(finding.severity == one for finding in report.findings) for one in ("error", "warning", "note")}
    verdict = ", ".join(plural(number, one) for one, number in counts.items() if number) or "nothing wrong found"
    parts = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Check of {name}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>Check of {name}</h1>",
        f'<p class="dim">{report.looked_at:,} of {plural(report.images, "image")} looked at: {verdict}.</p>',
        *(f"<p>{html.escape(note)}</p>" for note in report.notes),
        *(_finding(finding, sources) for finding in report.findings),
        *_figures(report),
        *_classes(splits.train),
    ]
    return "\n".join(parts) + "\n</body>\n</html>\n"


def _figures(report: Report) -> Iterator[str]:
    shown = sorted(range(len(report.classes)), key=lambda one: -report.splits[0].per_class[one])
    rows = [("images", *(f"{split.images:,}" for split in report.splits))]
    if any(split.unlabelled for split in report.splits):
        rows.append(("no label", *(f"{split.unlabelled:,}" for split in report.splits)))
    rows += [(report.classes[one], *(f"{split.per_class[one]:,}" for split in report.splits)) for one in shown[:200]]
    yield f"<h2>{plural(len(report.classes), 'class')}</h2>"
    if report.balance is not None:
        yield (
            f'<p class="dim">Training images of a class: {report.balance.smallest:,} to {report.balance.largest:,}; as '
            f"uneven as {report.balance.effective:.1f} classes of one size.</p>"
        )
    yield _table(("class", *(split.name for split in report.splits)), rows)
    if len(shown) > 200:
        yield f'<p class="dim">and {plural(len(shown) - 200, "smaller class")}</p>'
    if report.sizes is not None:
        sizes = report.sizes
        yield "<h2>Sizes and formats</h2>"
        if sizes.different > 1:
            yield (
                f"<p>{sizes.different:,} different sizes, width x height: from {_size(sizes.smallest)} to "
                f"{_size(sizes.largest)}, median {_size(sizes.median)}.</p>"
            )
        yield _table(("size", "images"), [(_size(one[:2]), f"{one[2]:,}") for one in sizes.common])
        yield _table(("format and mode", "images"), [(kind, f"{count:,}") for kind, count in report.kinds.items()])


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]:,} x {size[1]:,}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _finding(finding: Finding, sources: Mapping[str, Source]) -> str:
    groups = "\n".join(_group(group, sources) for group in finding.groups[:MOST_GROUPS])
    hidden = len(finding.groups) - MOST_GROUPS
    more = f'<p class="dim">and {hidden:,} more of the kind</p>' if hidden > 0 else ""
    return (
        f'<article class="{finding.severity}">\n<h3><span class="tag">{finding.severity}</span> '
        f"{html.escape(finding.text)}</h3>\n<p>Training: {html.escape(finding.training)}</p>\n"
        f"<p>You: {html.escape(finding.advice)}</p>\n"
        + (f'<div class="strip">\n{groups}\n</div>\n' if groups else "")
        + f"{more}</article>"
    )


def _group(group: Sequence[Example], sources: Mapping[str, Source]) -> str:
    figures = "\n".join(_figure(one, sources[one.split]) for one in group[:MOST_MEMBERS])
    return f'<div class="group">\n{figures}\n</div>' if len(group) > 1 else figures


def _figure(one: Example, source: Source) -> str:
    caption = "<br>".join(html.escape(text) for text in (f"{one.split}: {one.key}", one.label, one.detail) if text)
    return f"<figure>{_thumbnail(source, one.index, one.key)}<figcaption>{caption}</figcaption></figure>"


def _thumbnail(source: Source, index: int, name: str) -> str:
    try:
        picture = to_pil(source[index].image, 3)
    except DataError:
        return '<div class="none">no picture</div>'
    scale = SIDE / max(picture.size)
    if scale >= 2:
        picture = picture.resize((picture.width * int(scale), picture.height * int(scale)), Image.Resampling.NEAREST)
    else:
        picture.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return f'<img alt="{html.escape(name)}" src="data:image/jpeg;base64,{data}">'


def _classes(train: Source) -> Iterator[str]:
    """A few training images of every class, by which one sees at once whether labels and images belong together."""
    yield "<h2>A look at the classes</h2>"
    rows: dict[str, list[Example]] = {}
    for index in take_per_class(train, OF_EACH_CLASS).indices.tolist():
        one = example("train", train, index)
        rows.setdefault(one.label or "no label", []).append(replace(one, label=None))
    for label in sorted(rows)[:MOST_CLASSES]:
        figures = "\n".join(_figure(one, train) for one in rows[label])
        yield f'<p><strong>{html.escape(label)}</strong></p>\n<div class="strip">\n{figures}\n</div>'
    if len(rows) > MOST_CLASSES:
        yield f'<p class="dim">and {len(rows) - MOST_CLASSES:,} more</p>'
