"""Write label changes: replace rows and note what they were before, undo an edit, return to a copy."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np

from dexter.errors import UsageError
from dexter.model.label_file import (
    EXAMPLES,
    FORMAT_VERSION,
    LABELS,
    ChangedLabel,
    Example,
    LabelFile,
    LabelsOnDisk,
    Row,
    checksum,
    latest_examples,
)

UNDOABLE_EDITS = 100
"""Number of changes that can be undone; what labels were before older ones is forgotten."""
_MAX_AUTHOR_CHARACTERS = 200
_LATER_LABELS, _LATER_EXAMPLES = (
    f"SELECT DISTINCT version FROM {table} WHERE version > ? AND id IN (SELECT id FROM {table} WHERE version = ?)"  # noqa: S608
    for table in ("before", "examples")
)
_NO_ROW: Row = (None,) * 6


class LabelCopy(NamedTuple):
    """The labels of a copy of the file."""

    version: int
    rows: list[Row]
    examples: Sequence[Example] = ()


class LabelWriter:
    """An open transaction on the file of label changes."""

    def __init__(self, file: LabelFile, connection: sqlite3.Connection, *, is_new: bool = False) -> None:
        self._file, self._connection, self._is_new = file, connection, is_new
        self.has_written = False

    def read(self) -> LabelsOnDisk:
        """Read all changed labels as the transaction has them."""
        return self._file.read(self._connection)

    def write(
        self, version: int, changed: Sequence[ChangedLabel], examples: Sequence[Example] = (), *, by: str | None = None
    ) -> bytes:
        """Replace the rows of changed labels and examples and set the version; return what names the edit of `by`."""
        rows = ((label.id, self._to_row(label)) for label in changed)
        return self._replace(version, rows, examples, by=by)

    def undo(self, target: int | None = None, *, by: str | None = None) -> int:
        """Undo an edit, the last one that was not undone if left out, as one more edit; return the new version."""
        edits = {edit.version: edit for edit in self._file.read_edits(self._connection)}
        if target is None:
            target = next((edit.version for edit in edits.values() if edit.undoes is None and not edit.is_undone), 0)
        edit = edits.get(target)
        if edit is None:
            raise UsageError("there is no such edit to undo: `dexter labels history` lists them")
        if edit.is_undone:
            raise UsageError(f"edit {target} was undone already")
        before = self._file.read_before(self._connection, target)
        examples = self._examples_before(target)
        if examples is None or (not before and (edit.added or edit.renamed or edit.removed or not examples)):
            raise UsageError(
                f"edit {target} cannot be undone any more: what the labels were before it was forgotten "
                f"(more than {UNDOABLE_EDITS} edits ago, or compacted)"
            )
        later = [
            row
            for statement in (_LATER_LABELS, *([_LATER_EXAMPLES] if examples else []))
            for row in self._connection.execute(statement, [target, target])
        ]
        # An edit and its undoing cancel each other, if both came later.
        standing = (edits[version] for (version,) in later if version in edits and not edits[version].is_undone)
        blocking = next((each.version for each in standing if each.undoes is None or each.undoes < target), None)
        if blocking is not None:
            raise UsageError(f"edit {target} cannot be undone: edit {blocking} changed some of its labels again")
        version, _ = self._file.read_state(self._connection)
        self._replace(version + 1, before.items(), examples, by=by, undoes=target)
        return version + 1

    def _examples_before(self, target: int) -> list[Example] | None:
        """Return the examples of an edit as they were before it; None if one of them was forgotten since."""
        before: list[Example] = []
        for [example_id] in self._connection.execute("SELECT id FROM examples WHERE version = ?", [target]).fetchall():
            row = self._connection.execute(
                f"{EXAMPLES} WHERE id = ? AND version < ? ORDER BY version DESC LIMIT 1", [example_id, target]
            ).fetchone()
            earlier = Example(example_id, None) if row is None else self._file.example_from_row(row)
            if row is not None and row[2] != "removed" and earlier.text is None:
                return None
            before.append(earlier)
        return before

    def forget_examples(self) -> None:
        """Blank the texts, labels and vectors of examples that were changed or removed later."""
        rows = self._connection.execute(
            "SELECT version, id, kind FROM examples AS old WHERE text IS NOT NULL AND EXISTS "
            "(SELECT 1 FROM examples WHERE id = old.id AND version > old.version)"
        ).fetchall()
        for row in rows:
            self._connection.execute(
                "UPDATE examples SET text = NULL, labels = NULL, representation = NULL, sha256 = ? "
                "WHERE version = ? AND id = ?",
                [checksum(*row, None, None, None), *row[:2]],
            )

    def restore(self, saved: LabelCopy, *, by: str | None = None) -> int:
        """Return to the labels of a copy of the file; return the new version."""
        version = 0 if self._is_new else self._file.read_state(self._connection)[0]
        version = max(version, saved.version) + 1
        wanted = {row[1]: row[:-1] for row in saved.rows}
        present = {row[1]: row[:-1] for row in self._connection.execute(LABELS)}
        differing = [label_id for label_id in {**present, **wanted} if wanted.get(label_id) != present.get(label_id)]
        rows = [(label_id, wanted.get(label_id)) for label_id in differing]
        self._replace(version, rows, self._examples_to_restore(saved), by=by, undoes=0)
        return version

    def _examples_to_restore(self, saved: LabelCopy) -> list[Example]:
        present = {each.id: each for each in latest_examples(self._file.read_examples(self._connection))}
        wanted = {example.id: example for example in saved.examples}
        return [
            wanted.get(example_id, Example(example_id, None))
            for example_id in {**present, **wanted}
            if _content(wanted.get(example_id)) != _content(present.get(example_id))
        ]

    def _replace(
        self,
        version: int,
        rows: Iterable[tuple[str, Row | None]],
        examples: Sequence[Example],
        *,
        by: str | None,
        undoes: int | None = None,
    ) -> bytes:
        """Replace the row of each label (None: delete it), note what it was before, and set the version.

        Examples get one more row each.
        """
        execute = self._connection.execute
        [last] = execute("SELECT max(position) FROM labels").fetchone()
        positions = itertools.count((last or 0) + 1)
        counts = {"added": 0, "renamed": 0, "removed": 0}
        for label_id, row in rows:
            found = execute(f"{LABELS} WHERE id = ?", [label_id]).fetchone()
            known = None if found is None else tuple(found[:-1])
            counts[_kind_of_change(known, row)] += 1
            noted = (version, label_id, *(_NO_ROW if known is None else (known[0], *known[2:])))
            execute("INSERT INTO before VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*noted, checksum(*noted)))
            execute("DELETE FROM labels WHERE id = ?", [label_id])
            if row is not None:
                position, _, text, added_in, _, *vectors = row
                if position is None or execute("SELECT 1 FROM labels WHERE position = ?", [position]).fetchone():
                    position = next(positions)
                values = (position, label_id, text, added_in, version, *vectors)
                execute("INSERT INTO labels VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*values, checksum(*values)))
        self._append_examples(version, examples)
        author = None if by is None else by[:_MAX_AUTHOR_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        edit = (version, now, author, *counts.values(), undoes)
        digest = checksum(*edit)
        execute("INSERT INTO edits VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*edit, digest))
        execute("DELETE FROM before WHERE version <= ?", [version - UNDOABLE_EDITS])
        [num_rows] = execute("SELECT (SELECT count(*) FROM labels) + (SELECT count(*) FROM examples)").fetchone()
        state = (FORMAT_VERSION, self._file.fingerprint, version, num_rows)
        execute("DELETE FROM state")
        execute("INSERT INTO state VALUES (?, ?, ?, ?, ?)", (*state, checksum(*state)))
        self.has_written = True
        return digest

    def _append_examples(self, version: int, examples: Sequence[Example]) -> None:
        execute = self._connection.execute
        for example in examples:
            last = execute(
                "SELECT kind FROM examples WHERE id = ? ORDER BY version DESC LIMIT 1", [example.id]
            ).fetchone()
            kind = "removed" if example.text is None else "added" if last in (None, ("removed",)) else "changed"
            labels, vector_D = json.dumps(example.labels), example.representation_D
            content: tuple[str | bytes | None, ...] = (None, None, None)
            if example.text is not None and vector_D is not None:
                content = (example.text, labels, vector_D.astype("<f4").tobytes())
            values = (version, example.id, kind, *content)
            execute("INSERT INTO examples VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, checksum(*values)))

    def _to_row(self, label: ChangedLabel) -> Row:
        """Return a label's row; a renamed label keeps what else its row says."""
        position = None
        if label.added_in is None:  # An added label comes last, whatever its id stood for before.
            row = self._connection.execute(f"{LABELS} WHERE id = ?", [label.id]).fetchone()
            if row is not None:
                known, position = self._file.from_row(row), row[0]
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


def _content(example: Example | None) -> tuple[str | None, tuple[str, ...]]:
    return (None, ()) if example is None else (example.text, example.labels)


def _kind_of_change(before: Row | None, after: Row | None) -> str:
    """Return what a change did to a label, by its row before and after; without a row it is as published, if at all."""
    was_removed = before is not None and before[2] is None
    if after is None:
        return "added" if was_removed else "removed" if before is not None and before[3] is not None else "renamed"
    if after[2] is None:
        return "removed"
    return "added" if was_removed or (before is None and after[3] is not None) else "renamed"
