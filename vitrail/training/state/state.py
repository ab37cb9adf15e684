"""The state of a run: everything that its next step depends on, and that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from vitrail.data.pipeline import TrainingBatches
from vitrail.evaluation.predictions.streaming import merit
from vitrail.tasks.task import Objective
from vitrail.training.parallel.gradients import GradientSum
from vitrail.training.parallel.sharding import ShardedGradients, whole_weights
from vitrail.training.parallel.streamed import StreamedCopy
from vitrail.training.state.average import Average
from vitrail.training.state.random import random_state, restore_random_state
from vitrail.training.steps.faults import Faults

__all__ = ["Best", "TrainState"]


@dataclass
class Best:
    """The best result on the validation split so far."""

    score: float | None = None
    """Value of the metric that chooses the best weights, or None before the first evaluation."""
    step: int = -1
    """Step after which the score was measured, or -1 before the first evaluation."""
    waited: int = 0
    """Number of evaluations since the best score."""
    loss: float | None = None
    """Loss of the weights with the best score."""

    def is_beaten_by(self, score: float, loss: float, *, higher_is_better: bool) -> bool:
        """Return True if the score is better than the best score so far, or equally good with a lower loss, or if there
        is no score yet."""
        if self.score is None or self.step < 0:
            return True
        before = merit(self.score, self.loss, higher_is_better=higher_is_better)
        return merit(score, loss, higher_is_better=higher_is_better) > before


@dataclass
class TrainState:
    """Everything that changes during a run. Two runs with the same plan and equal states continue identically."""

    objective: Objective
    """The network with its loss, and the modules that the task trains beside it."""
    optimizer: Optimizer
    batches: TrainingBatches
    step: int = 0
    """Number of optimizer steps that were taken."""
    best: Best = field(default_factory=Best)
    skipped: set[str] = field(default_factory=set)
    """Keys of the training samples that could not be decoded."""
    faults: Faults = field(default_factory=Faults)
    average: Average | None = None
    gradients: GradientSum | ShardedGradients | None = None
    """The sum of gradients over several processes, or None if this process is alone."""
    copy: Objective | None = None
    """If weights are sharded, a copy of the objective with whole weights, which is evaluated and saved. With `streamed`
    weights, it is the copy that is evaluated."""
    streamed: StreamedCopy | None = None
    """If weights are sharded, and no process needs whole weights on its device: the copies that are evaluated and
    saved."""

    @property
    def is_sharded(self) -> bool:
        """True if each process has only a part of the weights and of the optimizer's state."""
        return self.copy is not None

    @property
    def measured(self) -> str:
        """The journal's name for the weights that are evaluated and saved: "trained" or "averaged"."""
        return "trained" if self.average is None else "averaged"

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the `with` block, the network has the mean of its weights, if there is one."""
        if self.average is None:
            yield
            return
        self.average.swap()
        try:
            yield
        finally:
            self.average.swap()

    def whole_objective(self) -> Objective:
        """Return the objective with its current weights, for evaluations. Sharded weights are whole in it, or they are
        gathered block by block while it computes (`streamed`). All processes call this method together."""
        if self.copy is None:
            return self.objective
        if self.streamed is not None:
            self.streamed.refresh(self.objective)
            return self.copy
        self.copy.load_state_dict(whole_weights(self.objective))
        return self.copy

    def saved_objective(self) -> Objective:
        """Return the objective with its current weights, to be saved by the first process. `streamed` weights are in
        main memory, and the other processes have none. All processes call this method together."""
        if self.streamed is None:
            return self.whole_objective()
        self.streamed.collect(self.objective)
        return self.streamed.saved

    @property
    def kept(self) -> Objective:
        """The objective that `saved_objective` returned last."""
        return self.streamed.saved if self.streamed is not None else self.copy or self.objective

    def settle(self) -> None:
        """Take part in the evaluations of other processes until none computes. All processes call this method together
        after they have computed their images."""
        if self.streamed is not None:
            self.streamed.settle()

    def tensors(self) -> dict[str, Any]:
        """Return the weights and their mean, and the optimizer's state, as torch.distributed.checkpoint takes them. If
        weights are sharded, each process has its parts."""
        is_new = not self.optimizer.state
        weights, optimizer = get_state_dict(self.objective, self.optimizer)
        if is_new:  # get_state_dict has filled the state by a step, which would count as the first one
            self.optimizer.state.clear()
        mean = {} if self.average is None else {"average": self.average.mean}
        return {"weights": weights, "optimizer": optimizer, **mean}

    def restore_tensors(self, tensors: dict[str, Any]) -> None:
        """Restore what `tensors` returned."""
        set_state_dict(
            self.objective,
            self.optimizer,
            model_state_dict=tensors["weights"],
            optim_state_dict=tensors["optimizer"],
        )
        if self.average is not None:
            self.average.restore(tensors["average"])

    def values(self) -> dict[str, Any]:
        """Return the rest of the state as plain JSON values, including the states of the random-number generators."""
        return {
            "step": self.step,
            "batches": self.batches.state(),
            "best": vars(self.best),
            "skipped": sorted(self.skipped),
            "faults": self.faults.values(),
            "averaged": 0 if self.average is None else self.average.updates,
            "random": random_state(),
        }

    def restore_values(self, values: dict[str, Any]) -> None:
        """Restore what `values` returned."""
        self.step = values["step"]
        if not self.step:
            self.optimizer.state.clear()  # the moments of no step
        self.batches.restore(values["batches"])
        self.best = Best(**values["best"])
        self.skipped = set(values["skipped"])
        self.faults = Faults.from_values(values["faults"]) if "faults" in values else Faults()
        if self.average is not None:  # older checkpoints do not count the updates, of which most steps have one
            self.average.updates = values.get("averaged", self.step)
        restore_random_state(values["random"])
