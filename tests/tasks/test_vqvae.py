"""Tests of the training of tokenizers: loss, gradients, running codes, restarts, metrics, and unfit settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tasks.images import Pictures, batch_of, images_of
from tests.tasks.objectives import check_parts, small_network
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.splits import Splits
from vitrail.evaluation.outputs import Outputs
from vitrail.processes.group import Processes
from vitrail.tasks.task import Position
from vitrail.tasks.tokenizer import Tokenizer, join_patches
from vitrail.tasks.vqvae import VqVae, VqVaeObjective

SETTINGS: dict[str, Any] = {"codes": 24, "code_width": 5, "decoder_width": 8, "decoder_depth": 1}
SPLITS = Splits(Pictures(9), Pictures(5), None)
START = Position(0, 10, 0.0)


def make_objective(*, size: tuple[int, int] = (21, 28), channels: int = 3, **fields: Any) -> VqVaeObjective:
    objective = VqVae(**{**SETTINGS, **fields}).objective(small_network(size=size, channels=channels), SPLITS)
    assert isinstance(objective, VqVaeObjective)
    objective.begin(Preprocess(image_size=size, channels=channels), seed=3)
    return objective


def patches_of(images: Tensor, side: int = 7) -> Tensor:
    """Return the pixels of each patch, cut one by one."""
    rows, columns = images.shape[2] // side, images.shape[3] // side
    cut = [
        images[:, :, side * row : side * row + side, side * column : side * column + side].flatten(1)
        for row in range(rows)
        for column in range(columns)
    ]
    return torch.stack(cut, dim=1)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_loss_is_the_formula(channels: int) -> None:
    objective = make_objective(channels=channels, commitment=0.4).eval()
    images, coder = images_of(3, channels=channels), objective.coder
    batch = replace(batch_of(images), valid=torch.tensor([True, False, True]))
    output = objective(batch)
    vectors = coder.projection(objective.network.features(images).patches)
    distances = (vectors[:, :, None].double() - coder.codebook.codes.double()).square().sum(dim=3)
    codes = coder.codebook.codes[distances.argmin(dim=2)]
    error = (coder.decoder(codes, (3, 4)) - patches_of(images)).square().mean(dim=(1, 2))
    commitment = (vectors - codes).square().mean(dim=(1, 2))
    expected = (error + 0.4 * commitment)[[0, 2]].mean()
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert output.metrics["reconstruction_loss"].item() == pytest.approx(error[[0, 2]].mean().item(), rel=1e-5)
    assert output.metrics["commitment_loss"].item() == pytest.approx(commitment[[0, 2]].mean().item(), rel=1e-5)
    assert output.metrics["perplexity"].item() == pytest.approx(1), "no code was used yet"
    assert torch.equal(join_patches(patches_of(images), (3, 4), (7, 7)), images)


def test_gradients_of_parts_add_up_to_those_of_the_batch() -> None:
    check_parts(make_objective())


def test_codes_follow_the_whole_batch_after_each_step() -> None:
    """Also if the batch is processed in parts, and if codes are restarted."""
    batch = replace(batch_of(images_of(6)), valid=torch.tensor([True, True, False, True, True, True]))
    states = []
    for parts in (1, 2, 3):
        objective = make_objective(restart_below=0.5, code_decay=0.5).train()
        before = objective.coder.codebook.codes.clone()
        objective(batch)  # of a step that was not completed
        objective.before_step(START)
        for part in batch.chunks(parts):
            objective(part)
        objective.after_step(START, Processes())
        states.append(objective.coder.codebook.state_dict())
        assert not torch.equal(before, objective.coder.codebook.codes)
    for state in states[1:]:
        for name, tensor in states[0].items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)
    vectors = objective.coder.projection(objective.network.features(batch.images).patches)
    nearest = (vectors.flatten(0, 1)[:, None] - objective.coder.codebook.codes).abs().amax(dim=2).amin(dim=0)
    restarted = (nearest < 1e-5).sum().item()
    assert restarted >= 5, "one patch of each decoded image became a code, and so did codes of a single patch"


def test_restarts_depend_on_seed_epoch_and_sample_alone() -> None:
    def codes(first: int = 0, epoch: int = 0, seed: int = 3) -> Tensor:
        objective = make_objective(restart_below=0.9, code_decay=0.5)
        objective.begin(Preprocess(image_size=(21, 28)), seed=seed)
        objective(batch_of(images_of(4), first=first, epoch=epoch))
        objective.after_step(START, Processes())
        return objective.coder.codebook.codes

    torch.testing.assert_close(codes(), codes(), rtol=0, atol=0)
    for other in (codes(first=7), codes(epoch=1), codes(seed=4)):
        assert not torch.equal(codes(), other)


def test_the_use_of_codes_is_measured() -> None:
    objective = make_objective(codes=7)
    task, preprocess = objective.task, Preprocess(image_size=(21, 28))
    bundle = task.bundle(objective, (), preprocess, {})
    assert isinstance(bundle, Tokenizer)
    found = task.evaluator(objective)(Outputs(bundle, batch_size=2), SPLITS.train, SPLITS.validation)
    images = preprocess.normalise(
        torch.stack([torch.from_numpy(preprocess.pixels(SPLITS.validation[n].image)) for n in range(5)])
    )
    tokens = bundle.tokens(images)
    counts = tokens.flatten().bincount(minlength=7).double()
    fractions = counts[counts > 0] / counts.sum()
    assert found["codes_used"] == (counts > 0).sum() and found["images"] == 5
    assert found["perplexity"] == pytest.approx((-(fractions * fractions.log()).sum()).exp().item())
    errors = (bundle.restored(tokens) - images).square().mean()
    assert found["reconstruction_loss"] == pytest.approx(errors.item(), rel=1e-5)
    assert task.texts(found)[1].startswith("perplexity ")
