"""Data sets on the Hugging Face hub, such as `hf:org/name`. Parquet files are downloaded into the hub client's cache.

The README of a repository or the folder names determine the configuration and split of each file. If a repository has
no Parquet files, the hub's own conversion is used, from the revision refs/convert/parquet.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.data.formats.parquet import SHARD, SUFFIX, ParquetFile, identity_of, missing_shards, open_files
from vitrail.data.splits import CHOICE, SPLITS, Choice, Split, SplitNames, Splits, check_chosen, split_of
from vitrail.errors import DataError, check_known, listed
from vitrail.files import cache_folder, replacing_file, saving
from vitrail.hub import Repository, cached_folder, client, fetch, from_cache, keep_branch, listing, parse

PREFIX = "hf:"
CONVERTED = "refs/convert/parquet"
README = "README.md"
ATTEMPTS = 3
"""Number of requests per file, with pauses of 1 and 2 seconds between requests. The hub client has its own retries in
addition."""
CONNECTIONS = 4

Configurations = dict[str, dict[str, list[str]]]
"""The files by configuration and split, with the configuration and split names of the repository."""


class _Listing(NamedTuple):
    """The files of a repository, as the hub or the cache lists them."""

    repository: Repository
    commit: str
    names: list[str]
    why: str
    """Reason why the hub cannot be reached, or "". If there is a reason, all files must come from the cache."""


def open_hub_data(
    spec: str, classes: tuple[str, ...] | None, numbers: tuple[str, ...] = (), choice: Choice | None = None
) -> Splits:
    """Open `hf:ORG/NAME[@REVISION][:CONFIG]`, downloading files that are not in the cache.

    Without a network, or in offline mode, only the cache is used. Raises `DataError` if the repository, revision or
    configuration does not exist, access is refused, there are no Parquet files, or the hub cannot be reached and the
    cache is incomplete. Raises `SaveError` if the disk is full or not writable.
    """
    choice = choice or Choice()
    name, colon, config = spec.removeprefix(PREFIX).partition(":")
    repository = parse("dataset", spec, name)
    if repository is None or (colon and not config):
        raise DataError(
            f"data {spec!r} is not a name on the hub; write hf:org/name, hf:org/name@revision or "
            "hf:org/name:configuration"
        )
    found = _listing(repository)
    configurations, preferred = _configurations(found)
    if not configurations:
        if repository.revision != "main":
            raise DataError(f"data {spec!r} has no {SUFFIX} files; its files are {listed(found.names)}")
        if not found.why:
            _keep(found)
        found = _converted(found)
        configurations, preferred = _by_folder(found.names), None
        if not configurations:
            raise DataError(f"data {spec!r} has no {SUFFIX} files, and neither has the hub's own conversion")
    stated = configurations[_chosen(spec, configurations, config, preferred)]
    splits, notes = _splits(spec, {split: names for split, names in stated.items() if names}, choice.splits)
    if empty := [split for split, names in stated.items() if not names]:
        notes.append(f"data {spec!r}: the README names no {SUFFIX} file of the repository for {', '.join(empty)}")
    paths = _files(found, [name for names in splits.values() for name in names])
    if found.why:
        notes.append(from_cache(repository, found.why))
    else:
        _keep(found)
        keep_branch(found.repository, found.commit, next(iter(paths)))
    files = {
        split: [ParquetFile(name, paths[name], _identity(paths[name])) for name in names]
        for split, names in splits.items()
    }
    choice = replace(choice, splits={}) if choice.splits else choice  # the choice is that of files, not of rows
    return open_files(f"data {spec!r}", files, choice, classes, notes, numbers=numbers)


# --- the files of a repository


def _listing(repository: Repository) -> _Listing:
    """Return the files of a repository, as listed by the hub.

    If the hub cannot be reached, return the list that an earlier call saved. If there is no such list, return the files
    in the cache.
    """
    answer = listing(repository)
    if not isinstance(answer, str):
        commit, names = answer
        return _Listing(repository, commit, sorted(names), "")
    try:
        kept = json.loads(_kept(repository).read_text(encoding="utf-8"))
        return _Listing(repository, kept["commit"], kept["names"], answer)
    except (OSError, ValueError, KeyError, TypeError):  # no earlier call saved a list
        folder = cached_folder(repository, answer)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    if incomplete := next(missing_shards(names), None):
        raise DataError(f"{repository.title} is incomplete in the cache, and {answer}. The cache has {incomplete}.")
    return _Listing(repository, folder.name, names, answer)


def _keep(found: _Listing) -> None:
    """Save the list of files for offline use. It replaces the list of an earlier commit."""
    place = _kept(found.repository)
    with saving(f"the list of files of {found.repository.title}", place), replacing_file(place) as partial:
        partial.write_text(json.dumps({"commit": found.commit, "names": found.names}), encoding="utf-8")


def _kept(repository: Repository) -> Path:
    asked = f"{client().constants.ENDPOINT} {repository.name} {repository.revision}"
    return cache_folder("parquet") / f"{hashlib.sha256(asked.encode()).hexdigest()[:24]}.json"


def _converted(original: _Listing) -> _Listing:
    """Return the files of the hub's own conversion of a repository. Raises `DataError`."""
    try:
        return _listing(original.repository._replace(revision=CONVERTED))
    except DataError as error:
        raise DataError(
            f"{original.repository.title} has no {SUFFIX} files (it holds: {listed(original.names) or 'nothing'}), and "
            f"the hub's own conversion is not available: {error}"
        ) from None


def _files(found: _Listing, names: Sequence[str]) -> dict[str, Path]:
    """Return the path of each file, downloading the files that are not in the cache. Raises `DataError`."""
    if found.why:
        folder = cached_folder(found.repository._replace(revision=found.commit), found.why)
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise DataError(
                f"{found.repository.title} is incomplete in the cache, and {found.why}: "
                f"{folder} lacks {listed(missing)}"
            )
        return {name: folder / name for name in names}
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        paths = threads.map(lambda name: fetch(found.repository, found.commit, name, attempts=ATTEMPTS), names)
        return dict(zip(names, paths, strict=True))


def _identity(path: Path) -> str:
    """Return a text that identifies the content of a file. It is the file's hash if the client's cache stores files by
    hash."""
    target = path.resolve()
    return f"hub {target.name}" if target.parent.name == "blobs" else identity_of(path)


# --- the configuration and the splits


def _configurations(found: _Listing) -> tuple[Configurations, str | None]:
    """Return the configurations, and the name of the README's default configuration.

    If the README states no configurations, they come from the folder names.
    """
    if not any(name.endswith(SUFFIX) for name in found.names):
        return {}, None
    stated: list[dict[str, Any]] = []
    if README in found.names:
        stated = _stated(_files(found, [README])[README])
    if not stated:
        return _by_folder(found.names), None
    result: Configurations = {}
    for entry in stated:
        splits = _matched(entry, [name for name in found.names if name.endswith(SUFFIX)])
        if any(splits.values()):
            result[str(entry["config_name"])] = splits
    preferred = next((str(entry["config_name"]) for entry in stated if entry.get("default") is True), None)
    return result, preferred if preferred in result else None


def _stated(readme: Path) -> list[dict[str, Any]]:
    """Return the field `configs` of the YAML at the top of a README. Return an empty list if it cannot be read."""
    text = readme.read_text(encoding="utf-8-sig", errors="replace")
    match = re.match(r"\s*---[ \t]*\r?\n(.*?\n)---", text, re.S)
    yaml = importlib.import_module("yaml")  # a dependency of huggingface_hub
    try:
        card = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, RecursionError, ValueError):
        return []
    configs = card.get("configs") if isinstance(card, dict) else None
    return [
        entry
        for entry in (configs if isinstance(configs, list) else ())
        if isinstance(entry, dict) and "config_name" in entry
    ]


def _matched(entry: Mapping[str, Any], names: Sequence[str]) -> dict[str, list[str]]:
    """Return the files per split of one configuration of a README. The configuration can state patterns, a folder, or
    neither."""
    folder = str(entry.get("data_dir") or "").strip("./")
    within = [name for name in names if not folder or name.startswith(f"{folder}/")]
    stated = entry.get("data_files")
    if stated is None:
        return _by_name(within)
    if isinstance(stated, dict):
        stated = [{"split": split, "path": path} for split, path in stated.items()]
    stated = stated if isinstance(stated, list) else [stated]
    if any(not isinstance(part, dict) for part in stated):
        stated = [{"split": "train", "path": [part for part in stated if isinstance(part, str)]}]
    result: dict[str, list[str]] = {}
    for part in stated:
        paths = part.get("path")
        patterns = [_pattern(f"{folder}/{path}" if folder else str(path)) for path in _listed(paths)]
        matching = [name for name in within if any(pattern.fullmatch(name) for pattern in patterns)]
        result.setdefault(str(part.get("split", "train")), []).extend(matching)
    return result


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _pattern(glob: str) -> re.Pattern[str]:
    """Return a path with * (within a folder), ** (across folders), ?, [abc] and [!abc] as a regular expression."""
    translated = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]/\\]+\])", glob.removeprefix("./"))
    sets = {part: part.replace("[!", "[^") for part in parts if part[:1] == "[" and part[-1:] == "]"}
    return re.compile("".join(translated.get(part) or sets.get(part) or re.escape(part) for part in parts), re.S)


def _by_folder(names: Iterable[str]) -> Configurations:
    """Return the files by configuration. A folder that contains splits is a configuration.

    For example, `plain/train/0000.parquet` belongs to the configuration `plain`, but `data/train-0.parquet` to none.
    """
    result: dict[str, list[str]] = {}
    for name in [name for name in names if name.endswith(SUFFIX)]:
        folder, _, rest = name.partition("/")
        is_own = rest and folder != "data" and split_of(folder) is None and split_of(_whole(rest)) is not None
        result.setdefault(folder if is_own else "default", []).append(name)
    return {config: _by_name(files) for config, files in result.items()}


def _whole(path: str) -> str:
    """Return a path without the prefix for partial conversions. The hub adds it if only the first 5 GB of a split were
    converted."""
    return re.sub(r"(^|/)partial-", r"\1", path)


def _by_name(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files by split, which the file or folder name states. Files without a split are under ""."""
    result: dict[str, list[str]] = {}
    for name in names:
        match = SHARD.fullmatch(Path(name).name.removesuffix(SUFFIX))
        split = match["split"] if match else split_of(_whole(name)) or ""
        result.setdefault(split, []).append(name)
    return result


def _chosen(spec: str, configurations: Configurations, wanted: str, preferred: str | None) -> str:
    names = list(configurations)
    if wanted:
        check_known(wanted, names, f"data {spec!r} has no configuration {wanted!r}", DataError)
        return wanted
    if len(names) == 1:
        return names[0]
    if preferred is not None or "default" in configurations:
        return preferred or "default"
    example = spec.partition("?")[0]
    raise DataError(
        f"data {spec!r} has several configurations: {', '.join(names)}; choose one by adding a colon and its name, "
        f"such as {example}:{names[0]}"
    )


def _splits(
    spec: str, found: Mapping[str, list[str]], chosen: SplitNames | None
) -> tuple[dict[Split, list[str]], list[str]]:
    """Return the files for train, validation and test, and notes on skipped splits. A single split is used for
    training."""
    result: dict[Split, list[str]] = {}
    taken: set[str] = set()
    for split, names in SPLITS.items():
        exact = [] if chosen else [name for name in found if name.lower() in names]
        alike = exact or [name for name in found if split_of(name, chosen) == split]
        if len(alike) > 1 and not chosen:
            raise DataError(
                f"data {spec!r} has {' and '.join(alike)}, but only one of them can be the {split} split; open a "
                f"configuration with one of them, or choose it: {CHOICE}"
            )
        if alike:
            result[split] = sorted({file for name in alike for file in found[name]})
            taken.update(alike)
    if chosen:
        check_chosen(f"data {spec!r}", chosen, result, list(found))
    if not result and len(found) == 1:
        return {"train": sorted(next(iter(found.values())))}, _partial(spec, found)
    if not result:
        shown = ", ".join(name or "(none)" for name in found)
        raise DataError(f"data {spec!r} has the splits {shown} but no train split; choose it: {CHOICE}")
    skipped = [name or "files of no split" for name in found if name not in taken]
    notes = (
        [f"data {spec!r}: skipped {', '.join(skipped)}, because only train, val and test are read"] if skipped else []
    )
    return result, notes + _partial(spec, {name: found[name] for name in taken})


def _partial(spec: str, found: Mapping[str, list[str]]) -> list[str]:
    partial = [split or "data" for split, names in found.items() if any(_whole(name) != name for name in names)]
    if not partial:
        return []
    return [f"data {spec!r}: the hub has converted only the first part of {', '.join(partial)}"]
