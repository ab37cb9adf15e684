"""Models by their names on the hub: what a model needs is fetched into the client's cache, and found there offline."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path

from vitrail.errors import BundleError
from vitrail.hub import Repository, cached_folder, fetch, keep_branch, listing, parse
from vitrail.weights.saved import DESCRIPTION, WEIGHTS
from vitrail.weights.tensors import SUFFIXES

__all__ = ["download", "looks_like_hub_name"]

PREFIXES = ("hf:", "hf-hub:")
DESCRIPTIONS = ("config.json", "preprocessor_config.json")
PREFERRED = (WEIGHTS, f"{WEIGHTS}.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""One repository may hold the same weights several times; the first of these is taken."""


def looks_like_hub_name(path: str | Path) -> bool:
    """Whether this is "org/name" or "org/name@revision" rather than a path. What exists here is always a path.

    "hf:" or "hf-hub:" in front says that a name is meant, also where "org/name" exists here or ends as a file would.
    """
    text = str(path)
    if os.path.lexists(text):
        return False
    if text.startswith(PREFIXES):
        return True
    model = parse("model", text, text)
    return model is not None and not model.name.lower().endswith((*SUFFIXES, ".json"))


def download(name: str) -> Path:
    """The folder in the cache with the model of this name, fetched unless it is there already.

    Only what a model needs is fetched: our own `model.json` and weights, or else another library's descriptions and
    one set of weights, safetensors where there are any. Without a network, what an earlier call fetched is used.

    Raises `BundleError` where there is no such repository or revision, access is refused, it holds no weights, or the
    hub cannot be reached and the cache does not hold all of the model; `SaveError` where the cache cannot be written.
    """
    model = _parsed(name)
    found = listing(model)
    if isinstance(found, str):
        return _cached(model, found)
    commit, names = found
    get = functools.partial(fetch, model, commit)
    descriptions, weights = _choose(model, names)
    for file in descriptions:
        get(file)
    path = get(weights)
    for shard in _shards(path):
        if shard not in names:
            raise BundleError(f"model {name!r} is incomplete: {weights} names {shard}, which the repository lacks")
        get(shard)
    keep_branch(model, commit, (*descriptions, weights)[0])
    return path.parent


def _parsed(name: str) -> Repository:
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    model = parse("model", name, name.removeprefix(prefix))
    if model is None:
        raise BundleError(f"model {name!r} is not a name on the hub, which has the form org/name or org/name@revision")
    return model


def _choose(model: Repository, names: Iterable[str]) -> tuple[list[str], str]:
    """Of a repository's files, the descriptions that a model needs, and its weights or the index of their shards."""
    names = sorted(name for name in names if "/" not in name)
    if DESCRIPTION in names and WEIGHTS in names:
        return [DESCRIPTION], WEIGHTS
    descriptions = [name for name in DESCRIPTIONS if name in names]
    for preferred in PREFERRED:
        if preferred in names:
            return descriptions, preferred
    for suffix in SUFFIXES:
        weights = [name for name in names if name.endswith(suffix)]
        if len(weights) > 1:
            raise BundleError(
                f"model {model.given!r} has several weights, {', '.join(weights)}: download the one that is meant, and "
                "load it by its path"
            )
        if weights:
            return descriptions, weights[0]
    raise BundleError(
        f"model {model.given!r} has no weights ({', '.join(SUFFIXES)}); its files are {', '.join(names) or 'none'}"
    )


def _shards(path: Path) -> list[str]:
    """The files beside an index that hold the weights; none where the file holds them itself."""
    if not path.name.endswith(".index.json"):
        return []
    try:
        shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BundleError(f"{path} is damaged: it does not say which file holds each tensor ({error})") from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise BundleError(f"{path} points outside its folder: {shard!r}")
    return shards


def _cached(model: Repository, why: str) -> Path:
    """The folder as an earlier download left it."""
    folder = cached_folder(model, why)
    try:
        _, weights = _choose(model, (file.name for file in folder.iterdir() if file.is_file()))
        missing = [shard for shard in _shards(folder / weights) if not (folder / shard).is_file()]
    except BundleError as error:
        raise BundleError(f"model {model.given!r} is not whole in the cache, and {why}: {error}") from None
    if missing:
        raise BundleError(f"model {model.given!r} is not whole in the cache, and {why}: {folder} lacks {missing[0]}")
    return folder
