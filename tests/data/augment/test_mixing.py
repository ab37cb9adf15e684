"""Tests of mixup and CutMix: the mixed pixels, and the targets that describe them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.augment.draws import symmetric_beta
from vitrail.data.augment.settings import cut_boxes, mix, mixup_shares
from vitrail.data.batch import Batch
from vitrail.errors import ConfigError

CLASSES = 5


def make_batch(count: int, *, size: tuple[int, int, int] = (3, 11, 17), **fields: Any) -> Batch:
    generator = torch.Generator().manual_seed(count)
    batch = Batch(
        images=torch.randint(0, 256, (count, *size), dtype=torch.uint8, generator=generator),
        labels=torch.arange(count) % CLASSES,
        valid=torch.ones(count, dtype=torch.bool),
        samples=torch.arange(count),
        epochs=torch.zeros(count, dtype=torch.int64),
    )
    return replace(batch, **fields)


def draws_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((count, 5)).astype(np.float32)


@given(count=st.integers(1, 9), alpha=st.sampled_from([0.1, 0.2, 1.0, 4.0]), seed=st.integers(0, 999))
def test_mixup_is_linear_in_images_and_targets(count: int, alpha: float, seed: int) -> None:
    batch, draws = make_batch(count), draws_of(count, seed)
    mixed = mix(batch, draws, mixup=alpha, cutmix=0.0, classes=CLASSES)
    assert mixed.images.dtype == torch.uint8 and mixed.targets is not None
    share = symmetric_beta(draws[:, 1:3], alpha)
    for n in range(count):
        own, partner = batch.images[n].double(), batch.images[(n + 1) % count].double()
        keep = max(share[n], 1 - share[n])
        expected = keep * own + (1 - keep) * partner
        assert (mixed.images[n] - expected).abs().max() < 0.5 + 255 / 2**16  # rounding of the pixel and of the fraction
        target = np.zeros(CLASSES)
        target[n % CLASSES] += keep
        target[(n + 1) % count % CLASSES] += 1 - keep
        np.testing.assert_allclose(mixed.targets[n].numpy(), target, atol=2**-16)
        assert mixed.targets[n, n % CLASSES] >= 0.5, "the image itself has the larger share"


def test_pixels_and_targets_of_mixup_agree_exactly() -> None:
    """One image is black and one is white, so a pixel shows the fraction, which is also the target."""
    images = torch.zeros(200, 1, 2, 3, dtype=torch.uint8)
    images[::2] = 255
    batch = make_batch(200, images=images, labels=torch.arange(200) % 2)
    mixed = mix(batch, draws_of(200), mixup=1.0, cutmix=0.0, classes=2)
    white = mixed.targets[:, 0].double()
    assert torch.equal(mixed.images[:, 0, 0, 0], (255 * white + 0.5).floor().to(torch.uint8))
    assert torch.equal(white * 2**16, (white * 2**16).round()), "shares are whole parts of 65536"


@given(samples=st.integers(1, 6), views=st.integers(1, 2), cutmix=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 99))
def test_one_mixup_weight_per_batch(samples: int, views: int, cutmix: float, seed: int) -> None:
    """The weight is the one that the first row alone would get. It does not change rows with CutMix."""
    count = samples * views
    batch = make_batch(count, views=torch.arange(count) % views)
    draws = draws_of(count, seed)
    shared = draws.copy()
    shared[:, 1:3] = np.where(draws[:, :1] < (0.5 if cutmix else 0), draws[:, 1:3], draws[:1, 1:3])
    alone = mix(batch, shared, mixup=0.4, cutmix=cutmix, classes=CLASSES, mixup_per="sample")
    together = mix(batch, draws, mixup=0.4, cutmix=cutmix, classes=CLASSES, mixup_per="batch")
    assert torch.equal(alone.images, together.images) and torch.equal(alone.targets, together.targets)


@given(
    samples=st.integers(1, 6), views=st.integers(1, 2), sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_timms_rule_has_one_weight_and_one_box_for_the_reversed_batch(
    samples: int, views: int, sizes: tuple[int, int], seed: int
) -> None:
    """The reference follows the equations of `Mixup` in pytorch-image-models with mode "batch"."""
    count = samples * views
    batch = make_batch(count, size=(3, *sizes), views=torch.arange(count) % views)
    draws = draws_of(count, seed)
    share = float(symmetric_beta(draws[:1, 1:3], 1.0 if draws[0, 0] < 0.5 else 0.8)[0])
    mixed = mix(batch, draws, mixup=0.8, cutmix=1.0, classes=CLASSES, mixup_per="timm-batch")
    images = batch.images.double()
    other = images.view(samples, views, 3, *sizes).flip(0).reshape(images.shape)
    expected = share * images + (1 - share) * other
    if draws[0, 0] < 0.5:
        spans = []
        for side, draw in zip(sizes, draws[0, 3:], strict=True):
            half, centre = int(side * (1 - share) ** 0.5) // 2, int(draw * side)
            spans.append(slice(max(centre - half, 0), min(centre + half, side)))
        expected = images.clone()
        expected[:, :, spans[0], spans[1]] = other[:, :, spans[0], spans[1]]
        area = (spans[0].stop - spans[0].start) * (spans[1].stop - spans[1].start)
        share = 1 - area / (sizes[0] * sizes[1])
    assert mixed.images.dtype == torch.float32 and mixed.targets is not None
    torch.testing.assert_close(mixed.images.double(), expected, rtol=0, atol=1e-4)
    labels = torch.nn.functional.one_hot(batch.labels, CLASSES).double()
    partners = labels.view(samples, views, CLASSES).flip(0).reshape(labels.shape)
    torch.testing.assert_close(mixed.targets.double(), share * labels + (1 - share) * partners, rtol=0, atol=1e-6)


@given(
    count=st.integers(1, 9), size=st.tuples(st.sampled_from([1, 3]), st.integers(1, 33), st.integers(1, 33)),
    alpha=st.sampled_from([0.2, 1.0, 4.0]), seed=st.integers(0, 999),
)  # fmt: skip
def test_cutmix_pastes_a_box_whose_area_counts(count: int, size: tuple[int, int, int], alpha: float, seed: int) -> None:
    batch, draws = make_batch(count, size=size, labels=torch.arange(count)), draws_of(count, seed)
    mixed = mix(batch, draws, mixup=0.0, cutmix=alpha, classes=count)
    rows, columns = cut_boxes(draws[:, 1:], alpha, *size[1:])
    lengths = (np.sqrt(1 - symmetric_beta(draws[:, 1:3], alpha))[:, None] * size[1:]).astype(int)
    for n in range(count):
        expected = batch.images[n].clone()
        for inside, centre, length, side in zip((rows[n], columns[n]), draws[n, 3:], lengths[n], size[1:], strict=True):
            first = int(centre * np.float32(side)) - length // 2
            assert np.flatnonzero(inside).tolist() == list(range(max(0, first), min(side, first + length)))
        box = np.ix_(np.flatnonzero(rows[n]), np.flatnonzero(columns[n]))
        partner = (n + 1) % count
        for channel in range(size[0]):
            expected[channel].numpy()[box] = batch.images[partner, channel].numpy()[box]
        assert torch.equal(mixed.images[n], expected)
        area = np.float32(rows[n].sum() * columns[n].sum())
        if count > 1:
            assert mixed.targets[n, n] == 1 - area / np.float32(size[1] * size[2])
            assert mixed.targets[n, partner] == 1 - mixed.targets[n, n]
        else:
            assert mixed.targets.tolist() == [[1]], "it is its own partner"


@pytest.mark.parametrize(("mixup", "cutmix"), [(1.0, 0.0), (0.0, 1.0)])
def test_nobody_is_mixed_with_a_sample_that_does_not_count(mixup: float, cutmix: float) -> None:
    labels = torch.tensor([0, 1, 2, -1, 4, 0])
    valid = torch.tensor([True, False, True, True, True, True])
    batch = make_batch(6, labels=labels, valid=valid)
    mixed = mix(batch, draws_of(6), mixup=mixup, cutmix=cutmix, classes=CLASSES)
    assert mixed.valid.tolist() == mixed.counted.tolist() == [True, False, True, False, True, True]
    for n in (0, 2):  # before the two
        assert torch.equal(mixed.images[n], batch.images[n])
        assert mixed.targets[n].tolist() == torch.nn.functional.one_hot(labels[n], CLASSES).tolist()
    assert not torch.equal(mixed.images[4], batch.images[4]) and 0 < mixed.targets[4, 0] < 1


def whole_parts(shares: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.rint(shares * 2**16)).float() / 2**16


def test_given_targets_are_mixed_instead_of_labels() -> None:
    several = (torch.rand(7, 3, generator=torch.Generator().manual_seed(0)) < 0.5).float()
    batch, draws = make_batch(7, labels=torch.full((7,), -1), targets=several), draws_of(7)
    mixed = mix(batch, draws, mixup=1.0, cutmix=0.0, classes=0)
    kept = whole_parts(mixup_shares(draws[:, 1:3], 1.0))[:, None]
    torch.testing.assert_close(mixed.targets, several * kept + several.roll(-1, 0) * (1 - kept))
    assert mixed.valid.all()


def test_mixup_blends_numbers_and_spreads_nothing_unknown() -> None:
    unknown = float("nan")
    targets = torch.tensor([[1.0, 10.0], [3.0, unknown], [unknown, unknown], [5.0, 50.0]])
    batch = make_batch(4, targets=targets, target_kind="numbers", labels=torch.full((4,), -1))
    assert batch.counted.tolist() == [True, True, False, True]
    draws = draws_of(4)
    mixed = mix(batch, draws, mixup=0.4, cutmix=0.0, classes=0)
    share = whole_parts(mixup_shares(draws[:, 1:3], 0.4))
    assert mixed.targets[0, 0] == 1.0 * share[0] + 3.0 * (1 - share[0]) and mixed.targets[0, 1].isnan()
    assert mixed.targets[1, 0] == 3.0 and mixed.targets[1, 1].isnan(), "its partner has nothing to give"
    assert torch.equal(mixed.targets[3], targets[3] * share[3] + targets[0] * (1 - share[3]))
    assert mixed.valid.tolist() == [True, True, False, True] and torch.equal(mixed.images[1], batch.images[1])


def test_mixing_without_the_number_of_classes_and_cutmix_of_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="need the number of classes"):
        mix(make_batch(3), draws_of(3), mixup=0.5, cutmix=0.0, classes=0)
    batch = make_batch(2, targets=torch.ones(2, 1), target_kind="numbers")
    with pytest.raises(ConfigError, match=r"cutmix=1\.0 pastes a part of another image"):
        mix(batch, draws_of(2), mixup=0.0, cutmix=1.0, classes=0)
