"""Choose what separates the columns of a table, which hold texts, labels and ids, and what separates two labels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from dexter.errors import DataError

Cell = str | list[str] | None

SEPARATORS = ("|", ";", ",", " ")
"""Tried in this order, when reading and when writing."""
DELIMITERS = (",", ";", "\t", "|")
"""What may separate the columns of a file."""
_LIST_ITEM = re.compile(
    r"""\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|-?[0-9.]+)(?:\s*,|\s+(?=["'\d-])|\s*$)""", re.DOTALL
)
_TEXT_NAMES = (
    "text",
    "query",
    "question",
    "document",
    "sentence",
    "content",
    "body",
    "abstract",
    "description",
    "title",
    "name",
)
_TITLE_PARTNERS = ("text", "content", "body", "abstract", "description")
_LABEL_NAMES = (
    "labels", "label", "tags", "tag", "subjects", "keywords", "categories", "category", "classes", "class", "topics",
    "targets", "subject_uris",
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
        labels = choose_column(names, options.label_column, path=path)
    if labels is None:
        raise _missing(
            path,
            "column of labels",
            names,
            "name it with --label-column (label_column); usual names are labels and tags",
        )
    text = _guess_text(lowered, taken=labels)
    if options.text_column is not None:
        text = _named_text(names, options.text_column, path=path)
    if not text:
        raise _missing(
            path, "text column", names, "name it with --text-column (text_column); usual names are text and title"
        )
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


def choose_text_columns(
    names: Sequence[str], options: TableOptions, *, path: Path
) -> tuple[int | None, tuple[int, ...]]:
    """Choose the column of ids, if there is one, and those of the text in a table of texts to label."""
    lowered = [name.strip().lower() for name in names]
    uid = _first(lowered, _ID_NAMES)
    text = _guess_text(lowered, taken=uid)
    if options.text_column is not None:
        text = _named_text(names, options.text_column, path=path)
    if not text:
        advice = "name it with --text-column, or call a file with a text per line .txt"
        raise _missing(path, "text column", names, advice)
    return uid, text


def choose_delimiter(header: str, usual: str) -> str:
    """Choose what separates the column names of a line: what gives most known names, and of these most columns."""
    known = {*_TEXT_NAMES, *_LABEL_NAMES, *_ID_NAMES, *_WEIGHT_NAMES}

    def fit(delimiter: str) -> tuple[int, int]:
        names = [name.strip().strip('"').lower() for name in header.split(delimiter)]
        return len(known.intersection(names)), len(names)

    return max((usual, *(one for one in DELIMITERS if one != usual)), key=fit)


def parse_list(cell: str) -> list[str] | None:
    """Return the items of a list as JSON, Python or NumPy writes it, such as `["a", "b"]`; None if it is none."""
    cell = cell.strip()
    if not (cell.startswith("[") and cell.endswith("]")):
        return None
    inner, items, end = cell[1:-1].strip(), [], 0
    while end < len(inner):
        found = _LIST_ITEM.match(inner, end)
        if found is None:
            return None
        end = found.end()
        items.append(_unquote(found[1]))
    return items


def holds_lists(cells: Iterable[Cell], known: Set[str] | None) -> bool:
    """Whether each of some sample cells that is not empty is written as a list, and none is a label as it is."""
    samples = [cell for cell in cells if isinstance(cell, str) and cell.strip()]
    return bool(samples) and all(cell not in (known or ()) and parse_list(cell) is not None for cell in samples)


def _unquote(item: str) -> str:
    if item[0] == '"':
        try:
            return str(json.loads(item))
        except ValueError:
            pass
    return re.sub(r"\\(.)", r"\1", item[1:-1]) if item[0] in "\"'" else item


def choose_separator(cells: Iterable[Cell], known: Set[str] | None) -> str | None:
    """Choose what separates the labels of some sample cells; None when each cell is one label.

    Where the labels are known, it is one that makes every part a known label, if possible one that no label contains.
    Else it is a space between URIs, or the first of `SEPARATORS` that occurs, other than a space, which labels may
    contain.
    """
    samples = [cell for cell in cells if isinstance(cell, str) and cell]
    used = [separator for separator in SEPARATORS if any(separator in cell for cell in samples)]
    if known is not None:
        fitting = [one for one in SEPARATORS if all(set(split_cell(cell, one, known)) <= known for cell in samples)]
        within = {one for one in fitting if any(one in label for label in known)}
        if fitting:
            return min(fitting, key=lambda one: (one in within, one not in used))
    if samples and all(is_uri(part) and part.count("://") < 2 for cell in samples for part in cell.split()):
        return " "
    return next((separator for separator in used if separator != " "), None)


def split_cell(cell: Cell, separator: str | None, known: Set[str] | None) -> list[str]:
    """Split a cell into labels. A cell that is one known label stays whole; a known label keeps the space around it."""
    if not cell:
        return []
    exact: Set[str] = known if known is not None else frozenset()
    if isinstance(cell, str):
        cell = [cell] if separator is None or cell in exact else cell.split(separator)
    labels = [part if part in exact else part.strip() for part in cell]
    return [
        label[1:-1] if label not in exact and is_uri(label) and label[0] == "<" else label for label in labels if label
    ]


def is_uri(token: str) -> bool:
    """Whether a token is written as a URI: in angle brackets, or beginning with http."""
    return (len(token) > 2 and token[0] == "<" and token[-1] == ">") or token.startswith(("http://", "https://"))


def _first(lowered: Sequence[str], candidates: Iterable[str]) -> int | None:
    return next((lowered.index(name) for name in candidates if name in lowered), None)


def _guess_text(lowered: Sequence[str], *, taken: int | None) -> tuple[int, ...]:
    free = [name if position != taken else "" for position, name in enumerate(lowered)]
    title, partner = _first(free, ["title"]), _first(free, _TITLE_PARTNERS)
    if title is not None and partner is not None:
        return (title, partner)
    single = _first(free, _TEXT_NAMES)
    return () if single is None else (single,)


def _named_text(names: Sequence[str], given: str, *, path: Path) -> tuple[int, ...]:
    if given in names:
        return (names.index(given),)
    return tuple(choose_column(names, name, path=path) for name in given.split("+"))


def choose_column(names: Sequence[str], name: str, *, path: Path) -> int:
    """Return the position of a column, or raise an error that names those there are."""
    if name not in names:
        raise _missing(path, f"column {name!r}", names, "give one of these")
    return names.index(name)


def _missing(path: Path, what: str, names: Sequence[str], advice: str) -> DataError:
    shown = ", ".join(repr(name[:40]) for name in names[:20])
    more = f", ... ({len(names)} columns)" if len(names) > 20 else ""
    return DataError(f"no {what} among {shown}{more}: {advice}", path=path, line=1)
