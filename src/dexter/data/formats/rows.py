"""The rows of one split while they are read, in flat arrays, and the CSR matrix made of them at the end."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
from scipy.sparse import csr_matrix

from dexter.data.formats.problems import BadRecord, excerpt

_LARGEST_WEIGHT = float(np.finfo(np.float32).max)


class Rows:
    """Query texts, ids and label columns of one split.

    Skipped rows keep their number, because files that refer to rows by number (filter pairs, npz matrices) count them.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.uids: list[str] = []
        self.kept = array("q")
        """For each row kept, its number in the file, from 0."""
        self.num_seen = 0
        self._columns = array("q")
        self._weights = array("f")
        self._ends = array("q", [0])

    def __len__(self) -> int:
        return len(self.texts)

    def add(
        self, text: str, columns: Sequence[int], *, uid: str | None = None, weights: Sequence[float] | None = None
    ) -> None:
        """Append a row; its number stands for a missing uid. Weights must have passed `check_weights`."""
        self.texts.append(text)
        self.uids.append(str(self.num_seen) if uid is None else uid)
        self._columns.extend(columns)
        self._weights.extend([1.0] * len(columns) if weights is None else weights)
        self._ends.append(len(self._columns))
        self.kept.append(self.num_seen)
        self.num_seen += 1

    def skip(self) -> None:
        """Count a row that could not be used."""
        self.num_seen += 1

    def relevance(self, num_labels: int) -> csr_matrix:
        """Rows x labels. A label repeated within a row counts once, with its largest weight; weight 0 is left out."""
        columns = np.array(self._columns, dtype=np.int64)
        weights = np.array(self._weights, dtype=np.float32)
        ends = np.array(self._ends, dtype=np.int64)
        row_ids = np.repeat(np.arange(len(self)), np.diff(ends))
        order = np.lexsort((-weights, columns, row_ids))
        row_ids, columns, weights = row_ids[order], columns[order], weights[order]
        wanted = weights > 0
        wanted[1:] &= (row_ids[1:] != row_ids[:-1]) | (columns[1:] != columns[:-1])
        counts = np.bincount(row_ids[wanted], minlength=len(self))
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return csr_matrix((weights[wanted], columns[wanted], offsets), shape=(len(self), num_labels))

    def unique_uids(self, announce: Callable[[str], None]) -> list[str]:
        """The uids, each once: a repeated one gets `#2`, `#3`, ... appended, and the number of those is announced."""
        if len(set(self.uids)) == len(self.uids):
            return self.uids
        used: set[str] = set()
        last_number: dict[str, int] = {}
        unique = []
        for uid in self.uids:
            name = uid
            while name in used:
                last_number[uid] = last_number.get(uid, 1) + 1
                name = f"{uid}#{last_number[uid]}"
            used.add(name)
            unique.append(name)
        renamed = [new for new, old in zip(unique, self.uids, strict=True) if new != old]
        announce(f"{len(renamed):,} query ids were used before and got a number appended, as in {excerpt(renamed[0])}")
        return unique


def check_weights(weights: object, *, count: int) -> list[float]:
    """The weights of a row's labels, or `BadRecord` unless there is one finite number, 0 or more, for each label."""
    if type(weights) is not list or not set(map(type, weights)) <= {int, float}:
        raise BadRecord("weights not numbers", f"weights must be a list of numbers, got {excerpt(weights)}")
    if len(weights) != count:
        raise BadRecord("weight count", f"got {len(weights)} weights for {count} labels: give one for each, or none")
    if not all(0 <= weight <= _LARGEST_WEIGHT for weight in weights):
        bad = next(weight for weight in weights if not 0 <= weight <= _LARGEST_WEIGHT)
        raise BadRecord("bad weight", f"weight {excerpt(bad)} must be finite and not negative: correct or remove it")
    return weights
