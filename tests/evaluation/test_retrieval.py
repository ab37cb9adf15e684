"""Tests of retrieval: ranks against a plain search, several texts per image, equal texts, ties, intervals, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tasks.images import Pictures
from tests.tasks.test_pairs import make_objective, small_task
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.evaluators import evaluators_of
from vitrail.evaluation.outputs import Outputs
from vitrail.evaluation.retrieval import KS, ByRetrieval, EmbeddedPairs
from vitrail.tasks.pairs import Clip
from vitrail.weights.bundle import Bundle


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 1000), st.booleans())
def test_recalls_are_those_of_a_plain_search(images: int, texts: int, seed: int, ties: bool) -> None:
    random = np.random.default_rng(seed)
    owned = [sorted(random.choice(texts, random.integers(1, texts + 1), replace=False)) for _ in range(images)]
    used = sorted({text for some in owned for text in some})
    owned = [[used.index(text) for text in some] for some in owned]
    width = 1 if ties else 6
    vectors = [
        F.normalize(torch.from_numpy(random.normal(size=(n, width))).float(), dim=1) for n in (images, len(used))
    ]
    owners = np.repeat(np.arange(images), [len(some) for some in owned])
    places = np.concatenate([np.array(some) for some in owned])
    found = ByRetrieval(bootstrap=20).of(EmbeddedPairs(*vectors, owners, places, 2))
    likeness = (vectors[0] @ vectors[1].T).tolist()
    of_text: dict[int, list[int]] = {text: [i for i in range(images) if text in owned[i]] for text in range(len(used))}

    def rank(scores: list[float], right: list[int]) -> int:
        best = max(scores[one] for one in right)
        return sum(score >= best for place, score in enumerate(scores) if place not in right)

    values = []
    for k in KS:
        hits = [rank(likeness[i], owned[i]) < k for i in range(images)]
        assert found[f"image_to_text_{k}"] == pytest.approx(np.mean(hits))
        back = [rank([row[text] for row in likeness], of_text[text]) < k for text in range(len(used))]
        assert found[f"text_to_image_{k}"] == pytest.approx(np.mean(back))
        values += [np.mean(hits), np.mean(back)]
        assert found[f"image_to_text_{k}_low"] <= found[f"image_to_text_{k}"] <= found[f"image_to_text_{k}_high"]
    assert found["mean_recall"] == pytest.approx(np.mean(values))
    assert (found["images"], found["texts"], found["skipped"]) == (images, len(used), 2)


def test_equal_embeddings_find_nothing() -> None:
    same = torch.ones(20, 4) / 2
    found = ByRetrieval(bootstrap=0).of(EmbeddedPairs(same, same, np.arange(20), np.arange(20), 0))
    assert found["mean_recall"] == 0


def outputs_of(**fields: Any) -> Outputs:
    objective = make_objective(small_task(Clip))
    preprocess = Preprocess(image_size=(21, 28))
    words = None if fields.get("without") else objective.current_words()
    return Outputs(Bundle(objective.network, (), preprocess, words=words))


def test_the_evaluator_embeds_images_and_texts() -> None:
    texts = [("red circle", "blue bar"), ("green square",), None, ("red circle",)]
    source = Pictures(8, targets=texts)
    outputs = outputs_of()
    found = evaluators_of("retrieval", {"retrieval": {"bootstrap": 10}})["retrieval"](outputs, source, source)
    assert (found["images"], found["texts"]) == (6, 3)
    assert found["image_to_text_5"] == found["text_to_image_10"] == 1


def test_texts_that_are_cut_are_noted() -> None:
    long, notes = "red circle " * 20, list[str]()
    source = Pictures(4, targets=[(long,), ("blue bar",)])
    ByRetrieval(bootstrap=0)(replace(outputs_of(), on_note=notes.append), source, source)
    assert len(notes) == 1 and "16 tokens" in notes[0] and "blue" not in notes[0]


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match="no text tower"):
        ByRetrieval()(outputs_of(without=True), Pictures(3), Pictures(3, targets=[("a",)]))
    with pytest.raises(DataError, match="retrieval needs images with texts"):
        ByRetrieval()(outputs_of(), Pictures(3), Pictures(3))
