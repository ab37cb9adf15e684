"""The tasks that learn from images with texts: CLIP (2103.00020) and SigLIP (2303.15343), and LiT (2111.07991) if the
image tower is frozen.

The network of the run is the image tower. A text tower and the scale of the similarities are trained beside it.
"""

from __future__ import annotations

import copy
import json
import math
from abc import abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source, truth_of
from vitrail.data.splits import Splits, check_texts
from vitrail.data.texts import FILES, TextTokenizer, train_tokenizer
from vitrail.errors import BundleError, ConfigError
from vitrail.evaluation.outputs import Outputs
from vitrail.evaluation.retrieval import METRICS, ByRetrieval, embedded
from vitrail.files import write_json
from vitrail.models.network import FootprintPrecision
from vitrail.models.text import TextConfig, TextPool, TextTower
from vitrail.models.variants import AnyConfig
from vitrail.processes.group import Processes
from vitrail.settings import Effect, from_plain, setting, to_plain
from vitrail.tasks.kept_outputs import KeptOutputs, is_frozen
from vitrail.tasks.task import (
    BatchObjective,
    HeadlessObjective,
    HeadlessTask,
    LossOutput,
    Objective,
    Position,
    StepCost,
    TaskMetric,
    mean_of_counted,
)
from vitrail.weights.bundle import Bundle
from vitrail.weights.words import Words

LARGEST_SCALE = math.log(100)
"""Largest logarithm of CLIP's scale."""

GROUP = 256
"""Number of held-out images that are compared with each other for the loss, which depends on it."""

TOKENIZER_TEXTS = 1_000_000
"""Largest number of texts from which a tokenizer is learned."""

DESCRIPTION = "words.json"
"""Name of the file in a run's folder that describes its text tower and tokenizer."""

OF_NEW_TOWER = ("text_width", "text_depth", "text_context", "vocabulary", "text_tokenizer", "initial_scale")
"""Settings that have no effect on a text tower of the initial model."""

OWN_TOKENIZER = Effect(lambda own: own.text_tokenizer is None, "unless --text-tokenizer gives a tokenizer")


def unused_with(words: Words) -> tuple[str, ...]:
    """Return the settings that have no effect with the text tower of an initial model, which may have a bias."""
    return OF_NEW_TOWER if words.bias is None else (*OF_NEW_TOWER, "initial_bias")


@dataclass(frozen=True, kw_only=True)
class PairTask(HeadlessTask):
    """Learn to find the text of each image among the texts of a batch, and the image of each text.

    The saved model is the image tower with the text tower.
    """

    targets = ("texts",)
    least_batch = 2
    metrics = (
        *(TaskMetric(name, is_fraction=True, label=label) for name, label in METRICS.items()),
        TaskMetric("pair_loss", higher_is_better=False),
    )
    loss_metric = "pair_loss"
    pool: ClassVar[TextPool]
    """Pooling of a new text tower."""
    is_causal: ClassVar[bool]
    """True if tokens of a new text tower attend only to earlier ones."""
    initial_bias: float | None = None
    """Value that is added to the logits at the beginning."""
    freeze: Literal["none", "image", "text"] = "none"
    """Tower that is not trained: image (LiT) or text. A frozen image tower embeds each image once and keeps the result
    in memory, so that later epochs are fast. By default both towers are trained."""
    text_width: int = setting(512, least=8)
    """Length of a token of a new text tower. It has a head per 64 numbers, and MLPs of four times this width. A text
    tower of the initial model is used as it is."""
    text_depth: int = setting(12, least=1)
    """Number of blocks of a new text tower."""
    text_context: int = setting(77, effect=OWN_TOKENIZER, least=3)
    """Number of tokens of a text in a new text tower. Longer texts are cut."""
    vocabulary: int = setting(49408, effect=OWN_TOKENIZER, least=514)
    """Largest number of tokens of a tokenizer that is learned from the training texts."""
    text_tokenizer: str | None = setting(None, metavar="MODEL")
    """Model with a text tower whose tokenizer a new text tower uses. By default that of the initial model, or one that
    is learned from the training texts."""
    initial_scale: float = setting(1 / 0.07, above=0, below=math.inf)
    """Initial factor of the cosine similarities."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.text_width % (heads := max(1, self.text_width // 64)):
            yield f"text_width={self.text_width} is not divisible by its {heads} heads; choose a multiple of {heads}"

    @property
    def trains_network(self) -> bool:
        return self.freeze != "image"

    def check_data(self, splits: Splits) -> None:
        """Raise `DataError` unless the targets are texts, and there are two different ones."""
        check_texts(splits, self.name)

    def text_config(self, outputs: int, tokenizer: TextTokenizer | None = None) -> TextConfig:
        """Return the config of a new text tower for embeddings of `outputs` numbers."""
        width = self.text_width
        words: Any = {"vocabulary": self.vocabulary, "end_token": self.vocabulary - 1, "context": self.text_context}
        if tokenizer is not None:
            words = {"vocabulary": tokenizer.vocabulary, "end_token": tokenizer.end_token, "context": tokenizer.context}
        return TextConfig(
            **words, width=width, depth=self.text_depth, heads=max(1, width // 64), mlp_width=4 * width,
            is_causal=self.is_causal, pool=self.pool, outputs=outputs, output_bias=self.initial_bias is not None,
        )  # fmt: skip

    def step_cost(self, network: AnyConfig, precision: FootprintPrecision) -> StepCost:
        """Return the cost of a step with a new text tower."""
        text = self.text_config(network.embed_width)
        values = text.context * text.depth * (12 * text.width + 2 * text.mlp_width)
        return StepCost(
            network,
            parameters=text.parameters(),
            image_bytes=4 * values,
            batch_bytes=8 * network.embed_width,
            flops=6 * text.macs(),
        )

    def words(self, model: Bundle | None, network: Any, splits: Splits) -> Words:
        """Return the text tower that a run begins with: that of the model, or a new one. Raise `ConfigError` if the
        settings contradict the model."""
        width = network.config.embed_width
        own = None if model is None else model.words
        if own is not None and own.tower.config.embed_width != width:
            raise ConfigError(
                f"the text tower of the initial model makes embeddings of {own.tower.config.embed_width} numbers, and "
                f"the image tower of this run makes {width}; leave out the settings that change the image tower"
            )
        if own is not None:
            if changed := [name for name in unused_with(own) if getattr(self, name) != getattr(type(self)(), name)]:
                raise ConfigError(
                    f"{', '.join(f'{name}={getattr(self, name)!r}' for name in changed)}: the initial model has a text "
                    "tower, which is used as it is; leave out these settings"
                )
            bias = self.initial_bias if own.bias is None else own.bias
            return replace(own, tower=copy.deepcopy(own.tower), bias=None if self.initial_bias is None else bias)
        if self.freeze == "text" or (self.freeze == "image" and model is None):
            needed = "a model" if self.freeze == "image" else "a model with a text tower"
            raise ConfigError(f"freeze={self.freeze!r} needs {needed} to start from; give init=...")
        if self.text_tokenizer is not None:
            from vitrail.weights.load import load  # other layouts, which few runs need

            try:
                tokenizer = load(self.text_tokenizer, device="cpu").reader_of_texts().tokenizer
            except (BundleError, ConfigError) as error:
                raise ConfigError(f"text_tokenizer={self.text_tokenizer!r}: {error}") from error
        else:
            targets = truth_of(splits.train)
            assert targets.texts is not None, "the task checks the data"
            texts = map(targets.texts.__getitem__, range(min(len(targets.texts), TOKENIZER_TEXTS)))
            tokenizer = train_tokenizer(texts, vocabulary=self.vocabulary, context=self.text_context)
        tower = TextTower(self.text_config(width, tokenizer))
        return Words(tower, tokenizer, math.log(self.initial_scale), self.initial_bias)

    def of_words(self, words: Words, typed: Collection[str]) -> PairTask:
        """Return the task without the settings of a recipe for a new text tower. Raise `ConfigError` if one of them was
        typed."""
        if given := [name for name in unused_with(words) if name in typed]:
            raise ConfigError(
                f"{' and '.join(f'--{name}'.replace('_', '-') for name in given)}: the initial model has a text tower, "
                "which is used as it is; leave out these settings"
            )
        usual = type(self)()
        return replace(self, **{name: getattr(usual, name) for name in unused_with(words)})

    def objective(self, network: nn.Module, splits: Splits) -> Objective:
        """Return the image tower, which receives its text tower before the first step."""
        return PairObjective(network, self)

    @abstractmethod
    def losses(
        self,
        pairs: Embeddings,
        scale: Float[Tensor, ""],
        bias: Float[Tensor, ""] | None,
        processes: Processes,
    ) -> Float[Tensor, " b"]:
        """Return the loss of each image of this process, of which the loss of the batch is the mean."""

    def bundle(
        self, objective: Objective, names: tuple[str, ...], preprocess: Preprocess, provenance: dict[str, Any]
    ) -> Bundle:
        """Return the image tower with the text tower."""
        assert isinstance(objective, PairObjective)
        return replace(super().bundle(objective, names, preprocess, provenance), words=objective.current_words())


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of this process's images and texts, and those of all processes. All have length 1."""

    images: Float[Tensor, "b width"]
    texts: Float[Tensor, "b width"]
    all_images: Float[Tensor, "n width"]
    all_texts: Float[Tensor, "n width"]
    valid: Bool[Tensor, " n"]
    """True for each pair of all processes that counts."""
    first: int
    """Index of this process's first pair among those of all processes."""

    @property
    def rows(self) -> Tensor:
        """The indices of this process's pairs among those of all processes."""
        return torch.arange(self.first, self.first + len(self.images), device=self.images.device)


@dataclass(frozen=True, kw_only=True)
class Clip(PairTask):
    """Find the text of each image, and the image of each text, by a softmax over the batch (CLIP)."""

    name = "clip"
    pool = "eot"
    is_causal = True

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.initial_bias is not None:
            yield (
                f"initial_bias={self.initial_bias}: the softmax of the task clip is the same with any bias; leave it "
                "out, or choose task='siglip'"
            )

    def losses(
        self,
        pairs: Embeddings,
        scale: Float[Tensor, ""],
        bias: Float[Tensor, ""] | None,
        processes: Processes,
    ) -> Float[Tensor, " b"]:
        """Return the mean of both cross-entropies of each pair."""
        rows = pairs.rows
        every = torch.arange(len(pairs.valid), device=rows.device)
        left_out = ~pairs.valid & (every != rows[:, None])
        found = []
        for mine, others in ((pairs.images, pairs.all_texts), (pairs.texts, pairs.all_images)):
            logits = (scale.exp() * mine @ others.T).masked_fill(left_out, -torch.inf)
            found.append(F.cross_entropy(logits, rows, reduction="none"))
        return (found[0] + found[1]) / 2


@dataclass(frozen=True, kw_only=True)
class SigLip(PairTask):
    """Decide for each pair of an image and a text of the batch whether they belong together, by a sigmoid (SigLIP)."""

    name = "siglip"
    pool = "last"
    is_causal = False

    initial_scale: float = setting(10.0, above=0, below=math.inf)
    """Initial factor of the cosine similarities."""
    initial_bias: float | None = setting(-10.0, above=-math.inf, below=math.inf)
    """Initial number that is added to the logits. The published -10 fits large batches: about -ln(batch size - 1)
    keeps the initial loss small."""
    text_context: int = setting(64, effect=OWN_TOKENIZER, least=3)
    """Number of tokens of a text in a new text tower. Longer texts are cut."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.initial_bias is None:
            yield "initial_bias=None: the sigmoid loss needs a bias; give a number such as -10"

    def losses(
        self,
        pairs: Embeddings,
        scale: Float[Tensor, ""],
        bias: Float[Tensor, ""] | None,
        processes: Processes,
    ) -> Float[Tensor, " b"]:
        """Return the sum of the losses of each image with all texts. The texts of one process after another are
        compared, and only the sums are kept for the backward pass."""
        assert bias is not None, "the task has an initial bias"
        total = torch.zeros(len(pairs.images), device=pairs.images.device)
        for number, (texts, valid) in enumerate(
            zip(torch.split(pairs.all_texts, len(total)), torch.split(pairs.valid, len(total)), strict=True)
        ):
            arguments = (pairs.images, texts, valid, scale, bias, number * len(total) == pairs.first)
            total = total + (
                checkpoint(sigmoid_losses, *arguments, use_reentrant=False)
                if processes.are_several
                else sigmoid_losses(*arguments)
            )
        return total


def sigmoid_losses(
    images: Float[Tensor, "b width"],
    texts: Float[Tensor, "t width"],
    valid: Bool[Tensor, " t"],
    scale: Float[Tensor, ""],
    bias: Float[Tensor, ""],
    is_own: bool,
) -> Float[Tensor, " b"]:
    """Return the sum of the losses of each image with some texts. If `is_own` is true, text i belongs to image i, and
    otherwise none belongs to any of the images."""
    logits = scale.exp() * images @ texts.T + bias
    signs = 2 * torch.eye(*logits.shape, device=logits.device) - 1 if is_own else -torch.ones_like(logits)
    return -(F.logsigmoid(signs * logits) * valid).sum(dim=1)


class PairObjective(HeadlessObjective, BatchObjective):
    """An image tower, a text tower, and the scale and the bias of their products."""

    text: TextTower
    scale: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, network: nn.Module, task: PairTask) -> None:
        super().__init__(network)
        self.task = task
        self._kept = KeptOutputs()

    def receive(self, words: Words) -> None:
        self.text, self.text_tokenizer = words.tower, words.tokenizer
        self.scale = nn.Parameter(torch.tensor(words.scale))
        self.bias = None if words.bias is None else nn.Parameter(torch.tensor(words.bias))
        self.text.requires_grad_(self.task.freeze != "text")
        if self.task.freeze == "image":
            self.network.requires_grad_(False)

    def train(self, mode: bool = True) -> PairObjective:
        """Set the mode of the towers. A frozen tower is always in evaluation mode."""
        super().train(mode)
        if self.task.freeze == "image":
            self.network.eval()
        return self

    def features(self, batch: Batch) -> dict[str, Tensor]:
        """Return the embeddings of images and texts, scaled to length 1, in float32. Embeddings of frozen images are
        fixed features."""
        assert batch.texts is not None, "batches are read with the tokenizer"
        found = {"texts": _of_length_one(self.text(batch.texts))}
        return found if self.task.freeze == "image" else {"images": self._images(batch.images), **found}

    @torch.no_grad()
    def fixed_features(self, batch: Batch) -> dict[str, Tensor]:
        if self.task.freeze != "image":
            return {}
        if batch.images.device.type == "cpu" and is_frozen(self.network):
            return {"images": self._kept(batch.images, self._images)}
        return {"images": self._images(batch.images)}

    def _images(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b width"]:
        return _of_length_one(self.network.embed(images))

    def compare(self, features: dict[str, Tensor], counted: Bool[Tensor, " b"], processes: Processes) -> LossOutput:
        pairs = Embeddings(
            features["images"],
            features["texts"],
            processes.gather_rows(features["images"]),
            processes.gather_rows(features["texts"]),
            processes.gather_rows(counted.float()) > 0,
            processes.rank * len(counted),
        )
        losses = self.task.losses(pairs, self.scale, self.bias, processes)
        with torch.no_grad():
            likeness = (pairs.images @ pairs.all_texts.T).masked_fill(~pairs.valid, -torch.inf)
            right = (likeness.argmax(dim=1) == pairs.rows).float()
        return LossOutput(mean_of_counted(losses, counted), {"pair_accuracy": mean_of_counted(right, counted)})

    def counted(self, batch: Batch) -> Bool[Tensor, " b"]:
        """Return a mask of the images that were decoded and have a text."""
        return batch.counted

    @torch.no_grad()
    def after_step(self, position: Position, processes: Processes) -> None:
        """Limit CLIP's scale to 100."""
        if self.bias is None:
            self.scale.clamp_(max=LARGEST_SCALE)

    def current_words(self) -> Words:
        """Return the text tower with the current scale and bias."""
        bias = None if self.bias is None else float(self.bias.detach())
        assert self.text_tokenizer is not None, "the run has begun"
        return Words(self.text, self.text_tokenizer, float(self.scale.detach()), bias)

    @torch.no_grad()
    def measure(self, outputs: Outputs, train: Source, held_out: Source) -> dict[str, float]:
        """Return the metrics of retrieval, the loss with the first text of each image, and the counts `images` and
        `skipped`. Without an image with a text, only the counts are returned."""
        measured = ByRetrieval(bootstrap=0)
        measured.check(outputs, train, held_out)
        pairs = embedded(outputs, held_out)
        found, count = measured.of(pairs), len(pairs.images)
        if not count:
            return found
        first = np.searchsorted(pairs.owners, np.arange(count))
        texts = pairs.texts[torch.from_numpy(pairs.places[first])]
        scale, bias = self.scale.cpu(), None if self.bias is None else self.bias.cpu()
        total = 0.0
        for own, other in zip(torch.split(pairs.images, GROUP), torch.split(texts, GROUP), strict=True):
            group = Embeddings(own, other, own, other, torch.ones(len(own), dtype=torch.bool), 0)
            total += float(self.task.losses(group, scale, bias, Processes()).sum())
        return {**found, "pair_loss": total / count}


def _of_length_one(rows: Float[Tensor, "b width"]) -> Float[Tensor, "b width"]:
    """Return rows that are scaled to length 1, in float32 at least."""
    return F.normalize(rows.to(torch.promote_types(rows.dtype, torch.float32)), dim=-1)


def save_words(words: Words, folder: Path) -> None:
    """Write the tokenizer and the description of a run's text tower, without weights, which checkpoints have."""
    (folder / FILES[words.tokenizer.kind]).write_bytes(words.tokenizer.content)
    values = {"config": to_plain(words.tower.config), "tokenizer": words.tokenizer.described()}
    write_json(folder / DESCRIPTION, {**values, "scale": words.scale, "bias": words.bias})


def saved_words(folder: Path) -> Words | None:
    """Return the text tower that `save_words` described, with random weights, or None if the run has none."""
    if not (folder / DESCRIPTION).exists():
        return None
    values = json.loads((folder / DESCRIPTION).read_bytes())
    content = (folder / FILES[values["tokenizer"]["kind"]]).read_bytes()
    tower = TextTower(from_plain(TextConfig, values["config"]))
    return Words(tower, TextTokenizer(content=content, **values["tokenizer"]), values["scale"], values["bias"])
