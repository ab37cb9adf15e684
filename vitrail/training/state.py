"""The state of a run: everything that its next step depends on, and that a checkpoint holds. Functions make the network
of a prepared run, its state before the first step, and its model as it is saved."""

from __future__ import annotations

import base64
import copy
import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import SGD, Optimizer

from vitrail.data.batch import Rows
from vitrail.data.pipeline import Stage, TrainingBatches
from vitrail.data.source import Samples, key_hash, truth_of
from vitrail.errors import ConfigError
from vitrail.evaluation.measured_images import place_hash
from vitrail.evaluation.metrics.numbers import merit
from vitrail.machine import available_memory
from vitrail.models.compiled import compile_blocks
from vitrail.models.variants import build
from vitrail.processes.group import Processes, local
from vitrail.tasks.own_model import own_config
from vitrail.tasks.task import Objective
from vitrail.training.config import FaultConfig, OnNonFinite
from vitrail.training.job import Job, check_network, network_config_of
from vitrail.training.optimizer import AverageStart, make_optimizer
from vitrail.training.sharding import GradientSum, StreamedCopy, can_stream, shard
from vitrail.training.start import Origin, choose_weights, network_from
from vitrail.weights.bundle import Bundle, weights_sha256

# The running mean of the trained weights (Polyak averaging; the paper's appendix B.1.1 uses 0.9999).


class Average:
    """The exponential moving average of a module's trainable parameters over the updates of the optimizer.

    With a decay rate d, every update multiplies the contribution of earlier weights by d. A step whose batch is skipped
    is no update. The choices of `start` differ early in the run, when a plain average would consist mostly of the
    initial weights:

    - "debiased": The initial weights are not part of the mean, and the factors of the weights of all updates add up to
      1. This is the bias correction of Adam (1412.6980, section 3).
    - "initial": The average starts at the initial weights, without a correction.
    - "capped": The average starts at the initial weights, and the decay after update t, counted from 0, is at most
      (1 + t) / (10 + t). The average then spans about a tenth of the updates so far until the decay is reached, after
      about 9 / (1 - d) updates.
    """

    def __init__(self, module: nn.Module, decay: float, start: AverageStart = "debiased") -> None:
        named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.decay = decay
        self.start = start
        self.weights: list[Tensor] = [local(parameter.detach()) for parameter in named.values()]
        """This process's parts of the weights, which share memory with the module."""
        self.mean = {name: parameter.detach().clone() for name, parameter in named.items()}
        """The mean of each parameter, by the parameter's name."""
        self.updates = 0
        """Number of updates in the mean."""

    @property
    def kept(self) -> float:
        """The factor of the old mean in the next update."""
        if self.start == "initial":
            return self.decay
        if self.start == "capped":
            return min(self.decay, (1 + self.updates) / (10 + self.updates))
        return self.decay * (1 - self.decay**self.updates) / (1 - self.decay ** (self.updates + 1))

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after an update of the optimizer to the mean."""
        torch._foreach_lerp_(self._means(), self.weights, 1 - self.kept)
        self.updates += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights and their mean in place."""
        mean = self._means()
        trained = [weight.clone() for weight in self.weights]
        torch._foreach_copy_(self.weights, mean)
        torch._foreach_copy_(mean, trained)

    @torch.no_grad()
    def restore(self, mean: dict[str, Tensor]) -> None:
        """Copy the mean of another average into this one."""
        for name, tensor in self.mean.items():
            local(tensor).copy_(local(mean[name]))

    def _means(self) -> list[Tensor]:
        return [local(tensor) for tensor in self.mean.values()]


# The states of PyTorch's random-number generators, as plain JSON values.


def process_seed(seed: int, rank: int) -> int:
    """Return the seed of one of several processes, whose dropout and stochastic depth must differ. The first process
    keeps the seed."""
    text = f"process {rank} of {seed}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1 if rank else seed


def random_state() -> dict[str, Any]:
    """Return the states of the generators of the CPU and of every CUDA device.

    The result has the same keys on every machine. "cuda" is an empty list if this process has not used CUDA, because no
    random number was then drawn there.
    """
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {"cpu": _text(torch.get_rng_state()), "cuda": [_text(state) for state in devices]}


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned, also on a machine with more, fewer or no CUDA devices.

    The states of devices that this machine does not have are ignored. Devices without a state in `state` keep their
    current state.
    """
    torch.set_rng_state(_tensor(state["cpu"]))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, text in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(_tensor(text), device)


def _text(state: Tensor) -> str:
    """Return the bytes of a generator's state in base64."""
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


# Faults of training steps: losses and gradients that are not finite, and spikes of the loss. A step is checked
# between its backward pass and the update of the weights. All processes check the same sums, so all of them find the
# same faults.


MAD_OF_NORMAL = 1.4826
"""Standard deviation of a normal distribution, divided by its median absolute deviation."""


class StepFault(Exception):
    """A fault of a step, found before the weights have changed."""

    def __init__(self, reason: str, action: OnNonFinite) -> None:
        super().__init__(reason)
        self.action = action


@dataclass
class Faults:
    """The faults of a run so far, and what is needed to find further ones."""

    count: int = 0
    left_out: list[int] = field(default_factory=list)
    """Steps whose batches are skipped, in increasing order. The first step is 1."""
    losses: list[float] = field(default_factory=list)
    """Losses of the last steps, if losses are compared."""

    def check(self, config: FaultConfig, metrics: dict[str, Tensor]) -> None:
        """Raise `StepFault` if the loss or the gradient norm of a step is not finite, or if the loss is a spike.

        The numbers are read from the device, unless steps are not checked.
        """
        if not config.are_checked:
            return
        names = ("loss", "gradient_norm")
        values = dict(zip(names, torch.stack([metrics[name].float() for name in names]).tolist(), strict=True))
        for name, value in values.items():
            if not math.isfinite(value):
                raise StepFault(f"{name} is {value}", config.on_non_finite)
        if not config.spike_score:
            return
        loss = values["loss"]
        if len(self.losses) >= config.spike_window and (score := robust_score(loss, self.losses)) > config.spike_score:
            raise StepFault(
                f"loss is {loss:.4g}, {score:.1f} robust standard deviations above the median of the "
                f"{config.spike_window} steps before",
                "rollback",
            )
        self.losses = [*self.losses, loss][-config.spike_window :]


def robust_score(value: float, others: list[float]) -> float:
    """Return the difference of a value from the median of others, in robust standard deviations. Return 0 if most of
    the others are equal."""
    middle = median(others)
    deviation = MAD_OF_NORMAL * median(abs(other - middle) for other in others)
    return (value - middle) / deviation if deviation else 0.0


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
    gradients: GradientSum | None = None
    """The sum of gradients over several processes, or None if this process is alone or weights are sharded."""
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

    def is_over(self, job: Job) -> bool:
        """Return True after the last step, or if patience is exhausted.

        The answer depends on the training state alone. A run that ended early therefore also ends when it is resumed
        from its last checkpoint.
        """
        patience = job.config.run.patience
        return self.step >= job.steps or (patience is not None and self.best.waited >= patience)

    def whole_objective(self) -> Objective:
        """Return the objective with its current weights, for evaluations. Sharded weights are whole in it, or they are
        gathered block by block while it computes (`streamed`). Its buffers, such as the running statistics of batch
        norms, are those of the first process. All processes call this method together."""
        if self.copy is None:
            if self.gradients is not None:
                self.gradients.processes.copy_from_first(self.objective.buffers())
            return self.objective
        if self.streamed is not None:
            self.streamed.refresh(self.objective)
            return self.copy
        weights = get_model_state_dict(self.objective, options=StateDictOptions(full_state_dict=True))
        self.copy.load_state_dict(weights)
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
            "faults": vars(self.faults),
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
        self.faults = Faults(**values["faults"])
        if self.average is not None:
            self.average.updates = values["averaged"]
        restore_random_state(values["random"])


# The parts of a prepared run: its network, its state before the first step, and its model as it is saved.


KEPT_FRACTION = 1 / 8
"""Fraction of the free memory that the pixels of the training images may take."""

EXAMINED_TEXTS = 10_000
"""Largest number of texts whose lengths are examined when a run begins."""


def make_network(
    job: Job, model: Bundle | None, on_progress: Callable[[int, int], None] | None = None
) -> tuple[Any, Job, tuple[str, ...]]:
    """Return the network on its device, the job with the network's origin, and notes for the user.

    The weights are those of `model`. Without a `model`, the weights are random. If the job has an origin, a
    checkpoint replaces the random weights later. `on_progress` is that of `head_outputs`.
    """
    config, task, splits = job.config, job.config.task, job.splits
    notes: tuple[str, ...] = ()
    names = task.output_names(splits)
    if job.own_network is not None:
        network: Any = job.own_network.to(job.first_device)
        check_network(network, config.images, len(names))
        return network, job, notes
    if model is not None:
        network, kept, notes = network_from(model, config.start, config.images, config.model.overrides, task, names)
        if config.start.linear_head:
            from vitrail.training.linear_start import head_outputs, start_head  # few runs need what it imports

            outputs = head_outputs(network.to(job.device), names, config, on_progress, job.processes)
            before = copy.deepcopy(network.head.state_dict())
            notes = (*notes, start_head(outputs, splits, kept=kept))
            kept = kept and all(torch.equal(weight, before[name]) for name, weight in network.head.state_dict().items())
        if kept or config.start.linear_head:
            task.load_head(network, splits)
        texts = model.provenance.get("zero_shot")
        made_of = None if texts is None else {**texts, "classes": list(model.classes)}
        origin = Origin(
            weights_sha256(model.network), network.config, texts if kept else None, made_of, model.provenance
        )
        job = replace(job, origin=job.origin or origin)
    else:
        network = build(network_config_of(config, None, job.origin, num_classes=len(names)))
    choose_weights(network, config.start)
    if job.words is None:
        job = replace(job, words=task.words(model, network, splits))
        notes = (*notes, *_notes_on_texts(job))
    if config.run.checkpoint_activations:
        network.checkpoints_activations = True
    network.to(job.first_device)
    if config.run.precision == "float8":
        from vitrail.models.linear.float8 import use_float8

        use_float8(network)
    compile_blocks(network, job.compile)
    return network, job, notes


def _notes_on_texts(job: Job) -> tuple[str, ...]:
    """Return a note if the text tower does not read some of the texts to their end. The first ones are examined. A
    task of a user can learn with a text tower from images that have no texts."""
    rows = range(min(len(job.splits.train), EXAMINED_TEXTS))
    if job.words is None or (texts := truth_of(job.splits.train, rows).texts) is None:
        return ()
    some = [texts[row] for row in range(min(len(texts), EXAMINED_TEXTS))]
    return job.words.notes(some, job.words.tokenizer.encode(some).cut)


def make_state(job: Job, network: nn.Module) -> TrainState:
    """Return the state before the first step."""
    config = job.config
    optimizer = config.optimizer.for_batch_size(config.run.batch_size)
    objective: Any = config.task.objective(network, job.splits)
    if not isinstance(objective, Objective) or not any(one.requires_grad for one in objective.parameters()):
        raise ConfigError(
            f"the objective of the task {config.task.name} must be an `Objective` with a parameter that requires "
            f"gradients, but it is a {type(objective).__name__}" + " without one" * isinstance(objective, Objective)
        )
    if job.words is not None:
        objective.receive(job.words)
    objective.to(job.first_device)
    job.processes.copy_from_first((*objective.parameters(), *objective.buffers()))
    objective.begin(config.images, config.run.seed)
    copied: Objective | None = None
    streamed = None
    if job.shards:
        if can_stream(objective):
            streamed = StreamedCopy(objective, job.device, job.processes)
            copied = streamed.objective
        else:
            copied = copy.deepcopy(objective).requires_grad_(False).to(job.device)
        shard(objective, config.run.shard, job.device, job.processes)
    if job.processes.rank:
        torch.manual_seed(process_seed(config.run.seed, job.processes.rank))
    rows = Rows(
        crop=config.augment.crop(config.run.seed),
        views=config.task.views,
        outlines=config.task.reads_outlines(job.network or own_config(network)),
        tokenizer=objective.text_tokenizer,
        partners=config.augment.mixes,
    )
    batches = TrainingBatches(
        job.splits.train,
        _stages(job),
        seed=config.run.seed,
        readers=job.readers,
        ranks=job.processes.place,
        rows=rows,
        keep=_keeps_pixels(job),
    )
    average = Average(objective, optimizer.average, optimizer.average_start) if optimizer.average else None
    made = make_optimizer(objective, optimizer, config.run.precision)
    if copied is not None and isinstance(made, SGD):  # PyTorch's fused SGD does not take sharded weights
        for group in made.param_groups:
            group |= {"fused": False, "foreach": True}
    gradients = GradientSum(objective, job.processes) if job.processes.are_several and copied is None else None
    return TrainState(objective, made, batches, average=average, gradients=gradients, copy=copied, streamed=streamed)


def _keeps_pixels(job: Job) -> bool:
    """Return True if later epochs should use the pixels that the first epoch decoded.

    This needs a run that reads its images more than once, and enough free memory (`KEPT_FRACTION`). Data that the user
    passes as an object may return another image each time, so it is read in every epoch.
    """
    config, images = job.config, len(job.splits.train)
    if "data" in job.objects or (job.steps - 1) * config.run.batch_size < images:
        return False
    size = max((stage.preprocess.image_size for stage in _stages(job)), key=math.prod)
    return pixels_fit(images * config.images.channels * math.prod(size), job.processes)


def pixels_fit(values: int, processes: Processes) -> bool:
    """Return True if the pixels of a run's images, one byte per value, may stay in memory (`KEPT_FRACTION`). Each of
    the processes of a machine has its own copy. False if the free memory is unknown."""
    needed = processes.place.local_world * values
    try:
        return needed <= KEPT_FRACTION * available_memory(torch.device("cpu"))
    except ConfigError:
        return False


def make_bundle(job: Job, objective: Objective) -> Bundle:
    """Return the model as it would be saved now. `objective` contains the network in training."""
    config, splits = job.config, job.splits
    provenance: dict[str, Any] = {
        "data": config.data.spec,
        "data_fingerprint": job.fingerprint,
        "validation": config.data.validation,
        "validation_share": config.data.validation_share if splits.validation is not None else 0.0,
        "cut_method": config.data.cut_method,
        "recipe": config.run.name,
        "seed": config.run.seed,
        "steps": job.steps,
        "kept": config.run.keep,
    }
    if config.data.mix:
        provenance["mix"] = list(config.data.mix)
    specs = [config.data.spec, *(text.partition(":")[2] for text in config.data.mix)]
    provenance["places"] = {spec: place for spec in specs if (place := place_hash(spec))}
    if splits.validation is not None:
        provenance["validation_keys"] = key_hash(splits.validation)
    if isinstance(splits.train, Samples) and splits.train.targets.ids:
        provenance["class_ids"] = list(splits.train.targets.ids)
    if job.origin is not None:
        provenance |= {
            "init": config.start.init, "init_sha256": job.origin.sha256, "initial": job.origin.provenance,
        }  # fmt: skip
        if job.origin.zero_shot is not None:
            provenance["zero_shot"] = job.origin.zero_shot
    return config.task.bundle(objective, config.task.output_names(splits), config.images, provenance)


def _stages(job: Job) -> list[Stage]:
    """Return the stages of the training batches, one for each phase."""
    config = job.config
    images = [replace(config.images, image_size=phase.image_size) for phase in job.phases]
    return [
        Stage(
            config.augment.training_preprocess(of_phase),
            phase.batch_size,
            phase.first,
            config.task.local_views_of(of_phase, config.augment, config.run.seed),
        )
        for phase, of_phase in zip(job.phases, images, strict=True)
    ]
