"""The training queries that a model keeps: their vectors and labels, and the beginnings of their texts to show.

They follow the model's labels when those change. How they vote is `dexter.predict.neighbours`.

Shapes: N texts, M training queries, L labels, D dimensions.
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

    vectors_MD: Tensor
    """Representations of length one, rounded to half precision, in which they are stored."""
    relevance: csr_matrix
    """Training queries x labels of the model; 1 where the query has the label."""
    uids: PackedTexts
    texts: PackedTexts

    @classmethod
    def of(
        cls, representations_MD: Tensor, relevance: csr_matrix, uids: Sequence[str], texts: Sequence[str]
    ) -> TrainingQueries:
        """Keep queries, given their representations, labels (queries x labels), ids and texts."""
        ones = csr_matrix(relevance, dtype=np.float32, copy=True)
        ones.data[:] = 1.0
        return cls(
            vectors_MD=functional.normalize(representations_MD, dim=1).half().float(),
            relevance=ones,
            uids=PackedTexts.of(uids),
            texts=PackedTexts.of(texts),
        )

    def __len__(self) -> int:
        return len(self.vectors_MD)

    def select_labels(self, labels: NDArray[np.int64]) -> TrainingQueries:
        """Return the queries with only some of the labels, in the order given."""
        return replace(self, relevance=self.relevance[:, labels].tocsr())

    def append_labels(self, num_new: int) -> TrainingQueries:
        """Return the queries with columns for more labels, which none of them has."""
        rows, columns = self.relevance.shape
        wider = csr_matrix(
            (self.relevance.data, self.relevance.indices, self.relevance.indptr), shape=(rows, columns + num_new)
        )
        return replace(self, relevance=wider)

    def nearest(self, representations_ND: Tensor, k: int, *, label: int | None = None) -> TopK:
        """Find the k most similar training queries of each text and their cosines; only those with `label` if given."""
        directions_ND = functional.normalize(representations_ND, dim=1)
        if label is None:
            return search(directions_ND, self.vectors_MD, min(k, len(self)))
        having = self.relevance[:, [label]].nonzero()[0].astype(np.int64)
        if not len(having):
            return TopK(np.empty((len(directions_ND), 0), np.int64), np.empty((len(directions_ND), 0), np.float32))
        found = search(directions_ND, self.vectors_MD[torch.from_numpy(having)], min(k, len(having)))
        return TopK(having[found.ids], found.scores)

    def labels_of(self, row: int) -> NDArray[np.integer]:
        """Return the labels of a training query, as positions among the model's labels."""
        start, end = self.relevance.indptr[row : row + 2]
        return np.asarray(self.relevance.indices[start:end])

    def save(self, folder: Path) -> None:
        """Write the queries as one file of a model folder."""
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
        """Read the queries of a model folder; None where it has none."""
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
            uids, texts = (
                PackedTexts(arrays["uids"], arrays["uid_ends"]),
                PackedTexts(arrays["texts"], arrays["text_ends"]),
            )
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ModelError(
                f"{path}: not the training queries of this model ({error}): restore the folder from a copy"
            ) from None
        fits = vectors.shape == (len(uids), dimension) and len(uids) == len(texts) > 0
        if not (fits and torch.isfinite(vectors.sum(dtype=torch.float32))):
            raise ModelError(f"{path}: not the training queries of this model: restore the folder from a copy")
        return cls(vectors_MD=vectors.to(device).float(), relevance=relevance, uids=uids, texts=texts)
