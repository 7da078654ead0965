"""Baselines to beat: the most common labels, the labels of similar training texts, and omikuji's trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.sparse import csr_matrix

from dexter.data import Dataset
from dexter.errors import DataError, UsageError, require
from dexter.evaluation.omikuji import omikuji_trees
from dexter.evaluation.report import test_split
from dexter.types import TopK

Baseline = Literal["popularity", "neighbours", "omikuji"]
_BLOCK_SIMILARITIES = 1 << 23
"""Similarities held at a time: 32 MB."""


def baseline(name: Baseline, dataset: Dataset, k: int) -> TopK:
    """Return a baseline's k best labels of every test query, trained on the training queries."""
    if name == "popularity":
        return popularity(dataset, k)
    if name == "omikuji":
        return omikuji_trees(dataset, k)
    return TfidfNeighbours.fit(dataset.train.texts, dataset.train.relevance).predict(test_split(dataset).texts, k)


def popularity(dataset: Dataset, k: int) -> TopK:
    """Return the k most common training labels for every test query; ties go to the lower label number."""
    num_queries = len(test_split(dataset))
    order = np.argsort(-dataset.label_counts, kind="stable")[: _checked_k(k)]
    ids = np.full((num_queries, k), -1, dtype=np.int64)
    scores = np.full((num_queries, k), -np.inf, dtype=np.float32)
    ids[:, : len(order)] = order
    scores[:, : len(order)] = dataset.label_counts[order]
    return TopK(ids, scores)


@dataclass(frozen=True, eq=False)
class TfidfNeighbours:
    """Nearest neighbours by TF-IDF: similar training queries vote for their labels with similarity ** power."""

    vectorizer: Any
    """The fitted TF-IDF vectorizer of scikit-learn."""
    transposed: csr_matrix
    """Words x training queries: the unit TF-IDF vectors of the training queries, as columns."""
    relevance: csr_matrix
    """Training queries x labels, 1 for a relevant pair."""
    num_neighbours: int
    """Number of the most similar training queries that vote."""
    power: float
    """Exponent of the similarity in a vote."""

    @classmethod
    def fit(
        cls, texts: Sequence[str], relevance: csr_matrix, *, num_neighbours: int = 50, power: float = 3.0
    ) -> TfidfNeighbours:
        """Index training texts and their labels."""
        if num_neighbours < 1:
            raise UsageError(f"num_neighbours is {num_neighbours}: expected 1 or more")
        text_features = require(
            "sklearn.feature_extraction.text", extra="data", purpose="the TF-IDF nearest-neighbour baseline"
        )
        vectorizer = text_features.TfidfVectorizer(sublinear_tf=True, dtype=np.float32)
        try:
            vectors = vectorizer.fit_transform(texts)
        except ValueError as error:
            raise DataError(
                f"the training texts have no words to compare by ({error}): check the text column"
            ) from error
        ones = csr_matrix(
            (np.ones(relevance.nnz, np.float32), relevance.indices, relevance.indptr), shape=relevance.shape
        )
        return cls(vectorizer, vectors.T.tocsr(), ones, min(num_neighbours, len(texts)), power)

    def predict(self, texts: Sequence[str], k: int) -> TopK:
        """Return the k labels with the most votes for each text; -1 where fewer labels got votes."""
        _checked_k(k)
        if not len(texts):
            return TopK(np.zeros((0, k), dtype=np.int64), np.zeros((0, k), dtype=np.float32))
        blocks = [top_of_rows(votes, k) for votes in self._votes(self.vectorizer.transform(texts))]
        return TopK(np.concatenate([block.ids for block in blocks]), np.concatenate([block.scores for block in blocks]))

    def _votes(self, vectors: csr_matrix) -> Iterator[csr_matrix]:
        """Yield the label votes, queries x labels, for one block of queries at a time."""
        num_train = self.transposed.shape[1]
        rows_per_block = max(1, _BLOCK_SIMILARITIES // num_train)
        for start in range(0, vectors.shape[0], rows_per_block):
            similarity = (vectors[start : start + rows_per_block] @ self.transposed).toarray()
            nearest = np.argpartition(-similarity, self.num_neighbours - 1, axis=1)[:, : self.num_neighbours]
            weight = np.take_along_axis(similarity, nearest, axis=1) ** self.power
            offsets = np.arange(0, nearest.size + 1, self.num_neighbours)
            neighbours = csr_matrix((weight.ravel(), nearest.ravel(), offsets), shape=(len(nearest), num_train))
            neighbours.eliminate_zeros()
            yield (neighbours @ self.relevance).tocsr()


def top_of_rows(scores: csr_matrix, k: int) -> TopK:
    """Return the k largest stored values of each row, largest first, ties to the lower column."""
    num_rows = scores.shape[0]
    rows = np.repeat(np.arange(num_rows), np.diff(scores.indptr))
    order = np.lexsort((scores.indices, -scores.data, rows))
    ranks = np.arange(len(order)) - np.repeat(scores.indptr[:-1], np.diff(scores.indptr))
    inside = ranks < k
    ids = np.full((num_rows, k), -1, dtype=np.int64)
    values = np.full((num_rows, k), -np.inf, dtype=np.float32)
    ids[rows[inside], ranks[inside]] = scores.indices[order][inside]
    values[rows[inside], ranks[inside]] = scores.data[order][inside]
    return TopK(ids, values)


def _checked_k(k: int) -> int:
    """Return k, or raise where it is below 1."""
    if k < 1:
        raise UsageError(f"the number of labels to predict is {k}: expected 1 or more")
    return k
