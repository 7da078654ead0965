"""What is counted of a data set: bytes of its texts, and the labels that a batch's positives bring."""

from __future__ import annotations

import numpy as np

from dexter.batches.pool import expected_label_counts
from dexter.config import Config
from dexter.data import Dataset
from dexter.planning.sizes import relevance_bytes, strings_bytes


def text_bytes(dataset: Dataset) -> int:
    """Texts, identifiers and relevance of all splits; the training split exists twice, sharing its strings."""
    total = strings_bytes(dataset.label_texts) + strings_bytes(dataset.label_ids)
    for split in dataset.splits.values():
        total += strings_bytes(split.texts) + strings_bytes(split.uids)
        total += relevance_bytes(int(split.relevance.nnz), len(split))
    return total + 16 * len(dataset.train) + relevance_bytes(int(dataset.train.relevance.nnz), len(dataset.train))


def characters(dataset: Dataset) -> int:
    """Characters that are tokenised before the first step."""
    return sum(map(len, dataset.train.texts)) + sum(map(len, dataset.label_texts))


def characters_per_query(dataset: Dataset) -> float:
    """Characters of an average training query."""
    return sum(map(len, dataset.train.texts)) / max(1, len(dataset.train))


def pool_positives(dataset: Dataset, config: Config) -> int:
    """Distinct labels that a random batch brings: the sum over labels of the chance that one of its queries does."""
    relevance = dataset.train.relevance
    drawn = expected_label_counts(relevance, sample_positives=config.batch.positives or dataset.num_labels)
    expected = config.batch.size * drawn / max(1, len(dataset.train))
    return round(float(np.sum(1 - np.exp(-expected))))
