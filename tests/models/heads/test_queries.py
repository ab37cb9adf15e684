"""The head of queries equals EoMT in transformers, also with masked attention, and has its layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from vitrail.errors import BundleError, ConfigError

CLASSES, QUERIES = 4, 6


def eomt(**fields: Any) -> Any:
    """Return transformers' network with random weights, and in evaluation mode."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.EomtConfig(
        hidden_size=24, num_hidden_layers=4, num_attention_heads=3, mlp_ratio=2, image_size=48, patch_size=8,
        num_blocks=2, num_queries=QUERIES, num_register_tokens=3, num_labels=CLASSES, **fields,
    )  # fmt: skip
    network = transformers.EomtForUniversalSegmentation(config).eval()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight.copy_(torch.randn(weight.shape) * 0.3 + ("norm" in name and name.endswith("weight")))
        network.attn_mask_probs.zero_()
    return network


def parts(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of classes and of masks."""
    return outputs[..., : CLASSES + 1], outputs[..., CLASSES + 1 :].unflatten(2, (24, 24))


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("swiglu", [False, True])
def test_outputs_and_files_are_those_of_transformers(tmp_path: Path, *, swiglu: bool) -> None:
    theirs = eomt(use_swiglu_ffn=swiglu)
    theirs.save_pretrained(tmp_path / "theirs")
    bundle = vitrail.load(tmp_path / "theirs", device="cpu")
    assert bundle.output == "mask" and len(bundle.classes) == CLASSES and bundle.network.config.queries == QUERIES
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        expected = theirs(images)
        classes, masks = parts(bundle.network(images))
    assert_near(classes, expected.class_queries_logits)
    assert_near(masks, expected.masks_queries_logits)
    vitrail.convert(tmp_path / "theirs", tmp_path / "ours", to="huggingface")
    again = type(theirs).from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        found = again(images)
    assert torch.equal(found.masks_queries_logits, expected.masks_queries_logits)
    assert torch.equal(found.class_queries_logits, expected.class_queries_logits)
    processor = pytest.importorskip("transformers").AutoImageProcessor.from_pretrained(tmp_path / "ours")
    assert type(processor).__name__.startswith("EomtImageProcessor")


def test_masked_attention_is_that_of_transformers(tmp_path: Path) -> None:
    theirs = eomt()
    theirs.save_pretrained(tmp_path / "theirs")
    network: Any = vitrail.load(tmp_path / "theirs", device="cpu").network
    images = torch.randn(2, 3, 48, 48)
    theirs.attn_mask_probs.fill_(1.0)  # transformers then masks in evaluation, too
    with torch.no_grad():
        expected = theirs(images)
        first, second, last = network.deep_outputs(images, (1.0, 1.0))
        without = network.deep_outputs(images, (0.0, 0.0))
    assert_near(parts(last)[0], expected.class_queries_logits)
    assert_near(parts(last)[1], expected.masks_queries_logits)
    assert torch.equal(without[-1], network(images)) and torch.equal(without[0], first)
    assert not torch.allclose(without[-1], last), "the masks of these weights hide patches"
    assert not torch.allclose(first, second)


def test_queries_are_tokens_of_the_last_blocks_only() -> None:
    fields: dict[str, Any] = {"num_classes": 3, "image_size": (16, 40), "depth": 3, "queries": 5, "query_blocks": 1}
    network: Any = vitrail.create("ViT-Pico/8", head_kind="queries", **fields).eval()
    images = torch.randn(2, 3, 16, 40)
    outputs = network(images)
    assert outputs.shape == (2, 5, 4 + 16 * 10)
    assert network.config.parameters() == sum(weight.numel() for weight in network.parameters())
    features = network.features(images)
    assert features.queries.shape[1] == 5 and features.patches.shape[1] == 10
    before, after = network.features(images, layers=(1, 2))
    assert before.queries is None and after.queries is not None
    bare = network.with_head(0)
    assert torch.equal(bare.features(images, layers=(1,))[0].patches, before.patches)
    assert network(torch.randn(1, 3, 32, 24)).shape == (1, 5, 4 + 16 * 12)


def test_class_maps_are_sums_over_queries() -> None:
    outputs = torch.randn(2, 5, 3 + 16 * 2)
    maps = vitrail.create("ViT-Pico/8", num_classes=2, image_size=(8, 16), head_kind="queries").config.dense_head
    found = maps.class_maps(outputs, (1, 2))
    assert found.shape == (2, 2, 4, 8)
    row, column, image, label = 3, 5, 1, 1
    total = 0.0
    for query in outputs[image]:
        shares = query[:3].exp() / query[:3].exp().sum()
        total += float(shares[label]) / (1 + math.exp(-float(query[3 + row * 8 + column])))
    assert float(found[image, label, row, column]) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(
    "field",
    [
        {"query_blocks": 3},
        {"attention": "local:window=3"},
        {"reversible": True},
        {"positions": "rotary-2d"},
        {"positions_at": "every-layer"},
        {"final_norm": "pooled"},
    ],
)
def test_settings_that_do_not_fit_added_tokens_are_refused(field: dict[str, Any]) -> None:
    fields = {"query_blocks": 1, **field}
    with pytest.raises(ConfigError, match="does not fit head_kind='queries'"):
        vitrail.create("ViT-Pico/8", num_classes=1, image_size=(40, 24), head_kind="queries", depth=3, **fields)


@pytest.mark.parametrize("kind", ["pooled", "pyramid", "patches"])
@pytest.mark.parametrize("field", [{"queries": 7}, {"query_blocks": 1}])
def test_other_heads_refuse_the_settings_of_queries(kind: str, field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"does not fit head_kind='{kind}'"):
        vitrail.create("ViT-Pico/8", num_classes=2, image_size=(40, 24), head_kind=kind, **field)


def test_files_with_other_masks_are_refused(tmp_path: Path) -> None:
    eomt(num_upscale_blocks=1).save_pretrained(tmp_path / "theirs")
    with pytest.raises(BundleError, match="num_upscale_blocks must be 2"):
        vitrail.load(tmp_path / "theirs", device="cpu")
