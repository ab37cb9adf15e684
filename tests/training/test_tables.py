"""Weights in the shapes of the original code, which big_vision's files have."""

from __future__ import annotations

import pytest
import torch

from vitrail.models.variants import create
from vitrail.training.update_rules import tables_of
from vitrail.weights.layouts.google import BIG_VISION
from vitrail.weights.layouts.layout import theirs_for


@pytest.mark.parametrize("pool", ["cls", "map"])
def test_the_arrays_are_those_of_a_file_of_big_vision(pool: str) -> None:
    network = create(
        "ViT-Pico/7", image_size=(15, 20), patch_size=(3, 5), num_classes=7, width=24, depth=1, heads=3, mlp_width=40,
        pool=pool, head_hidden=11,
    )  # fmt: skip
    tables, seen = tables_of(network), 0
    weights = dict(network.named_parameters())
    names = BIG_VISION.names(network.config)
    for name, weight in weights.items():
        arrays = tables[id(weight)].read(weight)
        theirs = list(theirs_for(name, names).write(weight.detach()).values())
        assert len(arrays) == len(theirs)
        for array, expected in zip(arrays, theirs, strict=True):
            assert torch.equal(array, expected), name
            seen += expected.numel()
    assert seen == sum(weight.numel() for weight in weights.values()) and set(tables) == set(map(id, weights.values()))


def test_filters_of_convolutions_are_read_as_in_the_original() -> None:
    network = create("BiT-R26x1", image_size=(33, 40), num_classes=3, width=32)
    tables = tables_of(network)
    weight = network.root.stem.weight if hasattr(network, "root") else next(network.parameters())
    assert torch.equal(tables[id(weight)].read(weight), weight.permute(2, 3, 1, 0)[None])


@pytest.mark.slow
def test_writing_undoes_reading() -> None:
    network = create("R26+ViT-Ti/32", image_size=(32, 64), num_classes=3, width=24, depth=1, heads=3, qk_norm=True)
    tables = tables_of(network)
    for name, weight in network.named_parameters():
        table = tables[id(weight)]
        assert torch.equal(table.write(table.read(weight)).reshape(weight.shape), weight), name
