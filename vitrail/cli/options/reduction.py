"""The options of commands that can merge or prune tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from vitrail.cli.options.fields import flag
from vitrail.errors import ConfigError

if TYPE_CHECKING:  # without PyTorch, --help is faster
    from vitrail.models.tokens.reduction import TokenReduction

__all__ = ["check_reduction", "reduction_of"]


def check_reduction(tokens: int | None, given: Collection[str]) -> None:
    """Raise `ConfigError` if the number of tokens is negative, or if an option of the reduction has no effect."""
    if tokens is not None and tokens < 0:
        raise ConfigError(f"reduce_tokens={tokens} is negative; 0 keeps all tokens")
    for name in ("reduce_by", "reduce_schedule"):
        if name in given and not tokens:
            raise ConfigError(f"{flag(name)}: it has an effect only with --reduce-tokens; add a number of tokens")


def reduction_of(
    tokens: int, by: Literal["merge", "prune"], schedule: Literal["constant", "decreasing"]
) -> TokenReduction | None:
    """Return the reduction, or None if no tokens are to be removed."""
    from vitrail.models.tokens.reduction import TokenReduction

    return TokenReduction(tokens=tokens, by=by, schedule=schedule) if tokens else None
