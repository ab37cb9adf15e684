"""The measured workload: one training step or one prediction, with a batch size and a number format."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.models.cost.footprint import activation_bytes, training_bytes
from vitrail.models.variants import AnyConfig

__all__ = ["EightBits", "Format", "Task", "Workload"]

Task = Literal["train", "infer"]
Format = Literal["float32", "bf16"]
EightBits = Literal["float8", "int8"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step on one batch of random images. Raises `ConfigError` for settings that cannot be run."""

    name: str
    """Name of the network in tables."""
    config: AnyConfig
    task: Task = "train"
    """"train": forward, cross-entropy, backward and AdamW. "infer": logits only."""
    batch: int = 32
    """Images per step."""
    precision: Format = "float32"
    """Format of matrix products. Weights are always float32."""
    eight_bits: EightBits | None = None
    """Format of the dense layers in our blocks, if it has 8 bits: "float8" in training, "int8" in predictions. All
    other layers and other libraries use `precision`."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ConfigError(f"batch_size={self.batch} is less than 1")
        if self.task == "train" and not self.config.num_classes:
            raise ConfigError("num_classes=0 leaves nothing to train; set 1 or more, or use bench infer")
        if self.eight_bits == "float8" and self.task == "infer":
            raise ConfigError("precision='float8' is for training only; choices: 'auto', 'int8', 'bf16', 'float32'")
        if self.eight_bits == "int8" and self.task == "train":
            raise ConfigError("precision='int8' is for predictions only; choices: 'auto', 'float8', 'bf16', 'float32'")

    @property
    def flops(self) -> int:
        """The FLOPs of all matrix products of a step, by formula."""
        each = self.config.training_flops() if self.task == "train" else self.config.inference_flops()
        return self.batch * each

    @property
    def whole_flops(self) -> int:
        """The FLOPs of all matrix products in other libraries, whose last block also computes tokens that the head
        ignores.
        """
        if self.config.architecture == "BiT" or self.config.pool != "cls":
            return self.flops
        return replace(self, config=replace(self.config, pool="gap", class_token=True)).flops

    @property
    def tokens(self) -> int:
        """The sequence length in the blocks, or the number of positions in the last feature map of a ResNet."""
        return self.config.tokens

    @property
    def predicted_bytes(self) -> int | None:
        """Bytes of a training step, by formula. None for predictions and 8 bits, for which there is no formula."""
        if self.task == "infer" or self.eight_bits:
            return None
        return training_bytes(self.config, self.batch, precision=self.precision)

    @property
    def activation_bytes(self) -> int | None:
        """The part of `predicted_bytes` that grows with the batch."""
        if self.task == "infer" or self.eight_bits:
            return None
        return self.batch * activation_bytes(self.config, precision=self.precision)

    @property
    def own_format(self) -> str:
        """Name of the format of our dense layers."""
        return self.eight_bits or self.precision

    def images(self) -> Float[Tensor, "b c h w"]:
        """Return random normalised pixels, the same in every call."""
        shape = self.batch, self.config.channels, *self.config.image_size
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.device)

    def labels(self) -> Int64[Tensor, " b"]:
        """Return random classes, the same in every call."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.config.num_classes, (self.batch,), generator=generator).to(self.device)

    def plain(self) -> dict[str, Any]:
        """Return the workload as JSON values."""
        return {
            "name": self.name,
            "task": self.task,
            "image_size": list(self.config.image_size),
            "channels": self.config.channels,
            "num_classes": self.config.num_classes,
            "tokens": self.tokens,
            "batch_size": self.batch,
            "precision": self.own_format,
            "device": str(self.device),
            "flops": self.flops,
        }
