"""Open an SQLite file that may come from somebody else, with the defences that SQLite documents for such files.

What SQLite would follow or believe beside the file is refused, its limits are low, and its errors become ours.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from dexter.errors import ModelError, ResourceError

REMEDY = "restore it from a copy (`dexter labels restore`), or remove it to return to the labels as published"
_SETTINGS = ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0", "synchronous = EXTRA")
_MAX_VALUE_BYTES = 2**26
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: _MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 10,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 3,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 25_000,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 8,
    sqlite3.SQLITE_LIMIT_ATTACHED: 1,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 50,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 10,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
}
"""Those that SQLite recommends for untrusted files, except that a row may have 64 MiB and VACUUM attaches a file."""
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")


class LabelsBusy(ResourceError):
    """Raised when another process is changing the labels."""


@contextmanager
def open_untrusted(
    path: Path, *, wait: float, expected: Mapping[str, str] | None = None, called: Path | None = None
) -> Iterator[sqlite3.Connection]:
    """Open the file, read-only if it cannot be written, and turn SQLite's errors into ours.

    Args:
        path: of the file, which exists.
        wait: seconds to wait for a transaction of another process.
        expected: the statements that created its tables, by name; None for a new file.
        called: the name that errors give it.
    """
    called = called or path
    try:
        _check_is_plain(path)
        uri = f"{(path.parent.resolve() / path.name).as_uri()}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, timeout=wait, isolation_level=None)) as connection:
            if sys.version_info >= (3, 12):
                connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE)
            for category, limit in _LIMITS.items():
                connection.setlimit(category, limit)
            for setting in _SETTINGS:
                connection.execute(f"PRAGMA {setting}")
            if expected is not None:
                _check_tables(called, connection, expected)
            yield connection
    except sqlite3.ProgrammingError:
        raise
    except sqlite3.DatabaseError as error:
        raise _explained(called, error) from error
    except UnicodeDecodeError as error:  # SQLite quotes a damaged schema in its message.
        raise damaged(called, str(error)) from None


def busy(path: Path) -> LabelsBusy:
    """Return the error that says that another process is writing."""
    return LabelsBusy(f"{path}: another process is changing the labels: wait until it is done and repeat")


def damaged(path: Path, reason: str) -> ModelError:
    """Return the error that says that the file cannot be used, and what to do."""
    return ModelError(f"{path}: damaged ({reason}): {REMEDY}")


def _check_is_plain(path: Path) -> None:
    """Refuse what SQLite would follow or believe in a folder that somebody else made.

    A link leads to another file. A journal that is rolled back may name a second journal, which SQLite then deletes,
    whatever file it is; ours never does. A write-ahead log is not what we write.
    """
    for name in (path.name, *(f"{path.name}-{kind}" for kind in ("journal", "wal", "shm"))):
        beside = path.with_name(name)
        try:
            kind = os.lstat(beside).st_mode
            is_good = stat.S_ISREG(kind) and not name.endswith(("-wal", "-shm"))
            if is_good and name.endswith("-journal"):
                with open(beside, "rb") as journal:
                    journal.seek(-min(len(_JOURNAL_MAGIC), os.fstat(journal.fileno()).st_size), os.SEEK_END)
                    is_good = journal.read() != _JOURNAL_MAGIC
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ResourceError(f"{beside}: cannot be read ({error.strerror}): check its permissions") from None
        if not is_good:
            raise ModelError(f"{beside}: not a file that dexter writes (a link, or made by another program): remove it")


def _check_tables(path: Path, connection: sqlite3.Connection, expected: Mapping[str, str]) -> None:
    """Raise unless the file has our tables and nothing else: no trigger, view, index or further column."""
    found = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT 10").fetchall()
    if dict(found) != expected or len(found) != len(expected):
        raise damaged(path, "other tables than expected")


def _explained(path: Path, error: sqlite3.DatabaseError) -> ModelError | ResourceError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return busy(path)
    if code == sqlite3.SQLITE_FULL:
        return ResourceError(f"{path}: the disk is full: free some space and repeat")
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return ResourceError(f"{path}: cannot be read or written ({error}): check permissions and the disk")
    return damaged(path, str(error))
