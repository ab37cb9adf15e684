"""The head of queries equals EoMT in transformers, also with masked attention, and has its layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vitrail
from vitrail.data.objects import Runs
from vitrail.data.pixels.geometry import place
from vitrail.errors import BundleError, ConfigError
from vitrail.models.heads.masks import QueryMasks
from vitrail.weights.answers import Detections, found_objects

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
    return outputs[..., : CLASSES + 1], outputs[..., CLASSES + 1 :].unflatten(2, (24, 24))


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("swiglu", [False, True])
def test_outputs_and_files_are_those_of_transformers(tmp_path: Path, *, swiglu: bool) -> None:
    theirs = eomt(use_swiglu_ffn=swiglu)
    theirs.save_pretrained(tmp_path / "theirs")
    bundle = vitrail.load(tmp_path / "theirs", device="cpu")
    assert bundle.output == "mask" and any("do_split_image" in note for note in bundle.notes)
    assert len(bundle.classes) == CLASSES and bundle.network.config.queries == QUERIES
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


@pytest.mark.slow
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
    ("name", "value"),
    [
        ("query_blocks", 3), ("attention", "local:window=3"), ("reversible", True), ("positions", "rotary-2d"),
        ("positions_at", "every-layer"), ("final_norm", "pooled"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_added_tokens_are_refused(name: str, value: Any) -> None:
    fields = {"depth": 3, "query_blocks": 1, name: value}
    with pytest.raises(ConfigError, match="does not fit head_kind='queries'"):
        vitrail.create("ViT-Pico/8", num_classes=1, image_size=(40, 24), head_kind="queries", **fields)


@pytest.mark.parametrize("kind", ["pooled", "pyramid", "patches"])
@pytest.mark.parametrize("field", [{"queries": 7}, {"query_blocks": 1}])
def test_other_heads_refuse_the_settings_of_queries(kind: str, field: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"does not fit head_kind='{kind}'"):
        vitrail.create("ViT-Pico/8", num_classes=2, image_size=(40, 24), head_kind=kind, **field)


def test_files_with_other_masks_are_refused(tmp_path: Path) -> None:
    eomt(num_upscale_blocks=1).save_pretrained(tmp_path / "theirs")
    with pytest.raises(BundleError, match="num_upscale_blocks must be 2"):
        vitrail.load(tmp_path / "theirs", device="cpu")


@pytest.mark.slow
def test_objects_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = eomt()
    theirs.save_pretrained(tmp_path / "theirs")
    processor = pytest.importorskip("transformers").EomtImageProcessor(
        do_split_image=False, do_pad=True, size={"shortest_edge": 48, "longest_edge": 48}
    )
    processor.save_pretrained(tmp_path / "theirs")
    bundle = vitrail.load(tmp_path / "theirs", device="cpu")
    assert bundle.output == "boxes" and bundle.finds_masks
    pixels = np.random.default_rng(0).integers(0, 255, (48, 48, 3), np.uint8)
    with torch.no_grad():
        outputs = theirs(bundle.inputs([bundle.preprocess.pixels(pixels)]))
    (expected,) = processor.post_process_instance_segmentation(outputs, [(48, 48)], threshold=0.0)
    (found,) = bundle.predict([pixels])
    assert isinstance(found, Detections)
    best = {}  # the likeliest class of each query
    for row, one in enumerate(found):
        best.setdefault(found.masks[row].counts, (found.labels[row], one.score))
    wanted = [(one["label_id"], one["score"]) for one in expected["segments_info"]]
    assert len(wanted) == QUERIES
    np.testing.assert_allclose(sorted(best.values()), sorted(wanted), atol=1e-5)
    assert len(found) == QUERIES * CLASSES and (np.diff(found.scores) <= 0).all()
    logits = torch.nn.functional.interpolate(outputs.masks_queries_logits, (48, 48), mode="bilinear")[0]
    masks = {Runs.of((logits[query] > 0).numpy()).counts for query in range(QUERIES)}
    assert masks == {runs.counts for runs in found.masks}
    bundle.save(tmp_path / "ours")
    for to in ("vitrail", "huggingface"):
        vitrail.convert(tmp_path / "ours", tmp_path / to, to=to)
        again = vitrail.load(tmp_path / to, device="cpu")
        assert again.output == "boxes" and not any("do_split_image" in note for note in again.notes)


@given(seed=st.integers(0, 2**32 - 1), size=st.tuples(st.integers(5, 90), st.integers(5, 90)), pads=st.booleans())
@settings(max_examples=20)
def test_pixels_around_a_mask_are_all_pixels(seed: int, size: tuple[int, int], *, pads: bool) -> None:
    """Only the part of an image around a mask is computed, at any scale, and with borders or a crop."""
    random = np.random.default_rng(seed)
    outputs = torch.full((1, 3, 3 + 16 * 6), -4.0)
    outputs[..., :3] = torch.from_numpy(random.normal(size=(1, 3, 3)))
    maps = outputs[..., 3:].view(1, 3, 8, 12)
    for query in range(3):
        top, left = random.integers(0, 8), random.integers(0, 12)
        maps[0, query, top : top + random.integers(0, 5), left : left + random.integers(0, 7)] = 3.0
    placement = place(size, (32, 48), "pad" if pads else "crop", 1.0)
    (found,) = found_objects(QueryMasks, outputs, ("a", "b"), [placement], (2, 3))
    expected: list[Any] = []
    for query in range(3):
        whole = placement.map_back(maps[0, query].numpy(), fill=-9.0)
        if not (whole > 0).any():
            continue
        quality = (1 / (1 + np.exp(-whole[whole > 0]))).mean()
        chances = outputs[0, query, :3].double().softmax(0)[:2].numpy() * quality
        rows, columns = (np.flatnonzero((whole > 0).any(axis=axis)) for axis in (1, 0))
        box = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        expected += [(float(chance), label, box, whole > 0) for label, chance in enumerate(chances)]
    expected.sort(key=lambda one: -one[0])
    assert found.scores.tolist() == pytest.approx([one[0] for one in expected], rel=1e-5)
    for row, (_, label, box, mask) in enumerate(expected):
        assert found.labels[row] == label and tuple(found.boxes[row]) == box
        assert np.array_equal(found.masks[row].mask(), mask)


def test_boxes_of_cells_are_around_them() -> None:
    outputs = torch.full((1, 2, 2 + 16 * 6), -1.0)
    outputs[0, 1, 2:].view(8, 12)[1:3, 4:9] = 2.0
    (found,) = QueryMasks.objects(outputs, (2, 3))
    assert found.boxes.flatten().tolist() == pytest.approx(
        [4 / 12, 1 / 8, 9 / 12, 3 / 8]
    ) and found.labels.tolist() == [0]
    assert found.mask_rows is not None and found.mask_rows.tolist() == [1], "the other mask has no cell"


def test_files_say_whether_masks_are_those_of_objects(tmp_path: Path) -> None:
    eomt().save_pretrained(tmp_path)
    processor, config = tmp_path / "preprocessor_config.json", tmp_path / "config.json"
    processor.write_text(json.dumps({"do_split_image": True, "size": {"shortest_edge": 48, "longest_edge": None}}))
    bundle = vitrail.load(tmp_path, device="cpu")
    assert bundle.output == "mask" and not bundle.finds_masks and any("=True" in note for note in bundle.notes)
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"masks_of": "boxes"}))
    assert vitrail.load(tmp_path, device="cpu").output == "boxes", "what Vitrail wrote counts"
    config.write_text(json.dumps(values | {"masks_of": "stuff"}))
    with pytest.raises(BundleError, match="masks_of='stuff' is not one of"):
        vitrail.load(tmp_path, device="cpu")
