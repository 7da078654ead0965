"""The label changes of a published model on disk: read, write, undo, back up, restore, compact, verify.

SQLite provides the transaction (a process killed at any moment leaves the labels before or after a change) and the
lock (one writer at a time, which the system releases when the writer dies). The rollback journal rather than a
write-ahead log lets read-only folders be read.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dexter.errors import ModelError, UsageError
from dexter.files import atomic_path, disk_errors, flush, rename_new
from dexter.model.label_file import LABELS, TABLES, LabelEdit, LabelFile, LabelsOnDisk
from dexter.model.label_writer import LabelCopy, LabelWriter
from dexter.model.published import fingerprint as fingerprint_of
from dexter.model.published import is_in_training
from dexter.model.untrusted_sqlite import busy, open_untrusted

if TYPE_CHECKING:
    from dexter.model.model import Model

log = logging.getLogger("dexter")
DATABASE = "labels.sqlite"
_TEMPORARY = ".tmp-labels-"
"""Begins the name of the folder in which the first change is prepared; a killed process leaves it behind."""
_READ_SECONDS, _WRITE_SECONDS = 10.0, 0.5
"""How long to wait for a transaction of another process that is being committed, and for another writer to finish."""
_MAX_UNUSED_BYTES = 2**20
"""Unused space beyond this, and beyond half of the file, is given back after a change."""


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
        self._folder = folder
        self._file = LabelFile(self.path, fingerprint, dimension, num_priors)

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
        with self._file.connect(wait=_READ_SECONDS) as connection:
            version, _ = self._file.read_state(connection)
            return version, self._file.name_of_edit(connection, version)

    def read(self, *, since: int = 0, edit: bytes = b"") -> LabelsOnDisk:
        """Read the labels that changed after version `since`, to which `edit` led; all where those are not enough.

        If all are read every byte of the file is checked, otherwise the rows that are returned.
        """
        self._check_model()
        if not self._exists():
            return LabelsOnDisk(0, b"", [], is_whole=True)
        with self._file.connect(wait=_READ_SECONDS) as connection:
            connection.execute("BEGIN")
            return self._file.read(connection, since=since, edit=edit)

    def history(self, label_id: str | None = None) -> list[LabelEdit]:
        """Return the changes, newest first; with a label only those that are known to have changed it."""
        self._check_model()
        if not self._exists():
            return []
        with self._file.connect(wait=_READ_SECONDS) as connection:
            connection.execute("BEGIN")
            self._file.read_state(connection)
            edits = self._file.read_edits(connection)
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
            with self._file.connect(wait=_READ_SECONDS) as connection:
                connection.execute("BEGIN")
                for edit in self._file.read_edits(connection):
                    self._file.read_before(connection, edit.version)
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
            with self._file.connect(wait=_WRITE_SECONDS) as connection:
                connection.execute("BEGIN IMMEDIATE")
                for leftover in self._folder.glob(f"{_TEMPORARY}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                yield LabelWriter(self._file, connection)
                connection.execute("COMMIT")
                _vacuum_if_mostly_unused(connection)
        else:
            yield from self._create()

    def compact(self) -> None:
        """Forget what undoing needs, and give all unused space back; the labels, versions and history stay."""
        if self._exists():
            with self._file.connect(wait=_WRITE_SECONDS) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("DELETE FROM before")
                LabelWriter(self._file, connection).forget_examples()
                connection.execute("COMMIT")
                connection.execute("VACUUM")

    def backup(self, path: Path) -> int:
        """Write a copy of the label changes as they are now, with their history; return their version."""
        if path.exists():
            raise UsageError(f"{path} exists already: choose another name for the backup")
        self._check_model()
        if not self._exists():
            raise UsageError(f"{self._folder}: no label was changed: there is nothing to back up")
        with self._file.connect(wait=_READ_SECONDS) as connection, atomic_path(path) as temporary:
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

    def _open_copy(self, path: Path) -> LabelCopy:
        """Read and check all rows of a copy of the file."""
        if not path.is_file():
            raise UsageError(f"{path}: no such file: give one that `dexter labels backup` wrote")
        there = replace(self._file, path=path)
        with there.connect(wait=_READ_SECONDS) as connection:
            connection.execute("BEGIN")
            found = there.read(connection)
            rows = connection.execute(f"{LABELS} ORDER BY position").fetchall()
            return LabelCopy(found.version, rows, [each for each in found.examples if each.text is not None])

    def _replace_damaged(self, path: Path, *, by: str | None) -> int:
        with disk_errors(self.path), self._temporary_folder() as temporary:
            prepared = temporary / DATABASE
            shutil.copyfile(path, prepared)
            with replace(self._file, path=prepared).connect(wait=0.0) as connection:
                connection.execute("BEGIN IMMEDIATE")
                version = LabelWriter(self._file, connection).restore(self._open_copy(path), by=by)
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
            with open_untrusted(path, wait=0.0, called=self.path) as connection:
                connection.execute("BEGIN IMMEDIATE")
                for statement in TABLES.values():
                    connection.execute(statement)
                writer = LabelWriter(self._file, connection, is_new=True)
                yield writer
                connection.execute("COMMIT")
            if writer.has_written:
                try:
                    rename_new(path, self.path)
                except FileExistsError:
                    raise busy(self.path) from None
                flush(self._folder)

    def _exists(self) -> bool:
        return os.path.lexists(self.path)

    def _check_model(self) -> None:
        if fingerprint_of(self._folder) != self._file.fingerprint:
            raise ModelError(f"{self._folder}: the model was replaced since it was loaded: load it again")


def _vacuum_if_mostly_unused(connection: sqlite3.Connection) -> None:
    """Compact the file if most of it is unused. Where that fails the file stays as it is: the change is committed."""
    unused, pages, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_count", "page_size")
    )
    if unused * size > _MAX_UNUSED_BYTES and 2 * unused > pages:
        with suppress(sqlite3.OperationalError):
            connection.execute("VACUUM")
