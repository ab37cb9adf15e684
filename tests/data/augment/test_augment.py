"""Tests of batch augmentation: flips, shifts and erased boxes against plain references, mixup, CutMix, and presets.

Each sample is changed independently of the other samples.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vitrail.data.augment import operations
from vitrail.data.augment.draws import (
    Slot,
    erased_box,
    keyed_uniform,
    symmetric_beta,
    tensorflow_crop,
    torchvision_crop,
)
from vitrail.data.augment.settings import Augment, cut_boxes, mix, mixup_shares
from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError


def reference_uniform(seed: int, epoch: int, sample: int, draws: int) -> list[float]:
    return keyed_uniform(seed, np.array([epoch]), np.array([sample]), draws=draws)[0].tolist()


def reference_augment(image: np.ndarray, numbers: list[float], *, flip: bool, shift: int) -> np.ndarray:
    """Return an image (c, h, w) that is mirrored, padded with its edge, and cropped at the drawn position."""
    _, height, width = image.shape
    if flip and numbers[0] < 0.5:
        image = image[:, :, ::-1]
    top, left = (int(number * (2 * shift + 1)) for number in numbers[1:3])
    padded = np.pad(image, ((0, 0), (shift, shift), (shift, shift)), mode="edge")
    return padded[:, top : top + height, left : left + width]


def longs(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def batch(count: int, height: int = 5, width: int = 7, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)


def make_batch(images: Tensor, epochs: Tensor, samples: Tensor) -> Batch:
    return Batch(images, samples % 4, torch.ones(len(images), dtype=torch.bool), samples, epochs)


def change(augment: Augment, images: Tensor, *, seed: int, epochs: Tensor, samples: Tensor) -> Tensor:
    return augment(make_batch(images, epochs, samples), seed=seed, classes=4).images


sizes = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))


@given(st.integers(0, 2**32 - 1), st.integers(0, 500), st.integers(0, 10**6), sizes, st.booleans(), st.integers(0, 12))
def test_images_equal_the_reference(
    seed: int, epoch: int, first: int, size: tuple[int, int, int], flip: bool, shift: int
) -> None:
    channels, height, width = size
    images = batch(4, height, width, channels)
    before = images.clone()
    samples = [first + number for number in range(4)]
    augment, epochs = Augment(flip=flip, shift=shift), longs(*[epoch] * 4)
    found = change(augment, images, seed=seed, epochs=epochs, samples=longs(*samples))
    assert found.dtype == torch.uint8 and found.shape == images.shape
    for image, sample, result in zip(before.numpy(), samples, found.numpy(), strict=True):
        numbers = reference_uniform(seed, epoch, sample, 3)
        np.testing.assert_array_equal(result, reference_augment(image, numbers, flip=flip, shift=shift))
    assert torch.equal(images, before)


EVERYTHING: dict[str, Any] = {
    "shift": 2, "erase": 0.5, "colour_jitter": (0.4, 0.4, 0.4, 0.1), "randaugment_layers": 2, "grey": 0.2,
    "blur": (0.5,), "solarise": (0.3,), "colour_jitter_probability": 0.8,
}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=10)
@given(
    order=st.permutations(range(12)), cuts=st.sets(st.integers(1, 11)), seed=st.integers(0, 9),
    rule=st.sampled_from(list(operations.KERNELS)),
)  # fmt: skip
def test_what_happens_to_a_sample_depends_neither_on_its_batch_nor_on_its_place(
    order: list[int], cuts: set[int], seed: int, rule: operations.RandAugmentRule
) -> None:
    images, samples = batch(12), torch.arange(100, 112)
    epochs = torch.arange(12) // 5
    augment = Augment(**EVERYTHING, randaugment_rule=rule)
    together = change(augment, images, seed=seed, epochs=epochs, samples=samples)
    parts = [
        change(augment, images[part], seed=seed, epochs=epochs[part], samples=samples[part])
        for part in torch.tensor(order).tensor_split(sorted(cuts))
    ]
    assert torch.equal(torch.cat(parts), together[torch.tensor(order)])


@pytest.mark.parametrize("fields", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}], ids=str)
@pytest.mark.parametrize("place", [0, 3, 7])
def test_with_mixing_only_the_partner_comes_from_the_batch(fields: dict[str, float], place: int) -> None:
    """A sample with the same next sample is mixed in the same way, whatever the rest of the batch is."""
    augment = Augment(**EVERYTHING, **fields)
    images, samples = batch(12), torch.arange(100, 112)
    whole = make_batch(images, samples // 105, samples)
    together = augment(whole, seed=2, classes=4)
    pair = torch.tensor([place, place + 1, (place + 5) % 12])
    few = augment(make_batch(images[pair], whole.epochs[pair], samples[pair]), seed=2, classes=4)
    assert torch.equal(few.images[0], together.images[place])
    assert together.targets is not None and few.targets is not None
    assert torch.equal(few.targets[0], together.targets[place])
    assert not torch.equal(few.images[2], together.images[pair[2]]), "another partner"


def test_the_steps_follow_each_other_in_the_order_stated() -> None:
    images, epochs, samples = batch(20, 16, 21), torch.zeros(20, dtype=torch.int64), torch.arange(20)
    key = {"seed": 3, "epochs": epochs, "samples": samples}

    def draws(first: Slot, count: int) -> np.ndarray:
        return keyed_uniform(3, epochs.numpy(), samples.numpy(), draws=count, first=first)

    expected = change(Augment(flip=True, shift=2), images, **key)
    jitter, view = draws(Slot.JITTER, 8), draws(Slot.VIEW, 5)
    for n in range(20):
        one = expected[[n]]
        if view[n, 0] < 0.8:
            one = operations.colour_jitter(one, jitter[[n]], EVERYTHING["colour_jitter"])
        if view[n, 1] < 0.2:
            one = operations.grey(one)
        if view[n, 2] < 0.5:
            one = operations.blur(one, (0.1 + 1.9 * view[[n], 4]).astype(np.float32))
        expected[n] = operations.solarise(one)[0] if view[n, 3] < 0.3 else one[0]
    numbers = draws(Slot.RANDAUGMENT, 8).reshape(20, 2, 4)
    expected = operations.randaugment(expected, numbers, magnitude=10.0)
    expected = change(Augment(flip=False, erase=0.5), expected, **key)
    assert torch.equal(change(Augment(**EVERYTHING), images, **key), expected)


@pytest.mark.slow
def test_each_view_has_its_own_probabilities() -> None:
    """The third and the fourth view have the last number, as local views have."""
    picture = batch(1, 6, 7)
    samples = torch.arange(2000).repeat_interleave(4)
    views = torch.arange(4).repeat(2000)
    data = replace(make_batch(picture.expand(8000, -1, -1, -1), 0 * samples, samples), views=views)
    for fields, expected in (
        ({"blur": (1.0, 0.1, 0.5), "blur_sigma": (0.5, 2.0)}, (1.0, 0.1, 0.5, 0.5)),
        ({"solarise": (0.0, 0.2)}, (0.0, 0.2, 0.2, 0.2)),
        ({"grey": 0.2}, (0.2,) * 4),
        ({"colour_jitter": (0.5, 0.0, 0.0, 0.0), "colour_jitter_probability": 0.8}, (0.8,) * 4),
    ):
        found = Augment(flip=False, **cast(dict[str, Any], fields))(data, seed=5).images
        shares = (found != picture).flatten(1).any(1).view(2000, 4).double().mean(0)
        for share, chance in zip(shares.tolist(), expected, strict=True):
            assert abs(share - chance) <= 4 * (chance * (1 - chance) / 2000) ** 0.5 + 0.003, fields


@given(size=st.tuples(st.integers(1, 3), st.integers(1, 31), st.integers(1, 31)), chance=st.sampled_from([0.3, 1.0]))
def test_erased_boxes_equal_the_reference(size: tuple[int, int, int], chance: float) -> None:
    channels, height, width = size
    images = batch(6, height, width, channels)
    samples = list(range(6))
    found = change(Augment(flip=False, erase=chance), images, seed=5, epochs=longs(*[2] * 6), samples=longs(*samples))
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


@pytest.mark.slow
def test_erased_noise_is_standard_after_normalisation() -> None:
    """The values are normal. The boxes themselves are compared with timm's below."""
    count, size = 1200, (24, 36)
    images, samples = torch.zeros(count, 3, *size, dtype=torch.uint8), torch.arange(count)
    preprocess = Preprocess(image_size=size, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    augment = Augment(flip=False, erase=0.25, erase_by="noise")
    data = make_batch(images, samples // 7, samples)
    found = augment(data, seed=1, preprocess=preprocess).images
    part = torch.randperm(count)[:5]
    alone = make_batch(images[part], data.epochs[part], samples[part])
    assert torch.equal(augment(alone, seed=1, preprocess=preprocess).images, found[part])
    mask = (found != 0).all(dim=1)
    share = mask.double().mean(dim=(1, 2))
    assert abs((share > 0).double().mean() - 0.25) < 4 * (0.25 * 0.75 / count) ** 0.5
    assert share[share > 0].min() > 0.01 and share.max() < 0.35
    for one in mask[share > 0][:20]:
        assert one.sum() == one.any(0).sum() * one.any(1).sum(), "a box"
    values = preprocess.normalise(found).movedim(1, 3)[mask].double()
    for power, expected in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert ((values**power).mean(0) - expected).abs().max() < 6 * 96**0.5 / len(values) ** 0.5
    assert (values.T.corrcoef() - torch.eye(3)).abs().max() < 6 / len(values) ** 0.5


def test_a_box_with_given_draws_equals_timms() -> None:
    """The boxes are those of RandomErasing in pytorch-image-models (aa4b5850) with the same uniform numbers."""
    draws = [
        (0.086, 0.237, 0.801, 0.582), (0.094, 0.433, 0.479, 0.16), (0.735, 0.114, 0.391, 0.517),
        (0.431, 0.587, 0.738, 0.956), (0.284, 0.649, 0.696, 0.293), (0.001, 0.973, 0.298, 0.314),
    ]  # fmt: skip
    boxes = [(24, 23, 7, 13), (13, 6, 9, 11), (9, 9, 14, 35), (14, 36, 19, 16), (14, 12, 17, 12), (8, 15, 11, 4)]
    too_high = (0.999, 0.99, 0.0, 0.0)
    assert [erased_box(np.array([too_high, one]), 37, 53) for one in draws] == boxes
    assert erased_box(np.array([too_high]), 37, 53) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"flip": True}, {"shift": 1}, {"crop_from": (40, 48)}, {"crop_area": (0.5, 1.0)}, {"erase": 0.1},
        {"colour_jitter": (0.0, 0.0, 0.0, 0.1)}, {"grey": 0.1}, {"blur": (0.1,)}, {"solarise": (0.0, 0.1)},
        {"preset": "light1"}, {"mixup": 0.1}, {"cutmix": 1.0},
    ],
)  # fmt: skip
def test_images_that_differ_from_epoch_to_epoch(fields: dict[str, Any]) -> None:
    images = Preprocess(image_size=(32, 32))
    plain: dict[str, Any] = {"flip": False, "crop_area": (1.0, 1.0)}
    assert not Augment(**plain).is_random_for(images)
    assert Augment(**{**plain, **fields}).is_random_for(images)


@pytest.mark.parametrize(
    ("fields", "channels"),
    [
        ({"grey": 0.5}, 1), ({"colour_jitter": (0.0, 0.0, 0.4, 0.1)}, 1), ({"crop_from": (16, 16)}, 3),
        ({"colour_jitter": (0.4, 0.4, 0.4, 0.1), "colour_jitter_probability": 0.0}, 3),
    ],
)  # fmt: skip
def test_changes_that_leave_every_image_as_it_is(fields: dict[str, Any], channels: int) -> None:
    images = Preprocess(image_size=(16, 16), channels=channels, mean=(0.5,), std=(0.5,))
    made = Augment(flip=False, **fields)
    assert not made.is_random_for(images)
    levels = batch(6, 16, 16, channels)
    found = made(make_batch(levels, longs(*range(6)), longs(*range(6))), seed=3, preprocess=images)
    assert torch.equal(found.images, levels)


def test_a_preset_fills_what_is_not_given() -> None:
    chosen = Augment(preset="medium2", mixup=0.0, randaugment_layers=3).settings
    assert (chosen.randaugment_layers, chosen.randaugment_magnitude, chosen.mixup) == (3, 15.0, 0.0)
    changed = replace(Augment(preset="medium2", mixup=0.1), preset="strong2").settings
    assert (changed.randaugment_magnitude, changed.mixup) == (20.0, 0.1)
    assert Augment(randaugment_layers=1).settings.randaugment_magnitude == 10.0
    assert Augment(preset="bp").settings.crop_area == (0.05, 1.0)
    assert Augment(preset="bp", crop_area=(0.3, 1.0)).settings.crop_area == (0.3, 1.0)
    assert Augment(preset="bp", crop_area=(1.0, 1.0)).settings.crop_area is None
    assert Augment() == replace(Augment(), preset="none") and Augment().settings.crop_area is None


def test_a_preset_changes_pixels_as_its_rules_say() -> None:
    pictures, epochs, samples = batch(16, 20, 24), torch.zeros(16, dtype=torch.int64), torch.arange(16)
    data = make_batch(pictures, epochs, samples)
    fields: dict[str, Any] = {"randaugment_layers": 2, "randaugment_magnitude": 15.0, "mixup": 0.5}
    rules: dict[str, Any] = {"randaugment_rule": "big-vision", "mixup_per": "batch"}
    found = Augment(preset="augreg-medium2")(data, seed=1, classes=4)
    given = Augment(**fields, **rules)(data, seed=1, classes=4)
    assert torch.equal(found.images, given.images) and torch.equal(found.targets, given.targets)
    for name, rule in (("randaugment_rule", "pillow"), ("mixup_per", "sample")):
        other = Augment(preset="augreg-medium2", **{name: rule})(data, seed=1, classes=4)
        assert not torch.equal(found.images, other.images), name
    assert Augment()(data, seed=1).targets is None


def test_boxes_follow_the_rule() -> None:
    assert Augment().crop(3) is None
    for augment, rule in (
        (Augment(crop_area=(0.2, 0.9)), torchvision_crop),
        (Augment(crop_area=(0.2, 0.9), crop_rule="tensorflow"), tensorflow_crop),
        (Augment(crop_area=(0.2, 0.9), preset="augreg-none"), tensorflow_crop),
    ):
        crop = augment.crop(3)
        assert crop(1, 2, 50, 40, view=1) == rule(3, 1, 2, 50, 40, area=(0.2, 0.9), view=1)


def test_boxes_are_scaled_by_pytorch_if_it_differs_by_one_level_and_original_ones_without_antialiasing() -> None:
    images = Preprocess(image_size=(7, 9), resize="crop", scaled_decode=True)
    cut, original = Augment(crop_area=(0.1, 1.0)), Augment(preset="augreg-none")
    assert cut.training_preprocess(images) == replace(images, resampler="torch")
    with pytest.raises(ConfigError, match=r"^scaled_decode=True averages pixels, and crop_rule='tensorflow' scales"):
        original.training_preprocess(images)
    plain = replace(images, scaled_decode=False)
    for fields in ({"interpolation": "bicubic"}, {"antialias": False}, {"resampler": "tensorflow"}):
        assert cut.training_preprocess(replace(plain, **fields)) == replace(plain, **fields)
    assert original.training_preprocess(replace(plain, resampler="torch")) == original.training_preprocess(plain)
    area = replace(plain, interpolation="area")
    assert original.training_preprocess(area) == replace(area, interpolation="bilinear", antialias=False)
    for other in (Augment(), cut, replace(original, crop_area=(1.0, 1.0))):
        assert other.training_preprocess(area) == area


@pytest.mark.parametrize(("fields", "message"), [
    ({"preset": "heavy"}, "preset='heavy' is not one of 'none', 'light1', 'light2', "),
    ({"crop_rule": "inception"}, "crop_rule='inception' is not one of 'torchvision', 'tensorflow'"),
    ({"erase": 1.5}, "erase=1.5 is not in [0, 1]"),
    ({"randaugment_layers": -2}, "randaugment_layers=-2 is not in [0, 100]; 0 means none"),
    ({"randaugment_magnitude": 31.0}, "randaugment_magnitude=31.0 is not in [0, 30]"),
    ({"randaugment_magnitude": float("nan")}, "randaugment_magnitude=nan is not in [0, 30]"),
    ({"mixup": -0.1}, "mixup=-0.1 is less than 0; 0 turns it off"),
    ({"cutmix": float("inf")}, "cutmix=inf is not a finite number; 0 turns it off"),
    ({"crop_area": (0.0, 1.0)}, "crop_area=(0.0, 1.0) is not two fractions in (0, 1], the smaller first"),
    ({"crop_area": (0.8, 0.2)}, "crop_area=(0.8, 0.2) is not two fractions in (0, 1], the smaller first"),
    ({"colour_jitter": (0.4, 0.4, 0.4, 0.6)}, "colour_jitter=(0.4, 0.4, 0.4, 0.6) is not brightness"),
    ({"colour_jitter": (0.4, -0.4, 0.4, 0.1)}, "colour_jitter=(0.4, -0.4, 0.4, 0.1) is not brightness"),
    ({"blur": (0.5, 1.5)}, "blur=1.5 is not in [0, 1]"),
    ({"blur_sigma": (2.0, 0.1)}, "blur_sigma=(2.0, 0.1) is not two numbers, the smaller first"),
    ({"shift": -2, "erase": -1.0}, "shift=-2 is not in [0, 32768]; 0 means none\nerase=-1.0 is not in [0, 1]"),
])  # fmt: skip
def test_a_bad_value_is_named_with_its_rule(fields: dict[str, Any], message: str, types_unchecked: None) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        Augment(**fields)


def test_the_key_must_lie_on_the_cpu() -> None:
    """A key on another device is an error, because reading it would make the processor wait for the device."""
    images, away = batch(2), torch.zeros(2, dtype=torch.int64, device="meta")
    data = replace(make_batch(images, longs(0, 0), longs(0, 1)), samples=away)
    with pytest.raises(BufferError):
        Augment()(data, seed=0)


@pytest.mark.parametrize("fields", [{}, {"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}], ids=str)
def test_each_view_is_augmented_and_mixed_for_itself(fields: dict[str, float]) -> None:
    """View 0 of several views equals the batch of one view. The other views differ, and are mixed with each other."""
    augment, views = Augment(**EVERYTHING, **fields), 3
    images, samples = batch(8), torch.arange(8)
    single = augment(make_batch(images, samples // 5, samples), seed=2, classes=4)
    rows = torch.arange(8).repeat_interleave(views)
    several = replace(make_batch(images[rows], samples[rows] // 5, samples[rows]), views=torch.arange(24) % views)
    several = augment(several, seed=2, classes=4)
    assert torch.equal(several.images[::views], single.images)
    assert not torch.equal(several.images[1::views], single.images)
    assert not torch.equal(several.images[1::views], several.images[2::views])
    if fields:
        assert torch.equal(several.targets[::views], single.targets)
        partners = (several.targets[1::views] > 0).nonzero()
        assert all((label - row) % 4 in (0, 1) for row, label in partners.tolist()), "the next sample is the partner"


def test_a_box_is_cut_out_of_scaled_images() -> None:
    """The pixels of the images are numbered. Every corner is drawn equally often."""
    count, scaled, size = 1200, (7, 9), (5, 6)
    ids = np.arange(63, dtype=np.uint8).reshape(scaled)
    samples = torch.arange(count)
    data = make_batch(torch.from_numpy(ids).repeat(count, 1, 1, 1), samples * 0, samples)
    augment = Augment(flip=True, crop_from=scaled)
    preprocess = Preprocess(image_size=size)
    changed = augment(data, seed=5, preprocess=preprocess).images[:, 0].numpy()
    upright = [image if image[0, 0] < image[0, 1] else image[:, ::-1] for image in changed]
    found = [divmod(int(image[0, 0]), scaled[1]) for image in upright]
    for image, (top, left) in zip(upright, found, strict=True):
        assert np.array_equal(image, ids[top : top + size[0], left : left + size[1]])
    corners, counts = np.unique(found, axis=0, return_counts=True)
    assert corners.tolist() == [[top, left] for top in range(3) for left in range(4)]
    assert np.abs(counts - count / 12).max() < 4 * np.sqrt(count / 12)
    part = slice(7, 8)
    alone = make_batch(data.images[part], data.epochs[part], samples[part])
    alone = augment(alone, seed=5, preprocess=preprocess)
    assert np.array_equal(alone.images[0, 0], changed[7])


def test_images_are_scaled_to_the_larger_size_for_training_alone() -> None:
    images = Preprocess(image_size=(5, 6), resize="crop", crop_share=0.9, interpolation="bicubic")
    larger = replace(images, image_size=(7, 9), resize="squash", crop_share=1.0)
    assert Augment(crop_from=(7, 9)).training_preprocess(images) == larger
    with pytest.raises(ConfigError, match=r"crop_from=\(7, 5\) is smaller than image_size=\(5, 6\)"):
        Augment(crop_from=(7, 5)).training_preprocess(images)
    with pytest.raises(ConfigError, match=r"crop_from=.* and crop_area=.* choose what is seen"):
        Augment(crop_from=(7, 9), crop_area=(0.5, 1.0))


CLASSES = 5


def mixable(count: int, *, size: tuple[int, int, int] = (3, 11, 17), **fields: Any) -> Batch:
    generator, samples = torch.Generator().manual_seed(count), torch.arange(count)
    images = torch.randint(0, 256, (count, *size), dtype=torch.uint8, generator=generator)
    return replace(make_batch(images, 0 * samples, samples), **{"labels": samples % CLASSES, **fields})


def draws_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((count, 5)).astype(np.float32)


@given(count=st.integers(1, 9), alpha=st.sampled_from([0.1, 0.2, 1.0, 4.0]), seed=st.integers(0, 999))
def test_mixup_is_linear_in_images_and_targets(count: int, alpha: float, seed: int) -> None:
    batch, draws = mixable(count), draws_of(count, seed)
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
    batch = mixable(200, images=images, labels=torch.arange(200) % 2)
    mixed = mix(batch, draws_of(200), mixup=1.0, cutmix=0.0, classes=2)
    white = mixed.targets[:, 0].double()
    assert torch.equal(mixed.images[:, 0, 0, 0], (255 * white + 0.5).floor().to(torch.uint8))
    assert torch.equal(white * 2**16, (white * 2**16).round()), "shares are whole parts of 65536"


@given(samples=st.integers(1, 6), views=st.integers(1, 2), cutmix=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 99))
def test_one_mixup_weight_per_batch(samples: int, views: int, cutmix: float, seed: int) -> None:
    """The weight is the one that the first row alone would get. It does not change rows with CutMix."""
    count = samples * views
    batch = mixable(count, views=torch.arange(count) % views)
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
    batch = mixable(count, size=(3, *sizes), views=torch.arange(count) % views)
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
    batch, draws = mixable(count, size=size, labels=torch.arange(count)), draws_of(count, seed)
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
    batch = mixable(6, labels=labels, valid=valid)
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
    batch, draws = mixable(7, labels=torch.full((7,), -1), targets=several), draws_of(7)
    mixed = mix(batch, draws, mixup=1.0, cutmix=0.0, classes=0)
    kept = whole_parts(mixup_shares(draws[:, 1:3], 1.0))[:, None]
    torch.testing.assert_close(mixed.targets, several * kept + several.roll(-1, 0) * (1 - kept))
    assert mixed.valid.all()


def test_mixup_blends_numbers_and_spreads_nothing_unknown() -> None:
    unknown = float("nan")
    targets = torch.tensor([[1.0, 10.0], [3.0, unknown], [unknown, unknown], [5.0, 50.0]])
    batch = mixable(4, targets=targets, target_kind="numbers", labels=torch.full((4,), -1))
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
        mix(mixable(3), draws_of(3), mixup=0.5, cutmix=0.0, classes=0)
    batch = mixable(2, targets=torch.ones(2, 1), target_kind="numbers")
    with pytest.raises(ConfigError, match=r"cutmix=1\.0 pastes a part of another image"):
        mix(batch, draws_of(2), mixup=0.0, cutmix=1.0, classes=0)
