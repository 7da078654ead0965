"""What the words of a text say for a label: a weight for each pair of a word and a label, from training queries.

    logit of a label = -2 + sum over the words of the text of (TF-IDF of the word) * (weight of the word for the label)
    gain of a label = sigmoid(logit)

A vector of some hundred numbers blurs words that a linear classifier keeps apart; these weights give them back. Only
labels that a neighbour of the text votes for get a gain (`dexter.predict.rank`), so a text costs a few thousand
look-ups. Each label has a part of one table, into which words are hashed: those that meet in one place share their
weight.

Shapes: W words of a text, K labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dexter.model.lexical import TextWords

BIAS = np.float32(-2.0)
"""The logit of a label for which no word says anything."""
MAX_WEIGHTS = 2**24


@dataclass(frozen=True, eq=False)
class WordWeights:
    """The weights of words for labels."""

    table: NDArray[np.floating]
    starts_L: NDArray[np.int64]
    """Where the weights of each label begin in the table."""
    sizes_L: NDArray[np.int64]
    """How many it has, at least one; a label that is newer than the weights shares the first."""

    def gains(
        self, words: Sequence[TextWords], starts: NDArray[np.integer], labels: NDArray[np.integer]
    ) -> NDArray[np.float32]:
        """Return the gains of some labels of each text: those of text n are `labels[starts[n]:starts[n + 1]]`."""
        logits = np.full(len(labels), BIAS)
        starts_K, sizes_K = self.starts_L[labels], self.sizes_L[labels]
        for text, (codes_W, weights_W) in enumerate(words):
            part = slice(starts[text], starts[text + 1])
            places_KW = places(codes_W, starts_K[part, None], sizes_K[part, None])
            logits[part] += self.table[places_KW] @ weights_W
        return np.asarray(1 / (1 + np.exp(-logits)), np.float32)

    def select_labels(self, labels: NDArray[np.int64]) -> WordWeights:
        """Return the weights for some of the labels, in the order given."""
        return replace(self, starts_L=self.starts_L[labels], sizes_L=self.sizes_L[labels])

    def append_labels(self, num_new: int) -> WordWeights:
        """Return the weights with more labels, which no training query has, so that they never get a gain."""
        return replace(
            self,
            starts_L=np.append(self.starts_L, np.zeros(num_new, np.int64)),
            sizes_L=np.append(self.sizes_L, np.ones(num_new, np.int64)),
        )

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that are stored, the weights in half precision."""
        ranges_2L = np.stack([self.starts_L, self.sizes_L])
        return {"word_label_weights": self.table.astype(np.float16), "word_label_ranges": ranges_2L}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], num_labels: int) -> WordWeights:
        """Make it from stored arrays; raises KeyError or ValueError where they do not fit together."""
        table, ranges_2L = arrays["word_label_weights"], arrays["word_label_ranges"]
        if table.ndim != 1 or table.dtype.kind != "f":
            raise ValueError("weights of words that are no fractions")
        if ranges_2L.shape != (2, num_labels) or ranges_2L.dtype != np.int64:
            raise ValueError("weights of words for other labels")
        starts_L, sizes_L = ranges_2L
        if ranges_2L.min(initial=0) < 0 or (sizes_L < 1).any() or (starts_L > len(table) - sizes_L).any():
            raise ValueError("weights of words beyond their table")
        return cls(table, starts_L, sizes_L)


def places(codes: NDArray[np.int64], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where the weights of words are, given their CRC-32 and where the weights of their labels begin."""
    return starts + (codes * sizes >> 32)
