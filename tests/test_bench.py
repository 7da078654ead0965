"""Helpers of the benchmarks that have failed on real data."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def quality(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("quality")


def test_texts_without_a_feature_are_not_written_for_omikuji(quality, tmp_path):
    vectors, _ = quality.tfidf(["river stone", "a", "", "stone"], ["river"])
    relevance = csr_matrix(np.array([[1, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 1]]))
    quality.write_svmlight(tmp_path / "train.txt", vectors, relevance)
    header, *lines = (tmp_path / "train.txt").read_text().splitlines()
    assert header == f"2 {vectors.shape[1]} 3"
    assert [line.split(" ")[0] for line in lines] == ["0,2", "2"]
    assert all(":" in line for line in lines)
