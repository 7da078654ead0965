"""Neighbours: the training queries nearest to a text vote with their labels, and the votes join the model's scores.

    vote_l  = sum of the weights of those nearest queries that have label l;  weights = softmax(cosine / temperature)
    score_l = the model's score + weight * (the model's temperature) * vote_l

A label that nobody votes for keeps its score, and votes are never negative. The k best labels of the blend are
therefore among the k best of the model and the labels with votes: a label that only the memory found gets its exact
model score, and the result is what scoring every label would give. The idea is that of RAE-XMC and PEFA; blending
probabilities or logarithms instead of scores, and letting label texts vote as keys beside the queries, did worse.

Shapes: N texts, M training queries in the memory, L labels, D dimensions, K places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor
from torch.nn import functional

from dexter.errors import ModelError
from dexter.index.exact import search
from dexter.types import TopK

TRAINING_QUERIES_FILE = "training_queries.safetensors"
_KEPT_CHARACTERS = 300
"""Texts are kept for explanations, and no longer than this."""
_PAIRS = 2**16
"""Query-label pairs that are scored at a time."""


@dataclass(frozen=True, kw_only=True)
class VoteSettings:
    """How much the memory has to say."""

    neighbours: int
    """Training queries that vote."""
    temperature: float
    """Similarities are divided by this before the softmax that makes them weights of votes."""
    weight: float
    """What a unanimous vote adds to a score, in units of the model's temperature."""


class Texts:
    """Many texts as one array of bytes: reading and holding them costs next to nothing until one is asked for."""

    def __init__(self, content: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.content, self.ends = content, ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """Put texts end to end, each cut to what is kept."""
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
    """The training queries of a model: their directions, their labels, and their texts to show."""

    vectors_MD: Tensor
    """Representations scaled to length one, with the values that half precision has: so they are stored."""
    relevance: csr_matrix
    """Training queries x labels of the model, ones where the query has the label."""
    uids: Texts
    texts: Texts

    @classmethod
    def of(
        cls, representations_MD: Tensor, relevance: csr_matrix, uids: Sequence[str], texts: Sequence[str]
    ) -> TrainingQueries:
        """A memory of queries as the encoder represents them."""
        ones = csr_matrix(relevance, dtype=np.float32, copy=True)
        ones.data[:] = 1.0
        return cls(
            vectors_MD=functional.normalize(representations_MD, dim=1).half().float(),
            relevance=ones,
            uids=Texts.of(uids),
            texts=Texts.of(texts),
        )

    def __len__(self) -> int:
        return len(self.vectors_MD)

    def keep(self, labels: NDArray[np.int64]) -> TrainingQueries:
        """The same with some of the labels, in the order given."""
        return replace(self, relevance=self.relevance[:, labels].tocsr())

    def widen(self, num_new: int) -> TrainingQueries:
        """The same with more labels, for which no query votes."""
        rows, columns = self.relevance.shape
        wider = csr_matrix(
            (self.relevance.data, self.relevance.indices, self.relevance.indptr), shape=(rows, columns + num_new)
        )
        return replace(self, relevance=wider)

    def nearest(self, representations_ND: Tensor, k: int, *, label: int | None = None) -> TopK:
        """The most similar training queries of each text and their cosines; only those that have `label` if given."""
        directions_ND = functional.normalize(representations_ND, dim=1)
        if label is None:
            return search(directions_ND, self.vectors_MD, min(k, len(self)))
        having = self.relevance[:, [label]].nonzero()[0].astype(np.int64)
        if not len(having):
            return TopK(np.empty((len(directions_ND), 0), np.int64), np.empty((len(directions_ND), 0), np.float32))
        found = search(directions_ND, self.vectors_MD[torch.from_numpy(having)], min(k, len(having)))
        return TopK(having[found.ids], found.scores)

    def labels_of(self, row: int) -> NDArray[np.integer]:
        """The labels of a training query, as the model's columns."""
        start, end = self.relevance.indptr[row : row + 2]
        return np.asarray(self.relevance.indices[start:end])

    def votes(self, nearest: TopK, temperature: float) -> csr_matrix:
        """Texts x labels: the share of the nearest queries' weight that has the label.

        A text of which the encoder knows nothing is near to nobody, and gets no votes.
        """
        num_texts, num_neighbours = nearest.ids.shape
        weights = np.exp((nearest.scores - nearest.scores[:, :1]) / temperature, dtype=np.float32)
        weights *= (nearest.scores[:, :1] > 0) / weights.sum(axis=1, keepdims=True)
        places = np.arange(num_texts + 1) * num_neighbours
        chosen = csr_matrix((weights.ravel(), nearest.ids.ravel(), places), shape=(num_texts, len(self)))
        return csr_matrix(chosen @ self.relevance)

    def save(self, folder: Path) -> None:
        """Write the memory as one file of a model folder."""
        from safetensors.torch import save_file

        arrays = {
            "label_ends": self.relevance.indptr[1:].astype(np.int64),
            "labels": self.relevance.indices.astype(np.int32),
            "uid_ends": self.uids.ends,
            "uids": self.uids.content,
            "text_ends": self.texts.ends,
            "texts": self.texts.content,
        }
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        save_file(tensors | {"vectors": self.vectors_MD.half().cpu().contiguous()}, folder / TRAINING_QUERIES_FILE)

    @classmethod
    def load(cls, folder: Path, *, num_labels: int, dimension: int, device: str) -> TrainingQueries | None:
        """Read the memory of a model folder; None where it has none."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = folder / TRAINING_QUERIES_FILE
        if not path.exists():
            return None
        try:
            tensors = load_file(path)
            vectors = tensors.pop("vectors")
            arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
            ends = np.concatenate([[0], arrays["label_ends"]])
            relevance = csr_matrix(
                (np.ones(len(arrays["labels"]), np.float32), arrays["labels"], ends), shape=(len(vectors), num_labels)
            )
            relevance.check_format(full_check=True)
            uids, texts = Texts(arrays["uids"], arrays["uid_ends"]), Texts(arrays["texts"], arrays["text_ends"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ModelError(
                f"{path}: not the training queries of this model ({error}): restore the folder from a copy"
            ) from None
        fits = vectors.shape == (len(uids), dimension) and len(uids) == len(texts) > 0
        if not (fits and torch.isfinite(vectors.sum(dtype=torch.float32))):
            raise ModelError(f"{path}: not the training queries of this model: restore the folder from a copy")
        return cls(vectors_MD=vectors.to(device).float(), relevance=relevance, uids=uids, texts=texts)


def add_votes(
    found: TopK,
    votes: csr_matrix,
    queries_ND: Tensor,
    labels_LD: Tensor,
    *,
    scale: float,
    exclude: csr_matrix | None = None,
) -> TopK:
    """The k best labels when `scale * vote` is added to every score, given the k best of the model alone.

    Args:
        found: the model's k best labels of each text and their scores.
        votes: texts x labels, never negative.
        queries_ND: the texts' vectors, with which labels that only the votes bring are scored.
        labels_LD: the labels' vectors.
        scale: what a vote of one adds.
        exclude: texts x labels; a stored entry marks a pair that is never returned.
    """
    num_texts, num_places = found.ids.shape
    num_labels = len(labels_LD)
    voted, gains = _pair_keys(votes), scale * votes.data
    if exclude is not None:
        allowed = ~np.isin(voted, _pair_keys(exclude))
        voted, gains = voted[allowed], gains[allowed]
    rows, places = np.nonzero(found.ids >= 0)
    listed = rows * num_labels + found.ids[rows, places]
    new = voted[~np.isin(voted, listed)]
    pairs = np.concatenate([listed, new])
    scores = np.concatenate([found.scores[rows, places], _score_pairs(new, queries_ND, labels_LD)])
    order = np.argsort(pairs)
    scores[order[np.searchsorted(pairs, voted, sorter=order)]] += gains
    return _best(pairs // num_labels, pairs % num_labels, scores, num_texts, num_places)


def _pair_keys(pairs: csr_matrix) -> NDArray[np.int64]:
    """One number for each stored pair: row x columns + column."""
    rows = np.repeat(np.arange(pairs.shape[0], dtype=np.int64), np.diff(pairs.indptr))
    return rows * pairs.shape[1] + pairs.indices


def _score_pairs(pairs: NDArray[np.int64], queries_ND: Tensor, labels_LD: Tensor) -> NDArray[np.float32]:
    """The inner products of some texts with some labels, a bounded number at a time."""
    rows, labels = np.divmod(pairs, len(labels_LD))
    queries_ND = queries_ND.to(labels_LD)
    scores = np.empty(len(rows), dtype=np.float32)
    for start in range(0, len(rows), _PAIRS):
        part = slice(start, start + _PAIRS)
        left, right = (torch.from_numpy(places[part]).to(labels_LD.device) for places in (rows, labels))
        products = (queries_ND[left] * labels_LD[right]).sum(dim=1)
        scores[part] = products.cpu().numpy()
    return scores


def _best(
    rows: NDArray[np.int64],
    labels: NDArray[np.int64],
    scores: NDArray[np.float32],
    num_texts: int,
    num_places: int,
) -> TopK:
    """The best pairs of each row, equal scores in order of label."""
    order = np.lexsort((labels, -scores, rows))
    rows, labels, scores = rows[order], labels[order], scores[order]
    places = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = places < num_places
    best = TopK(
        np.full((num_texts, num_places), -1, dtype=np.int64),
        np.full((num_texts, num_places), -np.inf, dtype=np.float32),
    )
    best.ids[rows[kept], places[kept]] = labels[kept]
    best.scores[rows[kept], places[kept]] = scores[kept]
    return best
