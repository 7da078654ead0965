"""A Zipf plot as PNG: how often each label occurs against its rank, both axes logarithmic."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dexter.errors import require
from dexter.files import atomic_path


def save_zipf_plot(label_counts: np.ndarray, path: str | Path, *, title: str) -> None:
    """Save how often each label occurs in training against its rank, both axes logarithmic, as a PNG."""
    figure_module = require("matplotlib.figure", extra="data", purpose="a Zipf plot as PNG")
    frequencies = np.sort(label_counts[label_counts > 0])[::-1]
    figure = figure_module.Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.loglog(np.arange(1, len(frequencies) + 1), frequencies, linewidth=1.5)
    for boundary, name in ((100, "frequent"), (10, "torso"), (1, "tail")):
        axes.axhline(boundary, color="0.8", linewidth=0.8)
        axes.annotate(name, (1, boundary), xytext=(2, 3), textcoords="offset points", color="0.4")
    axes.set(xlabel="label rank", ylabel="training queries", title=f"{title}: {len(frequencies):,} labels")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
