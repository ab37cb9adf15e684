"""AdamW and SGD with momentum, with decay on weight matrices alone."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from vitrail.training.config import OptimizerConfig

__all__ = ["make_optimizer", "split_by_decay"]

DECAYED = (nn.Linear, nn.Conv2d)


def split_by_decay(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights of linear layers and convolutions, which decay, and the rest: norms, biases, tokens, positions."""
    decayed = [layer.get_parameter("weight") for layer in module.modules() if isinstance(layer, DECAYED)]
    known = {id(parameter) for parameter in decayed}
    return decayed, [parameter for parameter in module.parameters() if id(parameter) not in known]


def make_optimizer(module: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimiser that `config` names, in its fused form: one kernel for all weights (CPU and CUDA have it)."""
    decayed, plain = split_by_decay(module)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if config.optimizer == "sgd":
        return SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=True)
    return AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)
