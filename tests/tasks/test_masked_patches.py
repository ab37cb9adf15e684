"""Tests of masked patch prediction: counts, corrupted embeddings, losses, gradients, unfit settings and networks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.tasks.books import make_tokenizer
from tests.tasks.images import Pictures, batch_of, images_of
from tests.tasks.objectives import check_parts, small_network
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.tasks.masked_patches import MaskedPatches, draw_corruption
from vitrail.testing import check_task

TARGETS = ("mean-colour", "colours", "pixels")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer of 24 codes for colour images of 21 x 28 pixels."""
    return str(make_tokenizer().save(tmp_path_factory.mktemp("tokenizer") / "model"))


def make_objective(task: MaskedPatches, *, size: tuple[int, int] = (21, 28), channels: int = 3) -> Any:
    network = small_network(size=size, channels=channels)
    objective: Any = task.objective(network, Splits(Pictures(3), None, None))
    objective.begin(Preprocess(image_size=size, channels=channels), seed=3)
    return objective


def test_every_image_has_exactly_the_counts_of_the_fractions() -> None:
    for patches, fractions, *counts in (
        (196, {}, 78, 10, 10), (16, {}, 6, 1, 1), (196, {"corrupt_fraction": 0.15}, 23, 3, 3),
        (20, {"mask_fraction": 1.0, "swap_fraction": 0.0}, 10, 0, 0), (12, {"mask_fraction": 0.0}, 0, 1, 5),
        (15, {"corrupt_fraction": 0.6, "mask_fraction": 0.5, "swap_fraction": 0.5}, 4, 4, 1),
        (2, {}, 1, 0, 0), (50, {"mask_fraction": 0.0, "swap_fraction": 1.0}, 0, 25, 0),
    ):  # fmt: skip
        found = draw_corruption(MaskedPatches(**fractions), batch_of(torch.zeros(40, 1, 1, 1)), (1, patches), seed=0)
        assert [group.shape for group in (found.masked, found.swapped, found.kept)] == [(40, count) for count in counts]
        assert found.sources.shape == found.swapped.shape and (found.sources != found.swapped).all()
        assert found.sources.numel() == 0 or 0 <= found.sources.min() <= found.sources.max() < patches
        for row in found.patches.tolist():
            assert len(set(row)) == sum(counts) and set(row) <= set(range(patches))


def test_all_patches_are_corrupted_and_copied_equally_often() -> None:
    task = MaskedPatches(mask_fraction=0.4, swap_fraction=0.4)
    found = draw_corruption(task, batch_of(torch.zeros(4000, 1, 1, 1)), (2, 5), seed=0)
    for places in found[:4]:
        counts = places.flatten().bincount(minlength=10) / places.numel()
        assert (counts - 0.1).abs().max() < 0.02


def test_embeddings_are_replaced_as_the_groups_say() -> None:
    task = MaskedPatches(mask_fraction=0.4, swap_fraction=0.4)
    found = draw_corruption(task, batch_of(torch.zeros(3, 1, 1, 1)), (3, 4), seed=0)
    embeddings, token = torch.randn(3, 12, 5), torch.randn(5)
    replaced = found.replacing(token)(embeddings)
    for image in range(3):
        expected = embeddings[image].clone()
        expected[found.masked[image]] = token
        for place, source in zip(found.swapped[image].tolist(), found.sources[image].tolist(), strict=True):
            expected[place] = embeddings[image, source]
        assert torch.equal(replaced[image], expected)
        assert torch.equal(replaced[image, found.kept[image]], embeddings[image, found.kept[image]])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("target", TARGETS)
def test_the_loss_is_the_formula(target: Any, channels: int) -> None:
    objective = make_objective(MaskedPatches(patch_target=target), channels=channels)
    images = images_of(2, channels=channels)
    output, batch = objective(batch_of(images)), batch_of(images)
    corruption = draw_corruption(objective.task, batch, (3, 4), seed=3)
    encoded = objective.network.encode(images, replace=corruption.replacing(objective.mask_embedding)).patches
    losses, right = [], []
    for image in range(2):
        for patch in corruption.patches[image].tolist():
            row, column = divmod(patch, 4)
            pixels = images[image, :, 7 * row : 7 * row + 7, 7 * column : 7 * column + 7]
            predicted = objective.decoder(encoded[image, patch])
            if target == "pixels":
                losses.append((predicted - pixels.flatten()).square().mean())
                continue
            side = 1 if target == "mean-colour" else 4
            levels = F.adaptive_avg_pool2d((pixels.double() * 0.5 + 0.5) * 255, side).flatten(1)
            bins = ((levels + 1e-4) / 32).floor().long()
            classes = (bins * torch.tensor([8**power for power in reversed(range(channels))])[:, None]).sum(dim=0)
            logits = predicted.view(side**2, 8**channels)
            losses.append(F.cross_entropy(logits, classes))
            right.append((logits.argmax(dim=1) == classes).float().mean())
    assert output.loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    if target == "pixels":
        assert not output.metrics
    else:
        assert output.metrics["colour_accuracy"].item() == pytest.approx(torch.stack(right).mean().item())


@pytest.mark.parametrize("channels", [1, 3])
def test_tokens_are_those_of_the_image_without_corruption(channels: int, tokenizer: str) -> None:
    """Grey images are tokenized as three equal channels."""
    objective = make_objective(MaskedPatches(patch_target="tokens", tokenizer=tokenizer), channels=channels)
    images = images_of(3, channels=channels)
    batch = replace(batch_of(images), valid=torch.tensor([True, False, True]))
    output = objective(batch)
    corruption = draw_corruption(objective.task, batch, (3, 4), seed=3)
    encoded = objective.network.encode(images, replace=corruption.replacing(objective.mask_embedding)).patches
    colours = images.expand(-1, 3, -1, -1)
    right = make_tokenizer().tokens(((colours * 0.5 + 0.5) - 0.4) / 0.3)
    losses, hits = [], []
    for image in (0, 2):
        for patch in corruption.patches[image].tolist():
            logits = objective.decoder(encoded[image, patch])
            assert logits.shape == (24,)
            losses.append(-logits.log_softmax(dim=0)[right[image, patch]])
            hits.append((logits.argmax() == right[image, patch]).float())
    assert output.loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    assert output.metrics["token_accuracy"].item() == pytest.approx(torch.stack(hits).mean().item())
    assert set(output.metrics) == {"token_accuracy"}


def test_the_tokenizer_is_neither_trained_nor_saved_but_recorded(tokenizer: str) -> None:
    task = MaskedPatches(patch_target="tokens", tokenizer=tokenizer)
    objective = make_objective(task)
    sha256 = make_tokenizer().sha256
    assert task.models() == {"tokenizer": sha256} and MaskedPatches().models() == {}
    assert not any("codebook" in name for name in objective.state_dict())
    assert len(list(objective.parameters())) == len(list(make_objective(MaskedPatches()).parameters()))
    bundle = task.bundle(objective, (), Preprocess(image_size=(21, 28)), {"seed": 0})
    assert bundle.provenance == {"seed": 0, "tokenizer": tokenizer, "tokenizer_sha256": sha256}


def test_predicted_tokens_are_restored_among_the_right_ones(tokenizer: str) -> None:
    task = MaskedPatches(patch_target="tokens", tokenizer=tokenizer)
    objective = make_objective(task).eval()
    images, preprocess = images_of(2), Preprocess(image_size=(21, 28))
    _, patches = objective.restored(objective.network, batch_of(images), preprocess, seed=0)
    places, logits = objective.predicted(objective.network, batch_of(images), seed=0)
    made = make_tokenizer()
    tokens = made.tokens(((images * 0.5 + 0.5) - 0.4) / 0.3)
    for image in range(2):
        tokens[image, places[image]] = logits[image].argmax(dim=1)
    levels = ((made.restored(tokens) * 0.3 + 0.4) * 255).round().clamp(0, 255)
    for image in range(2):
        for number, patch in enumerate(places[image].tolist()):
            row, column = divmod(patch, 4)
            expected = levels[image, :, 7 * row : 7 * row + 7, 7 * column : 7 * column + 7]
            assert (patches[image, number] - expected).abs().max() <= 1
    (table,) = task.pictures(objective, task.bundle(objective, (), preprocess, {}), Pictures(3))
    assert table.title == "Restored patches" and len(table.rows) == 3


@pytest.mark.parametrize("target", TARGETS)
def test_gradients_of_parts_add_up_to_those_of_the_batch(target: Any) -> None:
    check_parts(make_objective(MaskedPatches(patch_target=target)))


@pytest.mark.slow
def test_tokens_fulfil_the_contract_of_a_task(tmp_path: Path) -> None:
    tokenizer = str(make_tokenizer(size=(28, 42)).save(tmp_path / "model"))
    check_task(MaskedPatches(patch_target="tokens", tokenizer=tokenizer), Splits(Pictures(9), Pictures(5), None))
    check_parts(
        make_objective(MaskedPatches(patch_target="tokens", tokenizer=str(make_tokenizer().save(tmp_path / "wide"))))
    )
