"""Models by their names: those that are part of the package, and those on the Hugging Face hub.

A model's files on the hub are downloaded to the hub client's cache. Without a network connection, the files in the
cache are used.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path

from vitrail.errors import BundleError, listed
from vitrail.files import expanded
from vitrail.hub import Repository, cached_folder, fetch, from_cache, keep_branch, listing, parse
from vitrail.settings import typed
from vitrail.weights.saved import DESCRIPTION, NAMES, WEIGHTS
from vitrail.weights.tensors import SUFFIXES

PREFIXES = ("hf:", "hf-hub:")
DESCRIPTIONS = (
    "config.json", "preprocessor_config.json", "processor_config.json", "open_clip_config.json",
    "tokenizer_config.json",
)  # fmt: skip
TOKENIZERS = (("spiece.model",), ("tokenizer.json",), ("vocab.json", "merges.txt"))
"""Files of a tokenizer of texts, in order of preference."""
PREFERRED = (WEIGHTS, f"{WEIGHTS}.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names of weights files, in order of preference. A repository may hold the same weights in several formats."""


def looks_like_hub_name(path: str | Path) -> bool:
    """Return True if `path` has the form "org/name" or "org/name@revision" and does not exist on disk.

    A name with the prefix "hf:" or "hf-hub:" is always a hub name, even if "org/name" exists on disk or ends with a
    file suffix.
    """
    text = str(path)
    if os.path.lexists(text):
        return False
    if text.startswith(PREFIXES):
        return True
    model = parse("model", text, text)
    return model is not None and not model.name.lower().endswith((*SUFFIXES, ".json"))


def find(path: str | Path) -> tuple[Path, tuple[str, ...]]:
    """Return the file or folder of a model, and notes: a path on disk, a model of the package, or a name on the hub,
    whose files are downloaded. Raise the errors of `download`."""
    place: str = typed(str, os.fspath(path) if isinstance(path, os.PathLike) else path, "path")
    return download(place) if looks_like_hub_name(place) else (shipped_folder(place) or expanded(place), ())


def download(name: str) -> tuple[Path, tuple[str, ...]]:
    """Download the model of this name to the cache, and return its folder there, and notes. Files in the cache are not
    downloaded again.

    Only the needed files are downloaded: those of our own models, or another library's JSON descriptions, its tokenizer
    of texts and one set of weights, preferably safetensors. Without a network connection, the files of an earlier call
    are used, and a note says so.

    Raise `BundleError` if the repository or revision does not exist, access is refused, there are no weights, or the
    hub cannot be reached and the cache is incomplete. Raise `SaveError` if the cache cannot be written.
    """
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    model = parse("model", name, name.removeprefix(prefix))
    if model is None:
        raise BundleError(f"model {name!r} is not a name on the hub, which has the form org/name or org/name@revision")
    found = listing(model)
    if isinstance(found, str):
        return _cached(model, found), (from_cache(model, found),)
    commit, names = found
    get = functools.partial(fetch, model, commit)
    descriptions, weights = _choose(model, names)
    for file in descriptions:
        get(file)
    path = get(weights)
    for shard in _shards(path):
        if shard not in names:
            raise BundleError(f"model {name!r} is incomplete: {weights} names {shard}, which is not in the repository")
        get(shard)
    keep_branch(model, commit, (*descriptions, weights)[0])
    return path.parent, ()


def _choose(model: Repository, names: Iterable[str]) -> tuple[list[str], str]:
    """Return the names of the files to download from a repository.

    The first value lists the files beside the weights: descriptions, and what a text tower needs. The second value is
    the weights file, or the index of sharded weights.
    """
    everything = sorted(names)
    names = [name for name in everything if "/" not in name]
    if DESCRIPTION in names and WEIGHTS in names:
        return [name for name in NAMES if name in names and name != WEIGHTS], WEIGHTS
    tokenizer = next((files for files in TOKENIZERS if set(files) <= set(names)), ())
    descriptions = [name for name in (*DESCRIPTIONS, *tokenizer) if name in names]
    for preferred in PREFERRED:
        if preferred in names:
            return descriptions, preferred
    for suffix in SUFFIXES:
        weights = [name for name in names if name.endswith(suffix)]
        if len(weights) > 1:
            raise BundleError(
                f"model {model.given!r} has several files of weights, {', '.join(weights)}: download one of them, "
                "and load it by its path"
            )
        if weights:
            return descriptions, weights[0]
    raise BundleError(
        f"model {model.given!r} has no weights ({', '.join(SUFFIXES)}) outside of subfolders; its files are "
        f"{listed(everything) or 'none'}"
    )


def _shards(path: Path) -> list[str]:
    """Return the weights files that an index names, or an empty list if `path` is not an index."""
    if not path.name.endswith(".index.json"):
        return []
    try:
        shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BundleError(f"{path} is damaged: it does not name the file of each tensor ({error})") from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise BundleError(f"{path} points outside its folder: {shard!r}")
    return shards


def _cached(model: Repository, why: str) -> Path:
    """Return the folder of an earlier download. Raise `BundleError` if any file of the model is missing from it."""
    folder = cached_folder(model, why)
    try:
        _, weights = _choose(model, (file.name for file in folder.iterdir() if file.is_file()))
        missing = [shard for shard in _shards(folder / weights) if not (folder / shard).is_file()]
    except BundleError as error:
        raise BundleError(f"model {model.given!r} is incomplete in the cache, and {why}: {error}") from None
    if missing:
        raise BundleError(f"model {model.given!r} is incomplete in the cache, and {why}: {folder} lacks {missing[0]}")
    return folder


FOLDER = Path(__file__).parent / "shipped_models"

SHIPPED = ("small",)
"""Names of the models. docs/train.md says how each was trained, and what it is worth."""


def shipped_folder(name: str | Path) -> Path | None:
    """Return the folder of the model of this name, or None. A file or folder of that name on disk comes first."""
    text = str(name)
    return FOLDER / text if text in SHIPPED and not os.path.lexists(text) else None
