"""The labels of a data set while it is read: their ids, texts and columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from pathlib import Path

from dexter.data.formats.problems import BadRecord, excerpt


class LabelTable:
    """Label ids and texts in column order.

    With a labels file the table is closed: an id it does not hold is a bad record. Without one it is open: labels are
    taken up as they occur in the rows, and an id is its own text.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.ids: list[str] = []
        self.texts: list[str] = []
        self._columns: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_open(self) -> bool:
        """Whether rows may bring labels that were not listed."""
        return self.path is None

    @property
    def known(self) -> Set[str] | None:
        """The ids of a closed table; None for an open one, which knows no label before it has seen it."""
        return None if self.is_open else self._columns.keys()

    def add(self, identifier: str, text: str) -> int:
        """Append a label and return its column; an id that is there already is a bad record."""
        if identifier in self._columns:
            first = self._columns[identifier] + 1
            raise BadRecord(
                "duplicate label",
                f"label id {excerpt(identifier)} was given before (as label {first}): make label ids unique",
            )
        column = self._columns[identifier] = len(self.ids)
        self.ids.append(identifier)
        self.texts.append(text)
        return column

    def columns_of_ids(self, identifiers: Iterable[str]) -> list[int]:
        """The columns of label ids; an open table takes up new ones."""
        if self.is_open:
            columns = self._columns
            return [columns[one] if one in columns else self.add(one, one) for one in identifiers]
        try:
            return [self._columns[one] for one in identifiers]
        except KeyError as error:
            raise BadRecord(
                "unknown label",
                f"label id {excerpt(error.args[0])} is not in {self._file_name}: add it there or correct the id",
            ) from None

    def columns_of_indices(self, indices: Sequence[int]) -> Sequence[int]:
        """The columns of label indices, counted from 0 in the order of the labels file."""
        if self.is_open:
            raise BadRecord(
                "index without labels file",
                f"label index {excerpt(indices[0])} needs a labels file to refer to: add one, or give string ids",
            )
        if indices and not (min(indices) >= 0 and max(indices) < len(self.ids)):
            bad = next(index for index in indices if not 0 <= index < len(self.ids))
            raise BadRecord(
                "label index out of range",
                f"label index {excerpt(bad)} is out of range: {self._file_name} has {len(self.ids):,} labels, "
                f"numbered from 0",
            )
        return indices

    @property
    def _file_name(self) -> str:
        return self.path.name if self.path is not None else "the labels file"


def parse_index(token: str, bound: int, *, what: str) -> int:
    """A whole number from 0 to below `bound` written in ASCII digits, or `BadRecord`."""
    if not (token.isascii() and token.isdecimal() and len(token) < 19):
        raise BadRecord(f"{what} not a number", f"expected a {what} (a whole number from 0), got {excerpt(token)}")
    index = int(token)
    if index >= bound:
        raise BadRecord(f"{what} out of range", f"{what} {index} is out of range: expected less than {bound:,}")
    return index
