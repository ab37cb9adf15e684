"""The task detection: which cells learn from an object, and that a network learns a few drawn images by heart."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy.optimize import linear_sum_assignment

import vitrail
from tests.make import dense_bundle, make_outlines_folder, make_voc_folder, tiny_config
from tests.tasks.objectives import batch_of_boxes, check_parts
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.detection import ByDetection
from vitrail.evaluation.outputs import Outputs
from vitrail.models.heads.boxes import cells_of
from vitrail.tasks.detection import Detection, DetectionObjective, assign, focal, giou_loss, match, set_losses
from vitrail.training.job import prepare

TASK = Detection(cells_per_object=5)


def test_losses_of_boxes_and_scores_are_those_of_their_publications() -> None:
    boxes = torch.tensor([[0.0, 0, 2, 2], [0, 0, 1, 1], [0, 0, 0, 0]])
    others = torch.tensor([[1.0, 1, 3, 3], [2, 0, 3, 1], [0, 0, 0, 0]])
    expected = [1 - 1 / 7 + 2 / 9, 1 + 1 / 3, 1]  # by hand: the smallest box around both is 3 x 3, then 3 x 1
    assert giou_loss(boxes, others).tolist() == pytest.approx(expected)
    logits, targets = torch.tensor([[0.3, -2.0]]).double(), torch.tensor([[0.7, 0.0]]).double()
    probability = 1 / (1 + (-logits).exp())
    entropy = -(targets * probability.log() + (1 - targets) * (1 - probability).log())
    torch.testing.assert_close(focal(logits, targets), (probability - targets) ** 2 * entropy)


def test_the_best_cells_inside_an_object_learn_it() -> None:
    places, _ = cells_of((4, 6), torch.device("cpu"))
    truth = torch.tensor([[0.0, 0.0, 0.5, 0.5], [0.45, 0.5, 1.0, 1.0], [0.9, 0.0, 1.0, 0.1]])
    boxes = torch.cat([places - 0.2, places + 0.2], dim=1)
    scores = torch.full((len(places), 2), 0.1)
    scores[3, 1] = 0.9
    labels = torch.tensor([1, 0, -2])
    found = assign(boxes, scores, places, truth, labels, TASK)
    takes = found.quality > 0
    assert 0 < int(takes.sum()) <= 10
    for place, box, row in zip(places[takes], found.boxes[takes], found.scores[takes], strict=True):
        assert (place > box[:2]).all() and (place < box[2:]).all(), "cells learn only objects that contain them"
        assert (row > 0).tolist() == ([False, True] if box[0] == 0 else [True, False])
    assert found.scores.max() <= 1 and torch.equal(found.scores.sum(dim=1), found.quality)
    ignored = ((places > truth[2, :2]) & (places < truth[2, 2:])).all(dim=1)
    assert not found.counted[ignored & ~takes].any() and found.counted[~ignored].all()
    empty = assign(boxes, scores, places, truth[:0], labels[:0], TASK)
    assert empty.counted.all() and not empty.scores.any()


def test_an_object_smaller_than_a_cell_is_learned() -> None:
    places, _ = cells_of((3, 3), torch.device("cpu"))
    boxes = torch.cat([places - 0.1, places + 0.1], dim=1)
    tiny = torch.tensor([[0.51, 0.52, 0.515, 0.53]])
    found = assign(boxes, torch.full((len(places), 1), 0.1), places, tiny, torch.tensor([0]), TASK)
    assert int((found.quality > 0).sum()) == 1


def test_parts_of_a_batch_have_the_loss_of_the_whole() -> None:
    torch.manual_seed(0)
    network: Any = vitrail.create("ViT-Pico/8", num_classes=2, image_size=(24, 40), head_kind="pyramid", depth=1)
    objective = DetectionObjective(network.eval().double(), Detection())
    batch = batch_of_boxes(5, 3, classes=2)
    batch = replace(batch, images=batch.images.double(), valid=torch.arange(5) != 1)
    check_parts(objective, batch, parts=3, all_are_trained=False)
    assert int(objective.counted(batch)[1]) == 0, "an image that cannot be decoded does not count"


def test_tokens_of_a_frozen_network_are_computed_once() -> None:
    network: Any = vitrail.create("ViT-Pico/8", num_classes=2, image_size=(24, 40), head_kind="pyramid", depth=2)
    batch, calls = batch_of_boxes(3, 3, classes=2), []
    plain = DetectionObjective(network, Detection()).train()
    expected = plain(batch)
    network.requires_grad_(False).head.requires_grad_(True)
    frozen = DetectionObjective(network, Detection()).train()
    features = network.features
    network.__dict__["features"] = lambda images: calls.append(len(images)) or features(images)
    first, again = frozen(batch), frozen(batch)
    assert calls == [1, 1, 1], "each image by itself, and not in the second step"
    torch.testing.assert_close(first.loss, expected.loss)
    assert torch.equal(first.loss, again.loss)
    changed = frozen(replace(batch, images=batch.images.flip(3)))
    assert len(calls) == 6 and not torch.equal(changed.loss, first.loss)
    network.blocks[0].norm1.weight.requires_grad_(True)
    (slope,) = torch.autograd.grad(frozen(batch).loss, network.blocks[0].norm1.weight)
    assert len(calls) == 6 and slope.abs().sum() > 0, "a trained block changes the tokens"


def test_objects_without_outlines_are_refused_before_a_run_begins(tmp_path: Path) -> None:
    make_outlines_folder(tmp_path / "data", train=4, validation=2, test=0)
    file = tmp_path / "data/annotations/instances_val.json"
    values = json.loads(file.read_text())
    del values["annotations"][1]["segmentation"], values["annotations"][6]["segmentation"]
    values["annotations"][1]["iscrowd"] = 1  # needs no outline
    file.write_text(json.dumps(values))
    config = tiny_config(
        data=tmp_path / "data", run=tmp_path / "run", image_size=(28, 42), flip=False, erase=0.0, resize="pad"
    ).override(task="detection", head_kind="queries", query_blocks=1)
    with pytest.raises(DataError, match=r"1 of 8 objects have a box only.*choose head_kind='pyramid'"):
        prepare(config)
    prepare(config.override(head_kind="pyramid", query_blocks=3))
    assert not (tmp_path / "run").exists()
    bundle = dense_bundle("queries", query_blocks=1)
    held_out = open_data(str(tmp_path / "data"), validation_share=0.0).validation
    with pytest.raises(DataError, match="1 of 8 objects have a box only"):
        ByDetection().check(Outputs(bundle), held_out, held_out)


def test_boxes_of_images_that_cannot_be_decoded_are_not_measured(tmp_path: Path) -> None:
    data = make_voc_folder(tmp_path, train=3, validation=0, test=0)
    held_out = open_data(str(data), validation_share=0.0).train
    for picture in (data / "JPEGImages").iterdir():
        picture.write_text("no picture")
    with pytest.raises(DataError, match="none of 3 images"):
        ByDetection()(Outputs(dense_bundle()), held_out, held_out)


# Detection tokens, and their matching with objects.


def objective_of(tokens: int = 7, **settings: Any) -> Any:
    torch.manual_seed(0)
    network: Any = vitrail.create(
        "ViT-Pico/8", num_classes=3, image_size=(24, 40), head_kind="detection-tokens", depth=1, registers=tokens
    )
    task = Detection(**settings)
    task.check_network(network.config)
    return task.objectives["detection-tokens"](network.eval(), task)


@pytest.mark.parametrize("objects", [0, 4, 20])
def test_parts_of_a_batch_have_the_loss_of_the_whole_for_tokens(objects: int) -> None:
    """With and without objects, with more objects than tokens, and with an image that cannot be decoded."""
    objective = objective_of()
    batch = batch_of_boxes(5, objects)
    batch = replace(batch, valid=torch.arange(5) != 1)
    check_parts(objective, batch, parts=3, all_are_trained=False)
    assert objective.counted(batch)[1].tolist() == [0, 0]


def test_a_token_that_is_right_has_no_loss() -> None:
    truths, labels = torch.tensor([[0.1, 0.2, 0.4, 0.9], [0.5, 0.5, 0.5, 0.5]]), torch.tensor([1, 0])
    logits = torch.full((3, 3), -30.0)
    logits[[0, 1, 2], [0, 2, 1]] = 30.0
    boxes = torch.cat([truths[1:], torch.rand(1, 4), truths[:1]])
    outputs = torch.cat([boxes, logits], dim=1)
    # A box without an area overlaps nothing, not even itself.
    assert set_losses(outputs, truths, labels, 2.0).tolist() == pytest.approx([0, 2.0], abs=1e-5)


def test_settings_of_other_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="cells_per_object=5 has no effect on the head 'detection-tokens'"):
        objective_of(cells_per_object=5)


@pytest.mark.slow
@pytest.mark.parametrize("objects", [1, 4, 20])
@pytest.mark.parametrize("tokens", [7, 30])
def test_the_library_has_the_same_loss(objects: int, tokens: int) -> None:
    pytest.importorskip("transformers")
    from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

    objective, batch = objective_of(tokens), batch_of_boxes(5, objects, seed=3)
    with torch.no_grad():
        for parameter in objective.network.head.parameters():
            parameter *= 3
    assert batch.boxes is not None and batch.box_labels is not None
    outputs = objective.network(batch.images)
    corners, logits = outputs[..., :4], outputs[..., 4:]
    labels = []
    for boxes, numbers in zip(batch.boxes / torch.tensor([40, 24, 40, 24]), batch.box_labels, strict=True):
        starts, ends = boxes[numbers >= 0].split(2, dim=1)
        centres = torch.cat([(starts + ends) / 2, ends - starts], dim=1)
        labels.append({"class_labels": numbers[numbers >= 0], "boxes": centres})
    settings = SimpleNamespace(
        class_cost=1, bbox_cost=5, giou_cost=2, num_labels=3, eos_coefficient=0.1, auxiliary_loss=False,
        bbox_loss_coefficient=5, giou_loss_coefficient=2,
    )  # fmt: skip
    predicted = torch.cat([(corners[..., :2] + corners[..., 2:]) / 2, corners[..., 2:] - corners[..., :2]], dim=2)
    expected, parts, _ = ForObjectDetectionLoss(logits, labels, "cpu", predicted, settings)
    found = objective(batch)
    torch.testing.assert_close(found.loss.sum(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.metrics["class_loss"].sum(), parts["loss_ce"], rtol=1e-6, atol=1e-6)
    ours, theirs = (
        torch.autograd.grad(loss, [*objective.network.head.parameters()], retain_graph=True)
        for loss in (found.loss.sum(), expected)
    )
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-6)


COSTS = st.integers(-4, 4) | st.floats(-1e4, 1e4, width=32)


@given(arrays.arrays(np.float64, st.tuples(st.integers(0, 5), st.integers(0, 5)), elements=COSTS))
def test_no_other_pairs_cost_less(table: np.ndarray) -> None:
    rows, columns = match(torch.from_numpy(table))
    assert len(rows) == len(columns) == min(table.shape)
    assert len(set(rows.tolist())) == len(set(columns.tolist())) == len(rows)
    wide = table if table.shape[0] <= table.shape[1] else table.T
    best = min(
        sum(wide[row, column] for row, column in enumerate(order))
        for order in permutations(range(wide.shape[1]), wide.shape[0])
    )
    assert table[rows, columns].sum() == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("shape", [(60, 7), (50, 50), (30, 70)])
def test_large_tables_have_the_pairs_of_scipy(shape: tuple[int, int]) -> None:
    costs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows, columns = match(costs)
    found = sorted(zip(rows.tolist(), columns.tolist(), strict=True))
    assert found == list(zip(*(each.tolist() for each in linear_sum_assignment(costs.numpy())), strict=True))


def test_costs_that_are_not_finite_are_matched_last() -> None:
    nan, inf = float("nan"), float("inf")
    rows, columns = match(torch.tensor([[nan, 5.0, inf], [1.0, 2.0, -inf]]))
    assert sorted(zip(rows.tolist(), columns.tolist(), strict=True)) == [(0, 1), (1, 0)]
