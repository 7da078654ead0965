import numpy as np
import pytest
import torch
from torch.nn import functional

from dexter.errors import UsageError
from dexter.model.unseen import fill_unseen_rows


def unit(*shape, seed=0):
    return functional.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_filled_rows_equal_a_slow_loop():
    dual = unit(12, 3)
    rows = unit(12, 4, seed=1) * torch.arange(1, 13)[:, None]
    counts = np.array([1, 0, 2, 5, 0, 1, 1, 1, 4, 0, 2, 0])
    seen, unseen = np.flatnonzero(counts), np.flatnonzero(counts == 0)
    texts = 5 * unit(len(unseen), 4, seed=2)
    found = fill_unseen_rows(rows, counts, texts_UC=texts, label_vectors_LD=7 * dual, num_neighbours=3)
    assert torch.equal(found[seen], rows[seen])
    for place, label in enumerate(unseen):
        nearest = rows[sorted(seen, key=lambda other: -float(dual[label] @ dual[other]))[:3]]
        borrowed = functional.normalize(functional.normalize(nearest, dim=1).mean(dim=0), dim=0)
        direction = functional.normalize(borrowed + texts[place] / 5, dim=0)
        torch.testing.assert_close(found[label], direction * nearest.norm(dim=1).mean())


def test_filling_at_the_edges():
    dual, rows = unit(3, 2), unit(3, 2, seed=1)
    texts, none = rows[[1, 1]], rows[:0]
    torch.testing.assert_close(
        fill_unseen_rows(rows, np.ones(3, dtype=int), texts_UC=none, label_vectors_LD=dual), rows
    )
    assert not fill_unseen_rows(rows, np.zeros(3, dtype=int), texts_UC=rows, label_vectors_LD=dual).any()
    filled = fill_unseen_rows(rows, np.array([0, 4, 0]), texts_UC=texts, label_vectors_LD=dual)
    torch.testing.assert_close(filled, rows[[1, 1, 1]])


def test_counts_must_be_those_of_the_labels():
    with pytest.raises(UsageError, match="2 labels for 3 vectors"):
        fill_unseen_rows(
            torch.zeros(3, 2), np.array([1, 0]), texts_UC=torch.zeros(1, 2), label_vectors_LD=torch.zeros(3, 2)
        )
