"""Tests of pictures of models without labels: pasted patches, restored patches and nearest neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.tasks.images import Pictures, batch_of, images_of
from tests.tasks.objectives import small_network
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Sample
from vitrail.data.splits import Splits
from vitrail.models.tokens import cut_patches
from vitrail.tasks.contrast import SimClr
from vitrail.tasks.mae import Mae
from vitrail.tasks.masked_patches import MaskedPatches, colour_classes, colour_levels
from vitrail.tasks.pictures import ROWS, neighbour_table, paste_patches
from vitrail.tasks.unlabelled import PatchTask

PREPROCESS = Preprocess(image_size=(21, 28), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
SPLITS = Splits(Pictures(9), Pictures(5), None)


class Repeated(Pictures):
    """Images of which every third one is the same, labelled by their place modulo 3. The last one is broken."""

    def __init__(self, count: int) -> None:
        super().__init__(count, ("a", "b", "c"), (0, 1, 2))

    def __getitem__(self, index: int) -> Sample:
        image: Any = b"" if index == self.count - 1 else super().__getitem__(index % 3).image
        return Sample(self.key(index), image, self.target(index))


def test_pasted_patches_are_in_row_major_order() -> None:
    images = torch.zeros(2, 1, 5, 7, dtype=torch.int64)  # the patches leave a row and a column
    patches = torch.arange(1, 3)[None, :, None, None, None].expand(2, 2, 1, 2, 3)
    pasted = paste_patches(images, torch.tensor([[0, 3], [1, 2]]), patches)
    assert pasted[0, 0].tolist() == [[1, 1, 1, 0, 0, 0, 0]] * 2 + [[0, 0, 0, 2, 2, 2, 0]] * 2 + [[0] * 7]
    assert pasted[1, 0].tolist() == [[0, 0, 0, 1, 1, 1, 0]] * 2 + [[2, 2, 2, 0, 0, 0, 0]] * 2 + [[0] * 7]
    assert not images.any()


@pytest.mark.parametrize(("cells", "channels", "size"), [(1, 3, (7, 5)), (1, 1, (4, 4)), (4, 3, (8, 12))])
def test_levels_of_colours_have_these_colours(cells: int, channels: int, size: tuple[int, int]) -> None:
    classes = torch.randint(0, 8**channels, (2, 5, cells**2), generator=torch.Generator().manual_seed(0))
    levels = colour_levels(classes, cells, channels, size)
    assert levels.shape == (2, 5, channels, *size) and torch.equal(colour_classes(levels, cells), classes)
    assert set(levels.flatten().tolist()) <= {16 + 32 * number for number in range(8)}


@pytest.mark.parametrize("task", [Mae(), Mae(normalise_pixels=False), MaskedPatches(patch_target="pixels")], ids=str)
@torch.no_grad()
def test_restored_pixels_are_the_predicted_ones(task: PatchTask) -> None:
    objective: Any = task.objective(small_network(), SPLITS)
    batch = batch_of(images_of(3))
    places, predicted = objective.predicted(objective.network, batch, seed=0)
    restored_places, restored = objective.restored(objective.network, batch, PREPROCESS, seed=0)
    assert torch.equal(restored_places, places)
    patch, shown = cut_patches(batch.images, (7, 7))[2, places[2, 1]], predicted[2, 1].view(3, 7, 7)
    if isinstance(task, Mae) and task.normalise_pixels:
        shown = shown * patch.std() + patch.mean()
    levels = 255 * (shown * torch.tensor(PREPROCESS.std)[:, None, None] + torch.tensor(PREPROCESS.mean)[:, None, None])
    assert (restored[2, 1] - levels.clamp(0, 255)).abs().max() < 0.51


@pytest.mark.parametrize("target", ["mean-colour", "colours"])
@torch.no_grad()
def test_restored_colours_are_the_most_likely_ones(target: Any) -> None:
    objective: Any = MaskedPatches(patch_target=target).objective(small_network(), SPLITS)
    batch = batch_of(images_of(3))
    _, predicted = objective.predicted(objective.network, batch, seed=0)
    _, restored = objective.restored(objective.network, batch, PREPROCESS, seed=0)
    first = int(predicted[1, 2, :512].argmax())
    red, green, blue = (16 + 32 * (first // 8**power % 8) for power in (2, 1, 0))
    assert restored[1, 2, :, 0, 0].tolist() == [red, green, blue]


@pytest.mark.parametrize("task", [Mae(), MaskedPatches()], ids=str)
def test_a_table_shows_the_image_its_hidden_patches_and_the_restored_ones(task: PatchTask) -> None:
    objective = task.objective(small_network(), SPLITS)
    source = Pictures(20)
    (table,) = task.pictures(objective, task.bundle(objective, (), PREPROCESS, {}), source)
    assert len(table.rows) == ROWS and task.hidden in table.text
    image, hidden, restored = table.rows[3]
    assert [picture.lines for picture in table.rows[3]] == [("image",), (f"{task.hidden} patches",), ("restored",)]
    levels = source[3 * 20 // ROWS].image
    assert np.abs(np.asarray(image.image, int) - levels).max() <= 1
    is_grey = (np.asarray(hidden.image) == 128).all(axis=2)
    assert is_grey.sum() == 49 * task.hidden_of(12)
    assert np.array_equal(np.asarray(restored.image)[~is_grey], np.asarray(image.image)[~is_grey])
    assert task.pictures(objective, task.bundle(objective, (), PREPROCESS, {}), Repeated(1)) == ()


def test_the_nearest_images_are_equal_ones() -> None:
    task = SimClr()
    objective = task.objective(small_network(), SPLITS)
    source = Repeated(12)
    (table,) = task.pictures(objective, task.bundle(objective, (), PREPROCESS, {}), source)
    assert "out of 11 held-out images" in table.text and len(table.rows) == ROWS
    for number, row in enumerate(table.rows):
        label = source.classes[number * 11 // ROWS % 3]
        assert [len(picture.lines) for picture in row] == [2] * 7 and row[0].lines == ("searched", label)
        equal = [picture for picture in row[1:] if picture.lines[0] == "similarity 1.000"]
        assert len(equal) >= 2 and {picture.lines[1] for picture in row[1:3]} == {label}
    assert neighbour_table(objective.network.eval(), PREPROCESS, Repeated(2), torch.device("cpu")) is None
