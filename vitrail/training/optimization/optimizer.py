"""AdamW and SGD with momentum, with decay on weight matrices alone, and a learning rate that falls with depth."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from vitrail.models.lora import LowRank
from vitrail.models.resnet import ResNet
from vitrail.models.vit import VisionTransformer
from vitrail.training.config import OptimizerConfig
from vitrail.training.optimization.layers import layers_of

__all__ = ["make_optimizer", "split_by_decay"]

DECAYED = (nn.Linear, nn.Conv2d)


def split_by_decay(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights of linear layers, convolutions and adapters, which decay, and the rest: norms, biases, tokens,
    positions. Of those that are trained."""
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
    """The optimiser that `config` names, in its fused form: one kernel for all weights (CPU and CUDA have it).

    Weights of layer l of a network of depth d are in groups whose "scale" is `layer_decay ** (d + 1 - l)`: what the
    learning rate is to be multiplied with (2106.08254). Without layer decay all have the scale 1.
    """
    scales = _scales(module, config.layer_decay) if config.layer_decay < 1 else {}
    groups = []
    for parameters, decay in zip(split_by_decay(module), (config.weight_decay, 0.0), strict=True):
        by_scale: dict[float, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_scale.setdefault(scales.get(id(parameter), 1.0), []).append(parameter)
        for scale, members in by_scale.items():
            groups.append({"params": members, "weight_decay": decay, "scale": scale})
    if config.optimizer == "sgd":
        return SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=True)
    return AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def _scales(module: nn.Module, layer_decay: float) -> dict[int, float]:
    """The factor of each weight of the network, by its id."""
    network = next(part for part in module.modules() if isinstance(part, VisionTransformer | ResNet))
    layers = layers_of(network)
    top = len(layers.blocks) + 1
    return {parameter: layer_decay ** (top - number) for parameter, number in layers.numbers().items()}
