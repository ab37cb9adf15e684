"""Tests of training steps: accumulation, clipping, the schedule, and no waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from tests.training.jobs import Make, Prepare
from tests.training.test_budget import Calls
from vitrail.data.batch import Batch
from vitrail.tasks.classification import ClassificationObjective
from vitrail.tasks.regression import RegressionObjective
from vitrail.tasks.task import LossOutput, Objective
from vitrail.training import loop
from vitrail.training.job import Job
from vitrail.training.loop import train_step
from vitrail.training.state import TrainState

SGD = {
    "optimizer": "sgd", "learning_rate": 1.0, "schedule": "constant", "warmup": 0.0, "momentum": 0.0,
    "weight_decay": 0.0, "dropout": 0.0, "stochastic_depth": 0.0, "label_smoothing": 0.1,
}  # fmt: skip
"""Settings with which a step subtracts the gradient itself from the weights."""


@pytest.fixture
def make(small: Make, prepare: Prepare, tmp_path: Path) -> Callable[..., Any]:
    return lambda **fields: prepare(small(tmp_path / "run", **fields))


def weights(state: TrainState) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.objective.named_parameters()}


def gradient_of_step(state: TrainState, job: Job, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the negative change of every weight in a step, and the step's metrics."""
    before = weights(state)
    figures = train_step(job, state, batch)
    return {name: before[name] - tensor for name, tensor in weights(state).items()}, figures


def without(batch: Batch, places: list[int]) -> Batch:
    """Return the batch with some samples invalid and black, as the pipeline makes them."""
    images, valid = batch.images.clone(), batch.valid.clone()
    images[places], valid[places] = 0, False
    return replace(batch, images=images, valid=valid)


NONE, SOME, MOST, ALL = [], [0, 7, 8, 19], list(range(16)), list(range(20))


@pytest.mark.parametrize(
    ("loss", "invalid"),
    [*(("softmax", invalid) for invalid in (NONE, MOST, ALL)), ("sigmoid", SOME)],
    ids=lambda value: value if isinstance(value, str) else str(len(value)),
)
def test_accumulation_changes_nothing(make: Callable[..., Any], invalid: list[int], loss: str) -> None:
    whole, job = make(**SGD, clip=0.0, loss=loss, shift=2)
    batch = without(next(whole.batches), invalid)
    expected, expected_figures = gradient_of_step(whole, job, batch)
    if len(invalid) < 20:
        assert sum(float(gradient.norm()) for gradient in expected.values()) > 0.1
    for accumulation in (3, 20):
        state, job = make(**SGD, clip=0.0, loss=loss, shift=2, accumulation=accumulation)
        found, figures = gradient_of_step(state, job, batch)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)
        assert set(figures) == set(expected_figures) == {"loss", "accuracy", "gradient_norm"}
        torch.testing.assert_close(figures, expected_figures, rtol=1e-5, atol=1e-6)


class Amounts(ClassificationObjective):
    """Images count by amounts whose sum is below 1."""

    def forward(self, batch: Batch) -> LossOutput:
        amounts, losses = self.counted(batch), self.losses(self.network(batch.images), batch)
        return LossOutput((losses * amounts).sum() / amounts.sum().clamp(min=1e-9), {})

    def counted(self, batch: Batch) -> Tensor:
        return batch.valid * (1 + batch.labels) / 1000


@pytest.mark.parametrize("targets", ["labels", "numbers", "amounts"])
def test_accumulation_changes_nothing_if_samples_lack_targets(make: Callable[..., Any], targets: str) -> None:
    """The samples without a target are unevenly distributed over the parts, and the loss skips them."""
    found: dict[int, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
    for accumulation in (1, 3, 7, 20):
        state, job = make(**SGD, clip=0.0, accumulation=accumulation)
        batch = without(next(state.batches), [2, 19])
        if targets == "labels":
            labels = batch.labels.clone()
            labels[[0, 1, 4, 5, 6, 7, 13]] = -1
            batch = replace(batch, labels=labels)
        elif targets == "amounts":
            state.objective = Amounts(state.objective.network)
        else:
            numbers = torch.linspace(-3, 5, 200).reshape(20, 10)
            numbers[[0, 1, 4, 5, 6, 7, 13]] = torch.nan
            numbers[10:16, ::2] = torch.nan
            batch = replace(batch, targets=numbers, target_kind="numbers")
            state.objective = RegressionObjective(state.objective.network, torch.zeros(10), torch.full((10,), 2.0))
        found[accumulation] = gradient_of_step(state, job, batch)
    expected, expected_metrics = found.pop(1)
    assert sum(float(gradient.norm()) for gradient in expected.values()) > 0.1
    for gradients, metrics in found.values():
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(metrics, expected_metrics, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_accumulation_changes_no_image_and_no_target_of_a_mixture(make: Callable[..., Any], loss: str) -> None:
    seen: dict[int, list[Batch]] = {}
    for accumulation in (1, 4):
        state, job = make(
            loss=loss, accumulation=accumulation, preset="strong1", cutmix=1.0, colour_jitter=(0.4, 0.4, 0.4, 0.1)
        )
        parts = seen.setdefault(accumulation, [])
        state.objective.register_forward_pre_hook(lambda module, inputs, parts=parts: parts.append(inputs[0]))
        train_step(job, state, without(next(state.batches), [3, 11]))
    (whole,), parts = seen[1], seen[4]
    assert len(parts) == 4 and whole.targets is not None and whole.targets.max(dim=1).values.min() < 1
    for name in ("images", "targets", "labels", "valid"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name)), name


def norm(gradients: dict[str, Tensor]) -> float:
    return float(torch.cat([gradient.flatten() for gradient in gradients.values()]).double().norm())


def test_clipping_scales_down_to_the_limit(make: Callable[..., Any]) -> None:
    state, job = make(**SGD, clip=0.0)
    batch = next(state.batches)
    free, figures = gradient_of_step(state, job, batch)
    length = norm(free)
    assert length > 0.5
    assert figures["gradient_norm"].item() == pytest.approx(length, rel=1e-4)
    for clip in (0.01, length / 2, length * 2):
        state, job = make(**SGD, clip=clip)
        clipped, figures = gradient_of_step(state, job, batch)
        assert norm(clipped) == pytest.approx(min(clip, length), rel=1e-3)
        assert figures["gradient_norm"].item() == pytest.approx(length, rel=1e-4), "the norm before clipping"
        factor = min(clip / length, 1)
        for name, gradient in free.items():
            torch.testing.assert_close(clipped[name], gradient * factor, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("of", ["part", "weight"])
def test_clipping_limits_the_gradients_of_parts_or_weights(of: Any) -> None:
    """The limit of each weight is that of `clip_gradients` in facebookresearch/dino. DINOv2 limits those of the
    backbone, in which its mask embedding is, and those of each head."""
    module = nn.ModuleDict({"network": nn.Linear(3, 2), "head": nn.Linear(2, 4)})
    module.register_parameter("mask", nn.Parameter(torch.zeros(5)))
    part = {"network.weight": 0, "network.bias": 0, "mask": 0, "head.weight": 1, "head.bias": 1}
    before = {}
    for number, (name, parameter) in enumerate(module.named_parameters()):
        parameter.grad = torch.sin(number + 0.7 * torch.arange(parameter.numel())).view_as(parameter)
        before[name] = parameter.grad.double()
    total = loop._clip(module, 1.2, of)
    assert total.item() == pytest.approx(norm(before), rel=1e-6)
    for name, parameter in module.named_parameters():
        together = {
            key: one for key, one in before.items() if key == name or (of == "part" and part[key] == part[name])
        }
        expected = before[name] * min(1.2 / norm(together), 1)
        torch.testing.assert_close(parameter.grad, expected.float(), rtol=1e-6, atol=1e-7)
        assert not torch.equal(expected, before[name]) or norm(together) < 1.2


def test_frozen_weights_have_their_first_step_later(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam divides by the length of the mean gradient, so a first step is as long as the learning rate."""
    state, job = make(learning_rate=0.01, schedule="constant", warmup=0.0, weight_decay=0.3, clip=0.0)
    weight = state.objective.network.blocks[0].mlp.up.weight
    monkeypatch.setattr(state.objective, "frozen", lambda position: [weight] if position.step < 3 else [])
    first = weight.detach().clone()
    for _ in range(3):
        train_step(job, state, next(state.batches))
        state.step += 1
    assert torch.equal(weight, first) and not any(value.any() for value in state.optimizer.state[weight].values())
    train_step(job, state, next(state.batches))
    moved = (weight.detach() - first * (1 - 0.01 * 0.3)).abs()
    assert moved.quantile(0.1).item() == pytest.approx(0.01, rel=1e-2) == pytest.approx(moved.max().item(), rel=1e-2)


@pytest.mark.parametrize(("clip", "factor"), [(1e-6, 0.2), (4e-6, 0.8), (5e-6, 1.0), (6e-6, 1.0), (0.0, 1.0)])
def test_clipping_adds_no_small_number_to_the_norm(make: Callable[..., Any], clip: float, factor: float) -> None:
    state, job = make(**SGD, clip=clip)

    class Tiny(Objective):
        def forward(self, batch: Batch) -> LossOutput:
            bias = self.network.head.bias
            return LossOutput((bias[:2] * torch.tensor([3e-6, 4e-6])).sum(), {})

    state.objective = Tiny(state.objective.network)
    before = state.objective.network.head.bias.detach().clone()
    found, metrics = gradient_of_step(state, job, next(state.batches))
    assert metrics["gradient_norm"].item() == pytest.approx(5e-6, rel=1e-6)
    torch.testing.assert_close(before[:2], torch.zeros(2))
    expected = torch.tensor([3e-6, 4e-6]) * factor
    torch.testing.assert_close(found["network.head.bias"][:2], expected, rtol=1e-6, atol=0)


def test_each_group_has_its_own_share_of_the_schedule(make: Callable[..., Any]) -> None:
    state, job = make(steps=10, warmup=0.4, layer_decay=0.5)
    for step in range(5):
        state.step = step
        train_step(job, state, next(state.batches))
        rates = sorted({group["lr"] for group in state.optimizer.param_groups})
        assert rates == [job.schedule(step) * 0.5**layer for layer in (3, 2, 1, 0)], "two blocks between stem and head"


def test_the_batch_is_augmented_by_epoch_and_sample(make: Callable[..., Any]) -> None:
    state, job = make(flip=True, shift=3)
    seen: list[Tensor] = []
    state.objective.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].images))
    batch = next(state.batches)
    train_step(job, state, batch)
    expected = job.config.augment(batch, seed=job.config.run.seed).images
    assert not torch.equal(expected, batch.images)
    assert torch.equal(seen[0], job.config.images.normalise(expected))


class Reads(Calls):
    """Counts what would make the processor wait for a device: operations, and methods that no operation shows."""

    METHODS = ("tolist", "cpu", "numpy")

    def __enter__(self) -> Self:
        self.patch = pytest.MonkeyPatch()
        for name in self.METHODS:
            self.patch.setattr(Tensor, name, self._counted(name, getattr(Tensor, name)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.patch.undo()

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def count(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.figures.reads[name] += 1
            return method(tensor, *args, **kwargs)

        return count


@pytest.mark.parametrize("fields", [
    {"shift": 2}, {"accumulation": 3, "precision": "bf16"}, {"optimizer": "sgd", "clip": 0.0},
    {"preset": "bp", "cutmix": 1.0, "colour_jitter": (0.4, 0.4, 0.4, 0.1)},
    {"label_smoothing": 0.0, "average": 0.9, "layer_decay": 0.5, "momentum_format": "bfloat16"},
    {"optimizer": "adafactor", "momentum_format": "bfloat16", "update_clip": 1.0, "width": 32, "heads": 1},
    {"optimizer": "sgd", "weight_decay_rule": "decoupled"}, {"optimizer": "muon", "precision": "bf16"},
    {"optimizer": "lars"}, {"optimizer": "lamb"},
], ids=str)  # fmt: skip
def test_a_step_waits_for_no_number(make: Callable[..., Any], fields: dict[str, Any]) -> None:
    state, job = make(**fields)
    train_step(job, state, next(state.batches))  # the optimiser makes its state
    batch = next(state.batches)
    with Reads() as reads:
        train_step(job, state, batch)
    assert reads.figures.kernels.total() > 50 and not reads.figures.reads


def test_a_step_of_the_sigmoid_loss_waits_for_no_number_of_the_network(make: Callable[..., Any]) -> None:
    """On the CPU `one_hot` reads the least and the greatest label to check them; on a GPU it does not."""
    state, job = make(loss="sigmoid")
    train_step(job, state, next(state.batches))
    batch = next(state.batches)
    with Reads() as reads:
        train_step(job, state, batch)
    with Reads() as of_one_hot:
        torch.nn.functional.one_hot(batch.labels, 10)
    assert reads.figures.reads == of_one_hot.figures.reads


def test_weights_and_optimizer_state_stay_in_float32(small: Make, prepare: Prepare, tmp_path: Path) -> None:
    state, job = prepare(small(tmp_path / "run", precision="bf16"))
    outputs = []
    handle = state.objective.network.blocks[0].mlp.up.register_forward_hook(lambda *given: outputs.append(given[-1]))
    figures = train_step(job, state, next(state.batches))
    handle.remove()
    assert outputs[0].dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in state.objective.parameters())
    tensors = [value for item in state.optimizer.state.values() for value in item.values()]
    assert len(tensors) > 10 and all(value.dtype == torch.float32 for value in tensors)
    assert figures["loss"].dtype == torch.float32
