"""Tests of variant names: the published parameter counts, and messages for unknown names and fields."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from vitrail.errors import ConfigError
from vitrail.models.resnet_config import ResNetConfig, RootConfig, Stem
from vitrail.models.variants import VARIANTS, ModelConfig, Variant, create, variant_config
from vitrail.models.vit_config import ViTConfig
from vitrail.training.config import TrainConfig

COUNTS = {
    "ViT-Ti/16": (5_717_416, 5_754_472, 9_740_115, 5_717_032),
    "ViT-S/32": (22_878_952, 23_026_792, 30_903_507, 22_878_184),
    "ViT-S/16": (22_050_664, 22_198_504, 30_075_219, 22_049_896),
    "ViT-M/16": (38_837_736, 39_100_392, 49_530_195, 38_836_712),
    "ViT-B/32": (88_224_232, 88_814_824, 104_252_499, 88_222_696),
    "ViT-B/16": (86_567_656, 87_158_248, 102_595_923, 86_566_120),
    "ViT-B/8": (86_576_872, 87_167_464, 102_605_139, 86_575_336),
    "ViT-L/32": (306_535_400, 307_585_000, 327_899_475, 306_533_352),
    "ViT-L/16": (304_326_632, 305_376_232, 325_690_707, 304_324_584),
    "ViT-So400m/14": (413_597_656, 414_925_912, 437_629_635, 413_595_352),
    "ViT-H/14": (632_045_800, 633_685_480, 658_745_683, 632_043_240),
    "ViT-g/14": (1_012_611_432, 1_014_595_304, 1_041_979_219, 1_012_608_616),
    "ViT-G/14": (1_844_440_680, 1_847_211_240, 1_879_144_275, 1_844_437_352),
    "ViT-e/14": (3_807_214_312, 3_810_427_368, 3_844_585_811, 3_807_210_728),
}
"""Parameters with 1000 classes; with a hidden head layer as wide as the network; 21843 classes; mean pooling."""

OTHERS = {
    "R+ViT-Ti/16": (6_337_704, None),
    "R50+ViT-B/16": (98_659_112, 114_687_379),
    "R26+ViT-S/32": (36_431_912, 44_456_467),
    "R26+ViT-B/32": (101_383_976, None),
    "R50+ViT-L/32": (328_994_856, 350_358_931),
    "BiT-R50x1": (25_549_352, 68_256_659),
    "BiT-R101x1": (44_541_480, 87_248_787),
    "BiT-R50x3": (217_319_080, 345_399_315),
    "BiT-R101x3": (387_934_888, 516_015_123),
    "BiT-R152x2": (236_335_208, 321_728_979),
    "BiT-R152x4": (936_533_224, 1_107_299_923),
    **dict.fromkeys(("BiT-R200x3", "BiT-R26x1", "R101x3+ViT-L/32", "R152+ViT-B/16", "Conv+ViT-Pico/8"), (None,)),
    "BiT-Pico": (None,),
}
"""Parameters of hybrids and ResNets with 1000 and with 21843 classes, where they were published."""


def config_of(name: str, **fields: Any) -> Any:
    return variant_config(name, **fields)


def made(name: str, **fields: Any) -> int:
    """Return the number of parameters of a module on the meta device, which needs no memory."""
    with torch.device("meta"):
        network = create(name, **fields)
    assert all(parameter.requires_grad for parameter in network.parameters())
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_published_parameter_counts(name: str) -> None:
    width = VARIANTS[name.removeprefix("ViT-").partition("/")[0]].width
    columns: list[dict[str, Any]] = [{}, {"head_hidden": width}, {"num_classes": 21843}, {"pool": "gap"}]
    assert tuple(made(name, **fields) for fields in columns) == COUNTS[name]
    assert tuple(variant_config(name, **fields).parameters() for fields in columns) == COUNTS[name]


BASELINE = {"pool": "gap", "positions": "sincos-2d"}


@pytest.mark.parametrize(
    ("name", "fields", "count"),
    [
        ("ViT-B/16", {"num_classes": 21843, "head_hidden": 768}, 103_186_515),
        ("ViT-B/32", {"num_classes": 21843, "head_hidden": 768}, 104_843_091),
        ("ViT-L/16", {"num_classes": 21843, "head_hidden": 1024}, 326_740_307),
        ("ViT-H/14", {"num_classes": 21843, "head_hidden": 1280}, 660_385_363),
        ("R50+ViT-B/16", {"num_classes": 21843, "head_hidden": 768}, 115_277_971),
        ("ViT-S/16", {**BASELINE, "head_hidden": 384}, 22_122_472),
        ("ViT-S/16", BASELINE, 21_974_632),
        ("ViT-B/16", {"image_size": 384}, 86_859_496),
    ],
    ids=str,
)
def test_published_parameter_counts_of_other_heads_positions_and_sizes(
    name: str, fields: dict[str, Any], count: int
) -> None:
    assert made(name, **fields) == variant_config(name, **fields).parameters() == count


def test_a_size_of_a_user_is_checked_when_it_is_added() -> None:
    for wrong in ((48, 2, 96, 3), Variant(48, 2, 96, 0), Variant(48.0, 2, 96, 3)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"'Mini': .* is not a Variant"):
            VARIANTS["Mini"] = wrong  # type: ignore[assignment]
    VARIANTS["Mini"] = Variant(48, 2, 96, 3)
    assert config_of("ViT-Mini/7").width == 48
    del VARIANTS["Mini"]


@pytest.mark.parametrize("name", OTHERS)
def test_parameter_counts_of_hybrids_and_resnets(name: str) -> None:
    for classes, count in zip((1000, 21843), OTHERS[name], strict=False):
        found = made(name, num_classes=classes)
        assert variant_config(name, num_classes=classes).parameters() == found == (count or found)


def test_heads_of_published_sizes() -> None:
    heads = {"Ti": 3, "S": 6, "M": 8, "B": 12, "L": 16, "So400m": 16, "H": 16, "g": 16, "G": 16, "e": 16}
    assert {size: VARIANTS[size].heads for size in heads} == heads


@pytest.mark.parametrize(
    ("name", "depths", "width", "stem", "patch"),
    [
        ("RMicro+ViT-Pico/8", (1, 1, 1), 24, "3x3", 1),
        ("RMilli+ViT-Pico/8", (1, 1, 1), 32, "3x3", 1),
        ("R+ViT-Ti/16", (), 64, "7x7+pool", 8),
        ("Conv+ViT-Pico/8", (), 32, "3x3+3x3", 4),
        ("Conv+ViT-Ti/2", (), 32, "3x3+3x3", 1),
        ("RPico+ViT-Pico/2", (1,), 16, "3x3", 1),
        ("RNano+ViT-Nano/12", (1, 1), 32, "3x3", 3),
        ("RNano+ViT-Nano/48", (1, 1, 1), 32, "3x3", 6),
        ("R26+ViT-S/32", (2, 2, 2, 2), 64, "7x7+pool", 1),
        ("R26+ViT-B/96", (2, 2, 2, 2), 64, "7x7+pool", 3),
        ("R50+ViT-B/16", (3, 4, 9), 64, "7x7+pool", 1),
        ("R152x2+ViT-L/16", (3, 8, 39), 128, "7x7+pool", 1),
        ("R101x3+ViT-L/32", (3, 4, 23, 3), 192, "7x7+pool", 1),
        ("R200x1+ViT-Ti/32", (3, 24, 36, 3), 64, "7x7+pool", 1),
    ],
)
def test_roots_of_hybrids(name: str, depths: tuple[int, ...], width: int, stem: Stem, patch: int) -> None:
    config = config_of(name, image_size=192)
    assert config.root == RootConfig(depths=depths, width=width, stem=stem, pools="RM" in name)
    assert config.patch_size == (patch, patch)
    assert (config.root.norm_eps, config.root.weight_eps, config.root.weight_eps_on) == (1e-6, 1e-5, "deviation")


def test_fields_replace_those_of_the_variant() -> None:
    config = config_of("BiT-R50x1", depths=(1, 1), num_classes=3, image_size=(33, 20), channels=1)
    assert (config.depths, config.num_classes, config.image_size, config.channels) == ((1, 1), 3, (33, 20), 1)
    root = RootConfig(depths=(1,), width=32)
    hybrid = config_of("R50+ViT-B/16", root=root, depth=1, image_size=64)
    assert (hybrid.root, hybrid.depth, hybrid.width, hybrid.grid) == (root, 1, 768, (16, 16))
    plain = config_of("ViT-Ti/16x8", image_size=(32, 24))
    assert plain.patch_size == (16, 8) and plain.grid == (2, 3), "rows then columns"


FORM = r"names have the form ViT-SIZE/PATCH, R50\+ViT-SIZE/PATCH or BiT-R50x1"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ViT-X/16", r"unknown variant 'ViT-X/16': size 'X' does not exist; nearest: .*ViT-[A-Z]/16"),
        ("vit-b/16", f"'vit-b/16': {FORM}; nearest: ViT-B/16"),
        ("ViT-B", FORM + "; nearest: .*ViT-B/"),
        ("ViT-B/0", FORM),
        ("ViT-B/16x", FORM),
        ("ViT-B/16 ", FORM),
        ("BiT-R50", FORM + "; nearest: .*BiT-R50x1"),
        ("R50+ViT-B/16x8", FORM),
        ("R50x0+ViT-B/16", FORM),
        ("ConvViT-B/8", FORM),
        ("BiT-R34x1", r"'BiT-R34x1': a ResNet of 34 layers is not in the table; choose from 26, 50, 101, 152, 200"),
        ("R18+ViT-B/32", r"'R18\+ViT-B/32': a ResNet of 18 layers is not in the table; choose from 26, 50, 101"),
        ("R50+ViT-Q/32", r"unknown variant 'R50\+ViT-Q/32': size 'Q' does not exist; nearest: "),
        ("R50+ViT-B/8", r"unknown variant 'R50\+ViT-B/8': a hybrid's patch must be 16, or a multiple of 32"),
        ("R+ViT-B/7", r"unknown variant 'R\+ViT-B/7': the patch of a root without stages must be a multiple of 2"),
        ("RPico+ViT-B/7", r"'RPico\+ViT-B/7': the first stage of the root halves the sides, so the patch must be even"),
        ("RTi+ViT-B/8", r"unknown variant 'RTi\+ViT-B/8': names have the form"),
        ("Pico", r"unknown variant 'Pico'"),
        ("resnet", r"unknown variant 'resnet'.*choices: .*ViT-Pico/7.*ViT-e/14"),
        ("", r"unknown variant ''"),
    ],
)
def test_unknown_variant_names_the_nearest(name: str, message: str) -> None:
    for make in (create, variant_config):
        with pytest.raises(ConfigError, match=message):
            make(name)


@pytest.mark.parametrize("name", [None, 3, b"ViT-S/16", ["ViT-S/16"]], ids=repr)
def test_a_name_is_a_text(name: Any, types_unchecked: None) -> None:
    with pytest.raises(ConfigError, match=r"^variant=.* is not a text"):
        create(name)


@pytest.mark.parametrize("name", ["ViT-B/16", "BiT-R50x1"])
def test_fields_that_do_not_exist_are_named(name: str) -> None:
    for make in (create, variant_config):
        with pytest.raises(ConfigError, match=f"unknown field 'num_clases' of {name}; nearest: num_classes"):
            make(name, num_clases=10)


def test_a_fact_of_all_resnets_is_no_field_of_theirs() -> None:
    assert ModelConfig(overrides={"head_hidden": 8}).overrides == {"head_hidden": 8}  # a field of transformers
    for make in (create, variant_config):
        with pytest.raises(ConfigError, match="unknown field 'head_hidden' of BiT-Pico"):
            make("BiT-Pico", head_hidden=8)


@pytest.mark.usefixtures("types_unchecked")
def test_one_number_is_both_sides() -> None:
    made: Any = variant_config("ViT-Ti/16", image_size=np.int64(32), patch_size=8)
    assert (made.image_size, made.patch_size) == ((32, 32), (8, 8))
    assert TrainConfig().override(image_size=48).images.image_size == (48, 48)


@pytest.mark.usefixtures("types_unchecked")
def test_configs_hold_values_of_their_types() -> None:
    given: Any = {"image_size": [np.int64(32), 48], "num_classes": np.int64(3)}
    for kind in (ViTConfig, ResNetConfig):
        made: Any = kind(**given)
        assert made == kind(image_size=(32, 48), num_classes=3) and type(made.num_classes) is int
        with pytest.raises(ConfigError, match="num_classes=True is not a whole number"):
            replace(made, num_classes=True)
    with pytest.raises(ConfigError, match="reversible='no' is not true or false"):
        replace(variant_config("ViT-Ti/16"), reversible="no")


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("size", ["8", (8,), (8, 8, 8), (8, 8.0)], ids=str)
@pytest.mark.parametrize("name", ["image_size", "patch_size"])
def test_sizes_are_pairs(name: str, size: Any) -> None:
    message = f"^{re.escape(f'{name}={size!r} is not a pair of whole numbers, (height, width)')}$"
    with pytest.raises(ConfigError, match=message):
        ViTConfig(**{name: size})
    with pytest.raises(ConfigError, match=message):
        ResNetConfig(image_size=size) if name == "image_size" else create("ViT-Ti/16", patch_size=size)
