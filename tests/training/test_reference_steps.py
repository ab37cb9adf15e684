"""Twelve training steps of the papers' code, repeated by this package's loop, optimizers, schedules and losses.

`golden/pipeline/train_*.json` were computed by vision_transformer and big_vision in float32 on a CPU. Weights and
images follow from their names and seeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.golden import weights
from tests.training.jobs import job_of
from vitrail.data.augment.settings import Augment
from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.vit import VisionTransformer
from vitrail.tasks.classification import ClassificationObjective
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.job import Job
from vitrail.training.loop import train_step
from vitrail.training.optimizer import OptimizerConfig, make_optimizer
from vitrail.training.schedule import Schedule
from vitrail.training.state import TrainState
from vitrail.weights.layouts.google import BIG_VISION, GOOGLE
from vitrail.weights.layouts.layout import theirs_of
from vitrail.weights.load import load

FOLDER = Path(__file__).parents[1] / "golden" / "pipeline"
INDEPENDENT = {"weight_decay_rule": "independent"}
BV_ADAM = {"kind": "adamw", "learning_rate": 1e-3, "weight_decay": 1e-4, "warmup": "3 steps", **INDEPENDENT}
BV_ADAFACTOR = {**BV_ADAM, "kind": "adafactor", "beta2": 0.95, "momentum_format": "bfloat16"}
BV_STAIR = {
    "kind": "sgd", "learning_rate": 0.03, "schedule": "staircase", "stair_at": ("4 steps", "8 steps"),
    "stair_factors": (0.1, 0.01), "warmup": "2 steps",
}  # fmt: skip
VT_SGD = {"kind": "sgd", "learning_rate": 0.03, "weight_decay": 0.0, "warmup": "3 steps", "clip": 1.0}

RUNS: dict[tuple[str, str], dict[str, Any]] = {
    ("train_vt_sgd", "momentum_float32"): VT_SGD,
    ("train_vt_sgd", "momentum_bfloat16"): {**VT_SGD, "momentum_format": "bfloat16"},
    ("train_bv_adam", "adam_softmax"): {**BV_ADAM, "clip": 1.0},
    ("train_bv_adam", "adam_sigmoid"): {**BV_ADAM, "clip": 10.0},
    ("train_bv_adam", "adam_mu_bfloat16"): {**BV_ADAM, "clip": 1.0, "momentum_format": "bfloat16"},
    ("train_bv_adam", "adam_wd_mults"): {
        **BV_ADAM, "clip": 1.0, "weight_decay": 0.01, "beta2": 0.95,
        "learning_rate_factors": (r"head\..*=10", ".*=0.5"),
        "weight_decay_factors": (
            r"(.*\.)?(qkv|out|up|down|projection|head)\.weight=1", r"positions\.embedding=0.5",
        ),
    },
    ("train_bv_adafactor", "adafactor_narrow"): {**BV_ADAFACTOR, "clip": 1.0},
    ("train_bv_adafactor", "adafactor_wide"): {**BV_ADAFACTOR, "clip": 1.0},
    ("train_bv_adafactor", "adafactor_wide_float32_momentum"): {
        **BV_ADAFACTOR, "clip": 1.0, "momentum_format": "float32", "update_clip": 1.0,
    },
    ("train_bv_momentum", "momentum_bfloat16_stair"): {
        **BV_STAIR, "weight_decay": 0.0, "clip": 5.0, "momentum_format": "bfloat16",
    },
    ("train_bv_momentum", "momentum_float32_stair_frozen"): {
        **BV_STAIR, "weight_decay": 1e-4, "clip": 0.5, **INDEPENDENT,
    },
}  # fmt: skip
"""The settings of this package that are the options of each run of the original code."""


@dataclass
class Reference:
    run: dict[str, Any]
    setup: dict[str, Any]
    is_big_vision: bool

    def network(self, folder: Path) -> VisionTransformer:
        """The network with the weights at the start, read from a file of the original code."""
        tensors = {name: weights.tensor(name, tuple(one["shape"])) for name, one in self.run["params"].items()}
        path = folder / "start.npz"
        np.savez(path, **tensors)
        network: VisionTransformer = load(path, device="cpu", image_size=(self.setup["h"], self.setup["w"])).network
        return network.requires_grad_(True)

    def tensors(self, network: VisionTransformer) -> dict[str, np.ndarray]:
        """The weights under the names and in the shapes of the original code."""
        layout = BIG_VISION if self.is_big_vision else GOOGLE
        state = dict(network.named_parameters())
        theirs = theirs_of(state, layout.names(network.config))
        return {name: tensor.numpy().copy() for name, tensor in theirs.items()}

    def image(self, seed: int, count: int) -> Tensor:
        shape = count, 3, self.setup["h"], self.setup["w"]
        return torch.from_numpy(weights.image(seed, shape))

    def batch(self, step: int) -> Batch:
        count, items = self.setup["batch"], torch.arange(self.setup["batch"])
        return Batch(
            images=self.image(self.setup["image_seed"] + step, count),
            labels=(3 * step + 5 * items + step * items) % self.setup["classes"],
            valid=torch.ones(count, dtype=torch.bool),
            samples=items,
            epochs=torch.zeros(count, dtype=torch.int64),
        )

    def logits(self, network: VisionTransformer) -> Tensor:
        with torch.no_grad():
            return network.eval()(self.image(self.setup["probe_seed"], 1))[0]


@pytest.fixture
def reference(file: str, name: str) -> Reference:
    content = json.loads((FOLDER / f"{file}.json").read_text())
    run = content["runs"][name]
    return Reference(run, run.get("config", content.get("config")), "bv" in file)


def job_for(config: OptimizerConfig, setup: dict[str, Any]) -> Job:
    images = Preprocess(image_size=(setup["h"], setup["w"]), mean=(0.0,) * 3, std=(1 / 255,) * 3)
    run = RunConfig(steps=setup["steps"], batch_size=setup["batch"], precision="float32")
    return job_of(TrainConfig(optimizer=config, images=images, augment=Augment(flip=False), run=run), images=1000)


class SecondSchedule:
    """A second schedule for the weights of the first block, as big_vision has schedules by name. The loop has one, so
    the weights have groups of their own, whose scale is the ratio of the two schedules."""

    def __init__(self, state: TrainState, job: Job) -> None:
        inside = {id(weight) for weight in state.objective.network.blocks[0].parameters()}
        self.job = job
        self.schedule = Schedule("rsqrt", 0.03, 12, 2, warmup_from_zero=True, timescale=4, cooldown_steps=3)
        self.groups = []
        for group in list(state.optimizer.param_groups):
            members = [weight for weight in group["params"] if id(weight) in inside]
            group["params"] = [weight for weight in group["params"] if id(weight) not in inside]
            state.optimizer.add_param_group({**group, "params": members})
            self.groups.append(state.optimizer.param_groups[-1])

    def set_scales(self, step: int) -> None:
        for group in self.groups:
            group["scale"] = self.schedule(step) / self.job.schedule(step) if step else 1.0


@pytest.mark.parametrize(("file", "name"), RUNS, ids=[name for _, name in RUNS])
def test_steps_are_those_of_the_original_code(
    file: str, name: str, reference: Reference, tmp_path: Path, types_unchecked: None
) -> None:
    run, network = reference.run, reference.network(tmp_path)
    frozen = "frozen" in name
    if frozen:
        network.patches.requires_grad_(False)
    torch.testing.assert_close(reference.logits(network), torch.tensor(run["logits_before"]), atol=5e-5, rtol=0)
    config = OptimizerConfig(warmup_from_zero=True, **RUNS[file, name])
    options = reference.setup.get("config", {})
    sigmoid = options.get("loss") == "sigmoid_xent"
    objective = ClassificationObjective(network, loss="sigmoid" if sigmoid else "softmax")
    state = TrainState(objective, make_optimizer(objective, config), batches=None)  # type: ignore[arg-type]
    job = job_for(config, reference.setup)
    second = SecondSchedule(state, job) if frozen else None
    for number, values in enumerate(steps_of_run(run["per_step"])):
        before = [weight.detach().clone() for weight in network.parameters()]
        if second is not None:
            second.set_scales(number)
        rate = values.get("lr_applied", values.get("schedule"))
        expected_rate = rate if "lr_applied" in values else np.multiply(rate, config.learning_rate)
        found_rates = [second.schedule(number), job.schedule(number)] if second else job.schedule(number)
        assert found_rates == pytest.approx(expected_rate, rel=1e-6)
        network.train()
        metrics = train_step(job, state, reference.batch(number))
        state.step += 1
        after = [weight.detach() for weight in network.parameters()]
        moved = torch.cat([(new - old).double().flatten() for new, old in zip(after, before, strict=True)]).norm()
        norm = torch.cat([weight.double().flatten() for weight in after]).norm()
        assert metrics["loss"].item() == pytest.approx(values["loss"], abs=5e-5), number
        assert metrics["gradient_norm"].item() == pytest.approx(values["grad_norm"], rel=5e-5), number
        assert moved.item() == pytest.approx(values["update_norm"], rel=5e-4), number
        assert norm.item() == pytest.approx(values["param_norm"], rel=1e-5), number
    torch.testing.assert_close(reference.logits(network), torch.tensor(run["logits_after"]), atol=5e-5, rtol=0)
    compare_weights(reference.tensors(network), run["params"], is_bfloat16=config.momentum_format == "bfloat16")


def steps_of_run(per_step: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for number in range(len(per_step["loss"])):
        yield {name: values[number] for name, values in per_step.items()}


def compare_weights(found: dict[str, np.ndarray], expected: dict[str, Any], *, is_bfloat16: bool) -> None:
    """Compare norms and single values of every weight but the key biases, whose gradient is rounding noise alone."""
    assert set(found) == set(expected)
    for name, values in expected.items():
        if name.endswith("key/bias"):
            continue
        tensor = found[name]
        assert list(tensor.shape) == values["shape"], name
        assert np.linalg.norm(tensor.astype(np.float64)) == pytest.approx(values["l2"], rel=1e-5), name
        slack = 2 * values["noise_max"] if is_bfloat16 else 0.0
        np.testing.assert_allclose(
            tensor.flatten()[values["at"]], values["values"], atol=1e-5 + slack, rtol=0, err_msg=name
        )
