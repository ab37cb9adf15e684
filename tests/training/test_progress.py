"""Tests of the page of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.training.curves import events_of
from tests.training.jobs import Make, train_until
from vitrail.training import page as progress
from vitrail.training.page import ProgressPage
from vitrail.training.run import resume, train


def headings(page: str) -> list[str]:
    return re.findall(r"<h[12]>(.*?)</h[12]>|<figcaption>(?!\d\d-)(.*?)</figcaption>", page)


CURVES = [
    "Validation accuracy", "Training loss", "Learning rate, in 10⁻³", "Norm of the gradients", "Norm of the weights",
    "Update of the weights", "Largest attention logit", "Images per second", "Time spent waiting for images",
]  # fmt: skip


@pytest.mark.slow
def test_the_page_grows_with_the_run(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, versions = tmp_path / "a <run>", []
    plain = ProgressPage.write

    def kept(self: ProgressPage) -> Path:
        versions.append(plain(self).read_text(encoding="utf-8"))
        return run / "progress.html"

    monkeypatch.setattr(ProgressPage, "write", kept)
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    train_until(small(run, threads=0, learning_rate=0.005), 9)
    assert "The run is in progress: 4 of 24 steps were done" in versions[0]
    assert "The run was stopped after 9 of 24 steps. Continue it with vitrail train --resume" in versions[-1]
    stopped = versions[-1]
    assert "<h2>Held-out images</h2>" not in versions[-1] and "a &lt;run&gt;" in versions[-1]
    resume(run)
    assert any("The run is in progress: " in version for version in versions[versions.index(stopped) + 1 :])
    page = (run / "progress.html").read_text(encoding="utf-8")
    assert page == versions[-1] and "The run is finished, after 24 of 24 steps." in page
    found = [heading or caption for heading, caption in headings(page) if "<br>" not in caption]
    assert found == ["Run a &lt;run&gt;", "Held-out images", "Curves", *CURVES, "Settings"]
    assert "<td>learning rate</td><td>0.005</td>" in page and "<td>weight decay rule</td>" not in page
    assert "<td>label smoothing</td><td>0.1</td>" in page and "<td>loss</td>" not in page
    *_, tested = events_of(run, "evaluation")
    assert tested["split"] == "test" and f"<td>test</td><td>accuracy {tested['accuracy']:.2%}</td>" in page
    pairs = re.findall(r"true: (.*?)<br>predicted: (.*?)<br>[\d.]+%", page)
    right = [truth == predicted for truth, predicted in pairs]
    assert len(pairs) == 10 and right == sorted(right), "the wrong ones first"
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", ""), "the page asks for nothing"


@pytest.mark.slow
def test_versions_are_half_a_minute_apart(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(ProgressPage, "write", lambda self: written.append(1))
    train(small(tmp_path / "run", threads=0, steps=8, evaluations=4, checkpoints=4))
    assert len(written) == 2, "after the first evaluation, and at the end"
