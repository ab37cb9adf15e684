"""Names of sizes: the published parameter counts, and what is said of names and fields that do not exist."""

from __future__ import annotations

import pytest
import torch

import vitrail
from vitrail.errors import ConfigError
from vitrail.models import cost
from vitrail.models.variants import PUBLISHED, VARIANTS, create, variant_config
from vitrail.models.vit import VisionTransformer

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
"""1000 classes; with a hidden head layer as wide as the network; 21843 classes; 1000 classes with the mean pool."""

BOTH = {
    "ViT-B/16": 103_186_515,
    "ViT-B/32": 104_843_091,
    "ViT-L/16": 326_740_307,
    "ViT-H/14": 660_385_363,
}
"""21843 classes with the hidden head layer."""


def made(name: str, **fields: object) -> int:
    """Parameters of the module itself, which needs no memory on the meta device."""
    with torch.device("meta"):
        network = create(name, **fields)
    assert all(parameter.requires_grad for parameter in network.parameters())
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_published_parameter_counts(name: str) -> None:
    width = VARIANTS[name.removeprefix("ViT-").partition("/")[0]].width
    columns: list[dict[str, object]] = [{}, {"head_hidden": width}, {"num_classes": 21843}, {"pool": "gap"}]
    assert tuple(made(name, **fields) for fields in columns) == COUNTS[name]
    assert tuple(cost.parameters(variant_config(name, **fields)) for fields in columns) == COUNTS[name]


@pytest.mark.parametrize("name", BOTH)
def test_published_parameter_counts_of_pretraining_networks(name: str) -> None:
    fields = {"num_classes": 21843, "head_hidden": variant_config(name).width}
    assert made(name, **fields) == cost.parameters(variant_config(name, **fields)) == BOTH[name]


def test_published_parameter_count_at_384() -> None:
    assert made("ViT-B/16", image_size=384) == 86_859_496
    assert cost.parameters(variant_config("ViT-B/16", image_size=384)) == 86_859_496


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("ViT-B/16", (12, 768, 3072, 12)),
        ("ViT-L/16", (24, 1024, 4096, 16)),
        ("ViT-H/14", (32, 1280, 5120, 16)),
        ("ViT-Ti/16", (12, 192, 768, 3)),
        ("ViT-S/16", (12, 384, 1536, 6)),
        ("ViT-M/16", (12, 512, 2048, 8)),
        ("ViT-So400m/14", (27, 1152, 4304, 16)),
        ("ViT-g/14", (40, 1408, 6144, 16)),
        ("ViT-G/14", (48, 1664, 8192, 16)),
        ("ViT-e/14", (56, 1792, 15360, 16)),
    ],
)
def test_depth_width_mlp_and_heads_of_published_sizes(name: str, numbers: tuple[int, ...]) -> None:
    config = variant_config(name)
    assert (config.depth, config.width, config.mlp_width, config.heads) == numbers
    assert config.pool == "cls" and config.norm_eps == 1e-6 and config.activation == "gelu"


@pytest.mark.parametrize("name", PUBLISHED)
def test_listed_variants_exist_and_fit_an_image(name: str) -> None:
    patch = int(name.rpartition("/")[2])
    config = variant_config(name, image_size=2 * patch)
    assert config.patch_size == (patch, patch) and config.grid == (2, 2)


def test_case_tells_sizes_apart() -> None:
    assert variant_config("ViT-g/14").width == 1408 and variant_config("ViT-G/14").width == 1664


def test_patch_of_two_sides_is_rows_then_columns() -> None:
    config = variant_config("ViT-Ti/16x8", image_size=(32, 24))
    assert config.patch_size == (16, 8) and config.grid == (2, 3)


def test_image_size_of_one_number_is_a_square() -> None:
    assert variant_config("ViT-B/16", image_size=64).image_size == (64, 64)
    assert variant_config("ViT-B/16").image_size == (224, 224)


def test_fields_replace_those_of_the_variant() -> None:
    config = variant_config("ViT-B/16", depth=2, patch_size=(8, 8), channels=1)
    assert (config.depth, config.patch_size, config.channels, config.width) == (2, (8, 8), 1, 768)


def test_create_makes_a_network_that_runs() -> None:
    network = vitrail.create("ViT-Pico/16x8", image_size=(32, 24), num_classes=7, depth=1)
    assert isinstance(network, VisionTransformer)
    assert network(torch.zeros(2, 3, 32, 24)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ViT-X/16", r"unknown variant 'ViT-X/16': size 'X' does not exist; nearest: .*ViT-[A-Z]/16"),
        ("vit-b/16", r"unknown variant 'vit-b/16': a name is ViT-SIZE/PATCH; nearest: ViT-B/16"),
        ("ViT-B", r"a name is ViT-SIZE/PATCH; nearest: .*ViT-B/"),
        ("ViT-B/0", r"a name is ViT-SIZE/PATCH"),
        ("ViT-B/16x", r"a name is ViT-SIZE/PATCH"),
        ("ViT-B/16x0", r"a name is ViT-SIZE/PATCH"),
        ("ViT-B/16 ", r"a name is ViT-SIZE/PATCH"),
        ("ViT-b/16", r"size 'b' does not exist; nearest: ViT-B/16"),
        ("resnet", r"unknown variant 'resnet'.*choices: .*ViT-Pico/7.*ViT-e/14"),
        ("", r"unknown variant ''"),
    ],
)
def test_unknown_variant_names_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        variant_config(name)
    with pytest.raises(ConfigError, match=message):
        create(name)


def test_unknown_field_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown field 'num_clases' of ViT-B/16; nearest: num_classes"):
        create("ViT-B/16", num_clases=10)
    with pytest.raises(ConfigError, match=r"unknown field 'drop_out' of ViT-B/16; nearest: dropout"):
        variant_config("ViT-B/16", drop_out=0.1)


def test_image_that_the_patch_does_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"image_size=\(225, 160\) is not a multiple of patch_size=\(16, 16\)"):
        create("ViT-B/16", image_size=(225, 160))
