"""What is timed: one training step or one prediction of a network, at a batch size and in a number format."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.models.cost.footprint import activation_bytes, training_bytes
from vitrail.models.variants import AnyConfig

__all__ = ["Format", "Task", "Workload"]

Task = Literal["train", "infer"]
Format = Literal["float32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step on one batch of random images. Raises `ConfigError` when it is made and cannot be run."""

    name: str
    """The network's, for the reader."""
    config: AnyConfig
    task: Task = "train"
    """train: forward, cross-entropy, backward, AdamW. infer: logits alone."""
    batch: int = 32
    """Images a step."""
    precision: Format = "float32"
    """The format of matrix products; weights are float32 in both."""
    float8: bool = False
    """Whether the dense layers of our blocks train in 8 bits; all others, and other libraries, stay in `precision`."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch_size={self.batch} is less than 1")
        if self.task == "train" and not self.config.num_classes:
            raise ConfigError("num_classes=0 leaves nothing to train on; give 1 or more, or bench infer")
        if self.float8 and self.task == "infer":
            raise ConfigError("precision='float8' is of training; choices of bench infer: 'auto', 'bf16', 'float32'")

    @property
    def flops(self) -> int:
        """Of all matrix products of a step, by closed form."""
        each = self.config.training_flops() if self.task == "train" else self.config.inference_flops()
        return self.batch * each

    @property
    def whole_flops(self) -> int:
        """Of all products where the last block computes tokens that nobody reads, as in other libraries."""
        if self.config.architecture == "BiT" or self.config.pool != "cls":
            return self.flops
        return replace(self, config=replace(self.config, pool="gap", class_token=True)).flops

    @property
    def tokens(self) -> int:
        """Length of the sequence that the blocks see; of a ResNet, cells of its last feature map."""
        return self.config.tokens

    @property
    def predicted_bytes(self) -> int | None:
        """Memory of a training step by closed form; there is no such form of a prediction, nor of float8."""
        if self.task == "infer" or self.float8:
            return None
        return training_bytes(self.config, self.batch, precision=self.precision)

    @property
    def activation_bytes(self) -> int | None:
        """The part of `predicted_bytes` that grows with the batch."""
        if self.task == "infer" or self.float8:
            return None
        return self.batch * activation_bytes(self.config, precision=self.precision)

    def images(self) -> Float[Tensor, "b c h w"]:
        """Random pixels, normalised, the same in every call."""
        shape = self.batch, self.config.channels, *self.config.image_size
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.device)

    def labels(self) -> Int64[Tensor, " b"]:
        """Random classes, the same in every call."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.config.num_classes, (self.batch,), generator=generator).to(self.device)

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "name": self.name,
            "task": self.task,
            "image_size": list(self.config.image_size),
            "channels": self.config.channels,
            "num_classes": self.config.num_classes,
            "tokens": self.tokens,
            "batch_size": self.batch,
            "precision": "float8" if self.float8 else self.precision,
            "device": str(self.device),
            "flops": self.flops,
        }
