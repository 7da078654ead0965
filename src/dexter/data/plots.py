"""Zipf plots: how often each label occurs against its rank, both axes logarithmic, as text or as a PNG."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dexter.data.dataset import Dataset
from dexter.errors import require
from dexter.files import atomic_path

_BRAILLE = 0x2800
_DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
"""Bit of each dot of a braille character, 4 rows x 2 columns."""


def zipf_text(label_counts: np.ndarray, *, width: int = 72, height: int = 10) -> str:
    """Draw the counts of the labels that occur, most frequent first, in braille characters with both axes labelled."""
    frequencies = np.sort(label_counts[label_counts > 0])[::-1]
    if not len(frequencies):
        return "(no label occurs in training)"
    margin = len(f"{frequencies[0]:,}") + 1
    num_columns = max(width - margin - 1, 10)
    canvas = _draw(frequencies, num_columns=num_columns, height=height)
    tick_rows = {_row_of(tick, frequencies[0], height * 4) // 4: f"{tick:,}" for tick in _powers_of_ten(frequencies[0])}
    lines = ["training queries of each label, by rank"]
    lines += [f"{tick_rows.get(row, ''):>{margin - 1}} ┤{canvas[row]}" for row in range(height)]
    return "\n".join(
        [*lines, " " * margin + "└" + "─" * num_columns, _rank_axis(len(frequencies), margin, num_columns)]
    )


def save_zipf_plot(dataset: Dataset, path: str | Path) -> None:
    """Save the Zipf plot of a data set's training labels as a PNG."""
    figure_module = require("matplotlib.figure", extra="data", purpose="a Zipf plot as PNG")
    frequencies = np.sort(dataset.label_counts[dataset.label_counts > 0])[::-1]
    figure = figure_module.Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.loglog(np.arange(1, len(frequencies) + 1), frequencies, linewidth=1.5)
    for boundary, name in ((100, "frequent"), (10, "torso"), (1, "tail")):
        axes.axhline(boundary, color="0.8", linewidth=0.8)
        axes.annotate(name, (1, boundary), xytext=(2, 3), textcoords="offset points", color="0.4")
    axes.set(xlabel="label rank", ylabel="training queries", title=f"{dataset.name}: {len(frequencies):,} labels")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def _draw(frequencies: np.ndarray, *, num_columns: int, height: int) -> list[str]:
    """Rows of braille characters; a steep step is drawn as a vertical line, so that the curve has no gaps."""
    num_dots_x, num_dots_y = num_columns * 2, height * 4
    ranks = len(frequencies) ** (np.arange(num_dots_x) / (num_dots_x - 1))
    rows = np.array([_row_of(f, frequencies[0], num_dots_y) for f in frequencies[ranks.round().astype(int) - 1]])
    dots = np.zeros((num_dots_y, num_dots_x), dtype=bool)
    for column, (start, end) in enumerate(zip(np.r_[rows[0], rows[:-1]], rows, strict=True)):
        dots[min(start + 1, end) : end + 1, column] = True
    bits = (dots.reshape(height, 4, num_columns, 2) * _DOTS[None, :, None, :]).sum(axis=(1, 3))
    return ["".join(chr(_BRAILLE + int(cell)) for cell in row) for row in bits]


def _row_of(frequency: float, largest: float, num_rows: int) -> int:
    """The dot row of a frequency: the largest on top, 1 at the bottom, logarithmic between."""
    span = np.log(max(largest, 2))
    return round((num_rows - 1) * (1 - float(np.log(frequency)) / float(span)))


def _rank_axis(num_labels: int, margin: int, num_columns: int) -> str:
    """Powers of ten below the axis, each under its rank; the last is left out where it does not fit."""
    axis = ""
    for tick in _powers_of_ten(num_labels):
        column = margin + 1 + int((num_columns - 1) * np.log(tick) / np.log(max(num_labels, 2)))
        if len(axis) < column and column + len(f"{tick:,}") <= margin + 1 + num_columns:
            axis = f"{axis:<{column}}{tick:,}"
    return axis


def _powers_of_ten(largest: float) -> list[int]:
    return [10**exponent for exponent in range(int(np.log10(max(largest, 1))) + 1)]
