"""`vitrail models` and `vitrail recipes`: what can be trained, its cost, and results that papers published."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.bench.compare import layer_times
from vitrail.cli.console import Column, print_in_full, print_json, print_notes, terminal_table
from vitrail.cli.options import Call, Command, JsonOption, flag
from vitrail.cli.run_options import setting_text
from vitrail.errors import ConfigError, check_known, listed, plural
from vitrail.machine import total_memory
from vitrail.models.attention import ATTENTION
from vitrail.models.cost import attention_costs, layer_costs, of_pixels, training_bytes
from vitrail.models.variants import PUBLISHED, variant_config
from vitrail.models.vit_config import ViTConfig
from vitrail.recipes import PAPER_RECIPES, RECIPES
from vitrail.recipes.papers import TRANSFERS
from vitrail.settings import setting
from vitrail.training.config import TrainConfig
from vitrail.training.folder import settings_beside
from vitrail.weights.answers import OUTPUT_NOUNS


@dataclass(frozen=True, kw_only=True)
class Models(JsonOption):
    """Options of `vitrail models`."""

    model: str = setting("", argument="[MODEL]")
    """Model to describe: a folder of a model or a run, a file, or a name on the hub. By default network sizes are
    listed."""
    image_size: tuple[int, int] | None = setting(None, least=1, most=2**20)
    """Image height and width in pixels. By default each variant's own size, which the table shows."""
    num_classes: int = 1000
    """Number of outputs of the head."""
    batch_size: int = setting(32, least=1)
    """Batch size for which the memory of a training step is estimated (AdamW, bf16)."""
    layers: bool = False
    """Compare only the costs of layers: kinds of attention, recurrence and convolution, of patches and of pixels."""
    measure: bool = setting(
        False,
        needs=("layers", "it measures vitrail models --layers, without MODEL; vitrail bench train measures steps"),
    )
    """With --layers, also measure each layer on this machine: float32, one image, forward pass."""


OWN_SIZES = {
    "ViT-Pico/7": (28, 28), "ViT-Nano/8": (64, 64), "Conv+ViT-Pico/8": (32, 32), "RPico+ViT-Pico/8": (32, 32),
    "BiT-Pico": (32, 32), "BiT-Nano": (32, 32),
}  # fmt: skip


MODELS = Command(
    name="models",
    summary="""List network sizes with their parameters, the cost of one image in billions of multiply-accumulates
    (GMAC; one multiply-accumulate is two FLOPs), and the memory of a training step. Or describe a model: what it reads
    and predicts, and where it comes from.

    Any patch size that divides the image works: ViT-S/8 has patches of 8 x 8 pixels, ViT-S/16x8 has patches of 16
    rows and 8 columns. A hybrid has a ResNet before the transformer: R101x3+ViT-L/32.""",
    examples=(
        ("vitrail models --image-size 384 384 --batch-size 8", "Estimate cost and memory for larger images."),
        ("vitrail models --layers --measure", "Compare attention with recurrence and convolution."),
        ("vitrail models runs/flowers", "Describe a model: classes, metrics, the texts of its head."),
    ),
    options=(Models,),
    essential={"Settings": ("image_size", "num_classes", "batch_size"), "Output": ("layers", "measure", "json")},
)


def run_models(call: Call, options: Models) -> None:
    if options.model:
        _describe(options, call.options)
        return
    if options.layers and (unused := [flag(name) for name in ("num_classes", "batch_size") if name in call.options]):
        raise ConfigError(f"{unused[0]}: --layers compares single layers, which do not have it; leave it out")
    rows = _layer_rows(options) if options.layers else [_row(name, options) for name in PUBLISHED]
    if options.json:
        print_json(rows)
    else:
        print_in_full(_layer_table(rows) if options.layers else _models_table(rows, options))


def _describe(options: Models, given: Mapping[str, Any]) -> None:
    """Print what a model reads and predicts, and where it comes from. Raise `ConfigError` for other options."""
    from vitrail.weights.load import load  # few calls need it

    if other := [flag(name) for name in given if name not in ("model", "json")]:
        raise ConfigError(f"{other[0]}: it belongs to the list of network sizes; leave it or MODEL out")
    bundle = load(options.model, device="cpu")
    network, words, origin = bundle.network.config, bundle.words, bundle.provenance
    height, width = network.image_size
    if options.json:
        texts = None if words is None else words.described({})
        print_json({**bundle.described(), "words": texts, "notes": list(bundle.notes)}, ascii_only=False)
        return
    rows = {
        "network": f"{network.architecture} {network.summary}, {network.parameters():,} parameters",
        "images": f"{height} x {width} pixels, {plural(network.channels, 'channel')}",
        "predicts": f"{len(bundle.classes)} {OUTPUT_NOUNS[bundle.output]}: {listed(bundle.classes, 10)}",
    }
    if not bundle.classes:
        rows["predicts"] = f"nothing; embeddings have {network.embed_width} numbers"
    if words is not None:
        text = words.tower.config
        rows["texts"] = f"{text.parameters():,} parameters, {text.context} tokens of {text.vocabulary:,}"
    if isinstance(made := origin.get("zero_shot"), dict):
        names, templates = ([str(text) for text in made.get(part, ())] for part in ("texts", "templates"))
        # A pair makes a head after its own training.
        later = " Training changed it afterwards." if made == origin.get("initial", {}).get("zero_shot") else ""
        rows["head"] = f"made from the names of classes in {plural(len(templates), 'text')}.{later}"
        rows |= {"names": listed(names, 10), "templates": listed(templates, 4)}
    rows |= {
        "run name" if name == "recipe" else name: str(origin[name])  # --name replaces the recipe's
        for name in ("init", "data", "recipe", "step", "layout", "file")
        if origin.get(name)
    }
    rows |= {name: f"{value:.4g}" for name, value in bundle.metrics.items()}
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(name.replace("_", " "), Text(value))
    console = Console(highlight=False)
    console.print(table)
    print_notes(console, *map(MODELS.note, bundle.notes))


def _models_table(rows: Sequence[dict[str, Any]], options: Models) -> Table:
    here = total_memory()
    caption = (
        "shape: width/depth/MLP/heads, or units of a ResNet's stages. px: image side. GB: memory of a training step"
    )
    caption += f" of {options.batch_size} images"
    if any(row["training_bytes"] > here for row in rows):
        caption += f"; * is more than the {here / 1e9:,.0f} GB here"
    columns = (
        Column("name", "name"),
        Column("shape", "shape"),
        Column("px", lambda row: "x".join(map(str, dict.fromkeys(row["image_size"])))),
        Column("tokens", "tokens"),
        Column("parameters", "parameters", ",d"),
        Column("GMAC", lambda row: _short(row["macs"] / 1e9, digits=4)),
        Column("GB", "training_bytes", lambda size: _short(size / 1e9, digits=2) + ("*" if size > here else " ")),
    )
    return terminal_table(columns, rows, caption)


def _short(value: float, digits: int) -> str:
    """Return a number as text with about `digits` digits, at most two of them decimals. The table has 80 columns."""
    if value >= 10_000:
        return f"{value / 1000:.0f}k"
    return f"{value:.{min(2, max(0, digits - len(f'{value:.0f}')))}f}"


def _row(name: str, options: Models) -> dict[str, Any]:
    config = variant_config(name, num_classes=options.num_classes, image_size=_size(name, options))
    return {
        "name": name,
        "shape": config.summary,
        "image_size": list(config.image_size),
        "tokens": config.tokens,
        "parameters": config.parameters(),
        "macs": config.macs(),
        "training_flops": config.training_flops(),
        "training_bytes": training_bytes(config, options.batch_size, precision="bf16"),
    }


def _size(name: str, options: Models) -> tuple[int, int]:
    """Return the requested image size, or the nearest size that the variant's patches divide."""
    wanted = options.image_size or OWN_SIZES.get(name, (224, 224))
    config = variant_config(name, image_size=32 * int(name.rpartition("/")[2] if "/" in name else 1))
    return config.nearest_size(*wanted)


def _layer_rows(options: Models) -> list[dict[str, Any]]:
    """Return the costs of layers that mix the patches of an image, and of layers that mix its pixels."""
    base = ViTConfig()  # ViT-B/16
    config = base.with_image_size(base.nearest_size(*(options.image_size or (224, 224))))
    pixels, width = math.prod(config.image_size), config.width
    kinds = tuple(name for name in (*ATTENTION, "axial:sum=on") if name != "full")
    rows = [
        *((cost, config.tokens) for cost in layer_costs(config.tokens, width)),
        *((cost, config.tokens) for cost in attention_costs(config, kinds)),
        *((cost._replace(kind=of_pixels(cost.kind)), pixels) for cost in layer_costs(pixels, width)),
    ]
    found = [{**cost._asdict(), "tokens": tokens, "width": width} for cost, tokens in rows]
    if not options.measure:
        return found
    times = layer_times(config, kinds)
    return [
        {**row, "seconds": times[row["kind"]].seconds, "computed_tokens": times[row["kind"]].computed} for row in found
    ]


def _layer_table(rows: Sequence[dict[str, Any]]) -> Table:
    def milliseconds(row: Mapping[str, Any]) -> str:
        return f"{1000 * row['seconds']:,.2f}" + ("*" if row["computed_tokens"] < row["tokens"] else " ")

    is_measured = "seconds" in rows[0]
    caption = (
        "steps: in sequence. path: the longest of a signal. ms: one image, float32, without dense projections. *: "
        "measured for some of the tokens, and scaled to all of them"
    )
    columns = [
        Column("layer", "kind"),
        Column("GMAC", lambda row: row["macs"] / 1e9, ",.3f"),
        Column("steps" if is_measured else "steps in sequence", "sequential", ",d"),
        Column("path" if is_measured else "longest path", "path", ",d"),
    ]
    if is_measured:
        speed = Column("GFLOP/s", lambda row: 2 * row["macs"] / row["seconds"] / 1e9, ",.0f")
        columns += [Column("ms", milliseconds), speed]
    table = terminal_table(columns, rows, caption if is_measured else None)
    table.title = f"Mixing {rows[0]['tokens']} tokens of width {rows[0]['width']}, as in ViT-B/16"
    table.title_justify = "left"
    return table


# `vitrail recipes`: list recipes, the papers' runs among them, with their commands and published results.


@dataclass(frozen=True, kw_only=True)
class Recipes(JsonOption):
    """Options of `vitrail recipes`."""

    recipe: str = setting("", argument="[RECIPE]")
    """Recipe whose settings are shown. By default all recipes are listed."""
    transfers: bool = False
    """List the papers' fine-tuning runs instead, with commands of vitrail finetune."""


RECIPES_LIST = Command(
    name="recipes",
    summary="""List the recipes of vitrail train. Recipes of papers are shown with the result that was published.

    Train with vitrail train NAME. The papers' data sets are large: --data names your copy, and options on the command
    line replace those of the recipe. None of the papers' runs was repeated here.""",
    examples=(
        ("vitrail recipes plain-vit-s16-90", "Show the settings of one recipe."),
        ("vitrail recipes --transfers", "List the papers' fine-tuning runs with their commands."),
        ("vitrail train plain-vit-s16-90 --data imagenet --accumulation 8", "Train one of them."),
    ),
    options=(Recipes,),
    essential={"Output": ("transfers", "json")},
)


def run_recipes_list(call: Call, options: Recipes) -> None:
    if options.recipe:
        _show(options)
        return
    rows = [{**asdict(row), "measured": ""} for row in TRANSFERS] if options.transfers else _recipe_rows()
    if options.json:
        print_json(rows)
        return
    console = Console(highlight=False, markup=False)
    for source, group in itertools.groupby(rows, key=lambda row: (row["source"], row["measured"])):
        console.print(", ".join(filter(None, source)), style="bold", soft_wrap=True)
        if options.transfers:
            for row in group:
                console.print(f"  {row['result']:8}  {row['network']}, {row['data']}", soft_wrap=True)
                console.print(f"            {row['command']}", style="dim", soft_wrap=True)
        else:
            console.print(_recipes_table(list(group)))


def _show(options: Recipes) -> None:
    """Print a recipe with all settings that are not the defaults. Raise `ConfigError` if the recipe does not exist."""
    if options.transfers:
        raise ConfigError("--transfers: the list of fine-tuning runs has no recipes of vitrail train; leave RECIPE out")
    check_known(options.recipe, RECIPES, f"recipe {options.recipe!r} does not exist")
    row = next(row for row in _recipe_rows() if row["name"] == options.recipe)
    usual, own = settings_beside([TrainConfig(), RECIPES[options.recipe]()])
    settings = {name: value for name, value in own.items() if value is not None and repr(value) != repr(usual[name])}
    if options.json:
        print_json({**row, "settings": settings})
        return
    console = Console(highlight=False, markup=False)
    published = f"{row['result']} {row['measured']}".strip()
    console.print(": ".join(filter(None, (row["source"], published))), style="bold", soft_wrap=True)
    for name, value in settings.items():
        console.print(f"  {setting_text(name, value)}", soft_wrap=True)
    if row["differences"]:
        console.print("Differences from the publication:", *row["differences"], sep="\n  - ", soft_wrap=True)
    console.print(
        f"All other settings have their defaults, which vitrail train {row['name']} --help-all shows. Options replace "
        f"settings: {row['command']} --seed 1"
    )


def _recipes_table(rows: list[dict[str, Any]]) -> Table:
    texts = (Column(name, name, is_text=True, folds=True) for name in ("network", "data", "result"))
    columns = (Column("name", "name"), *texts, Column("epochs", "epochs", "g"))
    return terminal_table((*columns, Column("differs", lambda row: len(row["differences"]) or None)), rows)


def _recipe_rows() -> list[dict[str, Any]]:
    rows = []
    for name, recipe in RECIPES.items():
        config, paper = recipe(), PAPER_RECIPES.get(name)
        rows.append(
            {
                "name": name,
                "network": config.start.init or config.model.name,
                "data": "your own folder" if name == "folder" else config.data.spec,
                "epochs": config.run.epochs,
                "result": paper.result if paper else "",
                "measured": paper.measured if paper else "",
                "source": paper.source if paper else "Recipes of this project",
                "differences": paper.differences if paper else (),
                "command": f"vitrail train {name}",
            }
        )
    return rows
