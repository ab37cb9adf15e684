"""The numbers of compute threads and of reading threads, which a run can choose by measuring its steps."""

from __future__ import annotations

from collections.abc import Callable

from vitrail.cores import SharedCores
from vitrail.data.pipeline import Readers, default_threads
from vitrail.errors import plural
from vitrail.training.reporting.sinks import Sinks
from vitrail.training.speed.readers import ReaderTrials
from vitrail.training.state.state import TrainState
from vitrail.training.steps.plan import Plan

__all__ = ["Adaptation"]


class Adaptation:
    """Adapts a run to its machine, and reports this to the journal and the display. `on_readers` receives the number of
    reading threads if the run chooses it."""

    def __init__(self, state: TrainState, plan: Plan, sinks: Sinks, on_readers: Callable[[int], None]) -> None:
        self.state = state
        self.sinks = sinks
        self._on_readers = on_readers
        self._cores = SharedCores() if plan.adapts_threads else None
        self._has_shared = False
        self._trials: ReaderTrials | None = None
        if plan.chooses_readers:
            choices = default_threads(), 0
            self._trials = ReaderTrials(choices, lambda threads: state.batches.use_readers(Readers(threads)))

    def after_step(self, seconds: float, work: float) -> None:
        """Adapt the run after a step that took this time, and whose cost was `work`."""
        if self._trials is not None and (threads := self._trials.add(seconds, work)) is not None:
            self._say_readers(self._trials, threads)
            self._trials = None
        if self._cores is not None and (threads := self._cores.check()) is not None:
            self._say_threads(self._cores, threads)

    def _say_threads(self, cores: SharedCores, threads: int) -> None:
        """Write a new number of compute threads to the journal. The display shows only the first change."""
        self.sinks.journal.write("threads", step=self.state.step, threads=threads, at_most=cores.full)
        if not self._has_shared:
            self._has_shared = True
            self.sinks.display.note(
                f"other programs use the cores, so {threads} of {cores.full} compute threads are used until cores are "
                "free again"
            )

    def _say_readers(self, trials: ReaderTrials, threads: int) -> None:
        """Record the chosen number of reading threads, and display the reason."""
        texts = [f"{1000 * seconds:.3g} ms with {_readers_text(count)}" for count, seconds in trials.times.items()]
        self.sinks.journal.write("readers", step=self.state.step, threads=threads, seconds_per_step=trials.times)
        self.sinks.display.say(
            f"images are read by {_readers_text(threads)} from now on: a step took {' and '.join(texts)}"
        )
        self._on_readers(threads)


def _readers_text(threads: int) -> str:
    return plural(threads, "thread") if threads else "the main thread"
