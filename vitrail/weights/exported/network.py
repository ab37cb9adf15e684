"""An exported file as a network: it takes the batches that networks take, and runs in the file's own runtime."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.errors import BundleError, ConfigError
from vitrail.weights.exported.description import Exported


@runtime_checkable
class Session(Protocol):
    """A file that a runtime has loaded."""

    def run(self, images: np.ndarray) -> dict[str, np.ndarray]:
        """Return the outputs for images of shape (b, h, w, c), by their names. Threads may call it at the same time."""


def on_canvas(levels: np.ndarray, exported: Exported) -> np.ndarray:
    """Return resized images as a file takes them.

    A file that resizes pictures itself gets larger pictures if it crops. The images are the parts that it does not crop
    away, and it does not scale pictures of this size.
    """
    if not exported.resizes or exported.canvas == levels.shape[1:3]:
        return levels
    placement = exported.preprocess.placement(exported.canvas)
    canvas = np.zeros((len(levels), *exported.canvas, levels.shape[3]), levels.dtype)
    height, width = levels.shape[1:3]
    canvas[:, placement.top : placement.top + height, placement.left : placement.left + width] = levels
    return canvas


class ExportedNetwork(nn.Module):
    """An exported file with the methods of a network that predictions use.

    Images have the shape (b, c, h, w) and levels from 0 to 255, because the file normalises them. The network cannot be
    trained, saved or resized: the methods for these raise `BundleError`.
    """

    def __init__(self, exported: Exported, session: Session, path: str, seal: str) -> None:
        super().__init__()
        self.config = exported.config
        self.exported = exported
        self.path = path
        self.sha256 = seal
        """Hash of the file, which stands for the hash of the weights."""
        self.session = session
        self.head = nn.Identity() if exported.contents == "logits" else None  # the real head is in the file
        self.anchor = nn.Parameter(torch.empty(0), requires_grad=False)  # PyTorch finds the device by parameters

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Return logits, or the numbers of a regression. Raise `BundleError` if the file contains something else."""
        if self.exported.contents == "logits":
            return self._run(images, "numbers" if self.exported.output == "numbers" else "logits")
        return self.embed(images)

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b embed_width"]:
        """Return the embedding. Raise `BundleError` if the file contains something else."""
        self._check_contents("embedding")
        return self._run(images, "embedding")

    def head_inputs(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b head_inputs"]:
        """Return the embedding, which is the input of a head. Raise `BundleError` as `embed` does."""
        return self.embed(images)

    def features(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("the tokens of its blocks cannot be read")

    def layers(self) -> NoReturn:
        self._refuse("it cannot be trained or examined")

    def with_image_size(self, image_size: tuple[int, int]) -> NoReturn:
        self._refuse(f"it takes images of {self.config.image_size}, not image_size={image_size}")

    def with_head(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("it cannot be given another head")

    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse("its weights cannot be read, saved or trained")

    def __deepcopy__(self, memo: dict[int, Any]) -> ExportedNetwork:
        """Return the network itself. It has no state that a copy could change."""
        return self

    def _run(self, images: Tensor, name: str) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise ConfigError(f"{self.path} computes in its own number format; choose precision='float32'")
        with torch.no_grad():
            levels = images.detach().permute(0, 2, 3, 1).to(getattr(torch, self.exported.dtype))
        return torch.from_numpy(self.session.run(on_canvas(levels.contiguous().numpy(), self.exported))[name])

    def _check_contents(self, wanted: str) -> None:
        if self.exported.contents != wanted:
            self._refuse(
                f"it was exported with output={self.exported.contents!r}, but output={wanted!r} is needed here"
            )

    def _refuse(self, why: str) -> NoReturn:
        raise BundleError(f"{self.path} is an exported model: {why}. Use the model that it was exported from")
