"""Lines of a text file, plain or gzip, with bounded memory: bytes first, so that one bad line does not end the file.

Only a line feed ends a line (a carriage return before it is dropped); other Unicode line breaks belong to the text. A
byte order mark at the start is ignored. Whether a file is gzip is told by its first bytes, not by its name.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dexter.data.formats.limits import MAX_LINE_BYTES, decompressed_limit, limit_advice
from dexter.data.formats.problems import BadRecord
from dexter.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BUFFER_BYTES = 256 * 1024


def raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each line with its number from 1, line end included; an over-long line comes cut, for `decode` to refuse."""
    number = 0
    with _readable(path) as (handle, limit):
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


def decode(raw: bytes) -> str:
    """The text of a line, line end included, or `BadRecord`."""
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
    """The text without its line feed and the carriage return before it."""
    return text.removesuffix("\n").removesuffix("\r")


def first_lines(path: Path, *, count: int = 50, size: int = 64 * 1024) -> list[str]:
    """The first lines of a file, for detection: never raises for bad content, and leaves a cut line out."""
    try:
        with _readable(path) as (handle, _):
            head = handle.read(size)
    except (DataError, EOFError, OSError, zlib.error):
        return []
    lines = head.removeprefix(_BYTE_ORDER_MARK).split(b"\n")
    whole = lines[:-1] if len(head) == size and len(lines) > 1 else lines
    return [without_line_end(line.decode("utf-8", "replace")) for line in whole[:count]]


@contextmanager
def _readable(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """The decompressed bytes of a file, and how many of them may be read."""
    try:
        raw = open(path, "rb")  # noqa: SIM115 - closed below, with the decompressor
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror}): check the path and its permissions", path=path) from None
    with raw:
        compressed = raw.peek(2)[:2] == _GZIP_MAGIC
        if not compressed:
            yield raw, path.stat().st_size
            return
        with gzip.GzipFile(fileobj=raw) as unpacked:
            yield io.BufferedReader(unpacked, _BUFFER_BYTES), decompressed_limit(path)


def _discard_line(handle: BinaryIO, limit: int) -> int:
    """Read on to the end of an over-long line, or until the limit; returns the number of bytes passed over."""
    passed = 0
    while passed <= limit and (raw := handle.readline(MAX_LINE_BYTES)):
        passed += len(raw)
        if raw.endswith(b"\n"):
            break
    return passed
