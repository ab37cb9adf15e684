"""Prediction that does not change the network, by PyTorch or by another runtime on the CPU. Weights are converted once,
and several threads can predict at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.machine import Precision, autocast, resolve_precision
from vitrail.models.compiled import compile_copy
from vitrail.models.linear.dense import Linear
from vitrail.models.network import Features, shared_copy
from vitrail.models.resnet import StandardisedConv
from vitrail.models.shortcuts import has_hooks
from vitrail.settings import problem_of, raise_problems

EngineName = Literal["openvino", "onnxruntime"]
EngineChoice = Literal["auto", "torch", "openvino", "onnxruntime"]
"""Runtime that computes predictions on a CPU. "auto" is the fastest one of this machine."""


class _Exact(nn.Module):
    """A dense layer that computes in float32 under autocast."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Float[Tensor, "b inputs"]) -> Float[Tensor, "b outputs"]:
        with torch.autocast(x.device.type, enabled=False):
            return self.layer(x.float())


class Predictor:
    """Predicts with a network in one precision, in evaluation mode and without gradients.

    The network is not changed, not even its mode. Several predictors of one network may work at the same time, in
    different threads and precisions. Weights that are needed in another form (bfloat16, standardised filters, adapted
    weights) are converted once, when the predictor is made. All other tensors are shared with the network. The
    conversion takes time, so keep one predictor for a sequence of calls. Make a new predictor after the network's
    weights have changed.

    Results keep the number format of the network's last operation. With precision "bf16", logits are therefore
    bfloat16.
    """

    def __init__(self, network: nn.Module, precision: Precision = "float32", *, exact_head: bool = False) -> None:
        """Prepare a network for prediction. The precision "auto" is "bf16" if the processor has matrix units for
        bfloat16. With `exact_head`, the last dense layer computes in float32 in every precision: bfloat16 has eight
        bits for a number such as a year. Raise `ConfigError` for an unknown precision and for weights without
        values."""
        first = next(itertools.chain(network.parameters(), network.buffers()), None)
        self.device = torch.device("cpu") if first is None else first.device
        """Device of the weights. Images have to be on the same device."""
        empty = "network is on the device meta, so its weights have no values" if self.device.type == "meta" else ""
        raise_problems([problem_of("precision", precision, Precision, {}), empty])
        has_own = precision == "auto" and isinstance(getattr(network, "sha256", None), str)  # an exported file
        self.precision: Precision = resolve_precision("float32" if has_own else precision, self.device)
        """Format of matrix products: "bf16" or "float32"."""
        self.network: Any = shared_copy(network)
        """The copy of the network that predicts, with its weights in the form that products use."""
        is_bf16 = self.precision == "bf16"
        dtype = torch.bfloat16 if is_bf16 else None
        head = getattr(self.network, "head", None) if exact_head and is_bf16 else None
        with torch.no_grad():
            for module in self.network.modules():
                if isinstance(module, Linear | StandardisedConv):  # their products may use another weight
                    module.freeze(None if module is head else dtype)
                compile_copy(module)
            if isinstance(head, nn.Linear):
                self.network.head = _Exact(head)

    def __call__(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b ..."]:
        """Return logits, as `logits` does."""
        return self.logits(images)

    def logits(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b ..."]:
        """Return what `network(images)` returns."""
        with self._context():
            return self.network(images)

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b embed_width"]:
        """Return what `network.embed(images)` returns: one vector for each image."""
        with self._context():
            return self.network.embed(images)

    def head_inputs(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b head_inputs"]:
        """Return what `network.head_inputs(images)` returns: the output of the hidden layer before the head."""
        with self._context():
            return self.network.head_inputs(images)

    @overload
    def features(self, images: Float[Tensor, "b c h w"], layers: None = None) -> Features: ...
    @overload
    def features(self, images: Float[Tensor, "b c h w"], layers: Sequence[int]) -> tuple[Features, ...]: ...
    def features(
        self, images: Float[Tensor, "b c h w"], layers: Sequence[int] | None = None
    ) -> Features | tuple[Features, ...]:
        """Return what `network.features(images)` returns, or `network.features(images, layers)`."""
        with self._context():
            return self.network.features(images) if layers is None else self.network.features(images, layers)

    @contextmanager
    def _context(self) -> Iterator[None]:
        with torch.inference_mode(), autocast(self.precision, self.device):
            yield


def network_state(network: nn.Module) -> object:
    """Return a value that changes if a module, a method, a hook or a weight of the network is replaced or changed.

    PyTorch counts changes of a tensor, but not those through `.data` or NumPy, as in many running means of weights. So
    the last number of each tensor is compared as well."""
    tensors = (*network.parameters(), *network.buffers())
    return (
        [(module, vars(module).get("forward"), has_hooks(module)) for module in network.modules()],
        [(tensor.data_ptr(), None if tensor.is_inference() else tensor._version) for tensor in tensors],
        [tensor.detach().reshape(-1)[-1:].tolist() for tensor in tensors],
    )


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
    state: object
    """The `network_state` of the network when it was loaded."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Make a copied or pickled bundle have None in this place: PyTorch computes the network of the copy."""
        return type(None), ()

    @property
    def is_current(self) -> bool:
        """True unless the network was changed after it was loaded."""
        return network_state(self.network) == self.state

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
