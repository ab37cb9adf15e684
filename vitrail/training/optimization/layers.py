"""A network from bottom to top: how deep each of its parts lies, and which of them are trained."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.layers import StochasticDepth
from vitrail.models.lora import add_adapters, check_adapters
from vitrail.models.resnet import ResNet, ResNetConfig
from vitrail.models.variants import AnyConfig, AnyNetwork
from vitrail.training.start import StartConfig

__all__ = ["Layers", "block_count", "check_choice", "choose_weights", "layers_of"]


class Layers(NamedTuple):
    """All modules of a network that hold weights or drop values, each once."""

    embedding: list[nn.Module]
    """Layer 0: what makes tokens of an image, positions, and a hybrid's root; a ResNet's stem."""
    blocks: list[nn.Module]
    """Layers 1 to depth: blocks, or a ResNet's residual units."""
    summary: list[nn.Module]
    """Layer depth + 1, with the head: the final norm, and pooling."""
    head: list[nn.Module]
    """With its hidden layer, if any."""

    def numbers(self) -> dict[int, int]:
        """The layer of each parameter, by its id."""
        layers = [self.embedding, *([block] for block in self.blocks), [*self.summary, *self.head]]
        return {
            id(parameter): number
            for number, modules in enumerate(layers)
            for module in modules
            for parameter in module.parameters()
        }


def layers_of(network: AnyNetwork) -> Layers:
    """The parts of a network in the order of BEiT (2106.08254), whose learning rate decays from the head down."""
    if isinstance(network, ResNet):
        units = [unit for stage in network.stages.children() for unit in stage.children()]
        return Layers([network.stem], units, [network.norm], _there(network.head))
    embedding = _there(network.root, network.patches, network.prefix, network.positions, network.dropout)
    return Layers(
        embedding,
        list(network.blocks),
        _there(network.norm, network.attention_pool),
        _there(network.head_hidden, network.head),
    )


def block_count(config: AnyConfig) -> int:
    """How many blocks `layers_of` finds in a network of this config."""
    return sum(config.depths) if isinstance(config, ResNetConfig) else config.depth


def check_choice(start: StartConfig, config: AnyConfig) -> None:
    """Raises `ConfigError` where `choose_weights` could not do what `start` says with a network of this config."""
    if start.lora_rank is not None:
        check_adapters(config, start.lora_rank, start.lora_on)
    count = block_count(config)
    if start.train_blocks is not None and start.train_blocks > count:
        raise ConfigError(f"train_blocks={start.train_blocks} is more than the {count} blocks of the model")


def choose_weights(network: AnyNetwork, start: StartConfig) -> None:
    """Leaves `requires_grad` to the weights that are to move, and adds adapters where `start` asks for them.

    What lies below the first block that moves is a fixed function of the image: dropout and stochastic depth there are
    switched off for good, since noise that no weight can adapt to only blurs what the others learn from. (Patch dropout
    stays: which patches an image is made of is said for the whole network.) With adapters every block learns, and
    nothing is switched off. Raises `ConfigError`.

    A step of ViT-S/16 in bf16 takes 0.42 of its time with the last two blocks, and 0.32 with the head alone (two cores
    of an AMD EPYC 9004 that others used as well, least of 7, 2026-11).
    """
    check_choice(start, network.config)
    layers = layers_of(network)
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
            _still(module)
        if isinstance(network, ResNet) and start.train_blocks:
            layers.blocks[first].register_forward_pre_hook(_contiguous)
    else:
        return
    for module in trained:
        module.requires_grad_(True)


def _still(module: nn.Module) -> None:
    """Nothing in it is random any more, in training mode either: modes change with every evaluation."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        elif isinstance(part, StochasticDepth):
            part.rate, part.draws = 0.0, False
            part.keep.fill_(1.0)


def _contiguous(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """For a norm whose input wants no gradient: where channels lie last, PyTorch 2.13 ends the process in its backward
    on a CPU, writing the gradient that there is no place for."""
    return tuple(one.contiguous() for one in given)


def _there(*modules: nn.Module | None) -> list[nn.Module]:
    return [module for module in modules if module is not None]
