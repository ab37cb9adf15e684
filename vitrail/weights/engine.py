"""Another runtime that computes an output of a bundle's network on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from vitrail.models.predictor import Predictor

EngineName = Literal["openvino", "onnxruntime"]
EngineChoice = Literal["auto", "torch", "openvino", "onnxruntime"]
"""Runtime that computes predictions on a CPU. "auto" is the fastest one of this machine."""


@dataclass(frozen=True, eq=False)
class Engine:
    """A runtime that has loaded a network. `with_engine` in `vitrail/export/engines.py` makes engines."""

    name: EngineName
    network: nn.Module
    """The network that it has loaded. A bundle of another network does not keep the engine."""
    precision: Literal["float32", "bf16"]
    """Number format of matrix products."""
    contents: Literal["logits", "embedding"]
    """Output of the network that the engine computes. PyTorch computes all others."""
    run: Callable[[Float[Tensor, "b c h w"]], Float[Tensor, "b ..."]]
    """Function that computes this output from normalised images. Threads may call it at the same time."""

    @property
    def title(self) -> str:
        """The runtime's own name."""
        return {"openvino": "OpenVINO", "onnxruntime": "onnxruntime"}[self.name]


class EnginePredictor(Predictor):
    """A predictor whose logits or embeddings another runtime computes."""

    def __init__(self, network: nn.Module, engine: Engine) -> None:
        """Prepare a network that has the weights of the engine."""
        super().__init__(network, engine.precision)
        self._engine = engine

    def logits(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b ..."]:
        """Return what `network(images)` returns."""
        return self._engine.run(images) if self._engine.contents == "logits" else super().logits(images)

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b embed_width"]:
        """Return what `network.embed(images)` returns: one vector for each image."""
        return self._engine.run(images) if self._engine.contents == "embedding" else super().embed(images)
