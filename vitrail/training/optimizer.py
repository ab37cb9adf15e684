"""The settings of the optimizer and the schedule, and the construction of the optimizer with its groups of weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from vitrail.errors import ConfigError, plural
from vitrail.machine import TrainingPrecision
from vitrail.models.linear.lora import LowRank
from vitrail.settings import Checked, Effect, raise_problems, setting
from vitrail.training.schedule import Duration, RunLength, Schedule, ScheduleName, duration_problems, is_zero, steps_of
from vitrail.training.update_rules import (
    Adafactor,
    Lamb,
    Lars,
    MomentumFormat,
    MomentumOf,
    Muon,
    OptaxAdam,
    OptaxMomentum,
    layers_of,
    stacks_of,
    tables_of,
)

OptimizerName = Literal["adamw", "sgd", "adafactor", "muon", "lars", "lamb"]

ClipOf = Literal["all", "part", "weight"]

DecayRule = Literal["auto", "decoupled", "coupled", "independent"]

DECAYED = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention)

TO_AN_END = ("cosine", "linear", "polynomial")
"""Schedules that end at `end_learning_rate`."""


WITH_DECAY = Effect(lambda own: own.weight_decay > 0, "with --weight-decay above 0")

BELOW_HEAD = Effect(
    lambda run: run.task.trains_network and (run.start.train_blocks != 0 or "detection-tokens" in run.task.head_kinds),
    "with trained weights below the head",
    of_run=True,
)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Checked):
    """The optimizer and its learning rate."""

    kind: OptimizerName = setting(
        "adamw",
        name="optimizer",
        effect=Effect(
            lambda run: run.optimizer.kind != "muon" or run.start.train_blocks != 0,
            "unless it is muon and no block is trained",
            of_run=True,
        ),
    )
    """Adam (adamw), SGD with momentum, Adafactor in the variant of big_vision, Muon for the weight matrices of blocks
    and residual units with Adam for the other weights (muon), or for large batches LARS (lars: SGD) and LAMB (lamb:
    Adam), which scale each update by the length of its weight."""
    learning_rate: float = setting(1e-3, above=0, below=math.inf)
    """Peak learning rate, reached after warm-up."""
    base_batch_size: int | None = setting(None, least=1)
    """Batch size that --learning-rate is for. The rate is multiplied by the run's batch size divided by this
    number (1706.02677). By default it is not scaled."""
    schedule: ScheduleName = "cosine"
    """Shape of the learning rate after warm-up. cosine, linear and polynomial fall to --end-learning-rate. rsqrt is an
    inverse square root of the number of steps. staircase changes at the points --stair-at. constant does not change."""
    end_learning_rate: float = setting(0.0, least=0, below=math.inf)
    """Learning rate at the end of a cosine, linear or polynomial schedule."""
    power: float = setting(
        2.0,
        name="schedule_power",
        effect=Effect(lambda own: own.schedule == "polynomial", "with --schedule polynomial"),
        above=0,
        below=math.inf,
    )
    """Exponent of the polynomial schedule."""
    rsqrt_timescale: Duration = setting(
        "10000 steps", effect=Effect(lambda own: own.schedule == "rsqrt", "with --schedule rsqrt")
    )
    """Time scale of the rsqrt schedule: the rate is divided by sqrt(1 + steps after warm-up / time scale)."""
    rsqrt_shift: Duration = setting(
        "0 steps", effect=Effect(lambda own: own.schedule == "rsqrt", "with --schedule rsqrt")
    )
    """Length that is added to the steps after warm-up in the rsqrt schedule. The highest rate is then below
    --learning-rate. Useful for a run that continues another one."""
    stair_at: tuple[Duration, ...] = setting((), distinct=True)
    """Points of the run at which the staircase schedule changes the learning rate, in increasing order."""
    stair_factors: tuple[float, ...] = setting((), least=0, below=math.inf)
    """Factors of --learning-rate. Each one applies from the corresponding point of --stair-at. By default 0.1, 0.01,
    0.001 and so on."""
    warmup: Duration = 0.1
    """Length of the linear rise of the learning rate at the beginning: a fraction of the run, or a length with a unit
    such as "500 steps", "5 epochs" or "64000 images"."""
    warmup_from_zero: bool = setting(False, effect=Effect(lambda own: not is_zero(own.warmup), "with --warmup"))
    """Begin the warm-up at 0, as the papers' code does. By default the first of N warm-up steps has 1/N of the rate."""
    backbone_wait: Duration = setting(0.0, effect=BELOW_HEAD)
    """Length at the beginning of the run in which only the head is trained, as in EoMT (2503.19108). The other weights
    then have a schedule of their own for the rest of the run, which begins with --backbone-warmup."""
    backbone_warmup: Duration = setting(
        0.1, effect=Effect(lambda own: not is_zero(own.backbone_wait), "with --backbone-wait")
    )
    """Length of the warm-up of the weights below the head."""
    cooldown: Duration = 0.0
    """Length of the cool-down at the end of the run, in which the schedule is multiplied by a factor that falls
    linearly from 1 to 0."""
    weight_decay: float = setting(0.05, least=0, below=math.inf)
    """Weight decay of weight matrices. Norms, biases, tokens and position embeddings do not decay."""
    end_weight_decay: float | None = setting(None, least=0, below=math.inf)
    """Weight decay at the end of the run, which --weight-decay approaches along half a cosine wave. By default it does
    not change."""
    weight_decay_rule: DecayRule = setting("auto", effect=WITH_DECAY)
    """decoupled: subtracts decay x learning rate x weight (1711.05101). coupled: adds decay x weight to the gradient.
    independent: subtracts decay x (learning rate / peak learning rate) x weight (big_vision). auto: coupled for SGD
    and LARS, else decoupled."""
    beta1: float = setting(
        0.9,
        effect=Effect(lambda own: own.kind in ("adamw", "lamb", "muon"), "with --optimizer adamw, lamb or muon"),
        least=0,
        below=1,
    )
    """Decay rate of the mean gradient in AdamW and LAMB, and in Muon for the weights that Adam updates."""
    beta2: float = setting(
        0.999,
        effect=Effect(lambda own: own.kind not in ("sgd", "lars"), "with --optimizer adamw, lamb, adafactor or muon"),
        least=0,
        below=1,
    )
    """Decay rate of the mean squared gradient in AdamW, LAMB and Muon. Adafactor's decay rate increases with the steps
    up to this value."""
    momentum: float | None = setting(
        None,
        effect=Effect(lambda own: own.kind not in ("adamw", "lamb"), "with --optimizer sgd, lars, adafactor or muon"),
        least=0,
        below=1,
    )
    """Momentum of SGD and LARS, decay rate of Adafactor's mean update, or decay rate of Muon's mean gradient of
    matrices. By default 0.95 for Muon, else 0.9."""
    momentum_format: MomentumFormat = setting(
        "float32",
        effect=Effect(lambda own: own.kind in ("adamw", "lamb") or own.momentum_rate > 0, "with --momentum above 0"),
    )
    """Number format in which the momentum is stored (AdamW: the mean gradient; Muon: that of matrices). The papers'
    code often uses bfloat16."""
    momentum_of: MomentumOf = setting(
        "gradients",
        effect=Effect(lambda own: own.kind == "lars" and own.momentum_rate > 0, "with --optimizer lars and a momentum"),
    )
    """LARS: sum the scaled gradients, and multiply the sum by the learning rate (gradients: MoCo v3, MAE), or sum the
    gradients times the learning rate of their step (changes: SimCLR)."""
    update_clip: float = setting(0.0, least=0)
    """Adafactor: largest root mean square of the update of a weight matrix. 0 for no limit."""
    learning_rate_factors: tuple[str, ...] = ()
    """Factors of the learning rate for weights by name: PATTERN=FACTOR, such as "head\\..*=10". The first regular
    expression that matches the whole name is used. By default every factor is 1."""
    weight_decay_factors: tuple[str, ...] = setting((), effect=WITH_DECAY)
    """Factors of the weight decay by name, as in --learning-rate-factors. Weights without a match do not decay. By
    default weight matrices have the factor 1."""
    clip: float = setting(1.0, least=0)
    """Largest norm of a gradient; larger gradients are scaled down. 0 for no limit."""
    clip_of: ClipOf = setting("all", effect=Effect(lambda own: own.clip > 0, "with --clip above 0"))
    """Gradients that --clip limits together: those of all weights, those of each part, such as the network and each
    head beside it (part: DINOv2), or those of each weight (weight: DINO and iBOT)."""
    layer_decay: float = setting(1.0, effect=BELOW_HEAD, above=0, most=1)
    """Ratio of each block's learning rate to the rate of the block above. The head has the full rate (2106.08254)."""
    average: float = setting(0.0, least=0, below=1)
    """Decay rate of a running mean of the weights, such as 0.999 (Polyak averaging). The mean is then evaluated and
    saved. 0 for no averaging."""
    average_start: AverageStart = setting("debiased", effect=Effect(lambda own: own.average > 0, "with --average"))
    """Start of --average. debiased: the initial weights are not part of the mean, and the rate applies from the first
    step. initial: the mean starts at the initial weights. capped: the rate after t steps is at most
    (1 + t) / (10 + t)."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from factor_problems("learning_rate_factors", self.learning_rate_factors, zero=False)
        yield from factor_problems("weight_decay_factors", self.weight_decay_factors, zero=True)
        yield from self._schedule_problems()
        if self.update_clip and self.kind != "adafactor":
            yield f"update_clip={self.update_clip} is for optimizer='adafactor'; use clip, or leave it out"
        if self.end_weight_decay is not None and not self.weight_decay:
            yield (
                f"end_weight_decay={self.end_weight_decay} changes the weight decay, but weight_decay=0 switches it "
                "off; set weight_decay above 0"
            )

    def new_problems(self) -> Iterator[str]:
        """Yield a message for each setting that is refused in new runs. Runs of earlier versions can have it."""
        if self.kind == "lamb" and self.weight_decay_rule == "independent":
            yield (
                "weight_decay_rule='independent' does not fit optimizer='lamb', which scales the update with its decay "
                "to the length of the weight; choose 'decoupled' or 'coupled'"
            )

    def _schedule_problems(self) -> Iterator[str]:
        for name in ("warmup", "backbone_wait", "backbone_warmup", "cooldown", "rsqrt_timescale", "rsqrt_shift"):
            yield from duration_problems(name, getattr(self, name))
        for point in self.stair_at:
            yield from duration_problems("stair_at", point)
        if self.end_learning_rate and self.schedule not in TO_AN_END:
            yield (
                f"end_learning_rate={self.end_learning_rate} is for the schedules {', '.join(TO_AN_END)}, and the "
                f"schedule is {self.schedule}; leave it out"
            )
        # A rate for another batch size is compared after `for_batch_size`.
        if self.base_batch_size is None and 0 < self.learning_rate < self.end_learning_rate:
            yield f"end_learning_rate={self.end_learning_rate} is above learning_rate={self.learning_rate}"
        if self.schedule == "staircase" and not self.stair_at:
            yield "schedule='staircase' needs stair_at, the points at which it changes, such as stair_at=(0.33, 0.67)"
        if (self.stair_at or self.stair_factors) and self.schedule != "staircase":
            yield (
                f"stair_at={self.stair_at} and stair_factors={self.stair_factors} are for the schedule staircase, and "
                f"the schedule is {self.schedule}; leave them out"
            )
        if self.stair_factors and len(self.stair_factors) != len(self.stair_at):
            yield (
                f"stair_factors={self.stair_factors} are {len(self.stair_factors)} factors for "
                f"{len(self.stair_at)} points of stair_at; give one factor for each point"
            )

    @property
    def decay_rule(self) -> DecayRule:
        """The rule of weight decay, with "auto" replaced by the rule of the optimizer."""
        if self.weight_decay_rule != "auto":
            return self.weight_decay_rule
        return "coupled" if self.kind in ("sgd", "lars") else "decoupled"

    @property
    def momentum_rate(self) -> float:
        """The momentum, with None replaced by the default of the optimizer."""
        if self.momentum is not None:
            return self.momentum
        return 0.95 if self.kind == "muon" else 0.9

    def for_batch_size(self, batch_size: int | float) -> OptimizerConfig:
        """Return the config for batches of this size, with the learning rate scaled from `base_batch_size`."""
        if self.base_batch_size is None:
            return self
        return replace(self, learning_rate=self.learning_rate * batch_size / self.base_batch_size, base_batch_size=None)

    def decay_factor(self, step: int, steps: int) -> float:
        """Return the factor of the weight decay at a step, counted from 0, of a run of this many steps."""
        if self.end_weight_decay is None:
            return 1.0
        end = self.end_weight_decay / self.weight_decay
        return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * step / steps))

    def schedule_of(self, run: RunLength) -> Schedule:
        """Return the schedule for a run of this length.

        Raises `ConfigError` if parts of the schedule do not fit into the run.
        """
        points = tuple(steps_of(point, run) for point in self.stair_at)
        made = Schedule(
            self.schedule,
            self.for_batch_size(run.batch_size).learning_rate,
            run.steps,
            steps_of(self.warmup, run),
            warmup_from_zero=self.warmup_from_zero,
            end=self.end_learning_rate,
            power=self.power,
            timescale=steps_of(self.rsqrt_timescale, run),
            shift=steps_of(self.rsqrt_shift, run),
            boundaries=points,
            factors=self.stair_factors or tuple(0.1**number for number in range(1, len(points) + 1)),
            cooldown_steps=steps_of(self.cooldown, run),
        )
        raise_problems(self._misfits(made))
        return made

    def backbone_schedule_of(self, run: RunLength) -> Schedule:
        """Return the schedule of the weights below the head for a run of this length. Raises `ConfigError` if it does
        not fit into the run."""
        made, wait = self.schedule_of(run), steps_of(self.backbone_wait, run)
        if not wait:
            return made
        warmup = steps_of(self.backbone_warmup, run)
        if (total := wait + warmup + made.cooldown_steps) > run.steps:
            raise ConfigError(
                f"backbone_wait={self.backbone_wait!r}, backbone_warmup={self.backbone_warmup!r} and cooldown are "
                f"{total:,} steps together, more than the {plural(run.steps, 'step')} of the run; shorten one of them"
            )
        return replace(made, wait_steps=wait, warmup_steps=warmup)

    def _misfits(self, made: Schedule) -> Iterator[str]:
        run = plural(made.steps, "step")
        if made.warmup_steps > made.steps:
            yield (
                f"warmup={self.warmup!r} is {made.warmup_steps:,} steps, more than the {run} of the run; choose a "
                "shorter warm-up or a longer run"
            )
        elif made.warmup_steps + made.cooldown_steps > made.steps:
            yield (
                f"warmup={self.warmup!r} and cooldown={self.cooldown!r} are {made.warmup_steps:,} and "
                f"{made.cooldown_steps:,} steps, together more than the {run} of the run; shorten one of them"
            )
        if self.schedule == "staircase":
            if list(made.boundaries) != sorted(made.boundaries):
                yield f"stair_at={self.stair_at} does not increase: its points are the steps {made.boundaries}"
            elif isinstance(self.stair_at[-1], str) and made.boundaries[-1] >= made.steps:
                yield (
                    f"stair_at={self.stair_at}: step {made.boundaries[-1]:,} is not within the {run} of the run; "
                    "choose earlier points or a longer run"
                )
        if self.schedule == "rsqrt" and made.timescale < 1:
            yield f"rsqrt_timescale={self.rsqrt_timescale!r} is less than one step; choose a longer time scale"


def split_by_decay(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return two lists of the trained parameters: the parameters that decay, and the rest.

    The weights of linear layers, convolutions, attention and adapters decay. Norms, biases, tokens and positions do
    not.
    """
    decayed: set[int] = set()
    for layer in module.modules():
        if isinstance(layer, DECAYED):  # a parametrised weight is no parameter of its layer
            decayed |= {id(one) for name, one in layer.named_parameters(recurse=False) if "weight" in name}
        elif isinstance(layer, LowRank):
            decayed |= {id(layer.a), id(layer.b)}
    trained = [one for one in module.parameters() if one.requires_grad]  # has a weight that layers share once
    return [one for one in trained if id(one) in decayed], [one for one in trained if id(one) not in decayed]


def make_optimizer(module: nn.Module, config: OptimizerConfig, precision: TrainingPrecision = "float32") -> Optimizer:
    """Return the optimizer that `config` describes. `precision` is that of the matrix products in training, which Muon
    uses for its own.

    AdamW and SGD are PyTorch's fused optimizers, which update all weights in one kernel on CPU and CUDA. If the fused
    optimizers cannot apply the config's weight decay or momentum format, `OptaxAdam` and `OptaxMomentum` are used.

    Parameter groups have a "scale", by which the learning rate is multiplied. The scale of layer l of a network of
    depth d is `layer_decay ** (d + 1 - l)` (2106.08254), times the factor of `learning_rate_factors`. Groups of weights
    below the head are marked by "is_below_head" if they have a schedule of their own (`backbone_wait`).
    """
    scales: dict[int, float] = {}
    below: set[int] = set()
    if config.layer_decay < 1 or not is_zero(config.backbone_wait):  # only networks of this package have layers
        layers = layers_of(module)
        top = len(layers.blocks) + 1
        scales = {parameter: config.layer_decay ** (top - number) for parameter, number in layers.numbers().items()}
        head = {id(parameter) for part in layers.head for parameter in part.parameters()}
        below = set() if is_zero(config.backbone_wait) else scales.keys() - head
    names = {id(parameter): name.removeprefix("network.") for name, parameter in module.named_parameters()}
    groups = []
    for parameters, factor in zip(split_by_decay(module), (1.0, 0.0), strict=True):
        by_values: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            name = names.get(id(parameter), "")
            scale = scales.get(id(parameter), 1.0) * factor_of(name, config.learning_rate_factors, 1.0)
            own = factor_of(name, config.weight_decay_factors, 0.0) if config.weight_decay_factors else factor
            by_values.setdefault((scale, own, id(parameter) in below), []).append(parameter)
        for (scale, own, is_below_head), members in by_values.items():
            decay = config.weight_decay * own
            if config.decay_rule == "independent":
                decay /= config.learning_rate * scale  # times the learning rate, it leaves the course of the schedule
            group = {"params": members, "weight_decay": decay, "scale": scale}
            if is_below_head:
                group["is_below_head"] = True
            if config.end_weight_decay is not None:
                group["first_weight_decay"] = decay
            groups.append(group)
    return _of_kind(module, config, groups, precision)


def _of_kind(
    module: nn.Module, config: OptimizerConfig, groups: list[dict[str, Any]], precision: TrainingPrecision
) -> Optimizer:
    rate, momentum, coupled = config.learning_rate, config.momentum_rate, config.decay_rule == "coupled"
    shared: dict[str, Any] = {"lr": rate, "coupled": coupled, "momentum_format": config.momentum_format}
    if config.kind == "adafactor":
        return Adafactor(
            groups, tables_of(module), beta2=config.beta2, update_clip=config.update_clip, momentum=momentum, **shared
        )
    if config.kind == "muon":
        products = torch.float32 if precision == "float32" else torch.bfloat16
        betas = config.beta1, config.beta2
        return Muon(groups, stacks_of(module), betas=betas, momentum=momentum, products=products, **shared)
    is_float32 = config.momentum_format == "float32"
    if config.kind == "lars":
        return Lars(groups, momentum=momentum, momentum_of=config.momentum_of, **shared)
    if config.kind == "lamb":
        return Lamb(groups, momentum=config.beta1, beta2=config.beta2, **shared)
    if config.kind == "sgd":
        if is_float32 and (coupled or not config.weight_decay):
            return SGD(groups, lr=rate, momentum=momentum, fused=True)
        return OptaxMomentum(groups, momentum=momentum, **shared)
    if is_float32:
        return (Adam if coupled else AdamW)(groups, lr=rate, betas=(config.beta1, config.beta2), fused=True)
    return OptaxAdam(groups, momentum=config.beta1, beta2=config.beta2, **shared)


def check_names(module: nn.Module, config: OptimizerConfig) -> tuple[str, ...]:
    """Return notes on patterns for names of weights that match only weights that are not trained. Raise `ConfigError`
    if a pattern matches no weight of an objective or a network, or only weights that an earlier pattern matches."""
    trained = {name.removeprefix("network."): weight.requires_grad for name, weight in module.named_parameters()}
    names, notes = [*trained], []
    for option in ("learning_rate_factors", "weight_decay_factors"):
        left = names
        for text in getattr(config, option):
            before, left = left, [name for name in left if not re.fullmatch(text.rpartition("=")[0], name)]
            if len(left) == len(before):
                raise ConfigError(
                    f"{option}={text!r} matches no weight that no pattern before it matches; names are for example "
                    f"{names[0]} and {names[-1]}"
                )
            if not any(trained[name] for name in before if name not in left):
                notes.append(f"{option}={text!r} has no effect, because the weights that it matches are not trained")
    return tuple(notes)


# Factors of the learning rate and the weight decay for weights that are chosen by their names.


def factor_problems(name: str, factors: Sequence[str], *, zero: bool) -> Iterator[str]:
    """Yield a message for every text of the setting `name` that is not PATTERN=FACTOR.

    The pattern is a regular expression and the factor a number above 0, or at least 0 if `zero` is True.
    """
    for text in factors:
        pattern, found, number = text.rpartition("=")
        try:
            re.compile(pattern)
            value = float(number)
        except (re.error, ValueError):
            value = -1.0
        if not found or not (value >= 0 if zero else value > 0) or value == float("inf"):
            rule = "at least 0" if zero else "above 0"
            yield (
                f"{name}={text!r} is not PATTERN=FACTOR, a regular expression of names of weights and a number {rule}; "
                r"write for example 'head\..*=10'"
            )


def factor_of(weight: str, factors: Sequence[str], otherwise: float) -> float:
    """Return the factor of the first pattern that matches the whole name of a weight. If no pattern matches, return
    `otherwise`."""
    for text in factors:
        pattern, _, number = text.rpartition("=")
        if re.fullmatch(pattern, weight):
            return float(number)
    return otherwise


AverageStart = Literal["debiased", "initial", "capped"]
