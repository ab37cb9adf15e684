"""Search for the tar shards of each split. A location is a file, a folder, a brace pattern or a glob, local or as a
URL."""

from __future__ import annotations

import glob
import itertools
import json
import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from vitrail.data import remote
from vitrail.data.packing import manifest
from vitrail.data.pixels.formats import SUFFIXES as IMAGE_SUFFIXES
from vitrail.data.splits import SPLITS, Split, SplitNames, by_split, split_of
from vitrail.errors import DataError

SUFFIXES = (".tar", ".tar.gz", ".tgz")
"""File suffixes of tar files. Compressed ones are recognised so that a message can explain why they are refused."""

OTHER_SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet", ".json", ".zip", ".rar", ".7z", *IMAGE_SUFFIXES)
BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)\.\.(\d+)")
MOST = 1_000_000


@dataclass(frozen=True)
class Located:
    """Paths or URLs of shards, by split and in order."""

    shards: dict[Split, list[str]]
    classes: tuple[str, ...] | None
    """The classes from dataset.json or classes.json beside the shards, if there is such a file."""
    notes: tuple[str, ...]
    """Notes on shards that are in no split."""
    sizes: dict[str, int]
    """Size of each shard in bytes, by path, from dataset.json beside the shards. Empty without such a file."""


def looks_like_shards(location: str, chosen: SplitNames | None = None) -> bool:
    """Return True if `open_shards` should open this location.

    It opens .tar files, patterns and folders of .tar files, and all URLs except those of tables. A folder qualifies if
    it has packed shards, if it has .tar files that are in or named after train, val or test, or if it has .tar files
    and no subfolders.
    """
    bare = location.partition("?")[0] if remote.is_remote(location) else location
    if bare.endswith(SUFFIXES) or (_is_pattern(bare) and ".tar" in bare):
        return True
    if remote.is_remote(location):
        return not bare.endswith(OTHER_SUFFIXES)
    root = Path(location).expanduser()
    if not root.is_dir():
        return False
    if (root / manifest.FILE).is_file() or (root / manifest.UNFINISHED).is_file():
        return True
    found = _in_folder(root, chosen)
    if any(split_of(path, chosen) is not None for path in found):
        return True
    return bool(found) and not any(entry.is_dir() for entry in root.iterdir() if not entry.name.startswith("."))


def locate(location: str, chosen: SplitNames | None = None) -> Located:
    """Return the shards that a location names. `chosen` states the names of the splits. Raises `DataError`."""
    if not remote.is_remote(location):
        location = str(Path(location).expanduser())
    if _is_pattern(location) and not Path(location).exists():  # a file may have brackets in its name
        return _pattern(location, chosen)
    if location.partition("?")[0].endswith(SUFFIXES) and not Path(location).is_dir():
        folder, slash, _ = location.rpartition("/")
        if chosen:
            raise DataError(f"data {location!r} is a single shard, which --splits cannot divide; leave --splits out")
        return _located({"train": [location]}, folder + slash)
    return _folder(location, chosen)


def _is_pattern(location: str) -> bool:
    # A question mark in a URL begins its query.
    return re.search(r"[*{]" if remote.is_remote(location) else r"[*{?[]", location) is not None


def _pattern(location: str, chosen: SplitNames | None) -> Located:
    """Return the shards that match a pattern. If all shards are named after the same split, they are used for
    training."""
    folder, slash, _ = re.split(r"[*{]" if remote.is_remote(location) else r"[*{?[]", location)[0].rpartition("/")
    base = folder + slash
    found: list[str] = []
    for pattern in _expand(location.removeprefix(base)):
        if not _is_pattern(f"{base}{pattern}"):
            found.append(pattern)
            continue
        if remote.is_remote(location):
            matches = remote.glob(folder, pattern)
        else:
            matches = glob.glob(pattern, root_dir=base or None)  # noqa: PTH207 (Path.glob keeps no relative paths)
        found += [match for match in matches if match.endswith(SUFFIXES)]
    found = list(dict.fromkeys(found))
    if not found:
        raise DataError(f"data {location!r}: no file matches this pattern; correct the pattern")
    if missing := [path for path in found if not remote.is_remote(base) and not Path(base + path).exists()]:
        raise DataError(
            f"data {location!r}: {len(missing):,} of {len(found):,} shards are missing, such as {base + missing[0]}"
        )
    if not chosen and len({split_of(path) for path in found}) == 1:
        return _located({"train": [base + path for path in sorted(found)]}, base)
    named, notes = by_split(location, found, chosen)
    return _located({split: [base + path for path in paths] for split, paths in named.items()}, base, notes)


def _expand(pattern: str) -> list[str]:
    """Return all strings that a pattern with {000..012} or {train,val} stands for, as in a shell."""
    pieces = BRACES.split(pattern)
    choices: list[list[str]] = []
    for number, piece in enumerate(pieces):
        bounds = RANGE.fullmatch(piece) if number % 2 else None
        if bounds is not None:
            first, last = int(bounds[1]), int(bounds[2])
            if not first <= last < first + MOST:
                raise DataError(
                    f"{{{piece}}} in {pattern!r} is not a range from a number to a larger one, with at most {MOST:,} "
                    "numbers"
                )
            width = len(bounds[1]) if bounds[1].startswith("0") else 0
            choices.append([str(value).zfill(width) for value in range(first, last + 1)])
        else:
            choices.append(piece.split(",") if number % 2 else [piece])
    if math.prod(map(len, choices)) > MOST:
        raise DataError(f"{pattern!r} stands for more than {MOST:,} shards, which is the maximum")
    return ["".join(parts) for parts in itertools.product(*choices)]


def _folder(location: str, chosen: SplitNames | None) -> Located:
    base = location.rstrip("/") + "/"
    if (packed := _manifest(base)) is not None:
        if chosen:
            raise DataError(f"data {location!r} was packed with its splits, so --splits has no effect; leave it out")
        return _located(
            {
                split: [base + record.name for record in packed.shards[split]]
                for split in SPLITS
                if split in packed.shards
            },
            base,
        )
    if _file(base + manifest.UNFINISHED) is not None:
        again = f"vitrail data pack SPEC {shlex.quote(location)}"
        raise DataError(f"{location} is not packed completely; continue with: {again}")
    if remote.is_remote(base):
        found = [path for path in remote.list_files(base) if _is_shard(path, chosen)]
    else:
        found = _in_folder(Path(base), chosen)
    if not found:
        only = "; other formats must be on the disk, so download the data" if remote.is_remote(base) else ""
        raise DataError(f"{location} has no shards; it needs .tar files, directly or in train/, val/ or test/{only}")
    named, notes = by_split(location, found, chosen)
    return _located({split: [base + path for path in paths] for split, paths in named.items()}, base, notes)


def _in_folder(root: Path, chosen: SplitNames | None = None) -> list[str]:
    paths = (path.relative_to(root).as_posix() for depth in ("*", "*/*") for path in root.glob(depth))
    return sorted(path for path in paths if _is_shard(path, chosen))


def _is_shard(path: str, chosen: SplitNames | None) -> bool:
    """Return True for the relative path of a tar directly in a folder or in a subfolder that is named after a split."""
    folder, _, name = path.rpartition("/")
    return name.endswith(SUFFIXES) and not name.startswith(".") and (not folder or split_of(folder, chosen) is not None)


def _located(shards: dict[Split, list[str]], base: str, notes: tuple[str, ...] = ()) -> Located:
    """Return the shards with the classes and sizes from dataset.json or classes.json in their folder."""
    if (packed := _manifest(base)) is not None:
        records = (record for records in packed.shards.values() for record in records)
        return Located(shards, packed.classes, notes, {base + record.name: record.size for record in records})
    if (data := _file(f"{base}classes.json")) is None:
        return Located(shards, None, notes, {})
    try:
        names = json.loads(data)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise DataError(f"{base}classes.json must be a list of names without repetitions")
    return Located(shards, tuple(names), notes, {})


def _manifest(base: str) -> manifest.Manifest | None:
    data = _file(base + manifest.FILE)
    return None if data is None else manifest.parse(base + manifest.FILE, data)


def _file(path: str) -> bytes | None:
    """Return the bytes of a small file, or None if it does not exist."""
    try:
        return remote.read_all(path) if remote.is_remote(path) else Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if remote.is_remote(path) and isinstance(error, PermissionError):
            return None  # some servers give this answer for a missing file
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
