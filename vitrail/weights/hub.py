"""Names on the hub: what a model needs is fetched into huggingface_hub's cache, and found there without a network.

The cache, the endpoint, the token and offline mode are the client's own: HF_HOME, HF_ENDPOINT, HF_TOKEN,
HF_HUB_OFFLINE.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from vitrail.errors import BundleError, SaveError, nearest
from vitrail.weights.bundle import DESCRIPTION, WEIGHTS
from vitrail.weights.tensors import SUFFIXES

__all__ = ["download", "looks_like_hub_name"]

PREFIXES = ("hf:", "hf-hub:")
NAME = re.compile(
    r"(?:hf:|hf-hub:)?"
    r"(?P<repository>(?![^@]*(?:--|\.\.|\.git$|\.git@))\w(?:[\w.-]{0,94}\w)?/\w(?:[\w.-]{0,94}\w)?)"
    r"(?:@(?P<revision>(?!.*\.\.)\w[\w./+-]*))?",
    re.ASCII,
)
"""What the hub allows as a repository's name. No dots in a row in a revision either: it becomes a path in the cache."""

DESCRIPTIONS = ("config.json", "preprocessor_config.json")
PREFERRED = (WEIGHTS, f"{WEIGHTS}.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""One repository may hold the same weights several times; the first of these is taken."""


class _Model(NamedTuple):
    name: str
    """As it was given."""
    repository: str
    revision: str
    """A branch, a tag or a commit."""


def looks_like_hub_name(path: str | Path) -> bool:
    """Whether this is "org/name" or "org/name@revision" rather than a path. What exists here is always a path.

    "hf:" or "hf-hub:" in front says that a name is meant, also where "org/name" exists here or ends as a file would.
    """
    text = str(path)
    if os.path.lexists(text):
        return False
    if text.startswith(PREFIXES):
        return True
    match = NAME.fullmatch(text)
    return match is not None and not match["repository"].lower().endswith((*SUFFIXES, ".json"))


def download(name: str) -> Path:
    """The folder in the cache with the model of this name, fetched unless it is there already.

    Only what a model needs is fetched: our own `model.json` and weights, or else another library's descriptions and
    one set of weights, safetensors where there are any. Without a network, what an earlier call fetched is used.

    Raises `BundleError` where there is no such repository or revision, access is refused, it holds no weights, or the
    hub cannot be reached and the cache does not hold all of the model; `SaveError` where the cache cannot be written.
    """
    model = _parsed(name)
    hub = _client()
    found = "offline mode is on (HF_HUB_OFFLINE)" if hub.constants.HF_HUB_OFFLINE else _listing(model)
    if isinstance(found, str):
        return _cached(model, found)
    commit, names = found
    fetch = functools.partial(_fetch, model, commit)
    descriptions, weights = _choose(model, names)
    for file in descriptions:
        fetch(file)
    path = fetch(weights)
    for shard in _shards(path):
        if shard not in names:
            raise BundleError(f"model {name!r} is incomplete: {weights} names {shard}, which the repository lacks")
        fetch(shard)
    if commit != model.revision:
        # The client notes which commit a branch stands for when it asks for a file by the branch. That comes last, so
        # that a download which breaks off leaves the branch, for use offline, at the commit that is whole.
        with contextlib.suppress(Exception):
            hub.hf_hub_download(model.repository, (*descriptions, weights)[0], revision=model.revision)
    return path.parent


def _parsed(name: str) -> _Model:
    match = NAME.fullmatch(name)
    if match is None:
        raise BundleError(f"model {name!r} is not a name on the hub, which has the form org/name or org/name@revision")
    return _Model(name, match["repository"], match["revision"] or "main")


@functools.cache
def _client() -> ModuleType:
    """huggingface_hub, imported at first use: models on disk do without it."""
    for part in ("constants", "errors"):
        importlib.import_module(f"huggingface_hub.{part}")
    return importlib.import_module("huggingface_hub")


def _listing(model: _Model) -> tuple[str, list[str]] | str:
    """The commit that the revision stands for, and its files; or why the hub cannot be asked."""
    hub = _client()
    # Which exceptions a lost connection raises depends on the client's version: it has changed its HTTP library twice.
    try:
        found = hub.HfApi().model_info(
            model.repository, revision=model.revision, timeout=hub.constants.HF_HUB_ETAG_TIMEOUT
        )
        return str(found.sha), [file.rfilename for file in found.siblings or ()]
    except Exception as error:
        _raise_if_final(model, error)
        if isinstance(error, hub.errors.HfHubHTTPError):
            return f"the hub at {hub.constants.ENDPOINT} is out of order ({error.response.status_code})"
        return f"there is no network to the hub at {hub.constants.ENDPOINT} ({_line(error)})"


def _choose(model: _Model, names: Iterable[str]) -> tuple[list[str], str]:
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
                f"model {model.name!r} has several weights, {', '.join(weights)}: download the one that is meant, and "
                "load it by its path"
            )
        if weights:
            return descriptions, weights[0]
    raise BundleError(
        f"model {model.name!r} has no weights ({', '.join(SUFFIXES)}); its files are {', '.join(names) or 'none'}"
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


def _fetch(model: _Model, commit: str, file: str) -> Path:
    hub = _client()
    try:
        return Path(hub.hf_hub_download(model.repository, file, revision=commit))
    except Exception as error:  # whichever, as above
        cause = error.__cause__
        if isinstance(error, hub.errors.LocalEntryNotFoundError) and isinstance(cause, Exception):
            error = cause  # it could not ask for the file's size, and says so in general terms
        _raise_if_final(model, error)
        raise BundleError(
            f"the download of {file} of model {model.name!r} broke off ({_line(error)}); what has arrived whole is "
            f"kept in the cache {hub.constants.HF_HUB_CACHE}, so try again"
        ) from None


def _cached(model: _Model, why: str) -> Path:
    """The folder as an earlier download left it."""
    hub = _client()
    try:  # no patterns: which files are needed is for us to say, and not all of the repository's are
        folder = Path(
            hub.snapshot_download(model.repository, revision=model.revision, local_files_only=True, allow_patterns=[])
        )
    except hub.errors.LocalEntryNotFoundError:
        raise BundleError(
            f"model {model.name!r} is neither a file or folder here nor in the cache {hub.constants.HF_HUB_CACHE}, and "
            f"{why}"
        ) from None
    except OSError as error:
        raise BundleError(f"model {model.name!r} cannot be read from the cache ({error}), and {why}") from None
    try:
        _, weights = _choose(model, (file.name for file in folder.iterdir() if file.is_file()))
        missing = [shard for shard in _shards(folder / weights) if not (folder / shard).is_file()]
    except BundleError as error:
        raise BundleError(f"model {model.name!r} is not whole in the cache, and {why}: {error}") from None
    if missing:
        raise BundleError(f"model {model.name!r} is not whole in the cache, and {why}: {folder} lacks {missing[0]}")
    return folder


def _raise_if_final(model: _Model, error: Exception) -> None:
    """For what the hub says against the request, or this machine's disk; not where it could not be asked or is ill."""
    hub = _client()
    # Only the system's own errors have a number: those of the HTTP libraries, which are of the same class, have none.
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
        raise SaveError(f"model {model.name!r} cannot be kept in {hub.constants.HF_HUB_CACHE}: {error}") from None
    if not isinstance(error, hub.errors.HfHubHTTPError):
        return
    page = f"{hub.constants.ENDPOINT}/{model.repository}"
    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    status = error.response.status_code
    if isinstance(error, hub.errors.GatedRepoError):
        text = f"model {model.name!r} is gated: ask for access at {page}, then {log_in}"
    elif isinstance(error, hub.errors.RepositoryNotFoundError):
        text = (
            f"model {model.name!r} is neither a file or folder here nor a repository at {hub.constants.ENDPOINT}; if "
            f"it is a private one, {log_in}"
        )
    elif isinstance(error, hub.errors.RevisionNotFoundError):
        text = f"model {model.repository!r} has no revision {model.revision!r}{_revisions(model)}"
    elif status in (401, 403):
        text = f"access to model {model.name!r} is refused ({_line(error)}): see {page}, and {log_in}"
    elif status in (408, 429) or status >= 500:
        return
    else:
        text = f"the hub refuses model {model.name!r} ({_line(error)})"
    raise BundleError(text) from None


def _revisions(model: _Model) -> str:
    """The end of the message about one that does not exist."""
    with contextlib.suppress(Exception):  # there is a message to give, with or without it
        refs = _client().HfApi().list_repo_refs(model.repository)
        return "; " + nearest(model.revision, [ref.name for ref in (*refs.branches, *refs.tags)])
    return ""


def _line(error: Exception) -> str:
    """The client's messages run over several lines, and some of requests over hundreds of characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."
