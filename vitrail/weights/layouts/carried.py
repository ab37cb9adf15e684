"""Tables of the options that another library's layout can store, and the check of a model against them.

A layout has a rule for every field of the network's config, of its root and of the preprocessing. Writing fails for a
field without a rule, so that no option that changes the arithmetic is silently lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vitrail.errors import BundleError
from vitrail.weights.bundle import Bundle


@dataclass(frozen=True)
class Rule:
    """The values of a config field that a layout can store. By default the file stores any value."""

    only: tuple[Any, ...] | None = None
    """Values that the file can store. Any other value raises an error."""
    own: tuple[Any, ...] = ()
    """The value that is fixed in the other library's code, as a tuple of length 1. By default the library's code has no
    fixed value. A model with another value is written, and the difference is reported."""
    inside: Mapping[str, Rule] | None = None
    """Rules for the fields of a nested dataclass."""


Table = Mapping[str, Rule]
"""Rules of all fields of a dataclass, by their names."""

KEPT = Rule()


def only(*values: Any) -> Rule:
    """Return the rule of a field for which the layout can store only these values."""
    return Rule(only=values)


SHAPE: Table = {
    "image_size": KEPT, "patch_size": KEPT, "channels": KEPT, "width": KEPT, "depth": KEPT, "heads": KEPT,
    "mlp_width": KEPT, "num_classes": KEPT, "attention": only("full"),
    "cut_uneven": only(False), "reduction": only(None), "reversible": only(False),
}  # fmt: skip
"""Rules that all layouts share: they store all sizes of a Vision Transformer, and only full attention."""

WITHOUT_EFFECT = ("dropout", "stochastic_depth", "skip_dropped", "patch_dropout", "head_bias", "position_std")
"""Fields that only training and initialisation use, so that a file need not store them."""

EFFECTIVE = {"class_token": "has_class_token", "positions_at": "positions_place"}
"""Fields whose default depends on other fields. Each one is mapped to the property that returns its effective value."""

LAYOUTS_OF = {"ViT": "google, big-vision, timm, huggingface or torchvision", "BiT": "bit, bit-torch or timm"}
TITLES = {"ViT": "a Vision Transformer", "BiT": "a BiT ResNet"}


def own(value: Any) -> Rule:
    """Return the rule of a field that has a fixed value in the library's code."""
    return Rule(own=(value,))


def nested(table: Table) -> Rule:
    """Return the rule of a field that holds a dataclass or None."""
    return Rule(inside=table)


def other_architecture(layout: str, architecture: str) -> BundleError:
    """Return the error for a network whose architecture the layout cannot store."""
    title = TITLES.get(architecture, f"a network of the architecture {architecture}")
    return BundleError(
        f"{title} cannot be written as {layout}: choose {LAYOUTS_OF.get(architecture, 'vitrail, our own layout')}"
    )


def carried(layout: str, options: Any, table: Table) -> list[str]:
    """Return the options for which the other library's code will use its own values, because the file cannot store
    ours.

    Raise `BundleError` with all options that the layout cannot store, and all fields that are not in the table.
    """
    problems, lost = _compared(options, table, "")
    if problems:
        raise BundleError(f"the layout {layout} cannot store {'; '.join(problems)}")
    return lost


def output_loss(layout: str, bundle: Bundle, *, kept: tuple[str, ...], noted: tuple[str, ...] = ()) -> list[str]:
    """Return a note if the file does not store the meaning of the outputs.

    `kept` lists the meanings that the file stores. `noted` lists the meanings for which a note is enough. Raise
    `BundleError` for any other meaning.
    """
    if bundle.output not in (*kept, *noted):
        raise BundleError(f"the layout {layout} cannot store output={bundle.output!r}")
    return [f"output={bundle.output!r}"] if bundle.output in noted else []


def bare_loss(layout: str, bundle: Bundle) -> list[str]:
    """Return the properties of a model that a file with tensors alone does not store."""
    config = bundle.network.config
    lost = ["class names", "preprocessing"]
    lost += output_loss(layout, bundle, kept=("softmax",), noted=("sigmoid", "numbers"))
    if config.architecture == "ViT" and (config.positions != "learned" or config.grid[0] != config.grid[1]):
        lost.append(f"image_size={config.image_size}")
    return lost


def _compared(options: Any, table: Table, within: str) -> tuple[list[str], list[str]]:
    """Return the options that the layout cannot store, and the options that the library's code computes differently."""
    problems, lost = [], []
    for item in fields(options):
        name = f"{within}{item.name}"
        value = getattr(options, EFFECTIVE.get(item.name, item.name))
        rule = table.get(item.name)
        if rule is None:
            if item.name not in WITHOUT_EFFECT:
                problems.append(f"{name}={value!r} (an option that this layout does not know)")
        elif rule.inside is not None and value is not None:
            inner_problems, inner_lost = _compared(value, rule.inside, f"{name}.")
            problems += inner_problems
            lost += inner_lost
        elif rule.only is not None and value not in rule.only:
            problems.append(f"{name}={value!r} (only {', '.join(map(repr, rule.only))})")
        elif rule.own and value != rule.own[0]:
            lost.append(f"{name}={value!r} (its code has {rule.own[0]!r})")
    return problems, lost
