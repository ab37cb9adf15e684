"""Tests that every study keeps the rules that the engine and the page rely on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from vitrail.models.variants import build
from vitrail.studies.claims import Alike, Better, Claim, GainShrinks
from vitrail.studies.engine import CELL_SECONDS, cost_of, sizes_for
from vitrail.studies.questions import STUDIES
from vitrail.studies.study import Point, Scale, Settings, Study

STUDY = pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
SCALE = pytest.mark.parametrize("scale", ["quick", "default"])

FLOPS_PER_SECOND = 30e9
"""Speed of a core that the limits of time are held against."""

LIMITS = {"quick": 8 * 60, "default": 90 * 60}
"""Largest time of a study in seconds, on two cores."""

TRANSFER_LIMIT = 60 * 60


def points_of(study: Study, scale: Scale, channels: int = 1) -> Sequence[Point]:
    return study.points(Settings(scale=scale, channels=1 if channels == 1 else 3))


def named(claims: Sequence[Claim]) -> set[str]:
    """The points that claims compare."""
    found: set[str] = set()
    for claim in claims:
        if isinstance(claim, Better):
            found |= {name for pair in claim.pairs for name in pair}
        elif isinstance(claim, Alike):
            found |= set(claim.points)
        elif isinstance(claim, GainShrinks):
            found |= {*claim.few, *claim.many}
    return found


@STUDY
@SCALE
def test_every_arm_has_the_same_number_of_trials(study: Study, scale: Scale) -> None:
    points = points_of(study, scale)
    trained = [point for point in points if point.stages[-1].config.run.steps != 1]  # linear models try no rates
    counts = {point.arm: [len(stage.rates) for stage in point.stages if len(stage.rates) > 1] for point in trained}
    assert len({tuple(count) for count in counts.values()}) == 1, counts
    assert len({point.name for point in points}) == len(points)


@STUDY
@SCALE
def test_claims_compare_points_that_are_measured(study: Study, scale: Scale) -> None:
    points = points_of(study, scale)
    claims = study.claims(points)
    assert claims and named(claims) <= {point.name for point in points}
    study.claims(points[:1])  # of one arm


@pytest.mark.slow
@STUDY
@SCALE
def test_the_limits_of_time_are_kept(study: Study, scale: Scale) -> None:
    settings = Settings(scale=scale)
    points = study.points(settings)
    cost = cost_of(points, (0,), sizes_for(points, settings))
    costs = [*cost.costs, *cost.costs[: cost.cells], *cost.costs[: cost.cells]]  # of three seeds
    seconds = (CELL_SECONDS * len(costs) + sum(one.flops for one in costs) / FLOPS_PER_SECOND) / 2
    limit = TRANSFER_LIMIT if study.name == "transfer" and scale == "default" else LIMITS[scale]
    assert seconds < limit, f"{seconds:.0f} s"


@pytest.mark.slow
@STUDY
def test_colour_images_are_possible(study: Study) -> None:
    settings = Settings(scale="quick", channels=3)
    points = study.points(settings)
    cost_of(points, (0,), sizes_for(points, settings))


@pytest.mark.slow
@STUDY
def test_the_published_size_has_a_cost(study: Study) -> None:
    points = study.published()
    cost = cost_of(points, (0,), sizes_for(points, Settings()))
    assert cost.flops > 1e18 and study.paper and study.question.endswith("?")


@pytest.mark.slow
def test_each_kind_of_attention_changes_what_the_network_computes() -> None:
    """Two arms with equal weights once had equal outputs, because the class token sees all patches in every kind."""
    images = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    outputs: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for one in points_of(STUDIES["attention"], "quick"):
        config = one.stages[0].config
        torch.manual_seed(0)
        network = build(config.model.resolve(num_classes=3, image_size=(28, 28), channels=1)).eval()
        torch.nn.init.normal_(network.head.weight, generator=torch.Generator().manual_seed(1))
        weights = weights or network.state_dict()
        kept = {name: tensor for name, tensor in weights.items() if name in network.state_dict()}
        fitting = {name: tensor for name, tensor in kept.items() if tensor.shape == network.state_dict()[name].shape}
        network.load_state_dict(fitting, strict=False)
        with torch.no_grad():
            outputs[one.arm] = network(images)
    for first, second in itertools.combinations(outputs, 2):
        assert (outputs[first] - outputs[second]).abs().max() > 1e-3, (first, second)
