"""Which labels of which test texts were not found: a small sample for every label, for people to look at."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from dexter.files import write_text

MISSED_PLACES = 5
"""A label that is not among the first so many is missed."""
MISSED_TEXTS = 10_000
"""So many test texts are looked at."""
_PER_LABEL = 5
_EXCERPT = 300


@dataclass(frozen=True)
class Miss:
    """A text, a label that it has, and the labels it got in its place; labels by id."""

    label: str
    text: str
    """Its beginning."""
    got: Sequence[str]


def find_misses(
    top_ids_NK: NDArray[np.int64], texts: Sequence[str], relevance: csr_matrix, label_ids: Sequence[str]
) -> Iterator[Miss]:
    """The first few misses of each label, in the order of the texts.

    Args:
        top_ids_NK: the first places of each text, as columns of `relevance`; -1 for a label that is not there.
        texts: the texts.
        relevance: texts x labels.
        label_ids: the labels' ids, by column.
    """
    seen: Counter[int] = Counter()
    for row, (text, top_ids) in enumerate(zip(texts, top_ids_NK, strict=True)):
        start, end = relevance.indptr[row : row + 2]
        relevant = relevance.indices[start:end][relevance.data[start:end] != 0]
        for label in np.setdiff1d(relevant, top_ids).tolist():
            seen[label] += 1
            if seen[label] <= _PER_LABEL:
                yield Miss(label_ids[label], text[:_EXCERPT], [label_ids[place] for place in top_ids if place >= 0])


def write_misses(path: Path, misses: Iterable[Miss]) -> None:
    """One JSON object per line."""
    write_text(path, "".join(json.dumps(asdict(miss), ensure_ascii=False) + "\n" for miss in misses))


def read_misses(path: Path) -> Iterator[Miss]:
    """What `write_misses` wrote; lines of another form are passed over."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                fields = json.loads(line)
                yield Miss(str(fields["label"]), str(fields["text"]), [str(label) for label in fields["got"]])
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
