"""The choice of the weights that are trained: all, the last blocks, the head, or low-rank adapters."""

from __future__ import annotations

from torch import nn

from vitrail.errors import ConfigError
from vitrail.models.layers import StochasticDepth
from vitrail.models.linear.lora import add_adapters, check_adapters
from vitrail.models.variants import AnyConfig, AnyNetwork
from vitrail.training.start import StartConfig

__all__ = ["check_choice", "choose_weights"]


def check_choice(start: StartConfig, config: AnyConfig) -> None:
    """Raise `ConfigError` if `start` chooses blocks or adapters that a network of this config cannot have."""
    if start.lora_rank is not None:
        check_adapters(config, start.lora_rank, start.lora_on)
    count = config.num_blocks
    if start.train_blocks is not None and start.train_blocks > count:
        raise ConfigError(f"train_blocks={start.train_blocks} is more than the {count} blocks of the model")


def choose_weights(network: AnyNetwork, start: StartConfig) -> None:
    """Set `requires_grad` for the weights that `start` chooses, and add its adapters. Raises `ConfigError`.

    The blocks below the first trained block compute a fixed function of the image. Dropout and stochastic depth are
    switched off in these blocks, because no weight in them can adapt to the noise. Patch dropout stays, because it
    applies to the whole network. With adapters every block is trained, so nothing is switched off.

    `docs/transfer.md` reports how much time a step takes with few trained blocks.
    """
    check_choice(start, network.config)
    layers = network.layers()
    if start.lora_rank is not None:
        network.requires_grad_(False)
        alpha = float(start.lora_rank) if start.lora_alpha is None else start.lora_alpha
        add_adapters(network, rank=start.lora_rank, alpha=alpha, names=start.lora_on)
        trained = layers.head
    elif start.train_blocks is not None:
        network.requires_grad_(False)
        first = len(layers.blocks) - start.train_blocks
        trained = [*layers.blocks[first:], *(layers.summary if start.train_blocks else ()), *layers.head]
        for module in (*layers.embedding, *layers.blocks[:first]):
            _without_noise(module)
    else:
        return
    for module in trained:
        module.requires_grad_(True)


def _without_noise(module: nn.Module) -> None:
    """Switch off all randomness in a module, in training mode as well, because evaluations change the mode."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, StochasticDepth):
            part.rate = 0.0
