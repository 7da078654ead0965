"""The training queries that a model keeps: their vectors, words and labels, and the beginnings of their texts to show.

They follow the model's labels when those change. How they vote is `dexter.predict.neighbours`.

Shapes: N texts, M training queries, L labels, D dimensions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dexter.encoders.head_arrays import unit_rows
from dexter.errors import ModelError
from dexter.index import ExactIndex, search
from dexter.index.clustered import ClusteredIndex
from dexter.model.lexical import LexicalIndex
from dexter.model.word_weights import WordWeights
from dexter.tensor_files import read_tensors, release, row_starts, write_tensors
from dexter.types import TopK

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

log = logging.getLogger("dexter")
TRAINING_QUERIES_FILE = "training_queries.safetensors"
_KEPT_CHARACTERS = 300
"""Characters kept of each text, to be shown in explanations."""


class PackedTexts:
    """Many texts in one array of bytes, each decoded when it is read: loading 200,000 takes no time."""

    def __init__(self, content: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.content, self.ends = content, ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> PackedTexts:
        """Pack texts, each cut to its first 300 characters."""
        encoded = [text[:_KEPT_CHARACTERS].encode("utf-8", "surrogatepass") for text in texts]
        ends = np.cumsum([len(part) for part in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, place: int) -> str:
        start = int(self.ends[place - 1]) if place else 0
        return self.content[start : int(self.ends[place])].tobytes().decode("utf-8", "surrogatepass")


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingQueries:
    """The kept training queries of a model, one row each."""

    index: ExactIndex | ClusteredIndex | None
    """Finds the nearest: vectors of length one, rounded to half precision, in which they are stored; many in clusters.
    None where there are too many to keep their vectors."""
    label_starts: NDArray[np.int64]
    """Where the labels of each query begin in `label_rows`, and the end of the last."""
    label_rows: NDArray[np.integer]
    """The labels of all queries, as positions among the model's labels."""
    num_labels: int
    """Labels of the model."""
    uids: PackedTexts
    texts: PackedTexts
    lexical: LexicalIndex | None = None
    """Their words, where validation found that the queries nearest by words should vote too."""
    word_weights: WordWeights | None = None
    """What words say for labels, where validation found that this helps."""

    @classmethod
    def of(
        cls,
        representations_MD: NDArray[np.float32] | None,
        relevance: csr_matrix,
        uids: Sequence[str],
        texts: Sequence[str],
        *,
        device: str = "cpu",
    ) -> TrainingQueries:
        """Keep queries, given their representations, labels (queries x labels), ids and texts; `device` searches."""
        index = None
        if representations_MD is not None:
            index = ExactIndex(unit_rows(representations_MD).astype(np.float16).astype(np.float32), device)
        return cls(
            index=index,
            label_starts=relevance.indptr.astype(np.int64),
            label_rows=relevance.indices.astype(np.int32),
            num_labels=relevance.shape[1],
            uids=PackedTexts.of(uids),
            texts=PackedTexts.of(texts),
        )

    def __len__(self) -> int:
        return len(self.label_starts) - 1

    @cached_property
    def relevance(self) -> csr_matrix:
        """Training queries x labels of the model; 1 where the query has the label."""
        # Imported here because one text does not need it, and it takes a while.
        from scipy.sparse import csr_matrix

        ones = np.ones(len(self.label_rows), np.float32)
        return csr_matrix((ones, self.label_rows, self.label_starts), shape=(len(self), self.num_labels))

    def select_labels(self, labels: NDArray[np.int64]) -> TrainingQueries:
        """Return the queries with only some of the labels, in the order given."""
        places_L = np.full(self.num_labels, -1, dtype=np.int32)
        places_L[labels] = np.arange(len(labels))
        rows = places_L[self.label_rows]
        kept_before = np.concatenate([[0], np.cumsum(rows >= 0)])
        return replace(
            self,
            label_starts=kept_before[self.label_starts],
            label_rows=rows[rows >= 0],
            num_labels=len(labels),
            word_weights=self.word_weights and self.word_weights.select_labels(labels),
        )

    def append_labels(self, num_new: int) -> TrainingQueries:
        """Return the queries with columns for more labels, which none of them has."""
        return replace(
            self,
            num_labels=self.num_labels + num_new,
            word_weights=self.word_weights and self.word_weights.append_labels(num_new),
        )

    def nearest(self, representations_ND: NDArray[np.float32], k: int, *, label: int | None = None) -> TopK:
        """Find the k most similar training queries of each text and their cosines; only those with `label` if given."""
        assert self.index is not None
        directions_ND = unit_rows(representations_ND)
        if label is None:
            return self.index.search(directions_ND, min(k, len(self)))
        having = self.queries_of(label)
        if not len(having):
            return TopK(np.empty((len(directions_ND), 0), np.int64), np.empty((len(directions_ND), 0), np.float32))
        found = search(directions_ND, self.index.vectors(having), min(k, len(having)))
        return TopK(having[found.ids], found.scores)

    def queries_of(self, label: int) -> NDArray[np.int64]:
        """Return the rows of the training queries that have a label, ascending."""
        return np.searchsorted(self.label_starts, np.flatnonzero(self.label_rows == label), side="right") - 1

    def labels_of(self, row: int) -> NDArray[np.integer]:
        """Return the labels of a training query, as positions among the model's labels."""
        start, end = self.label_starts[row : row + 2]
        return np.asarray(self.label_rows[start:end])

    def searched_exactly(self) -> TrainingQueries:
        """Return the same queries with an index that finds all of the nearest."""
        if not isinstance(self.index, ClusteredIndex):
            return self
        return replace(self, index=ExactIndex(self.index.vectors_LD))

    def _clusters(self) -> ClusteredIndex | None:
        """Return the clusters that are stored, if they are worthwhile; made here: tuning wants all of the nearest."""
        if not isinstance(self.index, ExactIndex):
            return self.index
        if not ClusteredIndex.are_worthwhile(self.index.vectors_LD):
            return None
        made = ClusteredIndex.of(self.index.vectors_LD)
        log.info(
            "training queries in %d clusters: reading %.0f%% of them finds %.0f%% of the 20 nearest",
            len(made.centroids_CD),
            100 * made.num_read / len(self),
            100 * made.recall,
        )
        return made

    def save(self, folder: Path) -> None:
        """Write the queries as one file of a model folder; the vectors in clusters where these are worthwhile."""
        arrays: dict[str, NDArray[Any]] = {
            "label_ends": self.label_starts[1:],
            "labels": self.label_rows.astype(np.int32),
            "uid_ends": self.uids.ends,
            "uids": self.uids.content,
            "text_ends": self.texts.ends,
            "texts": self.texts.content,
        }
        if self.lexical is not None:
            arrays |= self.lexical.to_arrays()
        if self.word_weights is not None:
            arrays |= self.word_weights.to_arrays()
        clusters = self._clusters()
        if clusters is not None:
            arrays |= clusters.to_arrays()
        elif self.index is not None:
            arrays["vectors"] = self.index.vectors_LD.astype(np.float16)
        write_tensors(folder / TRAINING_QUERIES_FILE, arrays)

    @classmethod
    def load(cls, folder: Path, *, num_labels: int, dimension: int, device: str) -> TrainingQueries | None:
        """Read the queries of a model folder; None where it has none."""
        path = folder / TRAINING_QUERIES_FILE
        if not path.exists():
            return None
        arrays = read_tensors(path)
        try:
            num_queries, vectors_MD = len(arrays["uid_ends"]), arrays.get("vectors", arrays.get("cluster_vectors"))
            label_starts = row_starts(arrays["label_ends"], arrays["labels"], num_labels)
            uids, texts = (
                PackedTexts(arrays["uids"], arrays["uid_ends"]),
                PackedTexts(arrays["texts"], arrays["text_ends"]),
            )
            lexical = LexicalIndex.from_arrays(arrays, num_queries) if "words" in arrays else None
            spoken = WordWeights.from_arrays(arrays, num_labels) if lexical and "word_label_ranges" in arrays else None
            clusters = ClusteredIndex.from_arrays(arrays) if "cluster_vectors" in arrays else None
        except (KeyError, ValueError) as error:
            raise ModelError(
                f"{path}: not the training queries of this model ({error}): restore the folder from a copy"
            ) from None
        fits = lexical is not None if vectors_MD is None else vectors_MD.shape == (num_queries, dimension)
        if not (fits and num_queries == len(texts) == len(label_starts) - 1 > 0):
            raise ModelError(f"{path}: not the training queries of this model: restore the folder from a copy")
        index: ExactIndex | ClusteredIndex | None = clusters
        if clusters is None and vectors_MD is not None:
            index = ExactIndex(vectors_MD.astype(np.float32), device)
        elif clusters is not None and device != "cpu":
            index = ExactIndex(clusters.vectors_LD, device)
        release(*arrays.values())
        return cls(
            index=index,
            label_starts=label_starts,
            label_rows=arrays["labels"],
            num_labels=num_labels,
            uids=uids,
            texts=texts,
            lexical=lexical,
            word_weights=spoken,
        )
