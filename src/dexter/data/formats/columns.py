"""Choose which columns of a table hold texts, labels and ids, and what separates two labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from dexter.errors import DataError

Cell = str | list[str] | None

SEPARATORS = ("|", ";", ",", " ")
"""Tried in this order, when reading and when writing."""
_TEXT_NAMES = ("text", "query", "document", "sentence", "content", "body", "abstract", "description", "title", "name")
_TITLE_PARTNERS = ("text", "content", "body", "abstract", "description")
_LABEL_NAMES = (
    "labels", "label", "tags", "tag", "subjects", "keywords", "categories", "category", "classes", "class", "topics",
    "targets",
)  # fmt: skip
_ID_NAMES = ("uid", "id", "document_id", "doc_id", "label_id", "uri")
_WEIGHT_NAMES = ("weights",)


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How to read the columns of a table; what is None is guessed."""

    text_column: str | None = None
    """Name of the text column, or several joined by `+`."""
    label_column: str | None = None
    """Name of the column of labels."""
    label_separator: str | None = None
    """What separates two labels of a cell."""


@dataclass(frozen=True, kw_only=True)
class QueryColumns:
    """Positions of the columns to read in a table of queries."""

    text: tuple[int, ...]
    """Joined by a space."""
    labels: int
    uid: int | None
    weights: int | None

    @property
    def used(self) -> list[int]:
        """The positions to read."""
        return [position for position in (*self.text, self.labels, self.uid, self.weights) if position is not None]

    def describe(self, names: Sequence[str]) -> str:
        """Say which column holds what."""
        said = ["text from " + " + ".join(repr(names[position]) for position in self.text)]
        for what, position in (("labels", self.labels), ("ids", self.uid), ("weights", self.weights)):
            if position is not None:
                said.append(f"{what} from {names[position]!r}")
        return ", ".join(said)


def choose_columns(names: Sequence[str], options: TableOptions, *, path: Path) -> QueryColumns:
    """Choose the columns that the options name, or else those with a usual name."""
    lowered = [name.strip().lower() for name in names]
    labels = _first(lowered, _LABEL_NAMES)
    if options.label_column is not None:
        labels = _position(names, options.label_column, path=path)
    if labels is None:
        raise _missing(path, "column of labels", names, "name it with label_column (usual: labels, tags)")
    text = _guess_text(lowered, taken=labels)
    if options.text_column is not None:
        text = _named_text(names, options.text_column, path=path)
    if not text:
        raise _missing(path, "text column", names, "name it with text_column (usual: text, title)")
    return QueryColumns(
        text=text, labels=labels, uid=_first(lowered, _ID_NAMES), weights=_first(lowered, _WEIGHT_NAMES)
    )


def choose_label_file_columns(names: Sequence[str], *, path: Path) -> tuple[int, int]:
    """Choose the id and the text column of a table of labels; a single column is both."""
    lowered = [name.strip().lower() for name in names]
    uid = _first(lowered, (*_ID_NAMES, "label", "name"))
    if uid is None:
        raise _missing(path, "column of label ids", names, "call it uid or id")
    text = _first(lowered, [name for name in ("text", "label", "title", "name", "description") if name != lowered[uid]])
    return uid, uid if text is None else text


def choose_query_columns(names: Sequence[str]) -> tuple[int, tuple[int, ...]] | None:
    """Choose the column of ids and those of the text in a table of texts to label; None if one of them is missing."""
    lowered = [name.strip().lower() for name in names]
    uid = _first(lowered, _ID_NAMES)
    text = () if uid is None else _guess_text(lowered, taken=uid)
    return (uid, text) if uid is not None and text else None


def choose_separator(cells: Iterable[Cell], known: Set[str] | None) -> str | None:
    """Choose what separates the labels of some sample cells; None when each cell is one label.

    Where the labels are known, it is one that makes every part a known label, if possible one that no label contains.
    Else it is the first of `SEPARATORS` that occurs, other than a space, which may be part of a label.
    """
    samples = [cell for cell in cells if isinstance(cell, str) and cell]
    used = [separator for separator in SEPARATORS if any(separator in cell for cell in samples)]
    if known is not None:
        fitting = [one for one in SEPARATORS if all(set(split_cell(cell, one, known)) <= known for cell in samples)]
        within = {one for one in fitting if any(one in label for label in known)}
        if fitting:
            return min(fitting, key=lambda one: (one in within, one not in used))
    return next((separator for separator in used if separator != " "), None)


def split_cell(cell: Cell, separator: str | None, known: Set[str] | None) -> list[str]:
    """Split a cell into labels. A cell that is one known label stays whole; a known label keeps the space around it."""
    if not cell:
        return []
    exact: Set[str] = known if known is not None else frozenset()
    if isinstance(cell, str):
        cell = [cell] if separator is None or cell in exact else cell.split(separator)
    labels = [part if part in exact else part.strip() for part in cell]
    return [label for label in labels if label]


def _first(lowered: Sequence[str], candidates: Iterable[str]) -> int | None:
    return next((lowered.index(name) for name in candidates if name in lowered), None)


def _guess_text(lowered: Sequence[str], *, taken: int) -> tuple[int, ...]:
    free = [name if position != taken else "" for position, name in enumerate(lowered)]
    title, partner = _first(free, ["title"]), _first(free, _TITLE_PARTNERS)
    if title is not None and partner is not None:
        return (title, partner)
    single = _first(free, _TEXT_NAMES)
    return () if single is None else (single,)


def _named_text(names: Sequence[str], given: str, *, path: Path) -> tuple[int, ...]:
    if given in names:
        return (names.index(given),)
    return tuple(_position(names, name, path=path) for name in given.split("+"))


def _position(names: Sequence[str], name: str, *, path: Path) -> int:
    if name not in names:
        raise _missing(path, f"column {name!r}", names, "give one of these")
    return names.index(name)


def _missing(path: Path, what: str, names: Sequence[str], advice: str) -> DataError:
    shown = ", ".join(repr(name[:40]) for name in names[:20])
    more = f", ... ({len(names)} columns)" if len(names) > 20 else ""
    return DataError(f"no {what} among {shown}{more}: {advice}", path=path, line=1)
