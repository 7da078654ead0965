"""The file of label changes beside a published model: its tables, and rows that are checked before they are used.

`model/labels.sqlite` appears with the first change and stands outside the model's manifest; the published files never
change. It holds the labels that differ from the published ones as they are now, and how they came to be:

  state    one row: format version, fingerprint of the model, version of the labels, number of rows, SHA-256
  labels   one row for each added, renamed or removed label, with the encoder's output for a new text, and a SHA-256
  edits    one row for each change: the version it led to, when, by whom, what it did, and a SHA-256
  before   what each label of the last changes was before them, so that they can be undone
  examples one row for each text with labels that an edit added, changed or removed; the last of an id counts

The checksums, and SQLite's own check of its file, notice altered bytes. The file may come from somebody else, with
right checksums: it has exactly our tables, and every value is checked.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError
from dexter.model.untrusted_sqlite import REMEDY, damaged, open_untrusted

FORMAT_VERSION = 3
TABLES = {
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
    "examples": """CREATE TABLE examples (
    version INTEGER, id TEXT, kind TEXT, text TEXT, labels TEXT, representation BLOB, sha256 BLOB,
    PRIMARY KEY (version, id)
)""",
}
LABELS = "SELECT position, id, text, added_in, changed_in, priors, representation, sha256 FROM labels"
_STATE = "SELECT format_version, model, version, num_rows, sha256 FROM state"
_EDITS = "SELECT version, time, author, added, renamed, removed, undoes, sha256 FROM edits"
EXAMPLES = "SELECT version, id, kind, text, labels, representation, sha256 FROM examples"
_BEFORE = "SELECT version, id, position, text, added_in, changed_in, priors, representation, sha256 FROM before"
_LARGEST_VALUE = 1e9


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


class Example(NamedTuple):
    """A text that a person has labelled."""

    id: str
    text: str | None
    """None if the example was removed, or forgotten by compaction."""
    labels: tuple[str, ...] = ()
    """Ids of its labels."""
    representation_D: NDArray[np.float32] | None = None
    """Encoder output for the text."""
    version: int = 0
    """The version of the labels that it came with."""


class LabelEdit(NamedTuple):
    """One change of the labels, as the history tells it."""

    version: int
    """The version of the labels that it led to, by which it is called."""
    time: str
    """When, in UTC (ISO 8601)."""
    author: str | None
    """Who made it; None where that is not known."""
    added: int
    renamed: int
    removed: int
    undoes: int | None = None
    """The edit that it undid; 0 if it restored a backup, None otherwise."""
    is_undone: bool = False
    """Whether a later edit undid it."""
    examples_added: int = 0
    """Texts with labels that were added or got other labels."""
    examples_removed: int = 0

    def describe(self) -> str:
        """Describe what it did in a few words."""
        counts = {"added": self.added, "renamed": self.renamed, "removed": self.removed}
        counts |= {"example added": self.examples_added, "example removed": self.examples_removed}
        named = ((count, name if count == 1 else name.replace("example", "examples")) for name, count in counts.items())
        done = ", ".join(f"{count:,} {name}" for count, name in named if count) or "nothing changed"
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
    examples: Sequence[Example] = ()
    """Examples that were added, changed or removed, each as it is now, in the order of their last edits."""


Row = tuple[Any, ...]
"""Position, id, text, added_in, changed_in, priors and representation of a label."""


@dataclass(frozen=True)
class LabelFile:
    """A file of label changes; the methods that read take an open connection."""

    path: Path
    fingerprint: str
    """Of the published model."""
    dimension: int
    """Of the vectors that its encoder returns."""
    num_priors: int
    """Number of its heads that have label priors."""

    def connect(self, *, wait: float) -> AbstractContextManager[sqlite3.Connection]:
        """Open the file and check its tables; `wait` is the seconds to wait for another process."""
        return open_untrusted(self.path, wait=wait, expected=TABLES)

    def read(self, connection: sqlite3.Connection, *, since: int = 0, edit: bytes = b"") -> LabelsOnDisk:
        """Read and check the labels that changed after `since`, to which `edit` led; all where those are not enough."""
        version, num_rows = self.read_state(connection)
        is_whole = since == 0 or not self._continues(connection, version, since, edit)
        if is_whole:
            since = 0
            [finding] = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if finding != "ok":
                raise damaged(self.path, finding.splitlines()[-1])
        rows = connection.execute(f"{LABELS} WHERE changed_in > ? ORDER BY position", [since])
        changed = [self.from_row(row) for row in rows]
        examples = self.read_examples(connection, since=since)
        num_found = len({label.id for label in changed}) + len(examples)
        if is_whole and num_found != num_rows:
            raise damaged(self.path, f"{num_found} rows, expected {num_rows}")
        latest = latest_examples(examples)
        return LabelsOnDisk(version, self.name_of_edit(connection, version), changed, is_whole, latest)

    def read_examples(self, connection: sqlite3.Connection, *, since: int = 0) -> list[Example]:
        """Return every row of the examples that edits after a version wrote, oldest first."""
        rows = connection.execute(f"{EXAMPLES} WHERE version > ? ORDER BY version, rowid", [since])
        return [self.example_from_row(row) for row in rows]

    def example_from_row(self, row: Sequence[Any]) -> Example:
        """Return the example of a row, whose values may be of any type and length."""
        version, example_id, kind, text, labels, representation, digest = row
        if checksum(*row[:-1]) != digest:
            raise damaged(self.path, "an example differs from its checksum")
        is_good = _is_number(version, at_least=1) and isinstance(example_id, str) and example_id
        if not is_good or kind not in ("added", "changed", "removed"):
            raise damaged(self.path, "an example has values of other types than expected")
        if text is None:
            return Example(example_id, None, version=version)
        try:
            ids = json.loads(labels)
        except (TypeError, ValueError, RecursionError):
            ids = None
        if not (isinstance(text, str) and isinstance(ids, list) and all(isinstance(each, str) for each in ids)):
            raise damaged(self.path, "an example has values of other types than expected")
        vector_D = self._numbers(representation, self.dimension, "a vector")
        return Example(example_id, text, tuple(ids), vector_D, version)

    def _continues(self, connection: sqlite3.Connection, version: int, since: int, edit: bytes) -> bool:
        """Whether the labels changed from those that `edit` led to, and by edits that only add to them."""
        if version < since or self.name_of_edit(connection, since) != edit:
            return False
        statement = "SELECT 1 FROM edits WHERE version > ? AND undoes IS NOT NULL LIMIT 1"
        return connection.execute(statement, [since]).fetchone() is None

    def read_state(self, connection: sqlite3.Connection) -> tuple[int, int]:
        """Return the version of the labels and the number of rows."""
        states = connection.execute(f"{_STATE} LIMIT 2").fetchall()
        if len(states) != 1 or checksum(*states[0][:-1]) != states[0][-1]:
            raise damaged(self.path, "its state differs from its checksum")
        format_version, model, version, num_rows, _ = states[0]
        if format_version != FORMAT_VERSION or model != self.fingerprint:
            raise ModelError(
                f"{self.path}: labels in format {format_version!r} of model {model!r}, expected {FORMAT_VERSION} of "
                f"{self.fingerprint!r}: {REMEDY}"
            )
        if not (_is_number(version, at_least=1) and _is_number(num_rows)):
            raise damaged(self.path, "its state has other types than numbers")
        return version, num_rows

    def read_edits(self, connection: sqlite3.Connection) -> list[LabelEdit]:
        """Return the history, newest first."""
        edits: list[LabelEdit] = []
        undone: set[int] = set()
        statement = "SELECT version, sum(kind <> 'removed'), sum(kind = 'removed') FROM examples GROUP BY version"
        examples = {version: counts for version, *counts in connection.execute(statement)}
        for *values, digest in connection.execute(f"{_EDITS} ORDER BY version DESC"):
            version, time, author, added, renamed, removed, undoes = values
            if (
                checksum(*values) != digest
                or not (isinstance(time, str) and isinstance(author, str | None))
                or not all(map(_is_number, (version, added, renamed, removed, undoes or 0)))
            ):
                raise damaged(self.path, "its history differs from its checksum")
            is_undone = version in undone
            if undoes is not None and not is_undone:
                undone.add(undoes)
            edits.append(
                LabelEdit(
                    version, time, author, added, renamed, removed, undoes, is_undone, *examples.get(version, (0, 0))
                )
            )
        return edits

    def read_before(self, connection: sqlite3.Connection, version: int) -> dict[str, Row | None]:
        """Return the row of each label of an edit as it was before, without its checksum; None: there was none."""
        rows: dict[str, Row | None] = {}
        for *values, digest in connection.execute(f"{_BEFORE} WHERE version = ?", [version]):
            if checksum(*values) != digest:
                raise damaged(self.path, "its history differs from its checksum")
            _, label_id, position, *others = values
            row = None if position is None else (position, label_id, *others)
            if row is not None:
                self.from_row((*row, checksum(*row)))
            rows[label_id] = row
        return rows

    def from_row(self, row: Sequence[Any]) -> ChangedLabel:
        """Return the label of a row, whose values may be of any type and length."""
        if checksum(*row[:-1]) != row[-1]:
            raise damaged(self.path, "a label differs from its checksum")
        position, label_id, text, added_in, changed_in, priors, representation, _ = row
        if not (
            (isinstance(label_id, str) and label_id)
            and (text is None or (isinstance(text, str) and text.strip()))
            and (added_in is None or _is_number(added_in, at_least=1))
            and (_is_number(position) and _is_number(changed_in, at_least=1))
        ):
            raise damaged(self.path, "a label has values of other types than expected")
        is_new = added_in is not None and text is not None
        vector_D = None if representation is None else self._numbers(representation, self.dimension, "a vector")
        if is_new and vector_D is None:
            raise damaged(self.path, "an added label has no vector")
        known = self._numbers(priors, self.num_priors if is_new else 0, "label priors")
        return ChangedLabel(label_id, text, vector_D, tuple(known.tolist()), added_in)

    def _numbers(self, content: object, count: int, what: str) -> NDArray[np.float32]:
        if not isinstance(content, bytes) or len(content) != 4 * count:
            size = f"{len(content) / 4:g} elements" if isinstance(content, bytes) else type(content).__name__
            raise damaged(self.path, f"{what} of {size}, expected {count}")
        values = np.frombuffer(content, "<f4")
        if not (np.abs(values) <= _LARGEST_VALUE).all():
            raise damaged(self.path, f"{what} with values that are not finite or too large")
        return values

    def name_of_edit(self, connection: sqlite3.Connection, version: int) -> bytes:
        """Return what names the edit that led to a version; empty if there was none."""
        row = connection.execute("SELECT sha256 FROM edits WHERE version = ?", [version]).fetchone()
        return b"" if row is None or not isinstance(row[0], bytes) else row[0]


def latest_examples(examples: Iterable[Example]) -> list[Example]:
    """Return each example as its last row has it, in the order of these rows."""
    latest: dict[str, Example] = {}
    for example in examples:
        latest.pop(example.id, None)
        latest[example.id] = example
    return list(latest.values())


def _is_number(value: object, *, at_least: int = 0) -> bool:
    return isinstance(value, int) and at_least <= value < 2**53


def checksum(*values: str | int | bytes | None) -> bytes:
    """Return the SHA-256 of values with their types and lengths."""
    digest = hashlib.sha256()
    for value in values:
        content = value if isinstance(value, bytes) else repr(value).encode("utf-8", "surrogatepass")
        digest.update(f"{type(value).__name__} {len(content)} ".encode())
        digest.update(content)
    return digest.digest()
