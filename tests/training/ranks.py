"""Functions for the processes of a run in tests. The processes import this module, so it does not import pytest."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.data.formats.folder import read_folder
from vitrail.data.pipeline import Readers, Stage, TrainingBatches
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Sample, Source
from vitrail.data.sources import DataConfig
from vitrail.data.targets import Target
from vitrail.errors import Stopped
from vitrail.evaluation import outputs as outputs_module
from vitrail.evaluation.outputs import Outputs
from vitrail.models.network import HasLayers
from vitrail.processes.group import join_processes, whole
from vitrail.processes.launch import launch
from vitrail.recipes import RECIPES
from vitrail.tasks.classification import Accuracy
from vitrail.training import checkpoint, loop
from vitrail.training import job as forecast
from vitrail.training import run as execution
from vitrail.training.after_step import Run
from vitrail.training.config import TrainConfig
from vitrail.training.folder import locked
from vitrail.training.job import prepare
from vitrail.training.log import read_journal
from vitrail.training.run import resume, train
from vitrail.training.sharding import StreamedCopy
from vitrail.training.start import open_initial
from vitrail.training.state import TrainState, make_network, make_state
from vitrail.weights.load import load


def config_of(data: Path, run: Path, **fields: Any) -> TrainConfig:
    """Return a run of 12 steps, of which 10 are an epoch. With SGD, rounding errors do not grow."""
    defaults = {
        "data": str(data), "run": str(run), "variant": "ViT-Pico/7", "image_size": (28, 28), "steps": 12,
        "batch_size": 20, "width": 16, "depth": 2, "heads": 2, "mlp_width": 32, "precision": "float32",
        "device": "cpu", "threads": 1, "evaluations": 3, "checkpoints": 3, "optimizer": "sgd", "learning_rate": 0.05,
        "process_timeout": "300s",
    }  # fmt: skip
    return RECIPES["demo"]().override(**{**defaults, **fields})


def trained(config: TrainConfig) -> dict[str, float]:
    return train(config).metrics


def trained_on_machines(config: TrainConfig, processes: int) -> dict[str, float]:
    """Train as if each machine had this number of processes, and return the metrics."""
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "LOCAL_RANK": str(launch().rank % processes)}
    return trained(config)


def trained_and_stopped(config: TrainConfig, rank: int, step: int) -> str:
    """Train, and send one process a signal after a step. Return the message of the stop."""
    at_step(rank, step, lambda: os.kill(os.getpid(), signal.SIGTERM))
    try:
        train(config)
    except Stopped as stop:
        return str(stop)
    raise AssertionError("the run did not stop")


def stopped_and_resumed(config: TrainConfig) -> dict[str, float]:
    """Train until the time of the run is over, continue in the same processes, and return the metrics."""
    try:
        train(config.override(max_time="0.01s"))
    except Stopped as stop:
        assert stop.run is not None
        return resume(stop.run, changes={"max_time": "1h"}).metrics
    raise AssertionError("the run did not stop")


def resumed(folder: Path) -> dict[str, float]:
    return resume(folder).metrics


def killed(config: TrainConfig, rank: int, step: int) -> None:
    at_step(rank, step, lambda: os.kill(os.getpid(), signal.SIGKILL))
    train(config)


def killed_in_a_save(config: TrainConfig, rank: int, step: int) -> None:
    """Train, and kill one process in the checkpoint of a step, when its tensors are written and not yet hashed."""

    def hashes(folder: Path, own: int) -> dict[str, Any]:
        if own == rank and folder.name == f".step-{step}.vitrail-partial":
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(folder, own)

    plain, checkpoint._hashes = checkpoint._hashes, hashes
    train(config)


def hanging(config: TrainConfig, rank: int, step: int, seconds: float) -> None:
    at_step(rank, step, lambda: time.sleep(seconds))
    train(config)


def on_a_full_disk(config: TrainConfig, rank: int, step: int) -> None:
    """Train, and let one process write only small files after a step."""
    at_step(rank, step, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY)))
    train(config)


def at_step(rank: int, step: int, act: Any) -> None:
    """Act in one process before it has told the others that it has done a step."""
    after_step = loop.after_step

    def acting(run: Run, state: TrainState, batch: Any, metrics: dict[str, Tensor]) -> None:
        if launch().rank == rank and state.step == step:
            act()
        after_step(run, state, batch, metrics)

    loop.after_step = acting


class Breaking(nn.Module):
    """A network of the user's own, whose outputs become NaN in one process."""

    def __init__(self, rank: int, calls: int) -> None:
        super().__init__()
        self.rank, self.calls, self.called = rank, calls, 0
        self.layer = nn.Linear(28 * 28, 10)

    def forward(self, images: Tensor) -> Tensor:
        self.called += self.training
        outputs: Tensor = self.layer(images.flatten(1))
        return outputs * float("nan") if launch().rank == self.rank and self.called > self.calls else outputs


def diverging(config: TrainConfig, rank: int, steps: int) -> None:
    """Train a network that breaks in one process after some steps. The other processes begin with other weights."""
    torch.manual_seed(launch().rank)
    train(
        config.override(variant=None, width=None, depth=None, heads=None, mlp_width=None), network=Breaking(rank, steps)
    )


def poisoned(config: TrainConfig, rank: int, step: int) -> dict[str, float]:
    """Train, and make the outputs of the network in one process NaN in the batch after a step, once. Return the
    metrics."""
    after_step, done = loop.after_step, list[int]()

    def acting(run: Run, state: TrainState, batch: Any, metrics: dict[str, Tensor]) -> None:
        after_step(run, state, batch, metrics)
        if launch().rank == rank and state.step == step and not done:
            done.append(step)
            network = next(part for part in state.objective.modules() if isinstance(part, HasLayers))
            hook = network.register_forward_hook(lambda module, inputs, output: (hook.remove(), output * torch.nan)[1])

    loop.after_step = acting
    return train(config).metrics


class Marked:
    """A source in which the images of some samples are white."""

    def __init__(self, source: Source, marked: Iterable[int]) -> None:
        self.source, self.marked, self.classes = source, frozenset(marked), source.classes

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Sample:
        sample = self.source[index]
        return replace(sample, image=np.full((28, 28, 1), 255, np.uint8)) if index in self.marked else sample

    def key(self, index: int) -> str:
        return self.source.key(index)

    def target(self, index: int) -> Target:
        return self.source.target(index)


class Fragile(nn.Module):
    """A network of the user's own with a fault for white images: "loss", "gradient" or "spike"."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        torch.manual_seed(4)
        self.layer = nn.Linear(28 * 28, 10)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1)
        outputs: Tensor = self.layer(pixels)
        white = (pixels.amin(1) == pixels.amax(1)).unsqueeze(1)
        if self.fault == "gradient":  # the root of 0 is 0, and its derivative is infinite
            return outputs + (0 * outputs + (~white).float()).sqrt()
        return outputs * torch.where(white, float("nan") if self.fault == "loss" else 1e4, 1.0)


def measured_twice(config: TrainConfig) -> tuple[float, float]:
    """Train a network of the user's own with a batch norm. Return the cross-entropy of the test images that the run
    measured, and the one that this process measures alone."""
    plain = config.override(variant=None, width=None, depth=None, heads=None, mlp_width=None)
    network, source = (
        nn.Sequential(nn.Flatten(), nn.BatchNorm1d(28 * 28), nn.Linear(28 * 28, 10)),
        plain.data.open().test,
    )
    with patch.object(forecast, "EVALUATION_BATCH", 8):
        result = train(plain, network=network)
    (event,) = (one for one in read_journal(result.folder / "journal.jsonl") if one.get("split") == "test")
    return event["cross_entropy"], Accuracy()(Outputs(result.bundle), source, source)["cross_entropy"]


def batches_of(data: Path) -> list[list[int]]:
    """Return the samples of the 10 batches of an epoch of `config_of`."""
    splits = DataConfig(spec=str(data)).open()
    images = Preprocess(image_size=(28, 28), channels=1)
    batches = TrainingBatches(splits.train, [Stage(images, 20)], seed=0, readers=Readers(0))
    return [next(batches).samples.tolist() for _ in range(10)]


def with_faults(config: TrainConfig, marked: Sequence[int], fault: str = "loss", **options: Any) -> dict[str, float]:
    """Train a network that has a fault in the batches with marked samples, and return the metrics."""
    splits = config.data.open()
    plain = config.override(variant=None, width=None, depth=None, heads=None, mlp_width=None)
    data = replace(splits, train=Marked(splits.train, marked))
    return train(plain, data=data, network=Fragile(fault), **options).metrics


def gradients(
    config: TrainConfig, invalid: Sequence[int] = (), at_once: bool = False
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the metrics and the gradients of a step in float64, in which some images of the batch are not decoded.

    If `at_once`, one backward pass computes the gradients of a `BatchObjective` through the features of all parts.
    """
    model = open_initial(config.start)
    job = prepare(config, model=model, processes=join_processes())
    torch.manual_seed(config.run.seed)
    network, job, _ = make_network(job, model)
    state = make_state(job, network)
    objective: Any = state.objective.double()
    for one in (objective.network, getattr(objective, "teacher", objective.network)):
        for name in ("forward", "embed", "features", "encode"):
            plain = getattr(one, name)
            setattr(one, name, lambda images, plain=plain, **fields: plain(images.double(), **fields))
    batch, first = next(state.batches), 0
    if job.processes.are_several:
        first = job.processes.rank * (len(batch) // 2)
    valid = torch.tensor([first + row // 2 not in invalid for row in range(len(batch))])
    batch = replace(batch, valid=valid, images=batch.images * valid[:, None, None, None])
    found: dict[str, list[float]] = {}

    def keep() -> None:
        for name, parameter in objective.named_parameters():
            if parameter.grad is not None:
                found[name] = whole(parameter.grad).flatten().tolist()

    state.optimizer.step = keep  # type: ignore[assignment, method-assign]
    torch.manual_seed(7 + job.processes.rank)
    if at_once:
        objective.before_step(job.position(0))
        parts = [
            part.with_images(config.images.normalise)
            for part in loop._augmented(batch, job, 0).chunks(config.run.accumulation)
        ]
        features = [objective.fixed_features(part) | objective.features(part) for part in parts]
        joined = {name: torch.cat([values[name] for values in features]) for name in features[0]}
        output = objective.compare(joined, torch.cat([objective.counted(part) for part in parts]), job.processes)
        output.loss.backward()
        keep()
        return {"loss": output.loss.item()}, found
    return {name: float(value) for name, value in loop.train_step(job, state, batch).items()}, found


def holding_the_lock(folder: Path, ready: Any) -> None:
    """Hold the lock of a run's folder until the process is killed, and say so to another one."""
    with locked(folder):
        ready.send(True)
        time.sleep(60)


def on_other_machines(config: TrainConfig, folders: list[Path]) -> None:
    """Train in another current folder in every process."""
    os.chdir(folders[launch().rank])
    train(config)


def busy(timeout: float, seconds: float) -> tuple[float, float]:
    """Let the first process compute for longer than the time-out. Return its result, and the CPU time of this process
    meanwhile."""
    processes = join_processes(timeout)

    def compute() -> float:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return 1.5

    with processes.reporting():
        processes.gather(None)  # or the first process could end while another one still joins
        begin = time.process_time()
        found = processes.on_first(compute, is_long=True)
        return found, time.process_time() - begin


def streamed(config: TrainConfig, batch: int) -> tuple[dict[str, float], list[int], str]:
    """Train sharded weights with evaluations in small batches. Return the metrics, the largest number of bytes of block
    weights that evaluations held at a time with the number of bytes of all blocks, and the device of the result."""
    forecast.EVALUATION_BATCH = batch
    gather, free = StreamedCopy._gather, StreamedCopy._free
    held = {"now": 0, "most": 0}
    sizes: dict[tuple[int, int], int] = {}

    def size_of(copied: StreamedCopy, number: int, place: int) -> int:
        return sum(parameter.nbytes for _, parameter in copied._blocks[number][place])

    def gathering(self: StreamedCopy, number: int, place: int) -> None:
        gather(self, number, place)
        sizes[number, place] = size_of(self, number, place)
        held["now"] += sizes[number, place]
        held["most"] = max(held.values())

    def freeing(self: StreamedCopy, number: int, place: int) -> None:
        held["now"] -= size_of(self, number, place) if (number, place) in sizes else 0
        free(self, number, place)

    StreamedCopy._gather, StreamedCopy._free = gathering, freeing  # type: ignore[method-assign]
    result = train(config)
    return result.metrics, [held["most"], sum(sizes.values())], str(result.bundle.device)


def trained_on_unequal_machines(config: TrainConfig) -> dict[str, float]:
    """Train as if each machine had memory for evaluations in larger batches than the one before."""
    with patch.object(execution, "evaluation_batch", lambda config, network: 8 + 3 * launch().rank):
        return trained(config)


def measured_on_unequal_machines(model: Path, data: Path) -> tuple[dict[str, float], list[list[float]]]:
    """Return the metrics of a model, and its features, as if each machine computed in larger batches than the one
    before."""
    with patch.object(outputs_module, "prediction_batch", lambda *settings: 4 + 3 * launch().rank):
        source = read_folder(data).samples
        outputs = Outputs(load(str(model)), batch_size=None, processes=join_processes())
        return Accuracy()(outputs, source, source), outputs.features(source).features.tolist()
