"""The description inside an exported file: outputs, classes, preprocessing and the network's config, as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from vitrail.data.pixels.geometry import scaled_side
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError, ConfigError
from vitrail.models.variants import ARCHITECTURES, AnyConfig
from vitrail.settings import from_plain, to_plain
from vitrail.weights.prediction import OutputKind

KEY = "vitrail"
"""Name of the description among a file's metadata."""

FORMAT = 1

Contents = Literal["logits", "embedding", "tokens"]
"""Result of an exported network. "logits" is the head's output, with probabilities beside it."""


@dataclass(frozen=True)
class Exported:
    """Description of an exported file. The file takes images of shape (batch, height, width, channels), whose levels
    are in 0 to 255, and normalises them itself."""

    config: AnyConfig
    contents: Contents
    output: OutputKind
    """Meaning of the logits."""
    classes: tuple[str, ...]
    """Names of the head's outputs, or () if the file does not contain the head."""
    preprocess: Preprocess
    """Preprocessing of the model. Decoding is done before the file is called, and normalising is done in the file.
    Resizing is done in the file if `resizes` is True."""
    weights_sha256: str
    """Hash of the weights of the network that was exported."""
    precision: str = "float32"
    """Number format of products with weights: "float32" or "int8"."""
    resizes: bool = False
    """True if the file takes pictures of any size, and resizes and crops them itself."""
    any_size: bool = False
    """True if the file takes resized images of any height and width that patches divide."""

    @property
    def dtype(self) -> str:
        """Number format of the input: uint8, or float32 if resizing keeps fractions of levels."""
        return "float32" if self.preprocess.resampler == "tensorflow" else "uint8"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image. If the file takes images of any size, the height and width are those
        of the network."""
        return (*self.preprocess.image_size, self.preprocess.channels)

    @property
    def canvas(self) -> tuple[int, int]:
        """Height and width of a picture from which the file takes a part of the network's size without scaling it."""
        height, width = (scaled_side(side, self.preprocess.crop_share) for side in self.preprocess.image_size)
        return height, width


def output_names(contents: Contents, output: OutputKind) -> tuple[str, ...]:
    """Return the names of a file's outputs."""
    if contents != "logits":
        return (contents,)
    return ("numbers",) if output == "numbers" else ("logits", "probabilities")


def text_of(exported: Exported) -> str:
    """Return the description as JSON. The same description always has the same text."""
    return json.dumps(
        {
            "format": FORMAT,
            "architecture": exported.config.architecture,
            "config": to_plain(exported.config),
            "contents": exported.contents,
            "output": exported.output,
            "classes": list(exported.classes),
            "preprocess": to_plain(exported.preprocess),
            "weights_sha256": exported.weights_sha256,
            "precision": exported.precision,
            "resizes": exported.resizes,
            "any_size": exported.any_size,
        },
        ensure_ascii=False,
    )


def parse(text: str, path: str) -> Exported:
    """Return the description of the file `path` from its JSON. Raise `BundleError`."""
    try:
        values: dict[str, Any] = json.loads(text)
        if values["format"] > FORMAT:
            raise BundleError(
                f"{path} has format {values['format']}, written by a newer version of Vitrail; this version reads "
                f"formats up to {FORMAT}. Update Vitrail to use this model"
            )
        return Exported(
            config=from_plain(ARCHITECTURES[values["architecture"]][0], values["config"]),
            contents=values["contents"],
            output=values["output"],
            classes=tuple(values["classes"]),
            preprocess=from_plain(Preprocess, values["preprocess"]),
            weights_sha256=values["weights_sha256"],
            precision=values.get("precision", "float32"),  # files of earlier versions state none of these
            resizes=values.get("resizes", False),
            any_size=values.get("any_size", False),
        )
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"{path}: the description of the model is damaged: {error!r}; export it again") from error
