"""Vector-quantised autoencoders: "Neural Discrete Representation Learning" (VQ-VAE, 1711.00937).

A network encodes every patch of an image, and each encoded patch is replaced by the nearest vector of a codebook. A
decoder restores the image from these vectors. The index of a vector is the token of the patch. Masked patch prediction
can predict the tokens of hidden patches, as BEiT does (2106.08254). No labels are needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.data.augment.draws import Slot, keyed_uniform
from vitrail.data.augment.operations import on_device
from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.evaluation.outputs import Outputs
from vitrail.models.network import Footprint, FootprintPrecision, shared_copy
from vitrail.models.tokens import cut_patches
from vitrail.models.variants import AnyConfig, transformer_config
from vitrail.models.vit_config import ViTConfig
from vitrail.processes.group import Processes
from vitrail.settings import raise_problems, setting
from vitrail.tasks.pictures import ROWS, Picture, PictureTable, decoded, picture_of, spread
from vitrail.tasks.task import (
    HeadlessObjective,
    HeadlessTask,
    LossOutput,
    Objective,
    Position,
    StepCost,
    TaskMetric,
    mean_losses,
    mean_of_counted,
)
from vitrail.tasks.tokenizer import Coder, CoderConfig, Tokenizer, all_tokens, perplexity
from vitrail.tasks.unlabelled import batch_key, decoder_config, unfit_parts
from vitrail.weights.bundle import Bundle


@dataclass(frozen=True, kw_only=True)
class VqVae(HeadlessTask):
    """Learn discrete tokens of patches, from which a decoder restores the image. This needs no labels.

    The saved model is a tokenizer: the network without a head, with a codebook and a decoder in a file beside it.
    """

    name = "vqvae"
    loss_metric = "reconstruction_loss"
    metrics = (
        TaskMetric("reconstruction_loss", higher_is_better=False),
        TaskMetric("perplexity"),
        TaskMetric("codes_used"),
    )

    codes: int = setting(512, least=2, most=2**24)
    """Number of codes, which is the number of different tokens."""
    code_width: int = setting(32, least=1, most=2**24)
    """Length of a code."""
    commitment: float = setting(0.25, least=0, below=math.inf)
    """Weight of the squared difference between encoded patches and their codes, which keeps the encoder near the
    codes."""
    code_decay: float = setting(0.99, least=0, below=1)
    """Fraction of the running means that each step keeps. A code is the running mean of the encoded patches that it
    replaces."""
    restart_below: float = setting(0.0, least=0, below=1)
    """Fraction of the mean use of codes below which a code is replaced by an encoded patch of the batch. 0 replaces no
    code."""
    decoder_width: int | None = setting(None, least=4)
    """Width of the decoder's tokens. By default the width of the network."""
    decoder_depth: int | None = setting(None, least=1)
    """Number of blocks of the decoder. By default as many as the network has."""
    decoder_heads: int | None = setting(None, least=1)
    """Number of attention heads of the decoder. By default as many as the network has."""

    def check_network(self, network: AnyConfig | None) -> None:
        """Raise `ConfigError` unless the network is a transformer without weights that the task does not train, and the
        decoder's sizes fit together."""
        config = self.transformer(network)
        raise_problems(unfit_parts(config, f"task={self.name!r}"))
        self.coder_of(config)

    def transformer(self, network: AnyConfig | None) -> ViTConfig:
        """Return the config of a network if the network is a transformer of patches. Raise `ConfigError` for any other
        network."""
        config = transformer_config(network)
        if config is not None and config.root is None:
            return config
        kind = "a network of your own class" if network is None else "a ResNet" if config is None else "a hybrid"
        raise ConfigError(
            f"task={self.name!r} needs one encoded vector for each patch of pixels, which {kind} does not have; choose "
            "a Vision Transformer, such as variant='ViT-S/16'"
        )

    def coder_of(self, network: ViTConfig) -> CoderConfig:
        """Return the sizes of the codebook and the decoder for a network. Raise `ConfigError` if they do not fit
        together."""
        decoder = decoder_config(
            network,
            width=self.decoder_width or network.width,
            depth=self.decoder_depth or network.depth,
            heads=self.decoder_heads or network.heads,
        )
        return CoderConfig(self.codes, self.code_width, decoder)

    def step_cost(self, network: AnyConfig, precision: FootprintPrecision) -> StepCost:
        """Return the cost of a step, in which the network and the decoder compute all patches.

        At the peak, either the activations of the decoder exist, or the distances between patches and codes.
        """
        network = self.transformer(network)
        coder, patches = self.coder_of(network), math.prod(network.grid)
        with torch.device("meta"):
            parameters = sum(weight.numel() for weight in Coder(coder, network.width).parameters())
        held: Footprint = coder.decoder.footprint(coder.decoder.image_size, precision)
        pixels = network.channels * math.prod(network.patch_size)
        restored = held.activations + held.passing + 4 * patches * (3 * pixels + 4 * self.code_width)
        return StepCost(
            all_tokens(network),
            parameters=parameters,
            fixed_bytes=16 * self.codes * (self.code_width + 1),
            image_bytes=max(restored, 4 * patches * self.codes),
            flops=6 * coder.macs(network.width, patches) + 2 * coder.lookup_macs(patches),
        )

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        return VqVaeObjective(network, self)

    def bundle(
        self, objective: Objective, names: tuple[str, ...], preprocess: Preprocess, provenance: dict[str, Any]
    ) -> Bundle:
        """Return the tokenizer as it would be saved now."""
        assert isinstance(objective, VqVaeObjective)
        return Tokenizer(
            objective.saved_network(), names, preprocess, output=self.output, provenance=provenance,
            coder=objective.coder,
        )  # fmt: skip

    @torch.no_grad()
    def pictures(self, objective: Objective, bundle: Bundle, source: Source) -> tuple[PictureTable, ...]:
        """Return images, and the images that are restored from their tokens."""
        assert isinstance(objective, VqVaeObjective)
        preprocess = bundle.preprocess
        tokenizer = Tokenizer(bundle.network, (), preprocess, coder=objective.coder)
        places, images = decoded(preprocess, source, spread(len(source), ROWS), bundle.device)
        if not places:
            return ()
        tokens = tokenizer.tokens(images)
        restored = tokenizer.restored(tokens)
        rows = tuple(
            (
                Picture(picture_of(preprocess.levels(images)[row]), ("image",)),
                Picture(picture_of(preprocess.levels(restored)[row]), ("restored", f"{used} different tokens")),
            )
            for row, used in enumerate(len(set(line)) for line in tokens.tolist())
        )
        text = (
            f"Each row shows a held-out image, and the image that the decoder restores from its {tokens.shape[1]:,} "
            f"tokens. There are {self.codes:,} different tokens."
        )
        return (PictureTable("Images restored from tokens", text, rows),)


class VqVaeObjective(HeadlessObjective):
    """A network that encodes patches, a codebook, and a decoder that restores the images.

    The loss of an image is the mean squared error of its normalised pixels, plus the weighted commitment. The published
    code divides the error by the variance of the data, which is the same if pixels are normalised to a variance of 1.
    Gradients pass the codebook unchanged. The codes follow the encoded patches after every step. With gradient
    accumulation and with several processes, they change by the whole batch.
    """

    def __init__(self, network: Any, task: VqVae) -> None:
        super().__init__(network)
        self.task = task
        config: ViTConfig = self.network.config
        self.coder = Coder(task.coder_of(config), config.width)

    def before_step(self, position: Position) -> None:
        """Discard the sums of a step that was not completed."""
        self.coder.codebook.begin_step()

    def forward(self, batch: Batch) -> LossOutput:
        counted = self.counted(batch)
        encoded = self.network.features(batch.images)
        vectors = self.coder.projection(encoded.patches)
        codes, commitment = self.coder.codebook(vectors, counted)
        if self.training and self.task.restart_below:
            self._offer(vectors, batch)
        restored = self.coder.decoder(codes, encoded.grid)
        errors = pixel_errors(restored, batch.images, self.network.config.patch_size)
        losses = errors + self.task.commitment * commitment
        metrics = {
            "reconstruction_loss": mean_of_counted(errors.detach(), counted),
            "commitment_loss": mean_of_counted(commitment.detach(), counted),
            "perplexity": perplexity(self.coder.codebook.counts),
        }
        return LossOutput(mean_of_counted(losses, counted), metrics)

    def after_step(self, position: Position, processes: Processes) -> None:
        """Change the codes by the encoded patches of the whole batch."""
        self.coder.codebook.update(processes, decay=self.task.code_decay, restart_below=self.task.restart_below)

    def _offer(self, vectors: Float[Tensor, "b n width"], batch: Batch) -> None:
        """Offer one random patch of each decoded image to the codebook, in a random order of the images.

        Both are pure functions of the seed and of the image's epoch, sample and view, so that they do not depend on how
        a batch is divided.
        """
        uniform = keyed_uniform(self.seed, *batch_key(batch), draws=3, first=Slot.CODE_RESTART).astype(np.float64)
        chosen = (uniform[:, 0] * vectors.shape[1]).astype(np.int64)
        order = on_device(uniform[:, 1] + uniform[:, 2] * 2.0**-24, vectors.device)  # two draws, so that none are equal
        rows = torch.arange(len(vectors), device=vectors.device)
        picked = vectors[rows, on_device(chosen, vectors.device)]
        self.coder.codebook.offer(picked, torch.where(batch.valid, order, 2.0))

    @torch.no_grad()
    def measure(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the mean squared error of normalised pixels, the perplexity of the tokens, and the number of codes
        that occur, with the counts `images` and `skipped`."""
        coder, network = self.coder, shared_copy(outputs.bundle.network)
        used = torch.zeros(coder.config.codes, dtype=torch.float64, device=outputs.bundle.device)

        def losses(batch: Batch) -> dict[str, Tensor]:
            encoded = network.features(batch.images)
            tokens = coder.tokens(encoded.patches)
            used.index_add_(0, tokens.flatten(), batch.valid[:, None].expand_as(tokens).double().flatten())
            restored = coder.pixels(tokens, encoded.grid)
            return {"reconstruction_loss": pixel_errors(restored, batch.images, self.network.config.patch_size)}

        found = mean_losses(outputs, held_out, ("reconstruction_loss",), losses)
        counts = outputs.processes.sum(used)
        uses = {"perplexity": float(perplexity(counts)), "codes_used": float((counts > 0).sum())}
        return {"reconstruction_loss": found.pop("reconstruction_loss"), **uses, **found}


def pixel_errors(
    restored: Float[Tensor, "b n pixels"], images: Float[Tensor, "b c h w"], patch_size: tuple[int, int]
) -> Float[Tensor, " b"]:
    """Return the mean squared error of the restored pixels of each image."""
    return (restored - cut_patches(images, patch_size).flatten(2)).square().mean(dim=(1, 2))
