"""`vitrail recipes`: list recipes, the papers' runs among them, with their commands and published results."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.table import Table

from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional
from vitrail.cli.run_tables.listing import setting_text
from vitrail.errors import ConfigError, nearest
from vitrail.recipes import PAPER_RECIPES, RECIPES
from vitrail.recipes.transfers import TRANSFERS
from vitrail.training.config import TrainConfig
from vitrail.training.records.summary import settings_beside

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """Options of `vitrail recipes`."""

    recipe: Annotated[str, Positional("[RECIPE]")] = ""
    """Recipe whose settings are shown. By default all recipes are listed."""
    transfers: bool = False
    """List the papers' fine-tuning runs instead, with commands of vitrail finetune."""
    json: bool = False
    """Print JSON instead of a table."""


COMMAND = Command(
    name="recipes",
    summary="""List the recipes of vitrail train. Recipes of papers are shown with the result that was published.

    Train with vitrail train NAME. The papers' data sets are large: --data names your copy, and options on the command
    line replace those of the recipe. None of the papers' runs was repeated here.""",
    examples=(
        Example("vitrail recipes plain-vit-s16-90", "Show the settings of one recipe."),
        Example("vitrail recipes --transfers", "List the papers' fine-tuning runs with their commands."),
        Example("vitrail train plain-vit-s16-90 --data imagenet --accumulation 8", "Train one of them."),
    ),
    options=(Recipes,),
    essential={"Output": ("transfers", "json")},
)


def main(call: Call) -> int:
    options = Recipes(**call.options)
    if options.recipe:
        _show(options)
        return 0
    rows = _transfer_rows() if options.transfers else _recipe_rows()
    if options.json:
        print(json.dumps(rows))
        return 0
    console = Console(highlight=False, markup=False)
    for source, group in itertools.groupby(rows, key=lambda row: (row["source"], row["measured"])):
        console.print(", ".join(filter(None, source)), style="bold", soft_wrap=True)
        if options.transfers:
            for row in group:
                console.print(f"  {row['result']:8}  {row['network']}, {row['data']}", soft_wrap=True)
                console.print(f"            {row['command']}", style="dim", soft_wrap=True)
        else:
            console.print(_table(list(group)))
    return 0


def _show(options: Recipes) -> None:
    """Print a recipe with all settings that are not the defaults. Raise `ConfigError` if the recipe does not exist."""
    if options.transfers:
        raise ConfigError("--transfers: the list of fine-tuning runs has no recipes of vitrail train; leave RECIPE out")
    if options.recipe not in RECIPES:
        raise ConfigError(f"recipe {options.recipe!r} does not exist; {nearest(options.recipe, RECIPES)}")
    row = next(row for row in _recipe_rows() if row["name"] == options.recipe)
    usual, own = settings_beside([TrainConfig(), RECIPES[options.recipe]()])
    settings = {name: value for name, value in own.items() if value is not None and repr(value) != repr(usual[name])}
    if options.json:
        print(json.dumps({**row, "settings": settings}))
        return
    console = Console(highlight=False, markup=False)
    published = f"{row['result']} {row['measured']}".strip()
    console.print(": ".join(filter(None, (row["source"], published))), style="bold", soft_wrap=True)
    for name, value in settings.items():
        console.print(f"  {setting_text(name, value)}", soft_wrap=True)
    console.print(
        f"All other settings have their defaults, which vitrail train {row['name']} --help-all shows. Options replace "
        f"settings: {row['command']} --seed 1"
    )


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 1, 0, 2))
    for heading in ("name", "network", "data", "epochs", "result"):
        # A name that is cut off cannot be typed again.
        width = max(len(row["name"]) for row in rows) if heading == "name" else None
        justify: Literal["left", "right"] = "right" if heading == "epochs" else "left"
        table.add_column(heading, justify=justify, header_style="dim", min_width=width)
    for row in rows:
        table.add_row(row["name"], row["network"], row["data"], f"{row['epochs']:g}", row["result"])
    return table


def _recipe_rows() -> list[dict[str, Any]]:
    rows = []
    for name, recipe in RECIPES.items():
        config, paper = recipe(), PAPER_RECIPES.get(name)
        rows.append(
            {
                "name": name,
                "network": config.model.name,
                "data": "your own folder" if name == "folder" else config.data.spec,
                "epochs": config.run.epochs,
                "result": paper.result if paper else "",
                "measured": paper.measured if paper else "",
                "source": paper.source if paper else "Recipes of this project",
                "command": f"vitrail train {name}",
            }
        )
    return rows


def _transfer_rows() -> list[dict[str, Any]]:
    return [{**asdict(row), "measured": ""} for row in TRANSFERS]
