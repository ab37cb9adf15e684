"""Recovery from faults of training steps: the batch is skipped, or the run goes back to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from vitrail.data.batch import Batch
from vitrail.data.source import Source
from vitrail.errors import NonFiniteLoss
from vitrail.processes.group import Processes
from vitrail.training.reporting.sinks import Sinks
from vitrail.training.state.state import TrainState
from vitrail.training.steps.faults import FaultConfig, Faults, StepFault

__all__ = ["Recovery"]

BY_ROLLBACK = "the run went back to an earlier checkpoint"
"""Reason in the journal for skipping the batches before the batch of a fault."""


class Recovery:
    """Continues a run after faults, within the bound of its config. All processes call the methods together."""

    def __init__(
        self,
        config: FaultConfig,
        state: TrainState,
        source: Source,
        sinks: Sinks,
        *,
        processes: Processes,
        on_rollback: Callable[[], None],
    ) -> None:
        """`source` has the training images. `on_rollback` is called when the state is that of a checkpoint again."""
        self.config = config
        self.state = state
        self.source = source
        self.sinks = sinks
        self.processes = processes
        self._on_rollback = on_rollback

    def leaves_out(self, batch: Batch) -> bool:
        """Return True if the batch of the current step is skipped after a rollback, and write its keys into the
        journal."""
        if self.state.step + 1 not in self.state.faults.left_out:
            return False
        self._leave_out(batch, BY_ROLLBACK)
        return True

    def recover(self, batch: Batch, fault: StepFault) -> bool:
        """Skip the batch of a fault, or go back to a checkpoint. Return True if the run went back.

        Raises `NonFiniteLoss` if the run has had as many faults as it may have.
        """
        faults, step, most = self.state.faults, self.state.step + 1, self.config.max_faults
        faults.count += 1
        if faults.count > most:
            raise NonFiniteLoss(
                f"{fault} at step {step}, after {most} other faults, which is all that --max-faults allows"
            )
        if fault.action == "rollback":
            self._roll_back(step, str(fault))
            return True
        self._leave_out(batch, str(fault))
        self.sinks.display.note(f"{fault} at step {step:,}: the batch is skipped")
        return False

    def _leave_out(self, batch: Batch, reason: str) -> None:
        own = batch.without_partners()
        keys = [self.source.key(int(sample)) for sample in own.samples[own.views == 0]]
        everyone = [key for part in self.processes.gather(keys) for key in part]
        self.sinks.journal.write("batch left out", step=self.state.step + 1, reason=reason, keys=everyone)

    def _roll_back(self, step: int, reason: str) -> None:
        """Restore a checkpoint from before the batches that will be skipped. If there is none, restore the oldest
        checkpoint, and skip only the batches after it."""
        state, sinks = self.state, self.sinks
        faults = state.faults
        first = step - self.config.rollback_skips + 1
        for note in sinks.checkpoints.restore(state, before=first):
            sinks.display.note(note)
        first = max(first, state.step + 1)
        state.faults = Faults(faults.count, faults.left_out | set(range(first, step + 1)), state.faults.losses)
        self._on_rollback()
        sinks.journal.write("rolled back", step=state.step, at=step, reason=reason, left_out=[first, step])
        sinks.display.note(
            f"{reason} at step {step:,}: the run goes back to step {state.step:,}, and skips the batches of steps "
            f"{first:,} to {step:,}"
        )
