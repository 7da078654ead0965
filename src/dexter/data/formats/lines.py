"""Lines of a text file, plain or gzip, within limits; and bad records, which are grouped before they are reported.

Lines are read as bytes, so that one bad line does not end the file. Only a line feed ends a line (a carriage return
before it is dropped); other Unicode line breaks belong to the text. A byte order mark at the start is ignored. Whether
a file is gzip is decided by its first bytes, not by its name.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from dexter.errors import DataError, UsageError

OnError = Literal["fail", "skip"]

MAX_LINE_BYTES = 16 * 1024**2
"""A longer line is a bad record: no text of this length is worth encoding, and it would be held in memory whole."""
MAX_BAD_RECORDS = 1000
"""With `on_error="fail"`, reading stops after this many bad records: the first of each kind is what helps."""
_MAX_BYTES_VARIABLE = "DEXTER_MAX_BYTES"
_DEFAULT_MAX_BYTES = 16 * 1024**3
_MAX_WHOLE_BYTES = 1024**3
"""Of a file that is held in memory whole."""
_MAX_COMPRESSION_RATIO = 50
_RATIO_FREE_BYTES = 64 * 1024**2
_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BUFFER_BYTES, _FIRST_BYTES = 256 * 1024, 64 * 1024
_MAX_GROUPS_SHOWN = 10
_EXCERPT_CHARACTERS = 40


class BadRecord(Exception):
    """One record that cannot be used: a kind, by which repeats are grouped, and a message about this one.

    Damage to a whole file (a truncated gz, a missing column) is not a bad record: readers raise `DataError` at once.
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        self.message = message
        super().__init__(message)


@dataclass
class _Group:
    """Bad records of one kind in one file: the first of them and their number."""

    path: Path
    line: int
    message: str
    count: int = 1

    def __str__(self) -> str:
        return self.message + (f" (and {self.count - 1:,} more like it)" if self.count > 1 else "")


class RecordErrors:
    """The bad records of one data set, grouped by file and kind."""

    def __init__(self, on_error: OnError = "fail") -> None:
        self._on_error = on_error
        self._groups: dict[tuple[Path, str], _Group] = {}
        self._must_fail = False

    @property
    def count(self) -> int:
        """Number of bad records so far."""
        return sum(group.count for group in self._groups.values())

    def add(self, path: Path, line: int, bad: BadRecord, *, skippable: bool = True) -> None:
        """Note one bad record; if it is not skippable, `check` raises even with `on_error="skip"`."""
        group = self._groups.get((path, bad.kind))
        if group is None:
            self._groups[path, bad.kind] = _Group(path, line, bad.message)
        else:
            group.count += 1
        self._must_fail |= not skippable or self._on_error == "fail"
        if self._must_fail and self.count >= MAX_BAD_RECORDS:
            self.check()

    def check(self) -> None:
        """Raise one `DataError` with a line for each kind of bad record, unless all of them may be skipped."""
        if not self._must_fail:
            return
        first, *rest = self._groups.values()
        lines = [str(first)]
        lines += [f"{group.path}:{group.line}: {group}" for group in rest[: _MAX_GROUPS_SHOWN - 1]]
        if len(rest) >= _MAX_GROUPS_SHOWN:
            lines.append(f"... and {len(rest) - _MAX_GROUPS_SHOWN + 1} more kinds of bad lines")
        raise DataError("\n".join(lines), path=first.path, line=first.line)

    def summary(self) -> list[str]:
        """Describe what was skipped, one line for each kind; empty when nothing was."""
        if not self._groups:
            return []
        total = f"skipped {self.count:,} line{'s' if self.count != 1 else ''}"
        return [total] + [f"  {group.path}:{group.line}: {group}" for group in self._groups.values()]


def excerpt(value: object) -> str:
    """Return a short, printable form of a user's value for an error message."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= _EXCERPT_CHARACTERS else text[: _EXCERPT_CHARACTERS - 3] + "..."


def decompressed_limit(path: Path, *, most: int = _DEFAULT_MAX_BYTES) -> int:
    """Return the most bytes a file may hold once decompressed: the value of DEXTER_MAX_BYTES.

    Without that variable it is 50 times the file's size (text compresses 3 to 10 times), at least 64 MiB and at most
    16 GiB (or `most`): generous for data, far below what a decompression bomb needs.
    """
    given = os.environ.get(_MAX_BYTES_VARIABLE, "").strip()
    if not given:
        return min(most, max(_RATIO_FREE_BYTES, _MAX_COMPRESSION_RATIO * path.stat().st_size))
    if not (given.isascii() and given.isdecimal() and len(given) < 19):
        raise UsageError(f"{_MAX_BYTES_VARIABLE} must be a whole number of bytes, got {given[:40]!r}")
    return int(given)


def limit_advice() -> str:
    """Return what to do about a file above the limit, for the end of an error message."""
    return f"if you trust it, set the environment variable {_MAX_BYTES_VARIABLE} to the bytes it may have"


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its number from 1, line end included; an over-long line is cut, so that `decode` raises."""
    number = 0
    with _open_decompressed(path) as (handle, limit):
        seen = 0
        try:
            while raw := handle.readline(MAX_LINE_BYTES + 1):
                number += 1
                seen += len(raw)
                if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    seen += _discard_line(handle, limit)
                if seen > limit:
                    raise DataError(
                        f"decompresses to more than {limit:,} bytes: {limit_advice()}", path=path, line=number
                    )
                yield number, raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"the gzip data is truncated or damaged after this line ({error}): copy or download the file again",
                path=path,
                line=number + 1,
            ) from None


def read_whole(path: Path) -> bytes:
    """Read all bytes of a file that a parser needs whole, decompressed, up to the limit of compressed files."""
    parts, seen = [], 0
    with _open_decompressed(path) as (handle, _):
        limit = decompressed_limit(path, most=_MAX_WHOLE_BYTES)
        try:
            while part := handle.read(_BUFFER_BYTES):
                parts.append(part)
                seen += len(part)
                if seen > limit:
                    raise DataError(f"holds more than {limit:,} bytes: {limit_advice()}", path=path)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"the gzip data is truncated or damaged ({error}): copy the file again", path=path
            ) from None
    return b"".join(parts).removeprefix(_BYTE_ORDER_MARK)


def decode(raw: bytes) -> str:
    """Return the text of a line, line end included, or raise `BadRecord`."""
    if len(raw) > MAX_LINE_BYTES:
        raise BadRecord("long line", f"the line is longer than {MAX_LINE_BYTES:,} bytes: split or shorten it")
    if b"\0" in raw:
        raise BadRecord("NUL", "the line holds a NUL byte: the file is binary or UTF-16, save it as UTF-8 text")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = raw[error.start]
        raise BadRecord(
            "UTF-8", f"byte {error.start + 1} of the line (0x{bad:02x}) is not UTF-8: save the file as UTF-8 text"
        ) from None


def without_line_end(text: str) -> str:
    """Remove the line feed and the carriage return before it."""
    return text.removesuffix("\n").removesuffix("\r")


def first_lines(path: Path, *, count: int = 50) -> list[str]:
    """Read the first lines of a file, to detect its format: never raises for bad content, and omits a cut line."""
    try:
        with _open_decompressed(path) as (handle, _):
            start = handle.read(_FIRST_BYTES)
    except (DataError, EOFError, OSError, zlib.error):
        return []
    lines = start.removeprefix(_BYTE_ORDER_MARK).split(b"\n")
    whole = lines[:-1] if len(start) == _FIRST_BYTES and len(lines) > 1 else lines
    return [without_line_end(line.decode("utf-8", "replace")) for line in whole[:count]]


@contextmanager
def _open_decompressed(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file, plain or gzip; gives its decompressed bytes and how many of them may be read."""
    try:
        raw = open(path, "rb")  # noqa: SIM115 - closed below, with the decompressor
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror}): check the path and its permissions", path=path) from None
    with raw:
        if raw.peek(2)[:2] != _GZIP_MAGIC:
            yield raw, path.stat().st_size
            return
        with gzip.GzipFile(fileobj=raw) as unpacked:
            yield io.BufferedReader(unpacked, _BUFFER_BYTES), decompressed_limit(path)


def _discard_line(handle: BinaryIO, limit: int) -> int:
    """Read on to the end of an over-long line, or until the limit; returns the number of bytes discarded."""
    discarded = 0
    while discarded <= limit and (raw := handle.readline(MAX_LINE_BYTES)):
        discarded += len(raw)
        if raw.endswith(b"\n"):
            break
    return discarded
