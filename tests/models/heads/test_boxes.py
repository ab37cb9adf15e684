"""The heads of boxes: where its cells are, what it costs, and which of its boxes are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vitrail
from vitrail.errors import ConfigError
from vitrail.models.heads.boxes import DetectionTokens, best_boxes, cells_of, overlaps
from vitrail.models.network import Features


def test_a_network_of_boxes_fulfils_the_contract() -> None:
    network = vitrail.create("ViT-Pico/8", num_classes=3, image_size=(24, 40), head_kind="pyramid", depth=2)
    outputs = network(torch.zeros(2, 3, 24, 40))
    assert outputs.shape == (2, 4 * 15 + 15 + 2 * 3, 4 + 3) and outputs.dtype == torch.float32
    assert network.config.parameters() == sum(weight.numel() for weight in network.parameters())
    assert network(torch.zeros(1, 3, 16, 56)).shape == (1, 4 * 14 + 14 + 4, 7)
    bare, images = network.with_head(0), torch.ones(1, 3, 24, 40)
    assert bare.head is None and torch.equal(bare.features(images).patches, network.features(images).patches)
    other = network.with_head(5)
    assert other.head is not network.head and other(torch.zeros(1, 3, 24, 40)).shape[2] == 9


def test_first_boxes_lie_around_their_cells() -> None:
    network = vitrail.create("ViT-Pico/8", num_classes=1, image_size=(40, 24), head_kind="pyramid")
    boxes = network.eval()(torch.zeros(1, 3, 40, 24))[0, :, :4]
    places, sides = cells_of((5, 3), torch.device("cpu"))
    assert places[[0, -1]].tolist() == [pytest.approx([0.25 / 3, 0.25 / 5]), pytest.approx([1, 1])]
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2
    reach = (boxes[:, 2:] - boxes[:, :2]) * torch.tensor([3, 5]) / sides[:, None]
    assert (middles - places).abs().max() < 0.3 and reach.min() > 1 and reach.max() < 6


@pytest.mark.parametrize("fields", [{}, {"reversible": True}, {"depth": 1}, {"depth": 5, "registers": 2}])
def test_the_head_reads_the_tokens_of_the_middle_too(fields: dict[str, object]) -> None:
    shape = {"depth": 4, "width": 32, "heads": 2, **fields}
    network = vitrail.create("ViT-Pico/8", num_classes=2, image_size=(24, 40), head_kind="pyramid", **shape).train()
    images = torch.randn(2, 3, 24, 40)
    middle = max(0, network.config.depth // 2 - 1)
    (expected,) = network.features(images, layers=(middle,))
    found = network.features(images)
    assert torch.equal(found.middle, expected.patches)
    assert torch.equal(network.head(found), network(images))
    network(images).sum().backward()
    assert all(weight.grad is not None for weight in network.head.parameters())
    assert network.with_head(0).features(images).middle is None


@pytest.mark.parametrize(("kind", "field"), [
    ("pyramid", {"head_hidden": 5}), ("pyramid", {"patch_dropout": 0.5}), ("pyramid", {"cut_uneven": True}),
    ("detection-tokens", {"registers": 0}),
])  # fmt: skip
def test_settings_that_lose_what_the_head_reads_are_refused(kind: str, field: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(field))}=.* does not fit head_kind='{kind}'"):
        vitrail.create("ViT-Pico/8", num_classes=1, image_size=(40, 24), head_kind=kind, **field)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_kept_boxes_are_those_of_a_plain_suppression(seed: int) -> None:
    random = np.random.default_rng(seed)
    starts = random.uniform(0, 0.6, (30, 2))
    boxes = torch.tensor(np.concatenate([starts, starts + random.uniform(0.1, 0.4, (30, 2))], axis=1))
    scores = torch.tensor(random.uniform(size=(30, 2)))
    found = best_boxes(boxes, scores)
    kept: list[tuple[float, int, int]] = []
    for score, row, label in sorted(((float(scores[r, k]), r, k) for r in range(30) for k in range(2)), reverse=True):
        same = [other for _, other, its in kept if its == label]
        if all(float(overlaps(boxes[row : row + 1], boxes[other : other + 1])) <= 0.6 for other in same):
            kept.append((score, row, label))
    assert found.scores.tolist() == pytest.approx([score for score, _, _ in kept])
    assert found.labels.tolist() == [label for _, _, label in kept]
    torch.testing.assert_close(found.boxes, boxes[[row for _, row, _ in kept]])


@pytest.mark.parametrize("label", [0, 1199])
def test_small_boxes_are_compared_alike_in_every_class(label: int) -> None:
    boxes = torch.tensor([[0.621, 0.578, 0.631, 0.588], [0.6197, 0.579, 0.6297, 0.589]])  # an overlap of 0.643
    scores = torch.zeros(2, 1200)
    scores[:, label] = torch.tensor([0.9, 0.8])
    assert int((best_boxes(boxes, scores).scores > 0).sum()) == 1


def network_of(**fields: Any) -> Any:
    settings = {"depth": 2, "registers": 7, "positions_cover": "all", "image_size": (24, 40), "num_classes": 3}
    return vitrail.create("ViT-Pico/8", head_kind="detection-tokens", **{**settings, **fields})


@pytest.mark.parametrize("fields", [{}, {"positions_at": "every-layer", "initial_weights": "timm"}])
def test_a_network_with_detection_tokens_fulfils_the_contract(fields: dict[str, Any]) -> None:
    network = network_of(**fields)
    outputs = network(torch.zeros(2, 3, 24, 40))
    assert outputs.shape == (2, 7, 4 + 3 + 1) and outputs.dtype == torch.float32
    assert network.config.parameters() == sum(weight.numel() for weight in network.parameters())
    assert network(torch.zeros(1, 3, 16, 56)).shape == (1, 7, 8)
    assert network.with_head(5)(torch.zeros(1, 3, 24, 40)).shape == (1, 7, 10)
    counted = sum(module.weight.numel() for module in network.head.modules() if isinstance(module, torch.nn.Linear))
    assert DetectionTokens.macs(network.config) == 7 * counted


def test_tokens_keep_their_positions_at_another_image_size() -> None:
    network = network_of(positions_at="every-layer")
    resized = network.with_image_size((48, 16))
    assert torch.equal(resized.positions.embedding[:, :8], network.positions.embedding[:, :8])
    images = torch.randn(1, 3, 48, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(resized(images), network(images))


@pytest.mark.parametrize("fields", [{}, {"attention": "local:window=3"}, {"reversible": True}, {"layer_scale": 0.1}])
def test_the_last_block_computes_only_the_tokens_that_the_head_reads(fields: dict[str, Any]) -> None:
    network, sizes = network_of(**fields), list[int]()
    images = torch.randn(2, 3, 24, 40, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for layer in network.blocks:
            layer.mlp.down.bias.normal_(generator=torch.Generator().manual_seed(1))
    whole, found = network.head(network.features(images)), network(images)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(out.square().sum(), [*network.parameters()][:-2], allow_unused=True)
                 for out in (found, whole)]  # fmt: skip
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)
    network.blocks[-1].mlp.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[1]))
    network(images)
    network.head.register_forward_hook(lambda module, inputs, output: None)  # it may read the patches
    network(images)

    class Own(DetectionTokens):
        def forward(self, features: Features) -> torch.Tensor:
            return super().forward(features) + features.patches.mean()

    network.head = Own(network.config)
    network(images)
    whole_length = network.config.tokens
    assert sizes == [8 if not network.config.reversible else whole_length, whole_length, whole_length]


@pytest.mark.slow
def test_found_objects_are_those_of_the_library() -> None:
    pytest.importorskip("transformers")
    from transformers.models.yolos.image_processing_pil_yolos import YolosImageProcessorPil

    outputs = network_of()(torch.randn(2, 3, 24, 40, generator=torch.Generator().manual_seed(0))).detach()
    outputs[..., 4:] += 4 * torch.randn(outputs[..., 4:].shape, generator=torch.Generator().manual_seed(1))
    corners = outputs[..., :4]
    boxes = torch.cat([(corners[..., :2] + corners[..., 2:]) / 2, corners[..., 2:] - corners[..., :2]], dim=2)
    theirs = YolosImageProcessorPil().post_process_object_detection(
        SimpleNamespace(logits=outputs[..., 4:], pred_boxes=boxes), threshold=0.0
    )
    for our, their in zip(DetectionTokens.objects(outputs, (1, 1)), theirs, strict=True):
        order = their["scores"].argsort(descending=True, stable=True)
        torch.testing.assert_close(our.scores, their["scores"][order])
        assert torch.equal(our.labels, their["labels"][order])
        torch.testing.assert_close(our.boxes, their["boxes"][order].clamp(0, 1))
