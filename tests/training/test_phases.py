"""Cheaper steps at the beginning of a run: settings, phases, batches, costs, and resuming in every phase."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.training.curves import events_of
from tests.training.jobs import Make, Outcome, StopAt
from vitrail.errors import ConfigError, Stopped
from vitrail.models.variants import variant_config
from vitrail.tasks.classification import Classification
from vitrail.training.config import TrainConfig
from vitrail.training.job import first_steps, phases_of, prepare, run_flops
from vitrail.training.log import Log
from vitrail.training.run import resume, train
from vitrail.training.state import make_network, make_state

ALL: dict[str, Any] = {
    "early_image_size": ("7x14:0.25", "14x21:0.5"), "early_patch_dropout": ("0.5:0.25", "0.25:0.75"),
    "early_batch_size": ("7:0.5",), "shift": 4,
}  # fmt: skip
"""Settings with changes after a quarter, a half and three quarters of the run."""


def network_of(config: TrainConfig) -> Any:
    return config.model.resolve(num_classes=2, image_size=config.images.image_size, channels=config.images.channels)


def test_phases_follow_from_the_settings(small: Make, tmp_path: Path) -> None:
    config = small(tmp_path, **ALL, batch_size=20)
    network = network_of(config)
    found = phases_of(config, network, 24)
    assert [(one.first, one.steps, one.image_size, one.patch_dropout, one.batch_size) for one in found] == [
        (0, 6, (7, 14), 0.5, 7), (6, 6, (14, 21), 0.25, 7), (12, 6, (28, 28), 0.25, 20), (18, 6, (28, 28), 0.0, 20),
    ]  # fmt: skip
    flops = [6 * one.batch_size * variant_config(
        "ViT-Pico/7", image_size=one.image_size, patch_dropout=one.patch_dropout, num_classes=2, width=16, depth=2,
        heads=2, mlp_width=32, channels=1).training_flops() for one in found]  # fmt: skip
    assert run_flops(found, network, config.task) == sum(flops)
    two = type("Two", (Classification,), {"views": 2})()
    assert run_flops(found, network, two) == 2 * sum(flops)
    assert [one.cost for one in found] == pytest.approx([each / flops[-1] for each in flops], rel=1e-12)
    assert run_flops(first_steps(found, 14), network, config.task) == sum(flops[:2]) + flops[2] // 3
    assert first_steps(found, 24) == found
    assert found[0].cost < found[1].cost < found[2].cost < found[3].cost == 1


def test_short_runs_have_the_phases_that_fit(small: Make, tmp_path: Path) -> None:
    for early, side in (("14:0.4", 28), ("14:0.9", 14)):
        config = small(tmp_path, early_image_size=(early,))
        (phase,) = phases_of(config, network_of(config), 1)
        assert (phase.first, phase.steps, phase.image_size) == (0, 1, (side, side))


def test_a_phase_without_a_step_is_noticed(small: Make, tmp_path: Path) -> None:
    events: list[Any] = []
    train(small(tmp_path / "run", steps=2, early_image_size=("14:0.1",)), log=Log(events.append))
    assert "the steps in 1 phase compute" in str(events) and "100% of as many steps" in str(events)


def test_epochs_count_the_images_of_all_phases(small: Make, tmp_path: Path) -> None:
    config = small(tmp_path, steps=None, epochs=3.0, early_batch_size=("5:0.5", "10:0.75"))
    assert config.mean_batch_size == 0.5 * 5 + 0.25 * 10 + 0.25 * 20
    steps = config.total_steps(200)
    assert steps == 60
    assert sum(one.steps * one.batch_size for one in phases_of(config, network_of(config), steps)) == 600


NO_VIT = dict.fromkeys(("depth", "heads", "mlp_width", "dropout", "stochastic_depth"))


@pytest.mark.parametrize(("fields", "message"), [
    ({"early_image_size": ("14",)}, "early_image_size='14' is not SIZE:END, with END a fraction of the run"),
    ({"early_patch_dropout": ("1.5:0.5",)}, "early_patch_dropout='1.5:0.5' is not RATE:END, with END a fraction of"),
    ({"early_batch_size": ("8:1.0",)}, "early_batch_size='8:1.0' is not IMAGES:END, with END a fraction of the run"),
    ({"early_batch_size": ("8:0.5", "9:0.4")}, "early_batch_size='8:0.5 9:0.4' has ends that do not increase"),
    ({"early_image_size": ("21:0.2", "14:0.5")},
     "early_image_size='21:0.2 14:0.5' does not grow to image_size=(28, 28)"),
    ({"early_batch_size": ("20:0.2",)}, "early_batch_size='20:0.2' does not grow to batch_size=20"),
    ({"early_patch_dropout": ("0.2:0.2",), "patch_dropout": 0.5},
     "early_patch_dropout='0.2:0.2' does not fall to patch_dropout=0.5"),
    ({"early_image_size": ("15:0.2",)}, "early_image_size: image_size=(15, 15) is not a multiple of patch_size=(7, 7)"),
    ({"early_image_size": ("14:0.2",), "crop_from": (32, 32)},
     "early_image_size and crop_from=(32, 32) cannot be combined"),
    ({"early_patch_dropout": ("0.2:0.2",), "variant": "BiT-R26x1", "image_size": (32, 32), "width": 32, **NO_VIT},
     "early_patch_dropout drops patches of a transformer, but a ResNet has none"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_settings_that_do_not_fit_are_refused_before_the_run(
    small: Make, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        train(small(tmp_path / "run", **fields))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(12, 19), (3, 6, 11, 18)], ids=str)
def test_stopping_in_any_phase_changes_no_bit(
    cuts: tuple[int, ...], small: Make, outcome: Outcome, tmp_path: Path
) -> None:
    fields = {**ALL, "skip_dropped": True, "average": 0.9, "evaluations": 2, "checkpoints": 1}
    train(small(tmp_path / "straight", **fields))
    run = tmp_path / "stopped"
    for number, cut in enumerate(cuts):
        with pytest.raises(Stopped):
            config = small(run, **fields)
            train(config, log=Log(StopAt(cut))) if number == 0 else resume(run, log=Log(StopAt(cut)))
    resume(run)
    assert outcome(run) == outcome(tmp_path / "straight")
    for folder in (run, tmp_path / "straight"):
        begun = events_of(folder, "phase")
        values = [(one["step"], one["image_size"], one["patch_dropout"], one["batch_size"]) for one in begun]
        assert values == [
            (0, [7, 14], 0.5, 7), (6, [14, 21], 0.25, 7), (12, [28, 28], 0.25, 20), (18, [28, 28], 0.0, 20),
        ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("local_size", "expected"), [(None, [(7, 7), (14, 7)]), ((7, 14), [(7, 14), (7, 14)])])
def test_local_views_have_half_the_size_of_the_phase(
    local_size: tuple[int, int] | None, expected: list[tuple[int, int]], small: Make, tmp_path: Path
) -> None:
    early: dict[str, Any] = {"early_image_size": ("14:0.5",), "image_size": (28, 14), "average": 0.0}
    heads: dict[str, Any] = {"prototypes": 24, "projection_hidden": 20, "bottleneck": 12}
    config = small(tmp_path / "run", task="dino", local_views=1, local_size=local_size, **early, **heads)
    setup = prepare(config)
    batches = make_state(setup, make_network(setup, None)[0]).batches
    taken = [next(batches) for _ in range(13)]
    batches.close()
    seen = [(*batch.images.shape[2:], *batch.local.images.shape[2:]) for batch in taken if batch.local is not None]
    assert seen == [(14, 14, *expected[0])] * 12 + [(28, 14, *expected[1])]
