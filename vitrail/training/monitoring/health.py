"""The health of training: the norm of the weights, the relative size of an update, and the largest attention logit.

Attention logits that grow without limit precede a divergence (2302.05442). Query-key normalisation
(`qk_norm`) keeps them small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.models.attention.kind import AttentionLayer
from vitrail.processes.parts import local, whole

__all__ = ["Health"]

IMAGES = 8
"""Number of images of each part of a batch whose attention logits are computed again."""


class Health:
    """Measures chosen steps. The results stay on the device until they are read."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    @contextmanager
    def measuring(self, module: nn.Module) -> Iterator[None]:
        """Measure the step inside the `with` block. The step needs memory for a second copy of the trained weights.

        If weights are sharded, all processes measure the same step. The logits are those of this process's images.
        """
        weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        before = [weight.detach().clone() for weight in weights]
        logits: list[Tensor] = []
        with _collected_logits(module, logits):
            yield
        with torch.no_grad():
            norm = _norm(weights)
            torch._foreach_sub_([local(weight) for weight in before], [local(weight) for weight in weights])
            self._values = {"parameter_norm": norm, "update_ratio": _norm(before) / norm}
            if logits:
                self._values["attention_logit"] = torch.stack(logits).amax()

    def read(self) -> dict[str, float]:
        """Return the measurements of the last step that was measured since the last call. `parameter_norm` is the
        norm of all trained weights, `update_ratio` is the norm of their change divided by their norm, and
        `attention_logit` is the largest logit of all blocks. Compiled blocks, and kinds of attention without a dense
        map, have no logits."""
        found, self._values = self._values, {}
        if not found:
            return {}
        return dict(zip(found, torch.stack([value.float() for value in found.values()]).tolist(), strict=True))


def _norm(tensors: list[Any]) -> Tensor:
    return whole(nn.utils.get_total_norm([tensor.detach() for tensor in tensors], foreach=True))


@contextmanager
def _collected_logits(module: nn.Module, found: list[Tensor]) -> Iterator[None]:
    """Add the largest logit of each attention layer that runs inside the `with` block to `found`."""

    @torch.no_grad()
    def collect(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(layer, AttentionLayer)
        tokens, positions = inputs[0], inputs[1] if len(inputs) > 1 else None
        if positions is not None:
            positions = positions.of_images(torch.arange(min(IMAGES, len(tokens)), device=tokens.device))
        queries, keys, _, bias = layer.operands(tokens[:IMAGES], positions)
        logits = queries @ keys.mT / math.sqrt(queries.shape[-1])
        found.append((logits if bias is None else logits + bias).amax().float())

    with ExitStack() as stack:
        is_compiled = any(part._compiled_call_impl is not None for part in module.modules())
        for part in () if is_compiled else module.modules():  # a hook would compile the block again
            if isinstance(part, AttentionLayer) and part.training and _has_logits(part):
                stack.enter_context(part.register_forward_pre_hook(collect))
        yield


def _has_logits(layer: AttentionLayer) -> bool:
    return type(layer).operands is not AttentionLayer.operands
