"""What a user asks for: labels to remove, rename and add as one change, checked before anything happens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from dexter.errors import UsageError
from dexter.model.similar import Duplicate


@dataclass(frozen=True, kw_only=True)
class LabelEdit:
    """One change of the labels: all of it happens, or nothing. Removals come first, then new texts, then additions."""

    remove: Sequence[str] = ()
    """Ids of labels to take away."""
    rename: Sequence[tuple[str, str]] = ()
    """(id, new text) of labels to rename."""
    add: Sequence[tuple[str, str]] = ()
    """(id, text) of new labels."""
    keep_vectors: bool = False
    """Renamed labels are found by their old texts as before; only what is shown changes."""
    reuse_ids: bool = False
    """Whether new labels may have ids of labels that were removed."""


class VersionConflict(UsageError):
    """The labels have changed since the version that an edit was made for."""

    def __init__(self, *, expected: int, version: int) -> None:
        super().__init__(f"the labels are at version {version}, the edit is for {expected}: look again, then edit")


@dataclass(frozen=True)
class EditResult:
    """What came of an edit."""

    version: int
    """The version of the labels from now on."""
    duplicates: Sequence[Duplicate]
    """New or renamed labels that look like labels there were already."""


def check_edit(edit: LabelEdit, known: Sequence[str], retired: Collection[str]) -> None:
    """Raise `UsageError` unless the edit fits the labels there are.

    Args:
        edit: what is asked for.
        known: ids of the labels there are.
        retired: ids of labels that were removed.
    """
    _check_strings(edit)
    ids = set(known)
    for label_id in _distinct(edit.remove, "remove"):
        if label_id not in ids:
            raise UsageError(_unknown(label_id, retired))
        ids.remove(label_id)
    for label_id in _distinct([label_id for label_id, _ in edit.rename], "rename"):
        if label_id not in ids:
            raise UsageError(_unknown(label_id, retired))
    for label_id, _ in edit.add:
        if label_id in ids:
            raise UsageError(f"label id {label_id!r} is in use already: choose another id, or rename that label")
        if not edit.reuse_ids and (label_id in retired or label_id in edit.remove):
            raise UsageError(
                f"label id {label_id!r} belonged to a label that was removed, and ids are not used again: choose "
                "another id, or ask for it with reuse_ids=True (--reuse-ids)"
            )
        ids.add(label_id)
    if not ids:
        raise UsageError("a model needs at least one label: not removing the last one")


def _check_strings(edit: LabelEdit) -> None:
    """Ids and texts must be strings that a file can hold."""
    if isinstance(edit.remove, str):
        raise UsageError("labels to remove are a list of ids: write remove_labels([id])")
    for pair in (*edit.add, *edit.rename, *((label_id, "") for label_id in edit.remove)):
        if not _is_pair(pair):
            raise UsageError(f"a label is its id and its text, both strings: got {pair!r}")
        label_id, text = pair
        if not label_id or any("\ud800" <= character <= "\udfff" for character in label_id + text):
            raise UsageError(
                f"label id {label_id!a}: an id must not be empty, nor id or text hold half a surrogate pair"
            )
    for label_id, text in (*edit.add, *edit.rename):
        if not text.strip():
            raise UsageError(f"label {label_id!r} has no text: a label is found by its text, give it one")


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _distinct(ids: Iterable[str], verb: str) -> list[str]:
    ids = list(ids)
    if len(set(ids)) != len(ids):
        twice = next(label_id for place, label_id in enumerate(ids) if label_id in ids[:place])
        raise UsageError(f"label id {twice!r} is given twice: {verb} it once")
    return ids


def _unknown(label_id: str, retired: Collection[str]) -> str:
    return f"no label has the id {label_id!r}" + (": it was removed before" if label_id in retired else "")
