"""Tokenizers: models whose encoder, codebook and decoder turn images into tokens, and tokens into images, and the task
`vqvae` that trains them.

The folder of a tokenizer is that of every model, whose network is the encoder, with the file `tokenizer.safetensors`.
The header of this file states the sizes and the hashes of the encoder and of the tensors.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError, ConfigError, UserError
from vitrail.models.blocks import make_blocks
from vitrail.models.cost import prediction_bytes
from vitrail.models.initial_weights import INITIAL_WEIGHTS
from vitrail.models.linear.dense import Linear
from vitrail.models.network import FootprintPrecision, shared_copy
from vitrail.models.positions import sincos_2d
from vitrail.models.vit_config import ViTConfig
from vitrail.processes.group import Processes
from vitrail.settings import from_plain, to_plain
from vitrail.tasks.distillation import Conversion, files_of
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
        return join_patches(self.coder.pixels(tokens, config.grid), config.grid, config.patch_size)

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
    return replace(network, pool="gap", class_token=network.has_class_token, reduction=None)


def _load(model: str) -> Tokenizer:
    try:
        return load_tokenizer(model)
    except UserError as error:
        raise ConfigError(f"tokenizer={model!r} cannot be loaded: {error}") from None


# Vector quantisation with a codebook that follows the vectors, as in "Neural Discrete Representation Learning"
# (1711.00937).


SMOOTHING = 1e-5
"""Number that Laplace smoothing adds to the running count of each code, as in the published code."""


class Codebook(nn.Module):
    """Codes, each of which is a running mean of the vectors that it is nearest to (1711.00937, appendix A.1).

    Codes have no gradients. `forward` adds up the vectors of a step by their codes, and `update` changes the codes
    after the step.
    """

    codes: Tensor
    counts: Tensor
    """Running mean of the number of vectors of each code in a step, which begins at 0."""
    sums: Tensor
    """Running mean of the sum of the vectors of each code in a step, which begins at 0."""
    bias: Tensor
    """Weight of the zeros with which the running means began."""

    def __init__(self, size: int, width: int) -> None:
        """`size` is the number of codes, and `width` is their length. They begin as uniform numbers with a variance of
        1 / width, as in the published code."""
        super().__init__()
        limit = (3 / width) ** 0.5
        self.register_buffer("codes", torch.empty(size, width).uniform_(-limit, limit))
        self.register_buffer("counts", torch.zeros(size))
        self.register_buffer("sums", torch.zeros(size, width))
        self.register_buffer("bias", torch.ones((), dtype=torch.float64))
        self.begin_step()

    def nearest(self, vectors: Float[Tensor, "*shape width"]) -> Int64[Tensor, "*shape"]:
        """Return the index of the code with the smallest Euclidean distance to each vector. Of several such codes, the
        one with the lowest index is returned."""
        with torch.no_grad(), torch.autocast(vectors.device.type, enabled=False):
            flat = vectors.float().flatten(0, -2)
            # |v - c|² is |v|² - 2 v·c + |c|². For one vector v, all codes c share |v|², so |v|² is not computed.
            distances = torch.addmm(self.codes.square().sum(dim=1), flat, self.codes.T, alpha=-2)
            return distances.argmin(dim=1).view(vectors.shape[:-1])

    def forward(
        self, vectors: Float[Tensor, "b n width"], counted: Bool[Tensor, " b"]
    ) -> tuple[Float[Tensor, "b n width"], Float[Tensor, " b"]]:
        """Return the nearest codes, whose gradients are passed on to the vectors that they replace (straight-through),
        and the mean squared difference between the vectors of each image and their codes, whose gradient reaches the
        vectors alone. In training mode, the vectors of `counted` images are added up for `update`."""
        vectors = vectors.float()
        tokens = self.nearest(vectors)
        codes = self.codes[tokens]
        if self.training:
            ones = counted[:, None].expand_as(tokens).flatten().float()
            added = torch.where(counted[:, None, None], vectors.detach(), 0.0).flatten(0, 1)
            for step, rows in zip(self._step(), (ones, added), strict=True):
                step.index_add_(0, tokens.flatten(), rows)
        commitment = (vectors - codes).square().mean(dim=(1, 2))
        return vectors + (codes - vectors).detach(), commitment

    def begin_step(self) -> None:
        """Discard the vectors that were added up, such as those of a step that was not completed."""
        self._added: tuple[Tensor, Tensor] | None = None
        self._offered: list[Tensor] = []

    def offer(self, vectors: Float[Tensor, "b width"], order: Float64[Tensor, " b"]) -> None:
        """Offer vectors that can replace unused codes in the next `update`. The vector with the smallest number in
        `order` is used first. Vectors with a number of 1 or more are never used."""
        self._offered.append(torch.cat([order[:, None], vectors.detach().double()], dim=1))

    @torch.no_grad()
    def update(self, processes: Processes, *, decay: float, restart_below: float = 0.0) -> None:
        """Change the codes by the vectors of a step in all processes.

        `decay` is the fraction of the running means that is kept. They are divided by 1 minus their bias, so that the
        codes of the first step are its mean vectors, and those without a vector are 0. Afterwards, codes whose count is
        below `restart_below` times the mean count are replaced by vectors that were offered, as far as there are any,
        and get the mean count.
        """
        for running, step in zip((self.counts, self.sums), self._step(), strict=True):
            running.mul_(decay).add_(processes.sum(step), alpha=1 - decay)
        self.bias.mul_(decay)
        counts, sums = self.counts / (1 - self.bias), self.sums / (1 - self.bias)
        total, size = counts.sum(), len(counts)
        smoothed = (counts + SMOOTHING) / (total + size * SMOOTHING) * total
        self.codes.copy_(sums / smoothed[:, None])
        if restart_below and self._offered:
            self._restart(processes.gather_rows(torch.cat(self._offered)), restart_below)
        self.begin_step()

    def _step(self) -> tuple[Tensor, Tensor]:
        """Return the number and the sum of the vectors of each code in the current step."""
        if self._added is None:
            self._added = torch.zeros_like(self.counts), torch.zeros_like(self.sums)
        return self._added

    def _restart(self, offered: Float64[Tensor, "b columns"], below: float) -> None:
        """Replace codes of low counts. The first column of `offered` is the order of the vectors beside it."""
        offered = offered[offered[:, 0].argsort()]
        mean = self.counts.mean()
        is_unused = self.counts < below * mean
        places = is_unused.cumsum(dim=0) - 1  # numbers of the vectors that replace the codes
        places, is_offered = places.clamp(0, len(offered) - 1), places < (offered[:, 0] < 1).sum()
        is_replaced = is_unused & is_offered
        vectors = offered[places, 1:].float()
        self.codes.copy_(torch.where(is_replaced[:, None], vectors, self.codes))
        self.counts.copy_(torch.where(is_replaced, mean, self.counts))
        self.sums.copy_(torch.where(is_replaced[:, None], vectors * mean, self.sums))


def perplexity(counts: Float[Tensor, " size"]) -> Float[Tensor, ""]:
    """Return the exponential of the entropy of how often codes are used. It is the number of codes if all are used
    equally often, and 1 if one of them is always used."""
    fractions = counts / counts.sum().clamp(min=torch.finfo(counts.dtype).tiny)
    return torch.special.entr(fractions).sum().exp()


# The parts of a tokenizer above its encoder: a projection, a codebook, and a decoder that restores the pixels.


@dataclass(frozen=True)
class CoderConfig:
    """The sizes of a coder."""

    codes: int
    """Number of codes, which is the number of different tokens."""
    code_width: int
    """Length of a code."""
    decoder: ViTConfig
    """The blocks of the decoder, and the patches that it restores."""

    def macs(self, width: int, patches: int) -> int:
        """Return the multiply-accumulates of the projection and the decoder, without the codebook. `width` is the width
        of the encoder's tokens."""
        # The decoder's macs count a patch embedding, which costs as much as the head that a coder has instead.
        return patches * self.code_width * (width + self.decoder.width) + self.decoder.macs()

    def lookup_macs(self, patches: int) -> int:
        """Return the multiply-accumulates of the search for the nearest codes, which has no backward pass."""
        return patches * self.codes * self.code_width


class Coder(nn.Module):
    """Turns the encoded patches of an image into tokens, and tokens into pixels. It has no dropout, so that training
    mode changes none of the results."""

    def __init__(self, config: CoderConfig, width: int) -> None:
        """`width` is the width of the encoder's tokens."""
        super().__init__()
        self.config = config
        self.projection = Linear(width, config.code_width)
        self.codebook = Codebook(config.codes, config.code_width)
        self.decoder = GridDecoder(config.decoder, config.code_width)
        nn.init.normal_(self.projection.weight, std=width**-0.5)
        nn.init.zeros_(self.projection.bias)

    def tokens(self, encoded: Float[Tensor, "b n width"]) -> Int64[Tensor, "b n"]:
        """Return the tokens of encoded patches."""
        return self.codebook.nearest(self.projection(encoded))

    def pixels(self, tokens: Int64[Tensor, "b n"], grid: tuple[int, int]) -> Float[Tensor, "b n pixels"]:
        """Return the normalised pixels that the decoder restores from tokens."""
        return self.decoder(self.codebook.codes[tokens], grid)


class GridDecoder(nn.Module):
    """A transformer that restores the pixels of all patches from their codes, with fixed sines and cosines of the
    places."""

    def __init__(self, config: ViTConfig, width: int) -> None:
        """`config` describes the blocks, and `width` is the length of the codes."""
        super().__init__()
        self.config = config
        self.embedding = Linear(width, config.width)
        self.blocks = make_blocks(config)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.head = Linear(config.width, config.channels * config.patch_size[0] * config.patch_size[1])
        INITIAL_WEIGHTS["mae"].draw_dense(self)

    def forward(self, codes: Float[Tensor, "b n width"], grid: tuple[int, int]) -> Float[Tensor, "b n pixels"]:
        z = self.embedding(codes).to(self.norm.weight.dtype)  # under autocast, the residual stream stays in float32
        z = z + sincos_2d(grid, self.config.width, device=z.device, lowest=False).to(z.dtype)
        return self.head(self.norm(self.blocks(z))).float()


def join_patches(
    patches: Float[Tensor, "b n pixels"], grid: tuple[int, int], patch_size: tuple[int, int]
) -> Float[Tensor, "b c h w"]:
    """Return images from the pixels of their patches, which are in row-major order of the grid."""
    (rows, columns), (height, width) = grid, patch_size
    parts = patches.view(len(patches), rows, columns, -1, height, width)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(len(patches), -1, rows * height, columns * width)
