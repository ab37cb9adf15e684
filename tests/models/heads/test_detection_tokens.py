"""The head of detection tokens: its contract, and that its boxes are those of transformers' post-processing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vitrail
from vitrail.errors import ConfigError
from vitrail.models.heads.detection_tokens import DetectionTokens
from vitrail.models.network import Features


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


def test_a_head_without_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="registers=0 does not fit"):
        network_of(registers=0)


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
