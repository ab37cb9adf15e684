"""The text tower of a saved model, with its tokenizer: texts -> embeddings that are compared with those of images."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from vitrail.data.texts import FILES, TextTokenizer, is_usable
from vitrail.errors import BundleError, ConfigError, listed, plural
from vitrail.models.text import Pair, TextConfig, TextTower
from vitrail.settings import from_plain, to_plain, typed
from vitrail.weights.answers import OutputKind
from vitrail.weights.saved import TEXT_WEIGHTS, StoredFormat

if TYPE_CHECKING:
    LoadedTower = TextTower  # the tower of an exported file has what `Words` uses
else:
    LoadedTower = nn.Module

SPARE_TOKENS = 1 / 16
"""Largest fraction of a text tower's tokens that its tokenizer may lack. Some towers round their number up."""


class TextEmbeddings(NamedTuple):
    """The embeddings of texts, and notes on what was cut."""

    vectors: Float[Tensor, "n embed_width"]
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Words:
    """A text tower with its tokenizer, and the numbers that turn cosine similarities into logits.

    Raises `BundleError` for a tokenizer that does not belong to the text tower.
    """

    tower: LoadedTower
    tokenizer: TextTokenizer
    scale: float
    """Logarithm of the factor of the cosine similarity."""
    bias: float | None = None
    """Number that is added to logits, or None if texts are only compared with each other."""

    def __post_init__(self) -> None:
        config, tokenizer = self.tower.config, self.tokenizer
        spare = config.vocabulary - tokenizer.vocabulary
        rule = "so it does not belong to these weights; use the tokenizer of the folder that the weights come from"
        if not 0 <= spare <= SPARE_TOKENS * config.vocabulary:
            raise BundleError(
                f"the tokenizer has {tokenizer.vocabulary:,} tokens, but the text tower has {config.vocabulary:,}, "
                f"{rule}"
            )
        for name in ("context", "end_token", *(() if config.padding is None else ("padding",))):
            if getattr(tokenizer, name) != getattr(config, name):
                raise BundleError(
                    f"the tokenizer has {name}={getattr(tokenizer, name)}, but the text tower has "
                    f"{getattr(config, name)}, {rule}"
                )

    @classmethod
    def of(cls, pair: Pair, tokenizer: TextTokenizer) -> Words:
        """Return the text tower of a pair with its tokenizer."""
        return cls(pair.text, tokenizer, pair.scale.item(), None if pair.bias is None else pair.bias.item())

    @property
    def output(self) -> OutputKind:
        """Meaning of the logits: of independent yes and no (sigmoid), or of one choice among texts (softmax)."""
        return "softmax" if self.bias is None else "sigmoid"

    @torch.no_grad()
    def embed(self, texts: Sequence[str], *, batch_size: int = 64) -> TextEmbeddings:
        """Return the embeddings of texts, scaled to length 1, in float32 on the CPU. Texts that are longer than the
        context are cut, and a note says so. Raise `ConfigError` for an empty list and for a text that is empty or
        broken."""
        if not texts or isinstance(texts, str):
            raise ConfigError("texts must be a list with at least one text")
        texts = typed(tuple[str, ...], [*texts], "texts")
        if wrong := [number for number, text in enumerate(texts) if not is_usable(text)]:
            raise ConfigError(
                f"text {wrong[0] + 1} of {len(texts)} is empty, or has characters that cannot be decoded; give every "
                "text at least one character"
            )
        tokens, cut = self.tokenizer.encode(texts)
        config, device = self.tower.config, next(self.tower.parameters()).device
        lengths = torch.full((len(texts),), config.context)
        if config.padding is not None:  # such a tower does not read what fills the context
            lengths = torch.from_numpy((tokens != config.padding).sum(axis=1))
        elif config.is_causal and config.pool == "eot":  # nor does this one
            lengths = torch.from_numpy((tokens == config.end_token).argmax(axis=1) + 1)
        order = lengths.argsort()
        vectors = torch.empty(len(texts), config.embed_width)
        for start in range(0, len(texts), batch_size):
            rows = order[start : start + batch_size]
            chosen = torch.from_numpy(tokens)[rows, : int(lengths[rows].max())].to(device)
            vectors[rows] = F.normalize(self.tower(chosen).float(), dim=-1).cpu()
        return TextEmbeddings(vectors, self.notes(texts, cut))

    def notes(self, texts: Sequence[str], cut: Sequence[int]) -> tuple[str, ...]:
        """Return a note on the texts that were cut."""
        if not cut:
            return ()
        shown = listed([repr(texts[index][:40]) for index in cut], 3)
        many = f"{plural(len(cut), 'text')} {'is' if len(cut) == 1 else 'are'} longer"
        return (f"{many} than the {self.tokenizer.context} tokens that the model reads, and the end was cut: {shown}",)

    def files(self, stored: StoredFormat) -> dict[str, bytes]:
        """Return the contents of the files that hold the weights and the tokenizer, by their names."""
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tower.state_dict().items()}
        if stored == "bfloat16":
            weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
        return {TEXT_WEIGHTS: save(weights), FILES[self.tokenizer.kind]: self.tokenizer.content}

    def described(self, files: Mapping[str, bytes]) -> dict[str, Any]:
        """Return everything but the contents of the files as JSON values."""
        return {
            "config": to_plain(self.tower.config),
            "tokenizer": self.tokenizer.described(),
            "scale": self.scale,
            "bias": self.bias,
            "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        }


def read_words(folder: Path, values: Mapping[str, Any]) -> Words:
    """Return the text tower and the tokenizer in a model's folder. `values` is the field "words" of its description.

    Raise `BundleError` for a file that is missing or altered, and for values that this version does not know.
    """
    contents = read_contents(values, folder, lambda name: folder / name)
    return words_of(values, folder, contents, lambda config: _read_tower(config, folder, contents))


def _read_tower(config: TextConfig, folder: Path, contents: Mapping[str, bytes]) -> TextTower:
    """Return a text tower with the weights among the contents of a model's files."""
    if TEXT_WEIGHTS not in contents:
        raise BundleError(f"{folder} is incomplete: {TEXT_WEIGHTS} is missing")
    try:
        weights = load(contents[TEXT_WEIGHTS])
    except SafetensorError as error:
        raise BundleError(f"{folder}: the text tower cannot be read: {error}") from error
    with torch.device("meta"):  # no random weights are drawn, because the file has the weights
        tower = TextTower(config)
    try:
        tower.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    except RuntimeError as error:
        raise BundleError(f"{folder / TEXT_WEIGHTS} does not fit its config: {error}") from None
    return tower.eval()


def read_contents(values: Mapping[str, Any], model: Path, place: Callable[[str], Path]) -> dict[str, bytes]:
    """Return the contents of the files that a description names. `place` returns the path of a file with a name. Raise
    `BundleError` for a file that is missing or altered."""
    contents = {}
    for name, expected in _part(values, "files", dict, model).items():
        if name not in (TEXT_WEIGHTS, *FILES.values()) or not (path := place(name)).is_file():
            raise BundleError(f"{model} is incomplete: {place(name).name} is missing")
        contents[name] = path.read_bytes()
        if hashlib.sha256(contents[name]).hexdigest() != expected:
            raise BundleError(f"{path} was altered: its SHA-256 is not the one of the model; copy the model again")
    return contents


def words_of(
    values: Mapping[str, Any],
    model: Path,
    contents: Mapping[str, bytes],
    make_tower: Callable[[TextConfig], LoadedTower],
) -> Words:
    """Return what `Words.described` described, with the tower that `make_tower` makes from its config. Raise
    `BundleError` for values that this version does not know."""
    described = _part(values, "tokenizer", dict, model)
    names = {item.name for item in fields(TextTokenizer)} - {"content"}
    if described.keys() - names or described.get("kind") not in FILES or not {"context", "end_token"} <= set(described):
        raise BundleError(f"{model}: words.tokenizer={described!r} is not known to this version of Vitrail")
    if (file := FILES[described["kind"]]) not in contents:
        raise BundleError(f"{model} is incomplete: {file} is missing")
    try:
        tokenizer = TextTokenizer(content=contents[file], **described)
        config = from_plain(TextConfig, _part(values, "config", dict, model))
    except (ConfigError, TypeError) as error:
        raise BundleError(f"{model}: the text tower cannot be read: {error}") from error
    scale, bias = _part(values, "scale", (int, float), model), values.get("bias")
    if not math.isfinite(scale) or not isinstance(bias, int | float | None):
        raise BundleError(f"{model}: words.scale={scale!r} and words.bias={bias!r} must be numbers")
    return Words(make_tower(config), tokenizer, float(scale), bias if bias is None else float(bias))


def _part(values: Mapping[str, Any], name: str, kind: type | tuple[type, ...], model: Path) -> Any:
    if not isinstance(values.get(name), kind):
        raise BundleError(f"{model}: words.{name}={values.get(name)!r} is missing or has another type")
    return values[name]
