"""Data made up to show one thing: labels without meaning, and queries with positives of unequal difficulty."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from dexter.data import Dataset, Split

NUM_LABELS = 400
NUM_QUERIES = 1_500
NUM_EASY = 2
SEEN = 0.3
"""How often the word of a difficult label stands in a query that has it."""


def make_dataset(name: str) -> Dataset:
    """Make `synthetic-memory`, or `synthetic-positives-M` with M positives per query."""
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefghijklmnopqrstuvwxyz"), 6)) for _ in range(4 * NUM_LABELS)]
    if name == "synthetic-memory":
        split = _memory(words, random)
        return _dataset(name, [" ".join(random.choice(words, 2)) for _ in range(NUM_LABELS)], split, split)
    count = int(name.rpartition("-")[2])
    train, test = (_positives(words, count, size, part, random) for size, part in ((NUM_QUERIES, "trn"), (500, "tst")))
    return _dataset(name, words[:NUM_LABELS], train, test)


def _memory(words: list[str], random: np.random.Generator) -> Split:
    """Queries of random words with three random labels each: nothing but memory helps, and training is the test."""
    texts = [" ".join(random.choice(words, 6)) for _ in range(NUM_QUERIES)]
    return _split(texts, [random.choice(NUM_LABELS, 3, replace=False) for _ in texts], "trn")


def _positives(words: list[str], count: int, size: int, part: str, random: np.random.Generator) -> Split:
    """Queries with `count` labels: the words of two always stand in the text, those of the others seldom."""
    texts, labels = [], []
    for _ in range(size):
        chosen = random.choice(NUM_LABELS, count, replace=False)
        named = [words[label] for label in chosen[:NUM_EASY]]
        named += [words[label] for label in chosen[NUM_EASY:] if random.random() < SEEN]
        named += list(random.choice(words[NUM_LABELS:], 5))
        texts.append(" ".join(random.permutation(named)))
        labels.append(chosen)
    return _split(texts, labels, part)


def _split(texts: list[str], labels: list[NDArray[np.int64]], part: str) -> Split:
    rows = np.repeat(np.arange(len(texts)), [len(row) for row in labels])
    pairs = (np.ones(len(rows), dtype=np.float32), (rows, np.concatenate(labels)))
    return Split(
        texts, [f"{part}-{row}" for row in range(len(texts))], csr_matrix(pairs, shape=(len(texts), NUM_LABELS))
    )


def _dataset(name: str, label_texts: list[str], train: Split, test: Split) -> Dataset:
    return Dataset(name, label_texts, [f"L{label}" for label in range(NUM_LABELS)], train, test)
