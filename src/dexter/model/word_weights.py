"""What the words of a text say for a label: a weight for each pair of a word and a label, from training queries.

    logit of a label = -2 + sum over the words of the text of (TF-IDF of the word) * (weight of the word for the label)
    gain of a label = sigmoid(logit)

A vector of some hundred numbers blurs words that a linear classifier keeps apart; these weights give them back. Only
labels that a neighbour of the text votes for get a gain (`dexter.predict.rank`), so a text costs a few thousand
look-ups. Pairs are hashed into one table; pairs that meet in one place share their weight.

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
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class WordWeights:
    """The weights of words for labels."""

    table: NDArray[np.floating]
    """The weights, a power of two of them, each at the place of its pair (see `places`)."""
    numbers_L: NDArray[np.int64]
    """The number of each label when the weights were learned; -1: a label that is newer."""

    def gains(
        self, words: Sequence[TextWords], starts: NDArray[np.integer], labels: NDArray[np.integer]
    ) -> NDArray[np.float32]:
        """Return the gains of some labels of each text: those of text n are `labels[starts[n]:starts[n + 1]]`."""
        logits = np.full(len(labels), BIAS)
        numbers = self.numbers_L[labels]
        for text, (codes_W, weights_W) in enumerate(words):
            part = slice(starts[text], starts[text + 1])
            logits[part] += self.table[self.places(codes_W, numbers[part, None])] @ weights_W
        return np.asarray(1 / (1 + np.exp(-logits)), np.float32)

    def places(self, codes: NDArray[np.uint64], numbers: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return where the weights of words for labels are, given the CRC-32 of each word and the label's number."""
        mixed = (codes ^ (numbers.astype(np.uint64) << np.uint64(32))) * _MULTIPLIER
        return (mixed >> np.uint64(65 - len(self.table).bit_length())).astype(np.intp)

    def select_labels(self, labels: NDArray[np.int64]) -> WordWeights:
        """Return the weights for some of the labels, in the order given."""
        return replace(self, numbers_L=self.numbers_L[labels])

    def append_labels(self, num_new: int) -> WordWeights:
        """Return the weights with more labels, which no training query has, so that they never get a gain."""
        return replace(self, numbers_L=np.append(self.numbers_L, np.full(num_new, -1)))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that are stored, the weights in half precision."""
        return {"word_label_weights": self.table.astype(np.float16), "label_numbers": self.numbers_L}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], num_labels: int) -> WordWeights:
        """Make it from stored arrays; raises KeyError or ValueError where they do not fit together."""
        table, numbers_L = arrays["word_label_weights"], arrays["label_numbers"]
        if table.ndim != 1 or table.dtype.kind != "f" or len(table) < 2 or len(table) & (len(table) - 1):
            raise ValueError("weights of words whose number is no power of two")
        if numbers_L.shape != (num_labels,) or numbers_L.dtype != np.int64:
            raise ValueError("weights of words for other labels")
        return cls(table, numbers_L)
