"""The training loop. Kinds of training differ in their objective, never in the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitrail.data.batch import Batch
from vitrail.errors import ConfigError
from vitrail.machine import autocast
from vitrail.processes.group import local, whole
from vitrail.tasks.task import BatchObjective, LossOutput, Objective
from vitrail.training.after_step import Run, after_step, begin_phase, leaves_out, measuring, recover
from vitrail.training.job import Job, use_patch_dropout
from vitrail.training.optimizer import ClipOf
from vitrail.training.state import StepFault, TrainState

T = TypeVar("T")


def fit(run: Run, state: TrainState) -> None:
    """Train until the run is over. The loop never waits for a number that the device has yet to compute.

    Raises the errors of `after_step`.
    """
    state.objective.train()
    job, phase = run.job, None
    while not state.is_over(job):
        if (current := job.phase_of(state.step)) is not phase:
            phase = current
            use_patch_dropout(state.objective, phase.patch_dropout)
            begin_phase(run, state, phase)
        with run.clock.waiting():
            batch = next(state.batches)
        metrics: dict[str, Tensor] = {}
        if not leaves_out(run, state, batch):
            try:
                with measuring(run, state):
                    metrics = train_step(job, state, batch.to(job.device))
            except StepFault as fault:
                if recover(run, state, batch, fault):
                    phase = None
                    continue
        state.step += 1
        after_step(run, state, batch, metrics)


def train_step(job: Job, state: TrainState, batch: Batch) -> dict[str, Tensor]:
    """Take one optimizer step. Return the batch's loss, metrics and gradient norm, which stay on the device.

    The batch is augmented as a whole, because its samples are mixed with each other. With accumulation, the augmented
    batch is then processed in parts. Each part is weighted by its fraction of the samples over which the loss is
    averaged, so that the gradients add up to the gradient of the whole batch. Several processes have parts of the batch
    as well: the weights, the metrics and the gradients are sums over all of them. A `BatchObjective` compares the
    samples of all parts and of all processes with each other.

    Raises `StepFault` if the run checks steps and this one has a fault. The weights and the optimizer then stay as
    they are.
    """
    config, processes = job.config, job.processes
    learning_rate, below_head = job.schedule(state.step), job.backbone_schedule(state.step)
    decay = config.optimizer.decay_factor(state.step, job.steps)
    for group in state.optimizer.param_groups:
        group["lr"] = (below_head if group.get("is_below_head") else learning_rate) * group["scale"]
        if "first_weight_decay" in group:
            group["weight_decay"] = group["first_weight_decay"] * decay
    position = job.position(state.step)
    state.objective.before_step(position)
    parts = _augmented(batch, job, state.step).chunks(config.run.accumulation)
    metrics: dict[str, Tensor] = {}
    for loss, values, is_last in _losses(job, state, parts):
        if is_last and state.gradients is not None:
            state.gradients.begin()
        torch.autograd.backward(loss)
        for name, value in values.items():
            metrics[name] = metrics[name] + value.detach() if name in metrics else value.detach()
    if state.gradients is not None:
        state.gradients.finish()
    if processes.are_several:
        metrics = dict(zip(metrics, processes.sum(torch.stack(list(metrics.values())).float()).unbind(), strict=True))
    frozen = state.objective.frozen(position)
    for parameter in frozen:
        if parameter.grad is not None:
            local(parameter.grad).zero_()
    metrics["gradient_norm"] = _clip(state.objective, config.optimizer.clip, config.optimizer.clip_of)
    try:
        state.faults.check(config.faults, metrics)
        _update(state.optimizer, frozen)
    finally:
        state.optimizer.zero_grad(set_to_none=True)
    state.objective.after_step(position, processes)
    if state.average is not None:
        state.average.update()
    return metrics


def _losses(job: Job, state: TrainState, parts: list[Batch]) -> Iterator[tuple[Tensor, dict[str, Tensor], bool]]:
    """Yield losses whose gradients add up to the gradient of a step, each with its addends of the metrics, and True for
    the last one. The gradients of a loss are computed before the next loss is taken."""
    objective, processes, config = state.objective, job.processes, job.config
    is_whole = len(parts) == 1
    is_divided = processes.are_several or not is_whole
    counted = [objective.counted(part) for part in parts] if is_divided else []
    total = processes.sum(torch.cat(counted).sum(dim=0)).clamp(min=1e-30) if is_divided else None

    def weighted(output: LossOutput, *counted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        check_output(objective, output)
        values = {"loss": output.loss, **output.metrics}
        if total is not None:
            weight = torch.cat(counted).sum(dim=0) / total
            values = {name: value * weight for name, value in values.items()}
        values = {name: value.sum() if value.ndim else value for name, value in values.items()}
        # FSDP2 averages the gradients of sharded weights over the processes, whose sum is needed.
        return values["loss"] * processes.world if state.is_sharded else values["loss"], values

    def results(method: Callable[[Batch], T]) -> Iterator[T]:
        for part in parts:
            with autocast(config.run.precision, job.device):
                found = method(part.with_images(config.images.normalise))
            yield found

    if not is_divided or not isinstance(objective, BatchObjective):
        for number, output in enumerate(results(objective)):
            yield *weighted(output, *counted[number : number + 1]), number == len(parts) - 1
        return
    features = _joined(results(objective.fixed_features))
    generators = [job.device] if job.device.type == "cuda" else []
    with torch.random.fork_rng(generators, enabled=not is_whole), torch.set_grad_enabled(is_whole):
        compared = _joined(results(objective.features))
    for values in compared.values() if not is_whole else ():
        values.requires_grad_()
    with autocast(config.run.precision, job.device):
        output = objective.compare(features | compared, torch.cat(counted), processes)
    yield *weighted(output, *counted), is_whole
    if is_whole:
        return
    sizes = [len(part) for part in counted]
    gradients = {name: torch.split(values.grad, sizes) for name, values in compared.items() if values.grad is not None}
    for number, again in enumerate(results(objective.features)):  # with the same random numbers
        products = [(again[name] * parts[number]).sum() for name, parts in gradients.items()]
        yield torch.stack(products).sum(), {}, number == len(parts) - 1


def check_output(objective: Any, output: Any) -> None:
    """Raise `ConfigError` if an objective did not return a loss that can be minimised, and metrics beside it."""
    rule = ""
    values = (output.loss, *output.metrics.values()) if isinstance(output, LossOutput) else (output,)
    if not isinstance(output, LossOutput) or not all(isinstance(value, Tensor) for value in values):
        rule = f"a LossOutput of tensors, but it returned {output!r:.100}"
    elif not output.loss.requires_grad:
        rule = "a loss that depends on a weight that requires gradients; it was detached, or gradients are off"
    elif (shapes := [tuple(value.shape) for value in values if value.numel() != 1]) and type(
        objective
    ).counted is Objective.counted:
        rule = f"means over the samples, which are single numbers, but one has the shape {shapes[0]}"
    elif wrong := sorted(output.metrics.keys() & {"loss", "gradient_norm", "event", "step", "time"}):
        rule = f"metrics with other names than {wrong[0]!r}, which the journal uses"
    if rule:
        raise ConfigError(f"{type(objective).__name__} must return {rule}")


def _joined(parts: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the values of all parts in one tensor for each name."""
    first, *others = parts
    return {name: torch.cat([values, *(other[name] for other in others)]) for name, values in first.items()}


def _augmented(batch: Batch, job: Job, step: int) -> Batch:
    """Return the batch after the augmentation of a step. Local views are augmented by themselves."""
    preprocess, classes, seed = job.config.images, len(job.splits.classes), job.config.run.seed
    changed = job.augment_at(step)(batch, seed=seed, classes=classes, preprocess=preprocess)
    if (local := batch.local) is None:
        return changed
    augment = job.augment_at(step, height=local.images.shape[2])
    return replace(changed, local=augment(local, seed=seed, classes=classes, preprocess=preprocess))


@torch.no_grad()
def _clip(module: nn.Module, largest: float, of: ClipOf) -> Tensor:
    """Scale the gradients down to norms of at most `largest` (0 for no limit). Return the norm of all gradients before
    scaling.

    As in optax, no small number is added to a norm, and gradients below the limit do not change.
    """
    groups: dict[str, list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        part, _, rest = name.partition(".")
        key = {"all": "", "weight": name, "part": part if rest else "network"}[of]
        if parameter.grad is not None:
            groups.setdefault(key, []).append(parameter.grad)
    norms = []
    for gradients in groups.values():
        norms.append(whole(nn.utils.get_total_norm(gradients, foreach=True)))
        if largest:
            torch._foreach_mul_([local(gradient) for gradient in gradients], (largest / norms[-1]).clamp(max=1))
    return norms[0] if of == "all" else torch.stack(norms).norm()


@torch.no_grad()
def _update(optimizer: Optimizer, frozen: Sequence[nn.Parameter]) -> None:
    """Update all weights but the frozen ones. The optimizer's state of those is that before their first update."""
    kept = [parameter.detach().clone() for parameter in frozen]
    optimizer.step()
    for parameter, value in zip(frozen, kept, strict=True):
        parameter.copy_(value)
        for moment in optimizer.state.get(parameter, {}).values():
            if isinstance(moment, Tensor):
                moment.zero_()
