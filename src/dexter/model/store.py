"""A published model's folder: where it is, which model it holds, and the label changes that are kept beside it.

`model/labels.sqlite` appears with the first change and stands outside the model's manifest; the published files never
change. It holds the labels that differ from the published ones as they are now, not the history of changes:

  state    one row: format version, fingerprint of the model, version of the labels, number of rows, SHA-256
  labels   one row for each added, renamed or removed label, with the encoder's output for a new text, and a SHA-256

SQLite provides the transaction (a process killed at any moment leaves the labels before or after a change) and the
lock (one writer at a time, which the system releases when the writer dies). The checksums, and SQLite's own check of
its file, notice altered bytes. The rollback journal rather than a write-ahead log lets read-only folders be read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError, ResourceError
from dexter.files import MANIFEST, disk_errors, flush, read_manifest

FORMAT_VERSION = 1
DATABASE = "labels.sqlite"
_OWN_FOLDER = "dexter"
_TEMPORARY = ".tmp-labels-"
"""Begins the name of the folder in which the first change is prepared; a killed process leaves it behind."""
_READ_SECONDS, _WRITE_SECONDS = 10.0, 0.5
"""How long to wait for a transaction of another process that is being committed, and for another writer to finish."""
_REMEDY = "restore it from a copy, or remove it to return to the labels as published"
_TABLES = """
CREATE TABLE state (format_version INTEGER, model TEXT, version INTEGER, num_rows INTEGER, sha256 BLOB);
CREATE TABLE labels (
    position INTEGER PRIMARY KEY, id TEXT UNIQUE, text TEXT, added_in INTEGER, changed_in INTEGER,
    priors BLOB, representation BLOB, sha256 BLOB
);
"""
_STATE = "SELECT format_version, model, version, num_rows, sha256 FROM state"
_LABELS = "SELECT position, id, text, added_in, changed_in, priors, representation, sha256 FROM labels"


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


class LabelStore:
    """Reads and writes the label changes of one published model, whose encoder returns vectors of `dimension`."""

    def __init__(self, folder: Path, *, fingerprint: str, dimension: int) -> None:
        self.path = folder / DATABASE
        self._folder, self._fingerprint, self._dimension = folder, fingerprint, dimension

    def version(self) -> int:
        """Return the version of the labels on disk, 0 without changes. Cheap enough to poll."""
        self._check_model()
        if not self.path.exists():
            return 0
        with self._connect(self.path, wait=_READ_SECONDS) as connection:
            return self._read_state(connection)[0]

    def read(self, *, since: int = 0) -> tuple[int, list[ChangedLabel]]:
        """Return the version on disk and the labels that changed after version `since`, added ones in order.

        With `since` 0 every byte of the file is checked, otherwise the rows that are returned.
        """
        self._check_model()
        if not self.path.exists():
            return 0, []
        with self._connect(self.path, wait=_READ_SECONDS) as connection:
            connection.execute("BEGIN")
            version, num_rows = self._read_state(connection)
            if since == 0:
                [finding] = connection.execute("PRAGMA integrity_check(1)").fetchone()
                if finding != "ok":
                    raise self._damaged(finding.splitlines()[-1])
            rows = connection.execute(f"{_LABELS} WHERE changed_in > ? ORDER BY position", [since])
            changed = [self._from_row(row) for row in rows]
            if since == 0 and len(changed) != num_rows:
                raise self._damaged(f"{len(changed)} rows, expected {num_rows}")
            return version, changed

    @contextmanager
    def writing(self) -> Iterator[LabelWriter]:
        """Be the only writer: everything written in the block is committed when it ends, or nothing on an error."""
        if is_in_training(self._folder):
            raise ModelError(
                f"{self._folder}: its run has not ended, and its next model would replace the labels: finish it "
                "with `dexter train --resume`, or change a copy of the model folder"
            )
        if self.path.exists():
            with self._connect(self.path, wait=_WRITE_SECONDS) as connection:
                connection.execute("BEGIN IMMEDIATE")
                for leftover in self._folder.glob(f"{_TEMPORARY}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                yield LabelWriter(self, connection)
                connection.execute("COMMIT")
        else:
            yield from self._create()

    def compact(self) -> None:
        """Give the space of overwritten rows back to the system; the labels and their version stay."""
        if self.path.exists():
            with self._connect(self.path, wait=_WRITE_SECONDS) as connection:
                connection.execute("VACUUM")

    def _create(self) -> Iterator[LabelWriter]:
        """Write the first change to a file under another name, which takes its place whole."""
        with disk_errors(self.path), tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=self._folder) as temporary:
            path = Path(temporary) / DATABASE
            path.touch()
            with self._connect(path, wait=0.0) as connection:
                connection.executescript(f"BEGIN IMMEDIATE; {_TABLES}")
                writer = LabelWriter(self, connection)
                yield writer
                connection.execute("COMMIT")
            if writer.has_written:
                try:
                    os.link(path, self.path)  # Unlike a rename, this fails if another process was faster.
                except FileExistsError:
                    raise self._busy() from None
                flush(self._folder)

    @contextmanager
    def _connect(self, path: Path, *, wait: float) -> Iterator[sqlite3.Connection]:
        """Open the file, read-only if it cannot be written, and turn SQLite's errors into ours."""
        try:
            uri = f"{path.resolve().as_uri()}?mode=rw"
            with closing(sqlite3.connect(uri, uri=True, timeout=wait, isolation_level=None)) as connection:
                for setting in ("trusted_schema = OFF", "cell_size_check = ON", "synchronous = EXTRA"):
                    connection.execute(f"PRAGMA {setting}")
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

    def _busy(self) -> ResourceError:
        return ResourceError(f"{self.path}: another process is changing the labels: wait until it is done and repeat")

    def _damaged(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: damaged ({reason}): {_REMEDY}")

    def _check_model(self) -> None:
        if fingerprint(self._folder) != self._fingerprint:
            raise ModelError(f"{self._folder}: the model was replaced since it was loaded: load it again")

    def _read_state(self, connection: sqlite3.Connection) -> tuple[int, int]:
        """Return the version of the labels and the number of rows."""
        states = connection.execute(_STATE).fetchall()
        if len(states) != 1 or _checksum(*states[0][:-1]) != states[0][-1]:
            raise self._damaged("its state differs from its checksum")
        format_version, model, version, num_rows, _ = states[0]
        if (format_version, model) != (FORMAT_VERSION, self._fingerprint):
            raise ModelError(
                f"{self.path}: labels in format {format_version} of model {model}, expected {FORMAT_VERSION} of "
                f"{self._fingerprint}: {_REMEDY}"
            )
        return version, num_rows

    def _from_row(self, row: Sequence[Any]) -> ChangedLabel:
        if _checksum(*row[:-1]) != row[-1]:
            raise self._damaged("a label differs from its checksum")
        _, label_id, text, added_in, _, priors, representation, _ = row
        representation_D = None if representation is None else np.frombuffer(representation, "<f4")
        if representation_D is not None and len(representation_D) != self._dimension:
            raise self._damaged(f"a vector of {len(representation_D)} elements, expected {self._dimension}")
        return ChangedLabel(label_id, text, representation_D, tuple(np.frombuffer(priors, "<f4").tolist()), added_in)


class LabelWriter:
    """The open transaction of a `LabelStore`."""

    def __init__(self, store: LabelStore, connection: sqlite3.Connection) -> None:
        self._store, self._connection = store, connection
        self.has_written = False

    def write(self, version: int, changed: Sequence[ChangedLabel]) -> None:
        """Replace the rows of the changed labels and set the version."""
        [last] = self._connection.execute("SELECT max(position) FROM labels").fetchone()
        # An added label comes last, whatever its id stood for before.
        positions = itertools.count((last or 0) + 1)
        self._connection.executemany(
            "INSERT OR REPLACE INTO labels VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (self._to_row(version, label, positions) for label in changed),
        )
        [num_rows] = self._connection.execute("SELECT count(*) FROM labels").fetchone()
        state = (FORMAT_VERSION, self._store._fingerprint, version, num_rows)
        self._connection.execute("DELETE FROM state")
        self._connection.execute("INSERT INTO state VALUES (?, ?, ?, ?, ?)", (*state, _checksum(*state)))
        self.has_written = True

    def _to_row(self, version: int, label: ChangedLabel, positions: Iterator[int]) -> tuple[Any, ...]:
        """Return a label's row; a renamed label keeps what else its row says."""
        row = None
        if label.added_in is None:
            row = self._connection.execute(f"{_LABELS} WHERE id = ?", [label.id]).fetchone()
        position = next(positions) if row is None else row[0]
        if row is not None and label.text is not None:
            known = self._store._from_row(row)
            kept = known.representation_D if label.representation_D is None else label.representation_D
            label = known._replace(text=label.text, representation_D=kept)
        representation = None if label.representation_D is None else label.representation_D.astype("<f4").tobytes()
        priors = np.array(label.priors, "<f4").tobytes()
        values = (position, label.id, label.text, label.added_in, version, priors, representation)
        return (*values, _checksum(*values))


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


def _checksum(*values: str | int | bytes | None) -> bytes:
    """Return the SHA-256 of values with their types and lengths."""
    digest = hashlib.sha256()
    for value in values:
        content = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
        digest.update(f"{type(value).__name__} {len(content)} ".encode())
        digest.update(content)
    return digest.digest()
