"""The files in a tar and their positions, read from its headers alone (POSIX ustar and pax, GNU long names)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from vitrail.errors import DataError

Read = Callable[[int, int], bytes]
"""A function of an offset and a number of bytes that returns those bytes of a file. It returns fewer bytes at the end
of the file."""

BLOCK = 512
LONGEST_NAME = 2**20
FILES = (b"0", b"\0", b"7")
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """A file in a tar."""

    name: str
    offset: int
    """Position of the first byte in the tar."""
    size: int


def members(shard: str, read: Read, size: int) -> Iterator[Member]:
    """Yield the files in a tar of `size` bytes, in order, without its folders.

    Only headers and long names are read, never the content of a file. Raises `DataError` if the file is truncated or is
    not an uncompressed tar, if a member is a link, a device or a sparse file, or if the path of a member leads out of
    the folder.
    """
    position, name, length = 0, None, None
    last = "its beginning"
    while True:
        header = read(position, BLOCK) if position < size else b""  # a header may state any size
        if position == 0:
            _refuse_other(shard, header)
        if len(header) < BLOCK:
            raise DataError(
                f"{shard} is truncated: it ends at byte {size:,}, after {last}, without the zeros that end a tar; "
                "copy or create the shard again"
            )
        if header.count(0) == BLOCK:
            return
        kind = header[156:157]
        stated = _size(shard, header, position)
        data = position + BLOCK
        if kind in (b"L", b"x", b"X"):
            if stated > min(LONGEST_NAME, size - data):
                raise DataError(
                    f"{shard} is damaged at byte {position:,}: the stated length of a name is {stated:,} bytes, which "
                    "is too long; copy or create the shard again"
                )
            extra = read(data, stated)
            if kind == b"L":
                name = _text(extra.rstrip(b"\0"))
            else:
                name, length = _pax(shard, extra, position, name)
        elif kind not in (b"g", b"K"):
            path, count = name or _name(header), stated if length is None else length
            _refuse_hostile(shard, path, kind)
            if kind == b"5" or path.endswith("/"):
                count = 0
            elif data + count > size:
                raise DataError(
                    f"{shard} is truncated: it ends at byte {size:,}, inside {path!r}, which extends to "
                    f"{data + count:,}; copy or create the shard again"
                )
            else:
                yield Member(path.removeprefix("./"), data, count)
            stated, last = count, repr(path)
            name = length = None
        position = data + -(-stated // BLOCK) * BLOCK


def _refuse_other(shard: str, start: bytes) -> None:
    """Raise `DataError` if a file does not begin like a tar. The message names the actual format if it is known."""
    if not start:
        raise DataError(f"{shard} is empty (0 bytes); copy or create the shard again")
    if len(start) == BLOCK and (start.count(0) == BLOCK or _checks(start)):
        return
    for mark, method in COMPRESSED.items():
        if start.startswith(mark):
            raise DataError(
                f"{shard} is compressed ({method}); samples are read in random order, which needs a plain tar, so "
                "decompress it"
            )
    raise DataError(f"{shard} is not a tar file")


def _checks(header: bytes) -> bool:
    """Return True if a header's checksum is correct. The checksum is the sum of the header's bytes, with spaces in
    place of the checksum."""
    try:
        return _number(header[148:156]) == sum(header) - sum(header[148:156]) + 8 * 32
    except ValueError:
        return False


def _size(shard: str, header: bytes, position: int) -> int:
    try:
        size = _number(header[124:136])
    except ValueError:
        size = -1
    if size < 0 or not _checks(header):
        raise DataError(
            f"{shard} is damaged at byte {position:,}, where the header of a file is expected; copy or create the "
            "shard again"
        )
    return size


def _number(digits: bytes) -> int:
    """Return a number from a header field. Numbers are written in octal digits. A number that is too large for the
    field is written in base 256 after a first byte of 128 (GNU)."""
    if digits[0] & 0x80:
        return int.from_bytes(digits[1:], "big") if digits[0] == 0x80 else -1
    return int(digits.split(b"\0")[0].strip() or b"0", 8)


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0")[0]
    if header[257:263] == b"ustar\0" and (prefix := header[345:500].split(b"\0")[0]):
        name = prefix + b"/" + name
    return _text(name)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _pax(shard: str, data: bytes, position: int, name: str | None) -> tuple[str | None, int | None]:
    """Return the path and the size that a pax header states for the next member, in records "LENGTH KEY=VALUE\\n"."""
    length = None
    while data.strip(b"\0"):
        digits = data.split(b" ", 1)[0]
        count = int(digits) if digits.isdigit() and len(digits) < 8 else 0
        key, equals, value = data[len(digits) + 1 : count - 1].partition(b"=")
        if not equals or count > len(data):
            raise DataError(
                f"{shard} is damaged at byte {position:,}: its pax header cannot be read; copy or create the shard "
                "again"
            )
        if key.startswith(b"GNU.sparse"):
            raise DataError(f"{shard} has a sparse file, which cannot be read; pack it again without tar's --sparse")
        if key == b"path":
            name = _text(value)
        elif key == b"size" and value.isdigit() and len(value) < 20:
            length = int(value)
        data = data[count:]
    return name, length


def _refuse_hostile(shard: str, path: str, kind: bytes) -> None:
    if path.startswith("/") or ".." in path.split("/") or "\0" in path or not path:
        raise DataError(
            f"{shard} has a file called {path!r}, which leads out of the folder into which a tar is unpacked; pack it "
            "again with paths inside the folder"
        )
    if kind in (b"1", b"2"):
        raise DataError(f"{shard} has the link {path!r}; pack the file itself instead (tar --dereference)")
    if kind not in (*FILES, b"5"):
        raise DataError(f"{shard} has {path!r}, which is not an ordinary file (type {kind!r}); pack the tar without it")
