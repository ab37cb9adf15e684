"""Vector quantisation with a codebook that follows the vectors, as in "Neural Discrete Representation Learning"
(1711.00937)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor, nn

from vitrail.models.blocks import make_blocks
from vitrail.models.initial_weights import INITIAL_WEIGHTS
from vitrail.models.linear.dense import Linear
from vitrail.models.positions import sincos_2d
from vitrail.models.vit_config import ViTConfig
from vitrail.processes.group import Processes

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
