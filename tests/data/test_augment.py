"""Flips and shifts of a batch, and the keyed random numbers behind them, against plain references."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.augment import Augment, keyed_uniform
from vitrail.errors import ConfigError

MASK = (1 << 64) - 1


class SplitMix64:
    """The generator as its authors publish it (Vigna's C source), in Python's integers."""

    def __init__(self, state: int) -> None:
        self.state = state & MASK

    def __call__(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)


def reference_uniform(seed: int, epoch: int, sample: int, draws: int) -> list[float]:
    state = SplitMix64(seed)()
    state = SplitMix64(state ^ epoch)()
    generator = SplitMix64(SplitMix64(state ^ sample)())
    next_numbers = [SplitMix64(generator.state + draw * 0x9E3779B97F4A7C15)() for draw in range(1, draws + 1)]
    return [(number >> 40) / 2**24 for number in next_numbers]


def reference_augment(image: np.ndarray, numbers: list[float], *, flip: bool, shift: int) -> np.ndarray:
    """One image, c h w: mirrored, padded by its edge, and cut at the place that the numbers say."""
    _, height, width = image.shape
    if flip and numbers[0] < 0.5:
        image = image[:, :, ::-1]
    top, left = (int(number * (2 * shift + 1)) for number in numbers[1:3])
    padded = np.pad(image, ((0, 0), (shift, shift), (shift, shift)), mode="edge")
    return padded[:, top : top + height, left : left + width]


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def batch(count: int, height: int = 5, width: int = 7, channels: int = 3) -> torch.Tensor:
    return torch.randint(
        0, 256, (count, channels, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(4)
    )


def test_the_reference_is_splitmix64() -> None:
    generator = SplitMix64(1234567)
    assert [generator() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(
    seed=st.integers(0, 2**32 - 1),
    keys=st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1, max_size=5),
    draws=st.integers(1, 5),
)
def test_keyed_uniform_equals_the_reference(seed: int, keys: list[tuple[int, int]], draws: int) -> None:
    epochs, samples = (longs(*column) for column in zip(*keys, strict=True))
    found = keyed_uniform(seed, epochs, samples, draws=draws)
    assert found.dtype == torch.float32
    assert found.tolist() == [reference_uniform(seed, epoch, sample, draws) for epoch, sample in keys]


def test_keyed_uniform_is_uniform_from_0_to_below_1() -> None:
    count = 200_000
    numbers = keyed_uniform(0, torch.zeros(count, dtype=torch.int64), torch.arange(count), draws=3)
    assert numbers.min() >= 0 and numbers.max() < 1
    deviation = (1 / 12) ** 0.5
    assert (numbers.mean(0) - 0.5).abs().max() < 4 * deviation / count**0.5
    assert (numbers.var(0) - 1 / 12).abs().max() < 4 * (1 / 180) ** 0.5 / count**0.5
    counts = torch.stack([torch.histc(numbers[:, draw], 100, 0, 1) for draw in range(3)])
    chi_square = ((counts - count / 100) ** 2 / (count / 100)).sum(1)
    assert chi_square.min() > 50 and chi_square.max() < 165  # 99 degrees of freedom: 99 +- 14


@pytest.mark.parametrize("key", ["seed", "epoch", "sample", "draw"])
def test_neighbours_in_any_part_of_the_key_are_independent(key: str) -> None:
    count = 20_000
    zeros, numbers = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    if key == "seed":
        pair = [keyed_uniform(seed, zeros, numbers, draws=1)[:, 0] for seed in (0, 1)]
    elif key == "epoch":
        pair = [keyed_uniform(0, zeros + epoch, numbers, draws=1)[:, 0] for epoch in (0, 1)]
    elif key == "sample":
        pair = [keyed_uniform(0, zeros, numbers + step, draws=1)[:, 0] for step in (0, 1)]
    else:
        pair = list(keyed_uniform(0, zeros, numbers, draws=2).T)
    assert (pair[0] == pair[1]).float().mean() < 0.001
    assert abs(torch.corrcoef(torch.stack(pair))[0, 1]) < 4 / count**0.5


def test_parts_of_the_key_are_not_interchangeable() -> None:
    keys = list(product(range(6), repeat=3))
    numbers = [keyed_uniform(seed, longs(epoch), longs(sample), draws=1).item() for seed, epoch, sample in keys]
    assert len(set(numbers)) == len(keys)


@given(
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 500),
    first=st.integers(0, 10**6),
    size=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    flip=st.booleans(),
    shift=st.integers(0, 12),
)
def test_images_equal_the_reference(
    seed: int, epoch: int, first: int, size: tuple[int, int, int], flip: bool, shift: int
) -> None:
    channels, height, width = size
    images = batch(4, height, width, channels)
    before = images.clone()
    samples = [first + number for number in range(4)]
    found = Augment(flip=flip, shift=shift)(images, seed=seed, epochs=longs(*[epoch] * 4), samples=longs(*samples))
    assert found.dtype == torch.uint8 and found.shape == images.shape
    for image, sample, result in zip(before.numpy(), samples, found.numpy(), strict=True):
        numbers = reference_uniform(seed, epoch, sample, 3)
        np.testing.assert_array_equal(result, reference_augment(image, numbers, flip=flip, shift=shift))
    assert torch.equal(images, before)


@settings(max_examples=25)
@given(order=st.permutations(range(12)), cuts=st.sets(st.integers(1, 11)), seed=st.integers(0, 9))
def test_what_happens_to_a_sample_depends_neither_on_its_batch_nor_on_its_place(
    order: list[int], cuts: set[int], seed: int
) -> None:
    images, samples = batch(12), torch.arange(100, 112)
    epochs = torch.arange(12) // 5
    augment = Augment(flip=True, shift=2, erase=0.5)
    together = augment(images, seed=seed, epochs=epochs, samples=samples)
    parts = [
        augment(images[part], seed=seed, epochs=epochs[part], samples=samples[part])
        for part in torch.tensor(order).tensor_split(sorted(cuts))
    ]
    assert torch.equal(torch.cat(parts), together[torch.tensor(order)])


def test_all_offsets_appear_about_equally_often_and_half_are_flipped() -> None:
    count, shift = 9800, 3
    rows, columns = torch.meshgrid(torch.arange(7), torch.arange(7), indexing="ij")
    image = (16 * rows + columns).to(torch.uint8)  # the middle pixel tells the offset, its neighbour the flip
    found = Augment(flip=True, shift=shift)(
        image.expand(count, 1, 7, 7), seed=3, epochs=torch.zeros(count, dtype=torch.int64), samples=torch.arange(count)
    )
    down = found[:, 0, 3, 3].long() // 16
    across = found[:, 0, 3, 3].long() % 16
    pairs = torch.bincount(7 * down + across, minlength=49)
    assert len(pairs) == 49 and pairs.min() > 200 - 4 * 200**0.5 and pairs.max() < 200 + 4 * 200**0.5
    flipped = (found[:, 0, 3, 2] > found[:, 0, 3, 4]).float().mean()
    assert abs(flipped - 0.5) < 4 * 0.5 / count**0.5


@pytest.mark.parametrize("part", ["seed", "epochs", "samples"])
def test_another_seed_epoch_or_sample_gives_another_change(part: str) -> None:
    images = batch(1).expand(64, -1, -1, -1)
    key = {"seed": 0, "epochs": torch.zeros(64, dtype=torch.int64), "samples": torch.arange(64)}
    augment = Augment(flip=True, shift=2)
    changed = augment(images, **key) != augment(images, **{**key, part: key[part] + 64})
    assert changed.flatten(1).any(1).float().mean() > 0.8


def test_flip_alone_mirrors_some_and_shifts_none() -> None:
    images = batch(64)
    found = Augment(flip=True, shift=0)(
        images, seed=1, epochs=torch.zeros(64, dtype=torch.int64), samples=torch.arange(64)
    )
    same = (found == images).flatten(1).all(1)
    mirrored = (found == images.flip(3)).flatten(1).all(1)
    assert (same ^ mirrored).all() and 16 < mirrored.sum() < 48


def test_without_flip_and_shift_nothing_happens() -> None:
    images = batch(8)
    found = Augment(flip=False, shift=0)(images, seed=1, epochs=torch.arange(8), samples=torch.arange(8))
    assert torch.equal(found, images)


def test_a_flip_is_decided_apart_from_the_shift() -> None:
    images, key = batch(32, 9, 9), {"seed": 2, "epochs": torch.arange(32), "samples": torch.arange(32)}
    shifted = Augment(flip=False, shift=2)(images, **key)
    flipped = Augment(flip=True, shift=0)(images, **key)
    assert torch.equal(Augment(flip=True, shift=2)(images, **key), Augment(flip=False, shift=2)(flipped, **key))
    assert not torch.equal(shifted, images)


def test_a_negative_shift_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^shift=-1 is negative; 0 means none$"):
        Augment(shift=-1)


@given(size=st.tuples(st.integers(1, 3), st.integers(1, 31), st.integers(1, 31)), chance=st.sampled_from([0.3, 1.0]))
def test_erased_boxes_equal_the_reference(size: tuple[int, int, int], chance: float) -> None:
    channels, height, width = size
    images = batch(6, height, width, channels)
    samples = list(range(6))
    found = Augment(flip=False, erase=chance)(images, seed=5, epochs=longs(*[2] * 6), samples=longs(*samples))
    for image, sample, result in zip(images.numpy(), samples, found.numpy(), strict=True):
        drawn, centre_y, centre_x, size_y, size_x = reference_uniform(5, 2, sample, 8)[3:]
        expected = image.copy()
        for y in range(height):
            for x in range(width):
                inside_y = abs((y + 0.5) / height - centre_y) < 0.05 + 0.15 * size_y - 1e-6
                inside_x = abs((x + 0.5) / width - centre_x) < 0.05 + 0.15 * size_x - 1e-6
                if drawn < chance and inside_y and inside_x:
                    expected[:, y, x] = 128
        assert (result != expected).mean() < 0.02  # a pixel's middle may lie on the border, where rounding decides


def test_half_of_the_images_lose_a_twentieth() -> None:
    images = torch.zeros(4000, 1, 20, 30, dtype=torch.uint8)
    found = Augment(flip=False, erase=0.5)(
        images, seed=0, epochs=torch.zeros(4000, dtype=torch.int64), samples=torch.arange(4000)
    )
    erased = (found == 128).float().mean(dim=(1, 2, 3))
    assert ((erased > 0).float().mean() - 0.5).abs() < 0.04
    assert 0.04 < erased[erased > 0].mean() < 0.0625  # a quarter of each side on average, less what is cut off
    assert erased.max() <= 0.4**2 * 1.1


def test_the_chance_of_erasing_is_a_share() -> None:
    with pytest.raises(ConfigError, match=r"erase=1.5 is not in \[0, 1\]"):
        Augment(erase=1.5)
