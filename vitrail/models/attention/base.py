"""The contract of an attention mechanism: its settings, its rules and cost for a config, and its layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.linear.dense import Linear
from vitrail.models.network import FootprintPrecision
from vitrail.models.positions.embedding import AttentionPositions, ViTConfig
from vitrail.settings import problems, raise_problems

SWITCHES = {"on": True, "off": False}


@dataclass(frozen=True)
class NoSettings:
    """The settings of a mechanism that has none."""


def attention_name(text: str) -> str:
    """Return the name of the mechanism, without its settings."""
    return text.partition(":")[0]


def settings_of(text: str, settings: type[Any]) -> Any:
    """Return the settings behind a mechanism's name as an instance of `settings`, a frozen dataclass.

    Fields may be whole numbers, numbers, names (`Literal`), switches (written as on and off), and several whole numbers
    (written as 4/8). Raises `ConfigError` for an unknown setting and for a value that the setting cannot have, or that
    its field does not allow (`vitrail.settings.setting`).
    """
    name, _, rest = text.partition(":")
    hints, found = get_type_hints(settings), {}
    for part in rest.split(":") if rest else []:
        key, equals, value = part.partition("=")
        if key not in hints or not equals:
            known = ", ".join(f"{field.name}={_written(field.default)}" for field in fields(settings))
            choices = f"its settings and their defaults are {known}" if known else "it has no settings"
            raise ConfigError(f"attention={text!r}: {part!r} is not a setting of {name!r}; {choices}")
        read, choices = _rule(hints[key])
        try:
            found[key] = read(value)
        except (KeyError, ValueError):
            raise ConfigError(
                f"attention={text!r}: {key}={value!r} is not {choices}; the default is "
                f"{_written(getattr(settings, key))}{'; a colon separates settings' if ',' in value else ''}"
            ) from None
    made = settings(**found)
    raise_problems(f"attention={text!r}: {problem}" for problem in problems(made))
    return made


def _rule(hint: Any) -> tuple[Callable[[str], Any], str]:
    """Return the function that reads a setting of this type, and the texts that it reads in words. The function raises
    `ValueError` or `KeyError` for other texts."""
    if get_origin(hint) is Literal:
        return {name: name for name in get_args(hint)}.__getitem__, f"one of {', '.join(map(repr, get_args(hint)))}"
    if hint is bool:
        return SWITCHES.__getitem__, "on or off"
    if get_origin(hint) is tuple:
        return lambda text: tuple(map(int, text.split("/"))), "one or several whole numbers, such as 4 or 4/8"
    return (int, "a whole number") if hint is int else (float, "a number")


def _written(value: Any) -> str:
    """Return a value as it is written in the text."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


class AttentionOperands(NamedTuple):
    """The operands of `softmax(q k^T / sqrt(d) + bias) v`, after all normalisation and rotation."""

    queries: Float[Tensor, "b heads n d"]
    keys: Float[Tensor, "b heads n d"]
    values: Float[Tensor, "b heads n d"]
    bias: Float[Tensor, "*images heads n n"] | None = None


class AttentionLayer(nn.Module):
    """The layer that mixes the tokens of a block: MSA of equation 2, or another mechanism."""

    def forward(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None, read: int | None = None
    ) -> Float[Tensor, "b m width"]:
        """Return the mixed tokens. With `read`, return only the first `read` tokens, which still attend to all
        tokens."""
        raise NotImplementedError

    def weights(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None
    ) -> Float[Tensor, "b heads n n"]:
        """Return the weight with which each token (row) attends to each token (column). Rows add up to 1.

        A mechanism that has no such weights does not override this method. `vitrail.analysis` then refuses it by name.
        """
        raise NotImplementedError

    def operands(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None
    ) -> AttentionOperands:
        """Return queries, keys, values and bias of all tokens. `weights` is then the softmax of their products.

        A mechanism without queries and keys does not override this method. `vitrail.analysis` then shows its weights
        without their gradients.
        """
        raise NotImplementedError

    def combine(self, mixed: Float[Tensor, "b heads m d"]) -> Float[Tensor, "b m width"]:
        """Return the output of the layer for the values of each head that the weights have mixed. A mechanism with
        `operands` overrides this method."""
        raise NotImplementedError

    def projections(self) -> Iterator[tuple[Linear, tuple[str, ...]]]:
        """Yield each dense layer with the names of its projections. The rows of the layer's weight are divided equally
        among these projections, in this order."""
        raise NotImplementedError

    def initialise(self) -> None:
        """Draw new weights."""
        raise NotImplementedError


class AttentionContext(nn.Module):
    """The tables or weights that the attention of all blocks shares, such as the windows of a grid of patches.

    The network computes them once in each forward pass. A subclass whose parts are not tables overrides `for_blocks`.
    If it has weights, it also overrides `initialise`, and `resized` if they are made for one grid.
    """

    def __init__(self, name: str, make_tables: Callable[[tuple[int, int]], Sequence[Any]] | None = None) -> None:
        """`make_tables(grid)` returns the nested tuples of tensors of the first blocks, after which they repeat. They
        depend on nothing but the grid."""
        super().__init__()
        self.name = name
        self.make_tables = make_tables

    def join(
        self,
        insides: Sequence[AttentionPositions | None],
        grid: tuple[int, int],
        device: torch.device,
        kept: Int64[Tensor, "b k"] | None,
    ) -> list[AttentionPositions]:
        """Return the positions of every block together with its part of the context. Raise `ConfigError` if the patches
        are not a whole grid."""
        if kept is not None:
            raise ConfigError(
                f"attention={self.name!r} needs the whole grid of patches, but only some patches are encoded; keep all "
                "patches, or choose attention='full'"
            )
        given = self.for_blocks(grid, len(insides), device)
        return [
            (inside or AttentionPositions())._replace(context=part) for inside, part in zip(insides, given, strict=True)
        ]

    def for_blocks(self, grid: tuple[int, int], blocks: int, device: torch.device) -> Sequence[Any]:
        """Return the part of each block, by default the tables, which repeat. Raise `ConfigError` if the grid does not
        fit."""
        tables = self.tables(as_numbers(grid), device)
        return [tables[block % len(tables)] for block in range(blocks)]

    def tables(self, grid: tuple[int, int], device: torch.device) -> Sequence[Any]:
        """Return the tensors of `make_tables` on a device. The sides of the grid have to be numbers (`as_numbers`). An
        exported, traced or compiled network contains these tensors as constants."""
        return _tables_of(self.make_tables, grid, device)

    # What torch.compiler.assume_constant_result sets, which would import the compiler.
    tables._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def resized(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        """Return the weights that depend on the grid, resized to another grid, by their names."""
        return {}

    def initialise(self) -> None:
        """Draw new weights."""


@functools.lru_cache(maxsize=16)
def _tables_of(make: Callable[[tuple[int, int]], Any], grid: tuple[int, int], device: torch.device) -> Any:
    """Return `make(grid)` with all tensors on a device.

    A thread of its own makes the tensors, because modes of PyTorch belong to a thread. The caller may be in inference
    mode, or trace, export or transform the network. Its tensors could not be used again outside of this mode.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        if isinstance(value, tuple | list):
            parts = map(moved, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: moved(make(grid))).result()


def as_numbers(grid: tuple[int, int]) -> tuple[int, int]:
    """Return the sides of a grid as numbers. A compiler that passes symbols for sizes then compiles for this grid
    only."""
    height, width = grid
    return len([*range(height)]), len([*range(width)])


class AttentionKind:
    """An attention mechanism for one block of one config.

    `ViTConfig.attention` chooses the class, which is constructed from the config and the number of the block. To add a
    mechanism, write a file like `full.py` and add the class to `ATTENTION`.
    """

    Settings: ClassVar[type[Any]] = NoSettings
    """Frozen dataclass of the settings that may follow the name in `ViTConfig.attention`: `local:window=9`."""
    can_reduce: ClassVar[bool] = False
    """True if the layer shows its queries and keys to `AttentionPositions.removal` and accepts a bias of the logits, so
    that tokens can be merged or pruned in inference."""
    needs_grid: ClassVar[bool] = False
    """True if the layer needs all patches of the grid, so that training cannot drop patches."""
    depends_on_grid: ClassVar[bool] = False
    """True if some weights are made for one grid of patches and resized for others."""
    takes_offsets: ClassVar[bool] = False
    """True if the layer reads a bias of offsets from `AttentionPositions.offset_bias` instead of a bias for every
    pair of tokens."""

    def __init__(self, config: ViTConfig, block: int = 0, settings: Any = None) -> None:
        """By default, the settings are those in `ViTConfig.attention`."""
        self.config = config
        self.block = block
        self.settings: Any = settings_of(config.attention, self.Settings) if settings is None else settings

    @property
    def blocks_per_layer(self) -> int:
        """Number of blocks for each layer of `ViTConfig.depth`."""
        return 1

    def problems(self) -> list[str]:
        """Return a message for every field of the config that does not fit this attention."""
        return []

    def note(self) -> str:
        """Return a note for the user on how this attention treats the config's grid, or "" if there is none."""
        return ""

    def heads_problems(self) -> list[str]:
        """Return a message if the number of heads does not divide the width. The config itself checks that there is a
        head."""
        width, heads = self.config.width, self.config.heads
        return [f"width={width} is not divisible by heads={heads}"] if heads >= 1 and width % heads else []

    def context(self) -> AttentionContext | None:
        """Return a new module of what all blocks share, or None."""
        return None

    def build(self) -> AttentionLayer:
        """Return a new layer."""
        raise NotImplementedError

    def macs(self, tokens: int, read: int) -> int:
        """Return the multiply-accumulates for a sequence of `tokens` tokens if only the first `read` outputs are
        computed."""
        raise NotImplementedError

    def macs_of_shared_weights(self, tokens: int, read: int) -> int:
        """Return the part of `macs` whose products have weights of the positions or of the context as a factor. These
        weights are below the blocks: they have no gradients if only blocks are trained."""
        return self.config.position_embedding.macs_in_attention(self.config, read)

    def kept_bytes(self, tokens: int, read: int, precision: FootprintPrecision) -> int:
        """Return the bytes per image that the layer keeps for the backward pass, not counting the layer's input."""
        raise NotImplementedError

    def backward_bytes(self, tokens: int, precision: FootprintPrecision) -> int:
        """Return the peak extra bytes per image during the layer's backward pass, or 0 if they are negligible."""
        raise NotImplementedError
