"""A guard of speed that no noise reaches: what a step costs in counts, which must not grow, is kept in budget.json.

Per workload that is the FLOPs of its matrix products, its kernel calls (operations that do more than look at a tensor
in another way), its reads (for which the processor waits for a device), the bytes of what is only moved or converted,
and the bytes that forward keeps for backward. FLOPs must be exactly the budget's, the others at most; what is more than
5 % below fails as well, so that a gain is kept. Neither processor nor threads change a count. Versions of PyTorch do:
with another minor version than the budget was counted with, only FLOPs and reads are held. What no count shows is how
fast a kernel is: two operations of the same number and bytes are the same to it.

After a change that is meant to cost more or less, renew the budget and look at its difference before committing it:

    VITRAIL_RENEW_BUDGET=1 python -m pytest tests/training/test_budget.py
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.training.jobs import Make, Prepare
from vitrail.bench.step import record
from vitrail.models.linear.dense import ONEDNN
from vitrail.models.predictor import Predictor
from vitrail.training import loop

BUDGET = Path(__file__).with_name("budget.json")
RENEW = "VITRAIL_RENEW_BUDGET"
SLACK = 0.05
"""How far below its budget a count may lie, as a share of it."""

TORCH = ".".join(torch.__version__.split(".")[:2])

PLAIN = {
    "image_size": (28, 21), "width": 32, "depth": 3, "heads": 2, "mlp_width": 96, "batch_size": 6, "dropout": 0.0,
    "stochastic_depth": 0.0,
}  # fmt: skip
"""Twelve patches, not square. No dropout: it needs the output of GELU, which the fused layer does not keep."""

DEMO = {
    "variant": "RPico+ViT-Pico/8", "image_size": (32, 32), "width": None, "depth": None, "heads": None,
    "mlp_width": None, "batch_size": 4, "dropout": None, "stochastic_depth": None,
}  # fmt: skip
"""The recipe's own network, on a small batch."""

WORKLOADS = {
    f"{task} {name} {precision}": (task, {**fields, "precision": precision})
    for task, name, fields in (
        ("train", "class token", PLAIN),
        ("train", "gap", {**PLAIN, "pool": "gap"}),
        ("train", "demo", DEMO),
        ("predict", "class token", PLAIN),
    )
    for precision in ("bf16", "float32")
}

FREE = {
    "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip
"""Operations without a kernel that are no views by their schema: a view that says otherwise, and bare memory."""

READS = {
    "_local_scalar_dense", "_unique2", "equal", "is_nonzero", "item", "masked_select", "nonzero", "unique_consecutive",
    "unique_dim",
}  # fmt: skip
"""Operations whose result, or its shape, the processor has to know. Methods that are none are for test_loop.py."""

COPIES = {
    "_foreach_copy_", "_to_copy", "_to_dense", "cat", "clone", "constant_pad_nd", "copy", "copy_", "expand_copy",
    "flip", "gather", "index", "index_copy", "index_copy_", "index_select", "permute_copy", "repeat",
    "replication_pad2d", "roll", "select_backward", "slice_backward", "slice_scatter", "stack", "to_mkldnn",
    "view_copy",
}  # fmt: skip
"""Operations that compute nothing: they move or convert."""


@dataclass
class Figures:
    """What a workload costs, by operation; what is kept, by format and shape."""

    flops: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)
    copied_bytes: Counter[str] = field(default_factory=Counter)
    kept_bytes: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_plain(cls, entry: dict[str, Any]) -> Figures:
        return cls(**{name: Counter(counts) for name, counts in entry["parts"].items()})

    @property
    def totals(self) -> dict[str, int]:
        return {name: counts.total() for name, counts in vars(self).items()}

    def to_plain(self) -> dict[str, Any]:
        parts = {name: dict(sorted(counts.items())) for name, counts in vars(self).items()}
        return {"torch": TORCH, **self.totals, "parts": parts}


class Calls(TorchDispatchMode):
    """Counts the operations that it sees; `count` has the compound ones taken apart before they come here."""

    def __init__(self) -> None:
        super().__init__()
        self.figures = Figures()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0].removeprefix("aten::")
        if func.is_view or name in FREE or func.namespace == "profiler":
            return result
        self.figures.kernels[name] += 1
        if name in READS or (name.startswith("index") and _picks_by_mask(args)):
            self.figures.reads[name] += 1
        if name in COPIES:
            moved = tree_leaves(args[0] if result is None else result)  # None where a list is written to
            self.figures.copied_bytes[name] += sum(tensor.numel() * tensor.element_size() for tensor in moved)
        return result


def _picks_by_mask(args: Any) -> bool:
    """Whether an index is a mask: how many places it picks, only its content says."""
    return any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1:2]))


def count(step: Callable[[], object], weights: Iterable[Tensor] = ()) -> Figures:
    """What a call of `step` costs. `weights` are there anyway: that backward needs them keeps nothing."""
    with Calls() as calls:
        products = record(step)
    for product in products:
        calls.figures.flops[product.operation] += product.flops
    calls.figures.kept_bytes = kept_by(step, weights)
    return calls.figures


def kept_by(step: Callable[[], object], weights: Iterable[Tensor]) -> Counter[str]:
    """The bytes that a call of `step` keeps for backward, each storage once however often it is kept."""
    storages = {weight.untyped_storage().data_ptr(): weight for weight in weights}
    bytes_of: Counter[str] = Counter()

    def keep(tensor: Tensor) -> Tensor:
        tensor, storage = tensor.detach(), tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = tensor  # alive until the end, so that no other takes its place
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            bytes_of[f"{str(tensor.dtype).removeprefix('torch.')} {shape}"] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    return bytes_of


def problems(entry: dict[str, Any], found: Figures) -> list[str]:
    """Each count that is not within the budget of `entry`: from what to what, and by which operations."""
    budget, listed = Figures.from_plain(entry), []
    for name in budget.totals if entry["torch"] == TORCH else ("flops", "reads"):
        now, before = getattr(found, name), getattr(budget, name)
        least = before.total() if name == "flops" else (1 - SLACK) * before.total()
        if least <= now.total() <= before.total():
            continue
        verb = "grew" if now.total() > before.total() else "fell"
        changed = sorted(
            ((operation, before[operation], now[operation]) for operation in now | before),
            key=lambda change: -abs(change[2] - change[1]),
        )
        by = ", ".join(f"{operation} {old:,} -> {new:,}" for operation, old, new in changed if old != new)
        listed.append(f"{name} {verb} from {before.total():,} to {now.total():,}: {by}")
    return listed


def read_budget() -> dict[str, Any]:
    return json.loads(BUDGET.read_text(encoding="utf-8")) if BUDGET.exists() else {}


def renew(name: str, found: Figures) -> None:
    """Puts the workload's figures into the budget, and takes out those of workloads that are no more."""
    budget = {**read_budget(), name: found.to_plain()}
    kept = {each: budget[each] for each in WORKLOADS if each in budget}
    BUDGET.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def check(name: str, found: Figures) -> None:
    entry = read_budget().get(name)
    if listed := problems(entry, found) if entry else ["it has none yet"]:
        text = "\n  ".join([f"{name!r} left its budget:", *listed])
        pytest.fail(
            f"{text}\nIf that is meant (a gain is kept this way, too), renew the budget and commit it:\n"
            f"  {RENEW}=1 python -m pytest tests/training/test_budget.py",
            pytrace=False,
        )


@pytest.fixture
def measure(small: Make, prepare: Prepare, tmp_path: Path) -> Callable[[str], Figures]:
    """Counts a workload by its name, the second time that it runs: the first one makes what stays."""

    def run(name: str) -> Figures:
        task, fields = WORKLOADS[name]
        if fields["precision"] == "bf16" and not ONEDNN:
            pytest.skip("this build of torch has no dense layer of oneDNN")
        state, job = prepare(small(tmp_path / "run", **fields))
        state.objective.train()
        if task == "predict":
            network, images = state.objective.network, job.config.images.normalise(next(state.batches).images)

            def step() -> None:
                Predictor(network, job.config.run.precision).logits(images)

            step()
            return count(step, network.parameters())
        loop.train_step(job, state, next(state.batches))
        batch = next(state.batches)
        return count(lambda: loop.train_step(job, state, batch), state.objective.parameters())

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_keeps_to_its_budget(measure: Callable[[str], Figures], name: str) -> None:
    found = measure(name)
    if os.environ.get(RENEW):
        renew(name, found)
    check(name, found)


def test_the_budget_is_of_the_workloads() -> None:
    budget = read_budget()
    assert list(budget) == list(WORKLOADS)
    for entry in budget.values():
        totals = Figures.from_plain(entry).totals
        assert totals == {name: entry[name] for name in totals}
        assert totals["flops"] > 0 and totals["reads"] == 0


def test_numbers_that_are_waited_for_count_as_reads() -> None:
    x = torch.ones(3)

    def step() -> None:
        x.sum().item()
        bool(x[0])
        x[x > 0]
        x.nonzero()
        torch.equal(x, x + 1)

    assert count(step).reads == {"_local_scalar_dense": 2, "index": 1, "nonzero": 1, "equal": 1}
