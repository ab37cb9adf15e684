"""The common part of the tasks of boxes and of masks. If the head alone is trained, the tokens of an image are computed
once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError
from vitrail.models.network import Features
from vitrail.models.variants import AnyConfig
from vitrail.tasks.kept_outputs import KeptOutputs, is_frozen
from vitrail.tasks.task import Objective, Task


@dataclass(frozen=True, kw_only=True)
class DenseTask(Task):
    """A task of boxes or masks, which has an objective for each kind of head."""

    output_noun = "class"
    targets_noun: ClassVar[str]
    """Noun that messages use for the targets."""
    objectives: ClassVar[Mapping[str, Callable[[nn.Module, Any], Objective]]]
    """Functions that make the objective for a kind of head from the network and the task."""
    unread: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    """Settings of the task that the objective of a kind of head does not have."""

    def check_data(self, splits: Splits) -> None:
        """Raise `DataError` unless the targets are those of the task."""
        if splits.target_kind not in self.targets:
            refusal = f"{splits.title} has no {self.targets_noun}, which {self.name} learns; choose other data"
            raise DataError("\n".join([refusal, *splits.notes]))  # a note can say what is not read

    def check_network(self, network: AnyConfig | None) -> None:
        """Raise `ConfigError` for settings that the objective of the network's head does not have."""
        super().check_network(network)
        kind = getattr(network, "head_kind", "")
        for name in self.unread.get(kind, ()):
            if (value := getattr(self, name)) != getattr(type(self), name):
                raise ConfigError(
                    f"{name}={value} has no effect on the head {kind!r}, whose loss does not use it; leave it out"
                )

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        config: Any = network.config
        return self.objectives[config.head_kind](network, self)


class DenseObjective(Objective):
    """An objective of boxes or masks, whose network is called by `outputs`.

    If nothing below the head is trained, the tokens of an image are the same in every step. They are computed once for
    each image and its mirror image (`KeptOutputs`).
    """

    def __init__(self, network: nn.Module, task: Any = None) -> None:
        """A user's own objective can leave the `task` out."""
        super().__init__(network)
        self.task = task
        self._kept = KeptOutputs()

    def outputs(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b rows outputs"]:
        """Return the outputs of the network in float32."""
        network = self.network
        if not (self.training and images.device.type == "cpu" and is_frozen_below_head(network)):
            return network(images).float()
        tokens = self._kept(images, self._tokens)
        prefix, grid = network.config.prefix, network.config.grid_of(*images.shape[2:])
        first = int(network.config.has_class_token)
        end = prefix + grid[0] * grid[1]
        middle = tokens[:, end:] if network.head.reads_middle else None
        cls, registers, patches = tokens[:, 0] if first else None, tokens[:, first:prefix], tokens[:, prefix:end]
        return network.head(Features(cls, registers, patches, grid, middle=middle)).float()

    def _tokens(self, image: Float[Tensor, "1 c h w"]) -> Float[Tensor, "1 n width"]:
        """Return the tokens of an image, class token and registers first, and those of the middle last."""
        found: Features = self.network.features(image)
        first = [] if found.cls is None else [found.cls[:, None]]
        middle = [] if found.middle is None else [found.middle]
        return torch.cat([*first, found.registers, found.patches, *middle], dim=1)


def is_frozen_below_head(network: Any) -> bool:
    """Return True if only the head of a network is trained, and the tokens of an image do not change."""
    head = getattr(network, "head", None)
    return head is not None and is_frozen(network, tuple(head.parameters()))
