"""The link from the report of a run to the page on which `vitrail report` looks inside its model."""

from __future__ import annotations

import re
from pathlib import Path

from vitrail.files import partial_path, saving

__all__ = ["INSIDE", "inside_link", "link_inside"]

INSIDE = "inside"
"""Folder in a run's folder for the page of `vitrail report` on its model."""

PAGE = f"{INSIDE}/report.html"
"""Path of the page of `vitrail report` in a run's folder."""

PLACE = re.compile(rb'<p id="inside">.*?</p>', re.DOTALL)
"""The paragraph of a run's report that has the link."""


def inside_link(run: Path) -> str:
    """Return the paragraph with the link. It is empty unless the run has a page that is newer than its model."""
    page, model = run / PAGE, run / "model" / "model.json"
    is_current = page.is_file() and not (model.is_file() and model.stat().st_mtime > page.stat().st_mtime)
    text = f'<a href="{PAGE}">Look inside the model</a>: its layers, saliency maps, embeddings and errors.'
    return f'<p id="inside">{text if is_current else ""}</p>'


def link_inside(run: Path) -> None:
    """Put the link into the report of a run, if there is one. Raise `SaveError` if it cannot be written."""
    path = run / "report.html"
    if not path.is_file():
        return
    with saving("the report", path):
        before = path.read_bytes()
        after = PLACE.sub(lambda _: inside_link(run).encode(), before, count=1)
        if after != before:
            partial = partial_path(path)
            partial.write_bytes(after)
            partial.replace(path)
