"""A running mean of the weights of a network in training, which is a network as well: a teacher that is never trained.

The mean follows the trained weights after every step. Its momentum is the factor of the old mean.
"""

from __future__ import annotations

import copy
import math
from typing import TypeVar

import torch
from torch import nn

from vitrail.models.compiled import compile_copy
from vitrail.processes.parts import local
from vitrail.tasks.task import Position

__all__ = ["follow", "mean_of", "momentum_at"]

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def mean_of(module: AnyModule) -> AnyModule:
    """Return a copy of a module in evaluation mode that is not trained. Blocks that are compiled are compiled again."""
    made = copy.deepcopy(module).requires_grad_(False).eval()
    for part in made.modules():
        compile_copy(part)
    return made


@torch.no_grad()
def follow(mean: nn.Module, trained: nn.Module, momentum: float) -> None:
    """Multiply the weights of `mean` by the momentum, and add the trained weights, multiplied by 1 minus the
    momentum."""
    means, weights = ([local(weight.detach()) for weight in module.parameters()] for module in (mean, trained))
    torch._foreach_lerp_(means, weights, 1 - momentum)


def momentum_at(position: Position, start: float) -> float:
    """Return the momentum after a step, which rises from `start` to 1 along half a cosine wave."""
    return 1 - (1 - start) * 0.5 * (1 + math.cos(math.pi * position.step / position.steps))
