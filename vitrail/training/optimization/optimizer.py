"""AdamW and SGD with momentum, with decay on weight matrices only, and a learning rate that can fall with depth."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from vitrail.models.linear.lora import LowRank
from vitrail.models.network import HasLayers
from vitrail.settings import above_zero, at_least, below_one, named, one_of, raise_problems
from vitrail.training.optimization.schedule import ScheduleName
from vitrail.training.state.average import AverageStart

__all__ = ["OptimizerConfig", "OptimizerName", "make_optimizer", "split_by_decay"]

OptimizerName = Literal["adamw", "sgd"]

DECAYED = (nn.Linear, nn.Conv2d)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning rate. Raises `ConfigError`, naming every field that does not fit."""

    kind: OptimizerName = field(default="adamw", metadata=named("optimizer"))
    """AdamW, or SGD with momentum."""
    learning_rate: float = 1e-3
    """Peak learning rate, reached after warm-up."""
    schedule: ScheduleName = "cosine"
    """Course of the learning rate after the peak: down to 0 along a cosine or a line, or constant."""
    warmup: float = 0.1
    """Fraction of the run in which the learning rate rises linearly from 0."""
    weight_decay: float = 0.05
    """Decoupled weight decay. Applied to weight matrices only, not to norms, biases, tokens or position embeddings."""
    beta1: float = 0.9
    """AdamW's decay rate of the mean gradient."""
    beta2: float = 0.999
    """AdamW's decay rate of the mean squared gradient."""
    momentum: float = 0.9
    """Momentum of SGD."""
    clip: float = 1.0
    """Largest norm of the gradient over all weights; larger gradients are scaled down. 0 for no limit."""
    layer_decay: float = 1.0
    """Ratio of each block's learning rate to that of the block above it; the head has the full rate (2106.08254)."""
    average: float = 0.0
    """Decay rate of a running mean of the weights, such as 0.999 (Polyak averaging). The mean is then evaluated and
    kept. 0 for none."""
    average_start: AverageStart = "debiased"
    """Start of --average. debiased: the initial weights have no weight, and the rate applies from the first step.
    initial: the mean starts at the initial weights. capped: the rate after t steps is at most (1 + t) / (10 + t)."""

    def __post_init__(self) -> None:
        problems = [
            *above_zero(self, "learning_rate"),
            *at_least(self, clip=0, weight_decay=0),
            *below_one(self, "warmup", "beta1", "beta2", "momentum", "average"),
            *one_of(self, optimizer=OptimizerName, schedule=ScheduleName, average_start=AverageStart),
        ]
        if not 0 < self.layer_decay <= 1:
            problems.append(f"layer_decay={self.layer_decay} is not in (0, 1]")
        raise_problems(problems)


def split_by_decay(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained parameters in two lists: those that decay, and the rest.

    The weights of linear layers, convolutions and adapters decay. Norms, biases, tokens and positions do not.
    """
    matrices: list[nn.Parameter] = []
    for layer in module.modules():
        if isinstance(layer, DECAYED):
            matrices.append(layer.get_parameter("weight"))
        elif isinstance(layer, LowRank):
            matrices += [layer.a, layer.b]
    known = {id(parameter) for parameter in matrices}
    plain = [parameter for parameter in module.parameters() if id(parameter) not in known]
    return [one for one in matrices if one.requires_grad], [one for one in plain if one.requires_grad]


def make_optimizer(module: nn.Module, config: OptimizerConfig) -> Optimizer:
    """Return the optimiser that `config` names, in its fused form: one kernel for all weights, on CPU and CUDA.

    Parameter groups have a "scale", by which the learning rate is multiplied. The scale of layer l of a network of
    depth d is `layer_decay ** (d + 1 - l)` (2106.08254). Without layer decay every scale is 1.
    """
    scales = _scales(module, config.layer_decay) if config.layer_decay < 1 else {}
    groups = []
    for parameters, decay in zip(split_by_decay(module), (config.weight_decay, 0.0), strict=True):
        by_scale: dict[float, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_scale.setdefault(scales.get(id(parameter), 1.0), []).append(parameter)
        for scale, members in by_scale.items():
            groups.append({"params": members, "weight_decay": decay, "scale": scale})
    if config.kind == "sgd":
        return SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=True)
    return AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def _scales(module: nn.Module, layer_decay: float) -> dict[int, float]:
    """Return the scale of each parameter of the network, by its id."""
    network: HasLayers = next(part for part in module.modules() if isinstance(part, HasLayers))
    layers = network.layers()
    top = len(layers.blocks) + 1
    return {parameter: layer_decay ** (top - number) for parameter, number in layers.numbers().items()}
