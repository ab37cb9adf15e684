"""A trained tokenizer: a model whose encoder, codebook and decoder turn images into tokens, and tokens into images.

Its folder is that of every model, whose network is the encoder, with the file `tokenizer.safetensors`. The header of
this file states the sizes and the hashes of the encoder and of the tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError, ConfigError, UserError
from vitrail.models.cost import prediction_bytes
from vitrail.models.network import FootprintPrecision, shared_copy
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import from_plain, to_plain
from vitrail.tasks.codebook import Coder, CoderConfig, join_patches
from vitrail.tasks.teacher import Conversion, files_of
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.load import find, load
from vitrail.weights.saved import TOKENIZER, StoredFormat, tokenizer_file

FORMAT = 1


@dataclass
class Tokenizer(Bundle):
    """A model whose network is the encoder of a tokenizer. `load_tokenizer` returns one, and `save` writes one.

    `vitrail.load` reads the same folder as a model without a head.
    """

    network: Any
    coder: Coder = field(kw_only=True)

    @property
    def sha256(self) -> str:
        """A hash of all weights: those of the encoder, the codebook and the decoder."""
        both = weights_sha256(self.network) + weights_sha256(self.coder)
        return hashlib.sha256(both.encode()).hexdigest()

    @torch.no_grad()
    def tokens(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, "b n"]:
        """Return the tokens of all patches of normalised images, in row-major order of the grid."""
        return self.coder.tokens(shared_copy(self.network).features(images).patches)

    @torch.no_grad()
    def restored(self, tokens: Int64[Tensor, "b n"]) -> Float[Tensor, "b c h w"]:
        """Return the normalised images that the decoder restores from tokens."""
        config = self.network.config
        pixels = self.coder.pixels(tokens, config.grid)
        return join_patches(pixels, config.grid, config.patch_size)

    def save(self, path: str | Path, *, overwrite: bool = False, stored: StoredFormat = "float32") -> Path:
        """Write the folder. Raise `ConfigError` for rounded weights, and the errors of `Bundle.save`."""
        if stored != "float32":
            raise ConfigError(
                f"stored={stored!r}: rounding the weights of a tokenizer would change its tokens; leave it out"
            )
        return super().save(path, overwrite=overwrite)

    def further_files(self) -> dict[str, bytes]:
        """Return the content of `tokenizer.safetensors`."""
        header = {
            "format": FORMAT,
            "config": to_plain(self.coder.config),
            "encoder": weights_sha256(self.network),
            "sha256": weights_sha256(self.coder),
        }
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.coder.state_dict().items()}
        return {TOKENIZER: save(tensors, metadata={"tokenizer": json.dumps(header)})}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer in the folder of a model, or of the run that trained it, on the CPU.

    Raise `BundleError` for a model that is no tokenizer, and for missing or altered files.
    """
    place, _ = find(path)
    bundle = load(place, device="cpu")
    if (file := tokenizer_file(place)) is None:
        raise BundleError(
            f"{path} is a model without a codebook: it has no {TOKENIZER}; name a run or a model of the task 'vqvae'"
        )
    header, tensors = _read(file)
    try:
        with torch.device("meta"):  # no random weights are drawn, because the file has the weights
            coder = Coder(from_plain(CoderConfig, header["config"]), bundle.network.config.width)
        coder.load_state_dict(tensors, assign=True)
    except (ConfigError, KeyError, RuntimeError) as error:
        raise BundleError(f"{file} does not fit the encoder beside it: {error}") from None
    for name, part in (("encoder", bundle.network), ("sha256", coder)):
        if header.get(name) != weights_sha256(part):
            other = "belongs to other weights of the encoder" if name == "encoder" else "was altered"
            raise BundleError(f"{file} {other}: a SHA-256 is not the one that its header states; copy the model again")
    return Tokenizer(**{name: getattr(bundle, name) for name in bundle.__dataclass_fields__}, coder=coder)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of the file. Raise `BundleError` if it is damaged or newer than this code."""
    try:
        with safe_open(file, framework="pt") as opened:
            header = json.loads((opened.metadata() or {}).get("tokenizer", "{}"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise BundleError(f"{file} is damaged: {error}") from None
    if header.get("format") != FORMAT:
        raise BundleError(
            f"{file} has format {header.get('format')!r}, but this version of Vitrail reads format {FORMAT}"
        )
    return header, tensors


class TokenizerFacts(NamedTuple):
    """The properties of a tokenizer that are checked before training."""

    network: ViTConfig
    """The config of the encoder, which computes all tokens."""
    coder: CoderConfig
    parameters: int
    """Number of weights of the coder."""
    sha256: str

    @property
    def patches(self) -> int:
        """Number of tokens of an image."""
        rows, columns = self.network.grid
        return rows * columns

    @property
    def flops(self) -> int:
        """FLOPs that the tokens of an image need."""
        projection = self.patches * self.network.width * self.coder.code_width
        return self.network.inference_flops() + 2 * (projection + self.coder.lookup_macs(self.patches))

    def image_bytes(self, precision: FootprintPrecision) -> int:
        """Return the bytes that the tokenizer needs for an image: for the encoder, or for the distances of codes."""
        one, two = (prediction_bytes(self.network, count, None, precision) for count in (1, 2))
        return max(two - one, 4 * self.patches * self.coder.codes)

    def fixed_bytes(self, precision: FootprintPrecision) -> int:
        """Return the bytes that the tokenizer needs for its weights."""
        return prediction_bytes(self.network, 0, None, precision) + 4 * self.parameters


def tokenizer_facts(model: str) -> TokenizerFacts:
    """Return the properties of a tokenizer. They are cached until its files change. Raise `ConfigError` if the
    tokenizer cannot be loaded."""
    return _facts(model, str(Path.cwd()), (*files_of(model, "model*"), *files_of(model, TOKENIZER)))


@functools.lru_cache(maxsize=4)
def _facts(model: str, folder: str, files: tuple[tuple[str, int, int], ...]) -> TokenizerFacts:
    """Return the properties of a tokenizer. A relative path is looked up in `folder`, the current one. `files`
    distinguishes versions of the tokenizer."""
    tokenizer = _load(model)
    config: ViTConfig = tokenizer.network.config
    return TokenizerFacts(
        all_tokens(config),
        tokenizer.coder.config,
        sum(tensor.numel() for tensor in tokenizer.coder.state_dict().values()),
        tokenizer.sha256,
    )


def check_grid(model: str, network: ViTConfig) -> None:
    """Raise `ConfigError` unless a tokenizer has one token for each patch of a network."""
    facts = tokenizer_facts(model)
    if facts.network.grid == network.grid:
        return
    own, other = (
        "{} x {} patches (each {} x {} of {} x {} pixels)".format(*one.grid, *one.patch_size, *one.image_size)
        for one in (facts.network, network)
    )
    raise ConfigError(
        f"tokenizer={model!r} has tokens of {own}, but the network has {other}; train a tokenizer with the same number "
        "of patches, or choose another image_size or variant"
    )


class TokenizerTargets:
    """A tokenizer in evaluation mode that turns the images of training steps into tokens. It is no part of an
    objective's modules, so that it is neither trained nor saved in checkpoints."""

    def __init__(self, model: str) -> None:
        self.tokenizer = _load(model)
        self.sha256 = self.tokenizer.sha256
        for part in (self.tokenizer.network, self.tokenizer.coder):
            part.eval().requires_grad_(False)

    def begin(self, preprocess: Preprocess, device: torch.device) -> None:
        """Move the tokenizer to a device, and keep the preprocessing of the run's images there."""
        self.tokenizer.network.to(device)
        self.tokenizer.coder.to(device)
        self.convert = Conversion(preprocess, self.tokenizer.preprocess, device)
        self.convert_back = Conversion(self.tokenizer.preprocess, preprocess, device)

    @torch.no_grad()
    def tokens(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, "b n"]:
        """Return the tokens of normalised images of the run. Their size, normalisation and channels are changed to
        those of the tokenizer."""
        encoded = self.tokenizer.network.features(self.convert(images)).patches
        return self.tokenizer.coder.tokens(encoded)

    @torch.no_grad()
    def restored(self, tokens: Int64[Tensor, "b n"]) -> Float[Tensor, "b c h w"]:
        """Return the normalised images of the run that the decoder restores from tokens."""
        return self.convert_back(self.tokenizer.restored(tokens))


def all_tokens(network: ViTConfig) -> ViTConfig:
    """Return the config of the same network without the savings of one whose head does not read all tokens."""
    return dataclasses.replace(network, pool="gap", class_token=network.has_class_token, reduction=None)


def _load(model: str) -> Tokenizer:
    try:
        return load_tokenizer(model)
    except UserError as error:
        raise ConfigError(f"tokenizer={model!r} cannot be loaded: {error}") from None
