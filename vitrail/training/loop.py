"""The training loop. Kinds of training differ in their objective, never in the loop."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from vitrail.data.pipeline import Batch
from vitrail.machine import autocast
from vitrail.training.monitoring.monitor import Monitor
from vitrail.training.plan import Plan
from vitrail.training.state.state import TrainState

__all__ = ["fit", "train_step"]


def fit(state: TrainState, plan: Plan, monitor: Monitor) -> None:
    """Train until the plan is over. The loop never waits for a number that the device has yet to compute.

    Raises as `Monitor.after_step` does.
    """
    state.objective.train()
    while not plan.is_over(state):
        with monitor.waiting():
            batch = next(state.batches)
        metrics = train_step(state, plan, batch.to(plan.device))
        state.step += 1
        monitor.after_step(batch, metrics)


def train_step(state: TrainState, plan: Plan, batch: Batch) -> dict[str, Tensor]:
    """Take one optimiser step. Return the batch's loss, metrics and gradient norm, which stay on the device.

    The batch is augmented as a whole, because its samples are mixed with each other. With accumulation it is then
    processed in parts. Each part is weighted by its fraction of the samples that the loss is a mean over, so that the
    gradients add up to the gradient of the whole batch.
    """
    learning_rate = plan.schedule(state.step)
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate * group["scale"]
    batch = plan.augment(batch, seed=plan.seed, classes=plan.classes, size=plan.preprocess.image_size)
    counted = state.objective.counted(batch).sum().clamp(min=1)
    metrics: dict[str, Tensor] = {}
    for part in batch.chunks(plan.accumulation):
        weight = state.objective.counted(part).sum() / counted
        with autocast(plan.precision, plan.device):
            output = state.objective(replace(part, images=plan.preprocess.normalise(part.images)))
        (output.loss * weight).backward()
        for name, value in {"loss": output.loss, **output.metrics}.items():
            metrics[name] = metrics.get(name, 0) + value.detach() * weight
    metrics["gradient_norm"] = _clip(state.objective, plan.clip)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    if state.average is not None:
        state.average.update(state.step)
    return metrics


def _clip(module: nn.Module, largest: float) -> Tensor:
    """Scale the gradients down to a norm of at most `largest` (0 for no limit). Return the norm that they had."""
    if largest:
        return nn.utils.clip_grad_norm_(module.parameters(), largest, foreach=True)
    return nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None], foreach=True)
