"""A small data set with words that give the labels away."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter.data import Dataset, Split


@pytest.fixture(scope="package")
def tiny_dataset() -> Dataset:
    """20 labels of very different frequency; a query's text is made of its labels' words."""
    rng = np.random.default_rng(0)
    chance = 1.0 / np.arange(1, 21)

    def split(name: str, size: int) -> Split:
        relevance = rng.random((size, 20)) < chance[None] * 0.9
        relevance[0] = False  # one query without labels
        texts = [" ".join(f"word{label}" for label in np.flatnonzero(row)) + " filler" for row in relevance]
        uids = [f"{name}{row}" for row in range(size)]
        return Split(texts, uids, csr_matrix(relevance.astype(float)))

    label_texts = [f"label {label} <b>&amp;</b>" for label in range(20)]
    return Dataset("tiny", label_texts, [f"id{label}" for label in range(20)], split("train", 300), split("test", 40))
