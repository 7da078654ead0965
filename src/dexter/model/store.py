"""A published model's folder: where it is, which model it holds, and the label changes that are kept beside it.

`model/labels.sqlite` appears with the first change and stands outside the model's manifest; the published files never
change. It holds the labels that differ from the published ones as they are now, and how they came to be:

  state    one row: format version, fingerprint of the model, version of the labels, number of rows, SHA-256
  labels   one row for each added, renamed or removed label, with the encoder's output for a new text, and a SHA-256
  edits    one row for each change: the version it led to, when, by whom, what it did, and a SHA-256
  before   what each label of the last changes was before them, so that they can be undone

SQLite provides the transaction (a process killed at any moment leaves the labels before or after a change) and the
lock (one writer at a time, which the system releases when the writer dies). The checksums, and SQLite's own check of
its file, notice altered bytes. The rollback journal rather than a write-ahead log lets read-only folders be read.

The file may come from somebody else, with right checksums: it is opened with SQLite's defences for untrusted files,
has exactly our tables, and every value is checked before it is used.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import shutil
import sqlite3
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from copy import copy
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError, ResourceError, UsageError
from dexter.files import MANIFEST, atomic_path, disk_errors, flush, read_manifest, rename_new

if TYPE_CHECKING:
    from dexter.model.model import Model

log = logging.getLogger("dexter")
FORMAT_VERSION = 2
DATABASE = "labels.sqlite"
UNDOABLE_EDITS = 100
"""Number of changes that can be undone; what labels were before older ones is forgotten."""
_OWN_FOLDER = "dexter"
_TEMPORARY = ".tmp-labels-"
"""Begins the name of the folder in which the first change is prepared; a killed process leaves it behind."""
_READ_SECONDS, _WRITE_SECONDS = 10.0, 0.5
"""How long to wait for a transaction of another process that is being committed, and for another writer to finish."""
_MAX_AUTHOR_CHARACTERS = 200
_MAX_UNUSED_BYTES = 2**20
"""Unused space beyond this, and beyond half of the file, is given back after a change."""
_REMEDY = "restore it from a copy (`dexter labels restore`), or remove it to return to the labels as published"
_TABLES = {
    "state": "CREATE TABLE state (format_version INTEGER, model TEXT, version INTEGER, num_rows INTEGER, sha256 BLOB)",
    "labels": """CREATE TABLE labels (
    position INTEGER PRIMARY KEY, id TEXT UNIQUE, text TEXT, added_in INTEGER, changed_in INTEGER,
    priors BLOB, representation BLOB, sha256 BLOB
)""",
    "edits": """CREATE TABLE edits (
    version INTEGER PRIMARY KEY, time TEXT, author TEXT, added INTEGER, renamed INTEGER, removed INTEGER,
    undoes INTEGER, sha256 BLOB
)""",
    "before": """CREATE TABLE before (
    version INTEGER, id TEXT, position INTEGER, text TEXT, added_in INTEGER, changed_in INTEGER,
    priors BLOB, representation BLOB, sha256 BLOB, PRIMARY KEY (version, id)
)""",
}
_FIRST_FORMAT = {"state", "labels"}
"""The tables of format 1, which had no history."""
_STATE = "SELECT format_version, model, version, num_rows, sha256 FROM state"
_LABELS = "SELECT position, id, text, added_in, changed_in, priors, representation, sha256 FROM labels"
_EDITS = "SELECT version, time, author, added, renamed, removed, undoes, sha256 FROM edits"
_BEFORE = "SELECT version, id, position, text, added_in, changed_in, priors, representation, sha256 FROM before"
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
_LARGEST_VALUE = 1e9
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")


class LabelsBusy(ResourceError):
    """Raised when another process is changing the labels."""


class ChangedLabel(NamedTuple):
    """A label that differs from the published model."""

    id: str
    text: str | None
    """None if the label was removed."""
    representation_D: NDArray[np.float32] | None = None
    """Encoder output for a new text; None keeps the present one."""
    priors: tuple[float, ...] = ()
    """Of an added label: its prior in each head that has priors, the dual encoder's first."""
    added_in: int | None = None
    """Version of the labels that added it; None for a published label."""


class LabelEdit(NamedTuple):
    """One change of the labels, as the history tells it."""

    version: int
    """The version of the labels that it led to, by which it is called."""
    time: str
    """When, in UTC (ISO 8601)."""
    author: str | None
    """Who; None where nobody said so."""
    added: int
    renamed: int
    removed: int
    undoes: int | None = None
    """The edit that it undid; 0 if it restored a backup, None otherwise."""
    is_undone: bool = False
    """Whether a later edit undid it."""

    def describe(self) -> str:
        """Describe what it did in a few words."""
        counts = {"added": self.added, "renamed": self.renamed, "removed": self.removed}
        done = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "nothing changed"
        origin = "" if self.undoes is None else f" (undoes {self.undoes})" if self.undoes else " (backup restored)"
        return f"{done}{origin}{', undone' if self.is_undone else ''}"


class LabelsOnDisk(NamedTuple):
    """Label changes as read from disk."""

    version: int
    edit: bytes
    """Names the edit that led to this version, also where another copy of the file reached the same version."""
    changed: list[ChangedLabel]
    """Added ones in their order."""
    is_whole: bool
    """Whether these are all changes since the model was published, or those after the version asked for."""


_Row = tuple[Any, ...]
"""Position, id, text, added_in, changed_in, priors and representation of a label."""
_NO_ROW = (None,) * 6


class _Copy(NamedTuple):
    """The labels of a copy of the file."""

    version: int
    rows: list[_Row]


class LabelStore:
    """Reads and writes the label changes of one published model.

    Args:
        folder: the published model.
        fingerprint: of the model.
        dimension: of the vectors that its encoder returns.
        num_priors: number of its heads that have label priors.
    """

    def __init__(self, folder: Path, *, fingerprint: str, dimension: int, num_priors: int) -> None:
        self.path = folder / DATABASE
        self._folder, self._fingerprint = folder, fingerprint
        self._dimension, self._num_priors = dimension, num_priors

    @classmethod
    def for_model(cls, folder: Path, model: Model, *, fingerprint: str) -> LabelStore:
        """Return the label changes of a model that was loaded from the folder."""
        num_priors = len(model.prior_biases())
        return cls(folder, fingerprint=fingerprint, dimension=model.encoder.dimension, num_priors=num_priors)

    def version(self) -> int:
        """Return the version of the labels on disk, 0 without changes. Cheap enough to poll."""
        return self.last_edit()[0]

    def last_edit(self) -> tuple[int, bytes]:
        """Return the version of the labels on disk and what names the edit that led to it."""
        self._check_model()
        if not self._exists():
            return 0, b""
        with self._connect(self.path, wait=_READ_SECONDS) as connection:
            version, _ = self._read_state(connection)
            return version, self._name_of_edit(connection, version)

    def read(self, *, since: int = 0, edit: bytes = b"") -> LabelsOnDisk:
        """Read the labels that changed after version `since`, to which `edit` led; all where those are not enough.

        If all are read every byte of the file is checked, otherwise the rows that are returned.
        """
        self._check_model()
        if not self._exists():
            return LabelsOnDisk(0, b"", [], is_whole=True)
        with self._connect(self.path, wait=_READ_SECONDS) as connection:
            connection.execute("BEGIN")
            return self._read(connection, since=since, edit=edit)

    def history(self, label_id: str | None = None) -> list[LabelEdit]:
        """Return the changes, newest first; with a label only those that are known to have changed it."""
        self._check_model()
        if not self._exists():
            return []
        with self._connect(self.path, wait=_READ_SECONDS) as connection:
            connection.execute("BEGIN")
            self._read_state(connection)
            edits = self._read_edits(connection)
            if label_id is None or not edits:
                return edits
            rows = connection.execute("SELECT version FROM before WHERE id = ?", [label_id]).fetchall()
            rows += connection.execute("SELECT added_in FROM labels WHERE id = ?", [label_id]).fetchall()
            rows += connection.execute("SELECT changed_in FROM labels WHERE id = ?", [label_id]).fetchall()
            return [edit for edit in edits if (edit.version,) in rows]

    def verify(self) -> int:
        """Check every byte that counts, history included; return the number of changed labels."""
        found = self.read()
        if self._exists():
            with self._connect(self.path, wait=_READ_SECONDS) as connection:
                connection.execute("BEGIN")
                for edit in self._read_edits(connection):
                    self._read_before(connection, edit.version)
        return len(found.changed)

    @contextmanager
    def writing(self) -> Iterator[LabelWriter]:
        """Be the only writer: everything written in the block is committed when it ends, or nothing on an error."""
        if is_in_training(self._folder):
            raise ModelError(
                f"{self._folder}: its run has not ended, and its next model would replace the labels: finish it "
                "with `dexter train --resume`, or change a copy of the model folder"
            )
        if self._exists():
            with self._connect(self.path, wait=_WRITE_SECONDS) as connection:
                connection.execute("BEGIN IMMEDIATE")
                for leftover in self._folder.glob(f"{_TEMPORARY}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                yield LabelWriter(self, connection)
                connection.execute("COMMIT")
                _give_back_much_unused_space(connection)
        else:
            yield from self._create()

    def compact(self) -> None:
        """Forget what undoing needs, and give all unused space back; the labels, versions and history stay."""
        if self._exists():
            with self._connect(self.path, wait=_WRITE_SECONDS) as connection:
                if self._has_history(connection):
                    connection.execute("DELETE FROM before")
                connection.execute("VACUUM")

    def backup(self, path: Path) -> int:
        """Write a copy of the label changes as they are now, with their history; return their version."""
        if path.exists():
            raise UsageError(f"{path} exists already: choose another name for the backup")
        self._check_model()
        if not self._exists():
            raise UsageError(f"{self._folder}: no label was changed: there is nothing to back up")
        with self._connect(self.path, wait=_READ_SECONDS) as connection, atomic_path(path) as temporary:
            connection.execute("VACUUM INTO ?", [str(temporary)])
        return self._open_copy(path).version

    def restore(self, path: Path, *, by: str | None = None) -> int:
        """Return to the labels of a backup as one more edit, which can be undone; return the version.

        A damaged file is replaced by the backup, and kept as `labels.sqlite.damaged`.
        """
        saved = self._open_copy(path)
        try:
            self.read()
        except ModelError as error:
            self._check_model()
            log.warning("%s", error)
            return self._replace_damaged(path, by=by)
        with self.writing() as writer:
            return writer.restore(saved, by=by)

    def _open_copy(self, path: Path) -> _Copy:
        """Read and check all rows of a copy of the file."""
        if not path.is_file():
            raise UsageError(f"{path}: no such file: give one that `dexter labels backup` wrote")
        there = copy(self)
        there.path = path
        with there._connect(path, wait=_READ_SECONDS) as connection:
            connection.execute("BEGIN")
            found = there._read(connection, since=0, edit=b"")
            return _Copy(found.version, connection.execute(f"{_LABELS} ORDER BY position").fetchall())

    def _replace_damaged(self, path: Path, *, by: str | None) -> int:
        with disk_errors(self.path), self._temporary_folder() as temporary:
            prepared = temporary / DATABASE
            shutil.copyfile(path, prepared)
            with self._connect(prepared, wait=0.0) as connection:
                connection.execute("BEGIN IMMEDIATE")
                version = LabelWriter(self, connection).restore(self._open_copy(path), by=by)
                connection.execute("COMMIT")
            os.replace(self.path, self.path.with_name(f"{DATABASE}.damaged"))
            self.path.with_name(f"{DATABASE}-journal").unlink(missing_ok=True)
            os.replace(prepared, self.path)
            flush(self._folder)
        return version

    @contextmanager
    def _temporary_folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=self._folder) as temporary:
            yield Path(temporary)

    def _create(self) -> Iterator[LabelWriter]:
        """Write the first change to a file under another name, which takes its place whole."""
        with disk_errors(self.path), self._temporary_folder() as temporary:
            path = temporary / DATABASE
            path.touch()
            with self._connect(path, wait=0.0, is_new=True) as connection:
                connection.execute("BEGIN IMMEDIATE")
                for statement in _TABLES.values():
                    connection.execute(statement)
                writer = LabelWriter(self, connection, is_new=True)
                yield writer
                connection.execute("COMMIT")
            if writer.has_written:
                try:
                    rename_new(path, self.path)
                except FileExistsError:
                    raise self._busy() from None
                flush(self._folder)

    def _exists(self) -> bool:
        return os.path.lexists(self.path)

    @contextmanager
    def _connect(self, path: Path, *, wait: float, is_new: bool = False) -> Iterator[sqlite3.Connection]:
        """Open the file, read-only if it cannot be written, and turn SQLite's errors into ours."""
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
                if not is_new:
                    self._check_tables(connection)
                yield connection
        except sqlite3.ProgrammingError:
            raise
        except sqlite3.DatabaseError as error:
            raise self._explained(error) from error
        except UnicodeDecodeError as error:  # SQLite quotes a damaged schema in its message.
            raise self._damaged(str(error)) from None

    def _explained(self, error: sqlite3.DatabaseError) -> ModelError | ResourceError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return self._busy()
        if code == sqlite3.SQLITE_FULL:
            return ResourceError(f"{self.path}: the disk is full: free some space and repeat")
        if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
            return ResourceError(f"{self.path}: cannot be read or written ({error}): check permissions and the disk")
        return self._damaged(str(error))

    def _busy(self) -> LabelsBusy:
        return LabelsBusy(f"{self.path}: another process is changing the labels: wait until it is done and repeat")

    def _damaged(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: damaged ({reason}): {_REMEDY}")

    def _check_model(self) -> None:
        if fingerprint(self._folder) != self._fingerprint:
            raise ModelError(f"{self._folder}: the model was replaced since it was loaded: load it again")

    def _read(self, connection: sqlite3.Connection, *, since: int, edit: bytes) -> LabelsOnDisk:
        version, num_rows = self._read_state(connection)
        is_whole = since == 0 or not self._continues(connection, version, since, edit)
        if is_whole:
            since = 0
            [finding] = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if finding != "ok":
                raise self._damaged(finding.splitlines()[-1])
        rows = connection.execute(f"{_LABELS} WHERE changed_in > ? ORDER BY position", [since])
        changed = [self._from_row(row) for row in rows]
        if is_whole and len({label.id for label in changed}) != num_rows:
            raise self._damaged(f"{len(changed)} rows, expected {num_rows}")
        return LabelsOnDisk(version, self._name_of_edit(connection, version), changed, is_whole)

    def _continues(self, connection: sqlite3.Connection, version: int, since: int, edit: bytes) -> bool:
        """Whether the labels changed from those that `edit` led to, and by edits that only add to them."""
        if version < since or self._name_of_edit(connection, since) != edit:
            return False
        if not self._has_history(connection):
            return True
        statement = "SELECT 1 FROM edits WHERE version > ? AND undoes IS NOT NULL LIMIT 1"
        return connection.execute(statement, [since]).fetchone() is None

    def _read_state(self, connection: sqlite3.Connection) -> tuple[int, int]:
        """Return the version of the labels and the number of rows."""
        states = connection.execute(f"{_STATE} LIMIT 2").fetchall()
        if len(states) != 1 or _checksum(*states[0][:-1]) != states[0][-1]:
            raise self._damaged("its state differs from its checksum")
        format_version, model, version, num_rows, _ = states[0]
        if format_version not in (1, FORMAT_VERSION) or model != self._fingerprint:
            raise ModelError(
                f"{self.path}: labels in format {format_version!r} of model {model!r}, expected {FORMAT_VERSION} of "
                f"{self._fingerprint!r}: {_REMEDY}"
            )
        if not (_is_number(version, at_least=1) and _is_number(num_rows)):
            raise self._damaged("its state has other types than numbers")
        return version, num_rows

    def _read_edits(self, connection: sqlite3.Connection) -> list[LabelEdit]:
        """Return the history, newest first."""
        if not self._has_history(connection):
            return []
        edits: list[LabelEdit] = []
        undone: set[int] = set()
        for *values, digest in connection.execute(f"{_EDITS} ORDER BY version DESC"):
            version, time, author, added, renamed, removed, undoes = values
            if (
                _checksum(*values) != digest
                or not (isinstance(time, str) and isinstance(author, str | None))
                or not all(map(_is_number, (version, added, renamed, removed, undoes or 0)))
            ):
                raise self._damaged("its history differs from its checksum")
            is_undone = version in undone
            if undoes is not None and not is_undone:
                undone.add(undoes)
            edits.append(LabelEdit(version, time, author, added, renamed, removed, undoes, is_undone))
        return edits

    def _read_before(self, connection: sqlite3.Connection, version: int) -> dict[str, _Row | None]:
        """Return the row of each label of an edit as it was before, without its checksum; None: there was none."""
        rows: dict[str, _Row | None] = {}
        for *values, digest in connection.execute(f"{_BEFORE} WHERE version = ?", [version]):
            if _checksum(*values) != digest:
                raise self._damaged("its history differs from its checksum")
            _, label_id, position, *others = values
            row = None if position is None else (position, label_id, *others)
            if row is not None:
                self._from_row((*row, _checksum(*row)))
            rows[label_id] = row
        return rows

    def _from_row(self, row: Sequence[Any]) -> ChangedLabel:
        """Return the label of a row, whose values may be of any type and length."""
        if _checksum(*row[:-1]) != row[-1]:
            raise self._damaged("a label differs from its checksum")
        position, label_id, text, added_in, changed_in, priors, representation, _ = row
        if not (
            (isinstance(label_id, str) and label_id)
            and (text is None or (isinstance(text, str) and text.strip()))
            and (added_in is None or _is_number(added_in, at_least=1))
            and (_is_number(position) and _is_number(changed_in, at_least=1))
        ):
            raise self._damaged("a label has values of other types than expected")
        is_new = added_in is not None and text is not None
        vector_D = None if representation is None else self._numbers(representation, self._dimension, "a vector")
        if is_new and vector_D is None:
            raise self._damaged("an added label has no vector")
        known = self._numbers(priors, self._num_priors if is_new else 0, "label priors")
        return ChangedLabel(label_id, text, vector_D, tuple(known.tolist()), added_in)

    def _numbers(self, content: object, count: int, what: str) -> NDArray[np.float32]:
        if not isinstance(content, bytes) or len(content) != 4 * count:
            size = f"{len(content) / 4:g} elements" if isinstance(content, bytes) else type(content).__name__
            raise self._damaged(f"{what} of {size}, expected {count}")
        values = np.frombuffer(content, "<f4")
        if not (np.abs(values) <= _LARGEST_VALUE).all():
            raise self._damaged(f"{what} with values that are not finite or too large")
        return values

    def _name_of_edit(self, connection: sqlite3.Connection, version: int) -> bytes:
        if not self._has_history(connection):
            return b""
        row = connection.execute("SELECT sha256 FROM edits WHERE version = ?", [version]).fetchone()
        return b"" if row is None or not isinstance(row[0], bytes) else row[0]

    def _has_history(self, connection: sqlite3.Connection) -> bool:
        return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'edits'").fetchone() is not None

    def _check_tables(self, connection: sqlite3.Connection) -> None:
        """Raise unless the file has our tables and nothing else: no trigger, view, index or further column."""
        found = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT 10").fetchall()
        known = {name: sql for name, sql in _TABLES.items() if len(found) > len(_FIRST_FORMAT) or name in _FIRST_FORMAT}
        if dict(found) != known or len(found) != len(known):
            raise self._damaged("other tables than expected")


class LabelWriter:
    """The open transaction of a `LabelStore`."""

    def __init__(self, store: LabelStore, connection: sqlite3.Connection, *, is_new: bool = False) -> None:
        self._store, self._connection, self._is_new = store, connection, is_new
        self.has_written = False

    def read(self) -> LabelsOnDisk:
        """Read all changed labels as the transaction has them."""
        return self._store._read(self._connection, since=0, edit=b"")

    def write(self, version: int, changed: Sequence[ChangedLabel], *, by: str | None = None) -> bytes:
        """Replace the rows of the changed labels and set the version; return what names the edit of `by`."""
        return self._replace(version, ((label.id, self._to_row(label)) for label in changed), by=by)

    def undo(self, target: int | None = None, *, by: str | None = None) -> int:
        """Undo an edit, the last one that was not undone if left out, as one more edit; return the new version."""
        edits = {edit.version: edit for edit in self._store._read_edits(self._connection)}
        if target is None:
            target = next((edit.version for edit in edits.values() if edit.undoes is None and not edit.is_undone), 0)
        edit = edits.get(target)
        if edit is None:
            raise UsageError("there is no such edit to undo: `dexter labels history` lists them")
        if edit.is_undone:
            raise UsageError(f"edit {target} was undone already")
        before = self._store._read_before(self._connection, target)
        if not before:
            raise UsageError(
                f"edit {target} cannot be undone any more: what the labels were before it was forgotten "
                f"(more than {UNDOABLE_EDITS} edits ago, or compacted)"
            )
        later = self._connection.execute(
            "SELECT DISTINCT version FROM before WHERE version > ? AND id IN (SELECT id FROM before WHERE version = ?)",
            [target, target],
        ).fetchall()
        # An edit and its undoing cancel each other, if both came later.
        standing = (edits[version] for (version,) in later if version in edits and not edits[version].is_undone)
        blocking = next((each.version for each in standing if each.undoes is None or each.undoes < target), None)
        if blocking is not None:
            raise UsageError(f"edit {target} cannot be undone: edit {blocking} changed some of its labels again")
        version, _ = self._store._read_state(self._connection)
        self._replace(version + 1, before.items(), by=by, undoes=target)
        return version + 1

    def restore(self, saved: _Copy, *, by: str | None = None) -> int:
        """Return to the labels of a copy of the file; return the new version."""
        version = 0 if self._is_new else self._store._read_state(self._connection)[0]
        version = max(version, saved.version) + 1
        wanted = {row[1]: row[:-1] for row in saved.rows}
        present = {row[1]: row[:-1] for row in self._connection.execute(_LABELS)}
        differing = [label_id for label_id in {**present, **wanted} if wanted.get(label_id) != present.get(label_id)]
        self._replace(version, [(label_id, wanted.get(label_id)) for label_id in differing], by=by, undoes=0)
        return version

    def _replace(
        self, version: int, rows: Iterable[tuple[str, _Row | None]], *, by: str | None, undoes: int | None = None
    ) -> bytes:
        """Replace the row of each label (None: delete it), note what it was before, and set the version."""
        execute = self._connection.execute
        if not self._store._has_history(self._connection):
            for name in ("edits", "before"):
                execute(_TABLES[name])
        [last] = execute("SELECT max(position) FROM labels").fetchone()
        positions = itertools.count((last or 0) + 1)
        counts = {"added": 0, "renamed": 0, "removed": 0}
        for label_id, row in rows:
            found = execute(f"{_LABELS} WHERE id = ?", [label_id]).fetchone()
            known = None if found is None else tuple(found[:-1])
            counts[_kind_of_change(known, row)] += 1
            noted = (version, label_id, *(_NO_ROW if known is None else (known[0], *known[2:])))
            execute("INSERT INTO before VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*noted, _checksum(*noted)))
            execute("DELETE FROM labels WHERE id = ?", [label_id])
            if row is not None:
                position, _, text, added_in, _, *vectors = row
                if position is None or execute("SELECT 1 FROM labels WHERE position = ?", [position]).fetchone():
                    position = next(positions)
                values = (position, label_id, text, added_in, version, *vectors)
                execute("INSERT INTO labels VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*values, _checksum(*values)))
        author = None if by is None else by[:_MAX_AUTHOR_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        edit = (version, now, author, *counts.values(), undoes)
        digest = _checksum(*edit)
        execute("INSERT INTO edits VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*edit, digest))
        execute("DELETE FROM before WHERE version <= ?", [version - UNDOABLE_EDITS])
        [num_rows] = execute("SELECT count(*) FROM labels").fetchone()
        state = (FORMAT_VERSION, self._store._fingerprint, version, num_rows)
        execute("DELETE FROM state")
        execute("INSERT INTO state VALUES (?, ?, ?, ?, ?)", (*state, _checksum(*state)))
        self.has_written = True
        return digest

    def _to_row(self, label: ChangedLabel) -> _Row:
        """Return a label's row; a renamed label keeps what else its row says."""
        position = None
        if label.added_in is None:  # An added label comes last, whatever its id stood for before.
            row = self._connection.execute(f"{_LABELS} WHERE id = ?", [label.id]).fetchone()
            if row is not None:
                known, position = self._store._from_row(row), row[0]
                if label.text is not None:
                    kept = known.representation_D if label.representation_D is None else label.representation_D
                    label = known._replace(text=label.text, representation_D=kept)
        representation = None if label.representation_D is None else label.representation_D.astype("<f4").tobytes()
        return (
            position,
            label.id,
            label.text,
            label.added_in,
            0,
            np.array(label.priors, "<f4").tobytes(),
            representation,
        )


def model_folder(run: str | Path) -> Path:
    """Return the folder of the published model, given it or its run folder."""
    folder = Path(run)
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such run folder: train one with `dexter train DATA --out {folder}`")
    published = folder / "model"
    if not published.is_dir() and (folder / "config.toml").exists():
        raise ModelError(
            f"{folder}: the run has no model yet: let it finish, or continue it with `dexter train --resume`"
        )
    if published.is_symlink():  # Whoever made the run folder would choose what is changed.
        raise ModelError(f"{published}: a link: give the folder that it leads to instead")
    return published if published.is_dir() else folder


def is_in_training(folder: Path) -> bool:
    """Return whether a published model belongs to a run that may still replace it."""
    run = folder.resolve().parent
    return (run / "config.toml").exists() and not (run / "run.json").exists()


def fingerprint(folder: Path) -> str:
    """Return a short hash that changes with any file of a published model; label changes do not alter it."""
    try:
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ModelError(f"{folder / MANIFEST}: cannot be read ({error.strerror}): is the folder complete?") from None


def encoder_fingerprint(folder: Path) -> str:
    """Return a short hash of what turns a text into a vector: the files of the encoder and the heads."""
    files = read_manifest(folder)
    heads = f"{_OWN_FOLDER}/heads.safetensors"
    kept = {
        name: digest for name, (_, digest) in files.items() if name == heads or not name.startswith(f"{_OWN_FOLDER}/")
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _kind_of_change(before: _Row | None, after: _Row | None) -> str:
    """Return what a change did to a label, by its row before and after; without a row it is as published, if at all."""
    was_removed = before is not None and before[2] is None
    if after is None:
        return "added" if was_removed else "removed" if before is not None and before[3] is not None else "renamed"
    if after[2] is None:
        return "removed"
    return "added" if was_removed or (before is None and after[3] is not None) else "renamed"


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


def _give_back_much_unused_space(connection: sqlite3.Connection) -> None:
    """Compact the file if most of it is unused. Where that fails the file stays as it is: the change is committed."""
    unused, pages, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_count", "page_size")
    )
    if unused * size > _MAX_UNUSED_BYTES and 2 * unused > pages:
        with suppress(sqlite3.OperationalError):
            connection.execute("VACUUM")


def _is_number(value: object, *, at_least: int = 0) -> bool:
    return isinstance(value, int) and at_least <= value < 2**53


def _checksum(*values: str | int | bytes | None) -> bytes:
    """Return the SHA-256 of values with their types and lengths."""
    digest = hashlib.sha256()
    for value in values:
        content = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
        digest.update(f"{type(value).__name__} {len(content)} ".encode())
        digest.update(content)
    return digest.digest()
