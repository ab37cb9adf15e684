"""The one loop. What differs between kinds of training is the objective, never the loop."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from vitrail.data.pipeline import Batch
from vitrail.machine import autocast
from vitrail.training.monitoring.watch import Watch
from vitrail.training.plan import Plan
from vitrail.training.state.state import TrainState

__all__ = ["fit", "train_step"]


def fit(state: TrainState, plan: Plan, watch: Watch) -> None:
    """Trains until the plan is over. Nothing in here waits for a number that the device has yet to compute.

    Raises what `watch` does: `Stopped` on request, `NonFiniteLoss`, `DataError` for too many broken images,
    `SaveError`.
    """
    state.objective.train()
    while not plan.is_over(state):
        with watch.waiting():
            batch = next(state.batches)
        figures = train_step(state, plan, batch.to(plan.device))
        state.step += 1
        watch.after_step(batch, figures)


def train_step(state: TrainState, plan: Plan, batch: Batch) -> dict[str, Tensor]:
    """One optimiser step; returns the batch's loss, metrics and gradient norm, still on the device.

    The batch is augmented as a whole: mixing takes place between its samples. With accumulation it is then worked off
    in parts, each weighted by its share of the valid samples, so that the sum of their gradients is the gradient of the
    whole.
    """
    learning_rate = plan.schedule(state.step)
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate * group["scale"]
    batch = plan.augment(batch, seed=plan.seed, classes=plan.classes)
    valid = batch.valid.sum().clamp(min=1)
    figures: dict[str, Tensor] = {}
    for part in batch.chunks(plan.accumulation):
        share = part.valid.sum() / valid
        with autocast(plan.precision, plan.device):
            output = state.objective(replace(part, images=plan.preprocess.normalise(part.images)))
        (output.loss * share).backward()
        for name, value in {"loss": output.loss, **output.metrics}.items():
            figures[name] = figures.get(name, 0) + value.detach() * share
    figures["gradient_norm"] = _clip(state.objective, plan.clip)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    if state.average is not None:
        state.average.update(state.step)
    return figures


def _clip(module: nn.Module, largest: float) -> Tensor:
    """Scales the gradients down to a norm of `largest` at most (0 leaves them); returns the norm they had."""
    if largest:
        return nn.utils.clip_grad_norm_(module.parameters(), largest, foreach=True)
    return nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None], foreach=True)
