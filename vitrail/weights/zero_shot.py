"""Zero-shot classification: a head whose rows are embeddings of the names of classes (2103.00020, section 3.1)."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vitrail.data.formats.annotated import lines_of
from vitrail.data.targets import class_name
from vitrail.errors import ConfigError, listed, nearest, plural
from vitrail.models.network import separate_copy
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import typed
from vitrail.weights.bundle import Bundle
from vitrail.weights.words import TextEmbeddings, Words

PLACE = "{}"
"""Place of the name of a class in a template."""

NUMBER = re.compile(r"\d+|n\d{8}")
"""Pattern of names of classes that say nothing in a text: numbers, and ids of WordNet."""

USUAL_TEMPLATES = ("a photo of a {}.",)
"""Templates that are used unless others are chosen."""


def zero_shot(
    bundle: Bundle, classes: Sequence[str], *, templates: str | Sequence[str] = USUAL_TEMPLATES, readable: bool = False
) -> Bundle:
    """Return a classifier of the named classes, made from a model that reads texts. Its probabilities are those of the
    pair of towers: a softmax over the given classes, or with a bias of the logits an independent probability of each.

    `templates` are texts with {} in the place of the class, or a name or a file (`read_templates`). With `readable`,
    texts are made from names of folders (`readable_names`), and the classes keep their names.

    Raise `ConfigError` for a model without a text tower, for empty names, and for names that are given twice.
    """
    classes = typed(tuple[str, ...], classes, "classes")
    templates = typed(str | tuple[str, ...], templates, "templates")
    texts = readable_names(classes) if readable else list(classes)
    chosen = read_templates(templates) if isinstance(templates, str) else _checked(templates, "templates")
    words = bundle.reader_of_texts()
    found = embed_classes(words, texts, chosen)
    if words.output == "softmax" and len(classes) < 2:
        raise ConfigError(
            f"classes={list(classes)}: this model compares classes with each other, so it needs two or more, with "
            "spaces between; add another class, such as what else the images can show"
        )
    config = bundle.network.config
    if not isinstance(config, ViTConfig) or config.head_hidden:
        raise ConfigError("zero-shot classification needs a Vision Transformer without a hidden layer before its head")
    network: Any = separate_copy(bundle.network)
    network.config = replace(config, num_classes=len(classes), head_normalises=True, head_kind="pooled")
    network = network.with_head(len(classes)).eval()
    device = bundle.device
    weight = (math.exp(words.scale) * found.vectors).to(device)
    bias = torch.full((len(classes),), words.bias or 0.0, device=device)
    network.head.load_state_dict({"weight": weight, "bias": bias}, assign=True)
    origin = {**bundle.provenance, "zero_shot": {"texts": texts, "templates": list(chosen)}}
    meaning = "are compared with each other only" if words.output == "softmax" else "are independent of each other"
    note = f"zero-shot: the probabilities of the {plural(len(classes), 'class')} {meaning}; no image was learned from"
    return replace(
        bundle, network=network, classes=tuple(classes), output=words.output, metrics={}, provenance=origin,
        notes=(*bundle.notes, *found.notes, note),
    )  # fmt: skip


def embed_classes(words: Words, names: Sequence[str], templates: Sequence[str]) -> TextEmbeddings:
    """Return an embedding for each class: the mean of the embeddings of all templates, scaled to length 1. Raise the
    errors of `zero_shot`."""
    if not all(map(class_name, names)) or not names:
        raise ConfigError(f"classes={list(names)[:5]}: the name of a class is empty; name what the images show")
    texts = [template.replace(PLACE, class_name(name)) for name in names for template in templates]
    vectors, notes = words.embed(texts)
    tokens = [rows.tobytes() for rows in np.split(words.tokenizer.encode(texts).tokens, len(names))]
    counts = Counter(tokens)
    if same := [name for name, row in zip(names, tokens, strict=True) if counts[row] > 1]:
        raise ConfigError(
            f"classes: the texts of {len(same)} of {plural(len(names), 'class')} do not differ for this model: "
            f"{listed(same)}; give each class a name that differs within the tokens that the model reads"
        )
    mean = vectors.view(len(names), len(templates), -1).mean(dim=1)
    return TextEmbeddings(F.normalize(mean, dim=-1), notes)


def readable_name(name: str) -> str:
    """Return the name of a class as it is written in a text. The number before it is removed, words of names such as
    "Black_footed-Albatross" or "AnnualCrop" are separated, and the name ends at its first comma."""
    text = re.sub(r"^\d+[._\s-]+(?=\D)", "", name)
    text = re.sub(r"[_\s-]+", " ", text).split(",")[0]
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).strip()
    return text or name


def readable_names(names: Sequence[str]) -> list[str]:
    """Return the names of classes as they are written in texts (`readable_name`). Names
    whose texts would be equal, such as "maillot" and "maillot, tank suit" of ImageNet, stay whole."""
    texts = [readable_name(name) for name in names]
    counts = Counter(text.casefold() for text in texts)
    return [text if counts[text.casefold()] == 1 else name for text, name in zip(texts, names, strict=True)]


def read_templates(name: str) -> tuple[str, ...]:
    """Return published templates by their name, or those of a file with a template in each line.

    Raise `ConfigError` for an unknown name and a template without {}, and `DataError` for a file that cannot be read.
    """
    published = _published()
    if name in published:
        return published[name]
    path = Path(name)
    if not path.exists():
        raise ConfigError(f"templates={name!r} is neither a file nor a name; {nearest(name, published)}")
    return _checked([line.strip() for line in lines_of(path) if line.strip()], str(path))


def _checked(templates: Sequence[str], origin: str) -> tuple[str, ...]:
    wrong = [template for template in templates if template.count(PLACE) != 1]
    if wrong or not templates:
        shown = repr(wrong[0]) if wrong else "nothing"
        raise ConfigError(f"{origin}: each template has {PLACE} once, in the place of the class; found {shown}")
    return tuple(templates)


@functools.cache
def _published() -> dict[str, tuple[str, ...]]:
    """Return the templates of `templates.json`, with the usual one."""
    content: Any = json.loads(Path(__file__).with_name("templates.json").read_text(encoding="utf-8"))
    return {"usual": USUAL_TEMPLATES, **{name: tuple(found) for name, found in content["templates"].items()}}
