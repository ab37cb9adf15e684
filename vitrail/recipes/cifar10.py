"""The recipe for CIFAR-10, from scratch."""

from __future__ import annotations

from vitrail.recipes.fashion_mnist import fashion_mnist
from vitrail.training.config import TrainConfig

__all__ = ["cifar10"]


def cifar10() -> TrainConfig:
    """Return the config of a run with 1.3 million parameters on CIFAR-10, with a tenth of the training images held out.

    Command: `vitrail train cifar10`. `--data DIR` names a copy on the disk.
    Hardware: two CPU cores; any GPU.
    Time and result: not measured to the end of a run. The length is about 20 minutes at the measured speed of the
    recipe fashion-mnist, which trains the same network. `vitrail bench accuracy cifar10` measures both.
    docs/log.md has the short runs that chose the network.
    """
    return fashion_mnist().override(
        name="cifar10",
        data="hf:uoft-cs/cifar10",
        validation_share=0.1,
        cut_method="stratified",
        epochs=26.0,
        channels=3,
        mean=(0.491, 0.482, 0.447),
        std=(0.247, 0.243, 0.262),
        shift=4,
    )
