"""omikuji as a baseline: its files, its ranking, its place in `compare` and in the demo."""

import sys

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter.errors import DexterError
from dexter.evaluation import omikuji
from dexter.evaluation.baselines import baseline
from dexter.evaluation.runs import compare_runs
from dexter.metrics import score


def test_texts_without_a_feature_are_not_written(tmp_path):
    pytest.importorskip("sklearn")
    vectors, _ = omikuji.tfidf(["river stone", "a", "", "stone"], ["river"])
    relevance = csr_matrix(np.array([[1, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 1]]))
    omikuji.write_svmlight(tmp_path / "train.txt", vectors, relevance)
    header, *lines = (tmp_path / "train.txt").read_text().splitlines()
    assert header == f"2 {vectors.shape[1]} 3"
    assert [line.split(" ")[0] for line in lines] == ["0,2", "2"]
    assert all(":" in line for line in lines)


def test_it_learns_and_is_compared_with_a_run(world, trained):
    pytest.importorskip("omikuji")
    found = baseline("omikuji", world, 5)
    metrics = score(found.ids, world.test.relevance, world.train.relevance, ks=(1,))
    guessed = score(baseline("popularity", world, 5).ids, world.test.relevance, world.train.relevance, ks=(1,))
    assert metrics["P@1"] > 2 * guessed["P@1"]
    assert (np.diff(found.scores[found.ids[:, -1] >= 0], axis=1) <= 0).all()
    compared = compare_runs([trained], world, baselines=["omikuji", "neighbours"], num_resamples=50)
    assert list(compared.reports) == [str(trained), "omikuji", "neighbours"]
    assert compared.reports["omikuji"].metrics["P@1"] > 2 * guessed["P@1"]
    assert set(compared.differences) == {"omikuji", "neighbours"}


def test_without_the_package_the_install_line_is_named(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "omikuji", None)
    with pytest.raises(DexterError, match=r"baselines"):
        baseline("omikuji", world, 5)


def test_a_process_that_fails_is_an_error_that_says_so(world, monkeypatch):
    pytest.importorskip("omikuji")
    monkeypatch.setattr(omikuji, "SCRIPT", "raise SystemExit('no trees today')")
    with pytest.raises(DexterError, match="no trees today"):
        baseline("omikuji", world, 5)
