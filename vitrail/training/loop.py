"""The training loop. Kinds of training differ in their objective, never in the loop."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from vitrail.data.batch import Batch
from vitrail.machine import autocast
from vitrail.processes.group import local, whole
from vitrail.training.after_step import Monitor
from vitrail.training.job import Phase, Plan, use_patch_dropout
from vitrail.training.state import StepFault, TrainState


def fit(state: TrainState, plan: Plan, monitor: Monitor) -> None:
    """Train until the plan is over. The loop never waits for a number that the device has yet to compute.

    Raises the errors of `Monitor.after_step`.
    """
    state.objective.train()
    phase: Phase | None = None
    while not plan.is_over(state):
        if (current := plan.phase_of(state.step)) is not phase and current is not None:
            phase = current
            use_patch_dropout(state.objective, phase.patch_dropout)
            monitor.begin_phase(phase)
        with monitor.timing.waiting():
            batch = next(state.batches)
        metrics: dict[str, Tensor] = {}
        if not monitor.recovery.leaves_out(batch):
            try:
                with monitor.measuring():
                    metrics = train_step(state, plan, batch.to(plan.device))
            except StepFault as fault:
                if monitor.recovery.recover(batch, fault):
                    phase = None
                    continue
        state.step += 1
        monitor.after_step(batch, metrics)


def train_step(state: TrainState, plan: Plan, batch: Batch) -> dict[str, Tensor]:
    """Take one optimizer step. Return the batch's loss, metrics and gradient norm, which stay on the device.

    The batch is augmented as a whole, because its samples are mixed with each other. With accumulation, the augmented
    batch is then processed in parts. Each part is weighted by its fraction of the samples over which the loss is
    averaged, so that the gradients add up to the gradient of the whole batch. Several processes have parts of the batch
    as well: the weights, the metrics and the gradients are sums over all of them.

    Raises `StepFault` if the plan checks steps and this one has a fault. The weights and the optimizer then stay as
    they are.
    """
    learning_rate = plan.schedule(state.step)
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate * group["scale"]
        if "first_weight_decay" in group:
            group["weight_decay"] = group["first_weight_decay"] * plan.weight_decay(state.step)
    position = plan.position(state.step)
    state.objective.before_step(position)
    parts = _augmented(batch, plan, state.step).chunks(plan.accumulation)
    processes = plan.processes
    is_divided = len(parts) > 1 or processes.are_several
    counts = [state.objective.counted(part).sum() for part in parts] if is_divided else []
    total = processes.sum(torch.stack(counts).sum()).clamp(min=1) if counts else None
    metrics: dict[str, Tensor] = {}
    for number, part in enumerate(parts):
        with autocast(plan.precision, plan.device):
            output = state.objective(part.with_images(plan.preprocess.normalise))
        values = {"loss": output.loss, **output.metrics}
        if total is not None:
            weight = counts[number] / total
            values = {name: value * weight for name, value in values.items()}
        loss = values["loss"]
        if state.gradients is not None:
            loss = state.gradients.scaled(loss)
            if number == len(parts) - 1:
                state.gradients.begin()
        loss.backward()
        for name, value in values.items():
            metrics[name] = metrics[name] + value.detach() if number else value.detach()
    if state.gradients is not None:
        state.gradients.finish()
        metrics = dict(zip(metrics, processes.sum(torch.stack(list(metrics.values())).float()).unbind(), strict=True))
    metrics["gradient_norm"] = _clip(state.objective, plan.clip)
    try:
        state.faults.check(plan.faults, metrics)
        state.optimizer.step()
    finally:
        state.optimizer.zero_grad(set_to_none=True)
    state.objective.after_step(position, processes)
    if state.average is not None:
        state.average.update()
    return metrics


def _augmented(batch: Batch, plan: Plan, step: int) -> Batch:
    """Return the batch after the augmentation of a step. Local views are augmented by themselves."""
    size = plan.preprocess.image_size
    changed = plan.augment_at(step)(batch, seed=plan.seed, classes=plan.classes, size=size)
    if (local := batch.local) is None:
        return changed
    augment = plan.augment_at(step, height=local.images.shape[2])
    return replace(changed, local=augment(local, seed=plan.seed, classes=plan.classes, size=size))


@torch.no_grad()
def _clip(module: nn.Module, largest: float) -> Tensor:
    """Scale the gradients down to a norm of at most `largest` (0 for no limit). Return the norm before scaling.

    As in optax, no small number is added to the norm, and gradients below the limit do not change.
    """
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    norm = whole(nn.utils.get_total_norm(gradients, foreach=True))
    if largest:
        torch._foreach_mul_([local(gradient) for gradient in gradients], (largest / norm).clamp(max=1))
    return norm
