"""Vectors, priors and classifier rows for labels without training queries: from the label's text, texts that have it,
and its nearest trained labels.

Shapes: L labels, U of them unseen (without training queries), V unseen labels of all processes, K nearest labels,
S rows in use, N new labels, Q queries, P priors, D dimensions of the dual encoder, C of the classifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dexter.encoders.head_arrays import unit_rows
from dexter.errors import ModelError, UsageError
from dexter.index import place, search_shards
from dexter.processes import Processes, SingleProcess, concatenate_arrays, sum_arrays
from dexter.tensor_files import read_tensors, write_tensors

GENERATOR_FILE = "new_labels.safetensors"
NUM_NEIGHBOURS = 10
"""Number of nearest seen labels from which the row of an unseen one is made."""
_EXAMPLES_WEIGHT = 0.5
"""Length of the part of a new label's direction that comes from examples; that of its text has length one."""
_RIDGE = 3.0
"""Added to the variance of queries in every direction, in units of its mean."""
_LARGEST_VALUE = 1e9


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelGenerator:
    """How the representation and the priors of a new label are made; fitted by `dexter.training.new_labels`.

    Texts that have the label, if any are given, turn the direction of its own text: by their mean, less that of all
    queries, and divided by how much all queries differ in each direction (linear discriminant analysis).
    """

    priors: tuple[float, ...]
    """The prior of a new label in each head that has priors, the dual encoder's first."""
    word_weight: float
    """What a text adds to the score of a new label of which it has every word, in units of the temperature."""
    mean_D: NDArray[np.float32]
    """The mean representation of training queries."""
    covariance_DD: NDArray[np.float32]
    """The covariance of their representations."""

    @classmethod
    def of_queries(
        cls, queries_QD: NDArray[np.float32], *, priors: tuple[float, ...], word_weight: float
    ) -> LabelGenerator:
        """Make a generator from the representations of training queries."""
        mean_D = queries_QD.mean(axis=0)
        centred_QD = queries_QD - mean_D
        covariance_DD = centred_QD.T @ centred_QD / np.float32(len(queries_QD))
        return cls(priors=priors, word_weight=word_weight, mean_D=mean_D, covariance_DD=covariance_DD)

    def add_examples(
        self, texts_ND: NDArray[np.float32], examples: Sequence[NDArray[np.float32]]
    ) -> NDArray[np.float32]:
        """Return the representations of new labels, given those of their texts and of texts that have each of them."""
        given = [number for number, each in enumerate(examples) if len(each)]
        means_ND = np.stack([examples[number].mean(axis=0) for number in given]) - self.mean_D
        ridge = np.float32(_RIDGE * np.trace(self.covariance_DD) / len(self.mean_D))
        inner_DD = self.covariance_DD + ridge * np.eye(len(self.mean_D), dtype=np.float32)
        turned_ND = unit_rows(np.linalg.solve(inner_DD, means_ND.T).T)
        made_ND = texts_ND.copy()
        lengths_N1 = np.linalg.norm(texts_ND[given], axis=1, keepdims=True)
        made_ND[given] = lengths_N1 * unit_rows(unit_rows(texts_ND[given]) + _EXAMPLES_WEIGHT * turned_ND)
        return made_ND

    def save(self, folder: Path) -> None:
        """Write the generator as one file of a model folder."""
        priors = np.array(self.priors, dtype=np.float32)
        words = np.array([self.word_weight], dtype=np.float32)
        arrays = {"priors": priors, "words": words, "mean": self.mean_D, "covariance": self.covariance_DD}
        write_tensors(folder / GENERATOR_FILE, arrays)

    @classmethod
    def load(cls, folder: Path, *, dimension: int, num_priors: int) -> LabelGenerator | None:
        """Read the generator of a model folder; None where there is none, as in models of earlier versions."""
        path = folder / GENERATOR_FILE
        if not path.exists():
            return None
        # In models of earlier versions the words of a new label do not count.
        arrays = {"words": np.zeros(1, np.float32)} | read_tensors(path)
        shapes = {"priors": (num_priors,), "words": (1,), "mean": (dimension,), "covariance": (dimension, dimension)}
        for name, shape in shapes.items():
            array = arrays.get(name)
            fits = array is not None and array.shape == shape and array.dtype == np.float32
            if array is None or not fits or np.abs(array).max(initial=0.0) > _LARGEST_VALUE:
                raise ModelError(f"{path}: {name} does not fit this model: restore the folder from a copy")
        return cls(
            priors=tuple(arrays["priors"].tolist()),
            word_weight=float(arrays["words"][0]),
            mean_D=arrays["mean"],
            covariance_DD=arrays["covariance"],
        )


def fill_unseen_rows(
    rows_LC: NDArray[np.float32],
    counts_L: NDArray[np.integer],
    *,
    texts_UC: NDArray[np.float32],
    label_vectors_LD: NDArray[np.float32],
    num_neighbours: int = NUM_NEIGHBOURS,
    processes: Processes | None = None,
    device: str = "cpu",
) -> NDArray[np.float32]:
    """Return the classifier rows of all labels with those of unseen labels filled in: [L, C].

    The direction of a filled row is the mean of two directions: that of the label's own text, and the mean direction
    of the rows of its nearest seen labels. Its length is the mean length of those rows. Either direction alone finds
    fewer unseen labels (bench/unseen_labels.py). Rows of seen labels are unchanged. If no label was seen, the rows of
    unseen labels are zero.

    Args:
        rows_LC: classifier rows of all labels; those of unseen labels are not read.
        counts_L: number of training queries of each label; 0 for an unseen label.
        texts_UC: the classifier head's output for the texts of the unseen labels, in order.
        label_vectors_LD: the dual encoder's vectors of all labels, without the label prior.
        num_neighbours: number of nearest seen labels to average over.
        processes: the processes that hold the other labels, if any; neighbours come from all of them.
        device: where the nearest labels are searched.
    """
    if len(counts_L) != len(label_vectors_LD):
        raise UsageError(
            f"got training counts of {len(counts_L)} labels for {len(label_vectors_LD)} vectors: expected one each"
        )
    seen_L = np.asarray(counts_L) > 0
    filled_LC = np.where(seen_L[:, None], rows_LC, np.float32(0.0))
    vectors_LD = unit_rows(label_vectors_LD)
    means_UC = _neighbour_means(vectors_LD, filled_LC, seen_L, num_neighbours, processes or SingleProcess(), device)
    if means_UC is not None:
        directions_UC, lengths_U1 = means_UC[:, :-1], means_UC[:, -1:]
        filled_LC[~seen_L] = unit_rows(unit_rows(directions_UC) + unit_rows(texts_UC)) * lengths_U1
    return filled_LC


def _neighbour_means(
    vectors_LD: NDArray[np.float32],
    rows_LC: NDArray[np.float32],
    seen_L: NDArray[np.bool_],
    num_neighbours: int,
    processes: Processes,
    device: str,
) -> NDArray[np.float32] | None:
    """Mean direction and, as the last column, mean length of the rows of each unseen label's nearest seen labels.

    Every process searches among its own seen labels and adds the rows of those that are among the nearest of all.
    None if there is no seen or no unseen label.
    """
    num_seen, num_unseen = int(seen_L.sum()), int((~seen_L).sum())
    seen_counts, unseen_counts = concatenate_arrays(processes, np.array([[num_seen, num_unseen]])).T
    num_neighbours = min(num_neighbours, int(seen_counts.sum()))
    if not num_neighbours or not int(unseen_counts.sum()):
        return None
    first = int(seen_counts[: processes.rank].sum())
    found = search_shards(
        concatenate_arrays(processes, vectors_LD[~seen_L]),
        place(vectors_LD[seen_L], device),
        num_neighbours,
        label_ids=np.arange(first, first + num_seen),
        processes=processes,
    )
    nearest_VK = found.ids - first
    held_VK = (nearest_VK >= 0) & (nearest_VK < num_seen)
    # Only rows that are a neighbour of some label are copied.
    used_S, positions = np.unique(nearest_VK[held_VK], return_inverse=True)
    rows_SC = rows_LC[np.flatnonzero(seen_L)[used_S]]
    lengths_S1: NDArray[np.float32] = np.linalg.norm(rows_SC, axis=1, keepdims=True)
    row_starts = np.concatenate([[0], np.cumsum(held_VK.sum(axis=1))])
    # Imported here because predicting does not need it, and it takes a while.
    from scipy.sparse import csr_matrix

    chosen = csr_matrix((np.ones(len(positions), np.float32), positions, row_starts), shape=(len(held_VK), len(used_S)))
    sums_VC = chosen @ np.concatenate([unit_rows(rows_SC), lengths_S1], axis=1)
    start = int(unseen_counts[: processes.rank].sum())
    means_VC = (sum_arrays(processes, sums_VC) / num_neighbours).astype(np.float32)
    return means_VC[start : start + num_unseen]
