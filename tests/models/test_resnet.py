"""Tests of BiT ResNets and the root of hybrids: convolutions, padding and units against other implementations."""

from __future__ import annotations

import copy
import itertools
import math
import re
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.resnet import (
    BasicUnit,
    HybridRoot,
    PostActivationUnit,
    PreActivationUnit,
    ResNet,
    StandardisedConv,
    _pad_same,
    make_root,
)
from vitrail.models.resnet_config import ResNetConfig, ResNetUnit, RootConfig, Stem, WeightEps
from vitrail.models.vit_config import ViTConfig

BIT: tuple[float, WeightEps] = (1e-10, "variance")
ROOT: tuple[float, WeightEps] = (1e-5, "deviation")
STEMS: tuple[Stem, ...] = tuple(stem for stem in get_args(Stem) if stem != "3x3")


def drawn(module: Any) -> Any:
    """Return a network in float64 with small random numbers added to every weight."""
    generator = torch.Generator().manual_seed(0)
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def standardised(weight: Tensor, eps: tuple[float, WeightEps]) -> Tensor:
    """Return standardised filters, computed in numpy and float64, one filter at a time."""
    filters = []
    for one in weight.detach().double().numpy():
        variance = ((one - one.mean()) ** 2).mean()
        deviation = math.sqrt(variance + eps[0]) if eps[1] == "variance" else math.sqrt(variance) + eps[0]
        filters.append((one - one.mean()) / deviation)
    return torch.from_numpy(np.stack(filters))


def group_norm(x: Tensor, norm: nn.GroupNorm, groups: int = 32) -> Tensor:
    return F.group_norm(x, groups, norm.weight, norm.bias, norm.eps)


@pytest.mark.parametrize(
    ("eps", "kernel", "stride", "padding"),
    [
        (BIT, 7, 2, 3), (ROOT, 3, 1, 1), ((1e-8, "variance"), 3, 2, 1), ((0.5, "variance"), 1, 1, 0),
        ((0.5, "deviation"), 1, 2, 0),
    ],
)  # fmt: skip
def test_filters_are_standardised(eps: tuple[float, WeightEps], kernel: int, stride: int, padding: int) -> None:
    torch.manual_seed(0)
    layer = StandardisedConv(4, 6, kernel, stride=stride, padding=padding, eps=eps)
    with torch.no_grad():
        layer.weight.mul_(torch.logspace(-4, 1, 6).view(-1, 1, 1, 1)).add_(0.3)
        layer.weight[0] = 0.3  # equal weights are no division by zero
    x = torch.randn(2, 4, 9, 12)
    expected = F.conv2d(x.double(), standardised(layer.weight, eps), None, stride, padding)
    torch.testing.assert_close(layer(x).double(), expected, atol=2e-2, rtol=1e-3)
    exact = layer.double()
    torch.testing.assert_close(exact(x.double()), expected, atol=1e-8, rtol=1e-8)


def test_frozen_filters_are_standardised_once() -> None:
    layer = StandardisedConv(4, 6, 3, eps=BIT)
    x = torch.randn(1, 4, 5, 7)
    with torch.no_grad():
        expected = layer(x)
        frozen = copy.deepcopy(layer)
        frozen.freeze(None)
        frozen.freeze(None)  # standardised filters are not standardised again
        assert torch.equal(frozen(x), expected)
        assert not torch.equal(frozen.weight, layer.weight)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_same_convolution_by_brute_force(kernel: int, stride: int) -> None:
    torch.manual_seed(0)
    layer = StandardisedConv(2, 3, kernel, stride=stride, padding="same", eps=ROOT).double()
    weight = standardised(layer.weight, ROOT)
    for height, width in zip(range(1, 13), (5, 4, 3, 2, 1, 12, 11, 10, 9, 8, 7, 6), strict=True):
        x = torch.randn(1, 2, height, width, dtype=torch.float64)
        rows, columns = math.ceil(height / stride), math.ceil(width / stride)
        top = max((rows - 1) * stride + kernel - height, 0) // 2
        left = max((columns - 1) * stride + kernel - width, 0) // 2
        expected = torch.zeros(1, 3, rows, columns, dtype=torch.float64)
        for i, j, di, dj in itertools.product(range(rows), range(columns), range(kernel), range(kernel)):
            y, z = i * stride + di - top, j * stride + dj - left
            if 0 <= y < height and 0 <= z < width:
                expected[0, :, i, j] += weight[:, :, di, dj] @ x[0, :, y, z]
        torch.testing.assert_close(layer(x), expected, atol=1e-6, rtol=1e-6)


UNIT_SHAPES = [(32, 128, 1, (6, 6)), (128, 128, 1, (5, 7)), (128, 128, 2, (5, 7)), (64, 256, 2, (1, 2))]


@pytest.mark.parametrize(("before", "after", "stride", "size"), UNIT_SHAPES)
def test_pre_activation_unit(before: int, after: int, stride: int, size: tuple[int, int]) -> None:
    unit = drawn(PreActivationUnit(before, after, stride=stride, norm_eps=1e-5, weight_eps=BIT))
    x = torch.randn(2, before, *size, dtype=torch.float64)
    result = unit(x)
    active = group_norm(x, unit.norm1).clamp_min(0)
    y = F.conv2d(active, standardised(unit.conv1.weight, BIT))
    y = F.conv2d(group_norm(y, unit.norm2).clamp_min(0), standardised(unit.conv2.weight, BIT), None, stride, 1)
    y = F.conv2d(group_norm(y, unit.norm3).clamp_min(0), standardised(unit.conv3.weight, BIT))
    assert (unit.shortcut is None) == (before == after and stride == 1)
    if unit.shortcut is not None:
        x = F.conv2d(active, standardised(unit.shortcut.weight, BIT), None, stride)
    torch.testing.assert_close(result, x + y, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("before", "after", "stride", "size"), UNIT_SHAPES)
def test_post_activation_unit(before: int, after: int, stride: int, size: tuple[int, int]) -> None:
    unit = drawn(PostActivationUnit(before, after, stride=stride, norm_eps=1e-6, weight_eps=ROOT))
    x = torch.randn(2, before, *size, dtype=torch.float64)
    result = unit(x)
    y = group_norm(F.conv2d(x, standardised(unit.conv1.weight, ROOT)), unit.norm1).clamp_min(0)
    y = F.conv2d(_pad_same(y, 3, stride), standardised(unit.conv2.weight, ROOT), None, stride)
    y = group_norm(y, unit.norm2).clamp_min(0)
    y = group_norm(F.conv2d(y, standardised(unit.conv3.weight, ROOT)), unit.norm3)
    assert (unit.shortcut is None) == (unit.shortcut_norm is None) == (before == after and stride == 1)
    if unit.shortcut is not None and unit.shortcut_norm is not None:
        x = group_norm(F.conv2d(x, standardised(unit.shortcut.weight, ROOT), None, stride), unit.shortcut_norm)
    torch.testing.assert_close(result, (x + y).clamp_min(0), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("before", "after", "stride", "size"), [(8, 16, 2, (5, 7)), (8, 8, 1, (6, 6)), (16, 16, 2, (1, 2))]
)
@pytest.mark.parametrize("groups", [1, 4])
def test_basic_unit(before: int, after: int, stride: int, groups: int, size: tuple[int, int]) -> None:
    unit = drawn(BasicUnit(before, after, stride=stride, groups=groups, norm_eps=1e-5, weight_eps=BIT))
    x = torch.randn(2, before, *size, dtype=torch.float64)
    result = unit(x)
    active = group_norm(x, unit.norm1, groups).clamp_min(0)
    y = F.conv2d(active, standardised(unit.conv1.weight, BIT), None, stride, 1)
    y = F.conv2d(group_norm(y, unit.norm2, groups).clamp_min(0), standardised(unit.conv2.weight, BIT), None, 1, 1)
    assert (unit.shortcut is None) == (before == after and stride == 1)
    if unit.shortcut is not None:
        x = F.conv2d(active, standardised(unit.shortcut.weight, BIT), None, stride)
    torch.testing.assert_close(result, x + y, atol=1e-6, rtol=1e-6)


def small_bit(**fields: Any) -> ResNetConfig:
    defaults: dict[str, Any] = {"image_size": (40, 56), "depths": (1, 2), "width": 32, "num_classes": 5}
    return ResNetConfig(**{**defaults, **fields})


SMALL: dict[str, Any] = {"stem": "3x3", "unit": "basic", "norm_groups": 2, "width": 4}


@pytest.mark.parametrize(
    ("fields", "size"),
    [({}, (40, 56)), ({}, (33, 17)), ({}, (1, 1)), (SMALL | {"channels": 1}, (9, 14)), (SMALL, (1, 1))],
)
def test_a_resnet_by_its_parts(fields: dict[str, Any], size: tuple[int, int]) -> None:
    network = drawn(ResNet(small_bit(**fields)))
    config, stem, units = network.config, standardised(network.stem.weight, BIT), network.layers().blocks
    images = torch.randn(2, config.channels, *size, dtype=torch.float64)
    if fields:
        x, cell, kind = F.conv2d(images, stem, None, 1, 1), 4, BasicUnit
    else:
        x, cell, kind = F.conv2d(images, stem, None, 2, 3), 8, PreActivationUnit
        x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)  # over zeros
    assert [type(unit) for unit in units] == [kind] * 3
    for unit in units:
        x = unit(x)
    x = group_norm(x, network.norm, config.norm_groups).clamp_min(0)
    features = network.features(images)
    assert (
        features.grid == tuple(math.ceil(side / cell) for side in size) == tuple(x.shape[2:]) == config.grid_of(*size)
    )
    assert features.cls is None and features.registers.shape == (2, 0, config.embed_width) == (2, 0, x.shape[1])
    torch.testing.assert_close(features.patches.transpose(1, 2).reshape(x.shape), x, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(network.embed(images), x.mean((2, 3)), atol=1e-6, rtol=1e-6)
    expected = x.mean((2, 3)) @ network.head.weight.T + network.head.bias
    torch.testing.assert_close(network(images), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("size", [(8, 12), (9, 13)])
def test_a_unit_halves_the_sides_by_a_pool_after_its_first_convolution(size: tuple[int, int]) -> None:
    settings: dict[str, Any] = {"stem": "3x3", "unit": "basic", "norm_groups": 1, "depths": (1,), "width": 4}
    ((unit,),) = drawn(ResNet(ResNetConfig(pools=True, **settings))).stages
    x = torch.randn(2, 4, *size, dtype=torch.float64)
    active = group_norm(x, unit.norm1, 1).clamp_min(0)
    y = F.conv2d(active, standardised(unit.conv1.weight, BIT), None, 1, 1)
    squares = [part.amax((2, 3)) for row in y.split(2, 2) for part in row.split(2, 3)]  # the last ones can be smaller
    y = torch.stack(squares, -1).reshape(2, 8, *(math.ceil(side / 2) for side in size))
    y = F.conv2d(group_norm(y, unit.norm2, 1).clamp_min(0), standardised(unit.conv2.weight, BIT), None, 1, 1)
    shortcut = F.conv2d(active, standardised(unit.shortcut.weight, BIT), None, 2)
    torch.testing.assert_close(unit(x), shortcut + y, atol=1e-6, rtol=1e-6)
    for make in (lambda: ResNetConfig(pools=True), lambda: RootConfig(pools=True)):
        with pytest.raises(ConfigError, match="pools=True needs the"):
            make()


@pytest.mark.parametrize("channels", [1, 3])
def test_feature_maps_of_a_small_resnet_have_their_channels_last(channels: int) -> None:
    network = ResNet(ResNetConfig(channels=channels, stem="3x3", unit="basic", norm_groups=1, depths=(1, 1), width=4))
    orders = list[bool]()
    for part in (network.stem, *network.layers().blocks):
        part.register_forward_hook(
            lambda module, inputs, output: orders.append(output.is_contiguous(memory_format=torch.channels_last))
        )
    for images in (torch.randn(2, channels, 9, 14), torch.randn(2, channels, 14, 9).mT):
        network(images)
    assert orders == [True] * 6


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("unit", get_args(ResNetUnit))
@pytest.mark.parametrize("frozen", [1, 2])
def test_a_resnet_learns_above_frozen_stages(unit: ResNetUnit, channels: int, frozen: int) -> None:
    """With channels last in memory, the backward pass of a norm ended the process here."""
    network = ResNet(
        ResNetConfig(channels=channels, stem="3x3", unit=unit, norm_groups=1, depths=(1, 1), width=4, num_classes=3)
    )
    for part in (network.stem, *network.stages[:frozen]):
        part.requires_grad_(False)
    network.embed(torch.randn(2, channels, 9, 14)).square().sum().backward()
    gradient = (network.stages[1][0].norm1 if frozen == 1 else network.norm).weight.grad
    assert gradient.any() and network.stem.weight.grad is None


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("stages", [0, 1, 3])
def test_grids_of_a_hybrid_at_any_size(stages: int, stem: Stem) -> None:
    config = RootConfig(depths=(1,) * stages, width=32, stem=stem)
    root = HybridRoot(config, 2)
    for size in ((1, 1), (2, 3), (7, 8), (17, 33), (1, 65)):
        cells = root(torch.zeros(2, 2, *size))
        assert cells.shape == (2, config.out_channels, *(math.ceil(side / config.stride) for side in size))
        assert ViTConfig(root=config, patch_size=(1, 1), image_size=size).grid == tuple(cells.shape[2:])


@pytest.mark.parametrize("channels", [1, 3])
def test_a_small_root_is_a_small_resnet_without_its_head(channels: int) -> None:
    config = RootConfig(stem="3x3", depths=(1, 2), width=4, norm_eps=1e-5, weight_eps=1e-10, weight_eps_on="variance")
    root = make_root(config, channels)
    network = ResNet(
        ResNetConfig(channels=channels, depths=(1, 2), width=4, stem="3x3", unit="basic", norm_groups=1, num_classes=0)
    )
    network.load_state_dict(root.state_dict())
    images = torch.randn(2, channels, 13, 24)
    cells = network.features(images)
    assert cells.grid == (4, 6) == ViTConfig(root=config, patch_size=(1, 1), image_size=(13, 24)).grid
    torch.testing.assert_close(root(images).flatten(2).transpose(1, 2), cells.patches, rtol=0, atol=0)
    with pytest.raises(ConfigError, match=re.escape("depths=() leaves no stage")):
        RootConfig(stem="3x3", width=4)


def test_a_resnet_starts_with_a_head_of_zeros_and_its_bias() -> None:
    torch.manual_seed(0)
    network = ResNet(small_bit(head_bias=-6.9))
    logits = network(torch.randn(2, 3, 40, 56))
    assert torch.equal(logits, torch.full((2, 5), -6.9))
    assert torch.isfinite(network.embed(torch.randn(2, 3, 40, 56))).all()
    for module in network.modules():
        if isinstance(module, StandardisedConv) and module.weight.numel() > 8000:
            std = module.weight[0].numel() ** -0.5
            assert module.weight.std().item() == pytest.approx(std, rel=0.05)
        if isinstance(module, nn.GroupNorm):
            assert (module.weight == 1).all() and not module.bias.any() and module.num_groups == 32


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize(("depths", "size"), [((), (32, 48)), ((2, 1), (17, 30)), ((1, 1, 1), (32, 48))])
def test_a_root_by_its_parts(depths: tuple[int, ...], stem: Stem, size: tuple[int, int]) -> None:
    root = drawn(HybridRoot(RootConfig(depths=depths, stem=stem, width=32), 3))
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    if stem == "3x3+3x3":
        x = F.conv2d(images, standardised(root.before.weight, ROOT), None, 1, 1)
        x = group_norm(x, root.before_norm, 1).clamp_min(0)
        x = F.conv2d(_pad_same(x, 3, 2), standardised(root.stem.weight, ROOT), None, 2)
        x = group_norm(x, root.norm, 1).clamp_min(0)
        assert root.before.weight.shape == (16, 3, 3, 3) and root.stem.weight.shape == (32, 16, 3, 3)
    else:
        x = F.conv2d(_pad_same(images, 7, 2), standardised(root.stem.weight, ROOT), None, 2)
        x = group_norm(x, root.norm).clamp_min(0)
        needed = [(math.ceil(side / 2) - 1) * 2 + 3 - side for side in x.shape[2:]]
        (top, below), (left, right) = ((max(one, 0) // 2, max(one, 0) - max(one, 0) // 2) for one in needed)
        x = F.max_pool2d(F.pad(x, (left, right, top, below), value=-math.inf), 3, 2)
    for number, stage in enumerate(root.stages):
        assert len(stage) == depths[number]
        for unit in stage:
            x = unit(x)
    torch.testing.assert_close(root(images), x, atol=1e-6, rtol=1e-6)
    assert x.shape[1] == root.config.out_channels


def test_units_of_a_root_start_as_their_shortcuts() -> None:
    torch.manual_seed(0)
    root = HybridRoot(RootConfig(depths=(2, 2), width=32), 3)
    root.initialise()
    units = [unit for stage in root.stages for unit in stage]
    assert all(not unit.norm3.weight.any() and not unit.norm3.bias.any() for unit in units)
    assert all((unit.norm1.weight == 1).all() and (unit.norm2.weight == 1).all() for unit in units)
    x = torch.rand(1, 128, 6, 5)
    assert torch.equal(units[1](x), x)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"weight_eps": math.nan, "norm_eps": 0.5}, "weight_eps=nan is not a finite number"),
    ({"depths": (1, 0)}, "depths=(1, 0): a stage must have at least one unit"),
    ({"width": 48}, "width=48 is not a multiple of 32, the number of groups of every norm"),
    ({"width": 0}, "width=0 is not a multiple of 32, the number of groups of every norm"),
    ({"norm_eps": 0.0}, "norm_eps=0.0 is not above 0"),
    ({"weight_eps": -1.0, "norm_eps": 0.5}, "weight_eps=-1.0 is not above 0"),
    ({"weight_eps_on": "mean"}, "weight_eps_on='mean' is not one of 'variance', 'deviation'"),
    ({"stem": "5x5"}, "stem='5x5' is not one of '7x7+pool', '3x3"),
]
BAD_RESNETS: list[tuple[dict[str, Any], str]] = [
    ({"unit": "wide"}, "unit='wide' is not one of 'bottleneck', 'basic'"),
    ({"norm_groups": 48}, "width=64 is not a multiple of 48, the number of groups of every norm"),
    ({"norm_groups": 0}, "width=64 is not a multiple of 0, the number of groups of every norm"),
    ({"width": 48, "norm_groups": 16, "depths": ()}, "depths=() leaves no stage, but a ResNet must have at least one"),
    ({"image_size": (0, 8)}, "image_size=(0, 8) is less than 1"),
    ({"channels": 0}, "channels=0 is less than 1"),
    ({"num_classes": -1}, "num_classes=-1 is not in [0, 16777216]"),
    ({"head_bias": math.inf}, "head_bias=inf is not in [-1000000000.0, 1000000000.0]"),
]


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        *((kind, *bad) for kind in (RootConfig, ResNetConfig) for bad in BAD),
        *((ResNetConfig, *bad) for bad in BAD_RESNETS),
    ],
)
@pytest.mark.usefixtures("types_unchecked")
def test_fields_that_do_not_fit(kind: type[RootConfig | ResNetConfig], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="^" + re.escape(message.format(kind().weight_eps))):
        kind(**fields)
