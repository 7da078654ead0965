"""Filter pairs: `filter_labels_train.txt` and `filter_labels_test.txt`, a "row label" pair of numbers per line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix

from dexter.data.formats.labels import parse_index
from dexter.data.formats.problems import BadRecord, excerpt
from dexter.data.formats.reading import Reading
from dexter.data.formats.rows import Rows


def read_filter(path: Path, reading: Reading, *, rows: Rows, num_labels: int) -> csr_matrix:
    """The pairs as a matrix over the rows that were kept; pairs of skipped rows go with them."""

    def parse(line: str) -> tuple[int, int]:
        parts = line.split()
        if len(parts) != 2:
            raise BadRecord("filter pair", f'expected "row label", two numbers, got {excerpt(line)}')
        return (
            parse_index(parts[0], rows.num_seen, what="row number"),
            parse_index(parts[1], num_labels, what="label index"),
        )

    pairs = [pair for pair in reading.records(path, parse) if pair is not None]
    row_ids, columns = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    place = np.full(rows.num_seen, -1, dtype=np.int64)
    place[np.array(rows.kept, dtype=np.int64)] = np.arange(len(rows))
    row_ids = place[row_ids]
    present = row_ids >= 0
    marks = np.ones(int(present.sum()), dtype=np.float32)
    matrix = csr_matrix((marks, (row_ids[present], columns[present])), shape=(len(rows), num_labels))
    matrix.data[:] = 1.0
    return matrix


def filter_lines(filtered: csr_matrix) -> list[str]:
    """The pairs as lines to write, by row and then by label."""
    rows, columns = filtered.nonzero()
    return [f"{row} {column}" for row, column in zip(rows.tolist(), columns.tolist(), strict=True)]
