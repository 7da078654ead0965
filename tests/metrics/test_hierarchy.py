"""Metrics with broader labels, against a slow loop over sets."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter.errors import DataError
from dexter.metrics import hierarchy_ratios, per_query


def slow(top_ids, relevance, parents, k):
    def with_ancestors(labels):
        found, waiting = set(), list(labels)
        while waiting:
            if (one := waiting.pop()) not in found:
                found.add(one)
                waiting += parents[one]
        return found

    num_labels = relevance.shape[1]
    hits, common, num_predicted, num_relevant = 0, 0, 0, 0
    for row, ids in enumerate(top_ids):
        relevant = {label for label in range(num_labels) if relevance[row, label] > 0}
        predicted = [label for label in ids[:k] if 0 <= label < num_labels]
        lenient = relevant | {parent for label in relevant for parent in parents[label]}
        hits += sum(label in lenient for label in predicted)
        above, true = with_ancestors(predicted), with_ancestors(relevant)
        common, num_predicted, num_relevant = (
            common + len(above & true),
            num_predicted + len(above),
            num_relevant + len(true),
        )
    share = [100 * a / b if b else float("nan") for a, b in ((common, num_predicted), (common, num_relevant))]
    return [100 * hits / (k * len(top_ids)), *share]


@pytest.mark.parametrize("seed", range(20))
def test_equal_to_a_slow_loop(seed):
    rng = np.random.default_rng(seed)
    num_queries, num_labels, num_other = int(rng.integers(1, 12)), int(rng.integers(4, 20)), int(rng.integers(0, 4))
    relevance = csr_matrix((rng.random((num_queries, num_labels)) < 0.2) * rng.uniform(0.1, 2.0))
    top_ids = np.array([rng.permutation(num_labels)[:4] for _ in range(num_queries)])
    top_ids[rng.random(top_ids.shape) < 0.2] = -1
    size = num_labels + num_other
    broader = (rng.random((size, size)) < 0.08).astype(float)  # circles and several parents included
    parents = [list(np.flatnonzero(row)) for row in broader]
    ratios = hierarchy_ratios(top_ids, relevance, csr_matrix(broader), (1, 3))
    for k in (1, 3):
        found = [ratios[f"{name}@{k}"].value for name in ("parentP", "hP", "hR")]
        np.testing.assert_allclose(found, slow(top_ids, relevance.toarray(), parents, k), rtol=1e-12)


def test_without_broader_labels_a_lenient_hit_is_a_strict_one():
    relevance, top_ids = csr_matrix([[1, 0, 1], [0, 1, 0]]), np.array([[0, 1], [1, 2]])
    ratios = hierarchy_ratios(top_ids, relevance, csr_matrix((3, 3)), (1, 2))
    strict = per_query(top_ids, relevance, None, (1, 2))
    assert ratios["parentP@2"].value == strict["P@2"].value == 50.0
    assert ratios["hP@1"].value == 100.0


def test_a_hierarchy_of_other_labels_is_refused():
    with pytest.raises(DataError, match="broader has shape"):
        hierarchy_ratios(np.array([[0]]), csr_matrix([[1, 0]]), csr_matrix((1, 1)), (1,))
