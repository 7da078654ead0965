"""Result records: complete, valid JSON, and tied to the data they were computed on."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter.errors import DataError
from dexter.evaluation import records
from dexter.evaluation.baselines import popularity
from dexter.evaluation.records import git_commit, make_record, pairs_sha256, peak_rss_bytes, write_record
from dexter.evaluation.report import score_report


@pytest.fixture(scope="module")
def report(tiny_dataset):
    return score_report(
        popularity(tiny_dataset, 5).ids, tiny_dataset.test, tiny_dataset.train.relevance, num_resamples=20
    )


def test_a_record_is_json_with_everything_a_repeat_needs(tiny_dataset, report, tmp_path, monkeypatch):
    monkeypatch.setattr(records.sys, "argv", ["dexter", "demo"])
    record = make_record(report, tiny_dataset, model={"head": "popularity", "seed": 3}, search={"k": 5}, seconds=0.5)
    write_record(tmp_path / "deep" / "record.json", record)
    read = json.loads((tmp_path / "deep" / "record.json").read_text(encoding="utf-8"))
    assert read == record
    assert read["metrics"]["P@1"] == report.metrics["P@1"]
    assert read["by_frequency"]["unseen"]["P@1"] is None
    assert (read["data"]["name"], read["data"]["split"], read["data"]["num_labels"]) == ("tiny", "test", 20)
    assert read["settings"]["propensity"] == {"a": 0.55, "b": 1.5, "num_train": 300}
    assert (read["model"]["head"], read["model"]["seed"], read["search"]["k"]) == ("popularity", 3, 5)
    assert read["environment"]["packages"]["numpy"] == np.__version__
    assert read["command"] == ["dexter", "demo"]
    assert read["peak_rss_bytes"] > 10**6
    assert read["intervals"]["P@1"].keys() == {"value", "low", "high"}


def test_values_that_json_does_not_have_become_null(tmp_path):
    write_record(
        tmp_path / "r.json", {"a": float("nan"), "b": [np.float32(np.inf), np.int64(3)], "c": (True, "x", None)}
    )
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": None, "b": [None, 3], "c": [True, "x", None]}


def test_a_record_needs_a_test_split(tiny_dataset, report):
    with pytest.raises(DataError, match="no test split"):
        make_record(report, dataclasses.replace(tiny_dataset, test=None), model={}, search={})


def test_the_hash_of_pairs_depends_on_the_pairs_alone():
    dense = np.array([[1, 0, 2], [0, 3, 0]])
    reference = pairs_sha256(csr_matrix(dense))
    wide = csr_matrix(dense * 0.5)
    wide.indices, wide.indptr = wide.indices.astype(np.int64), wide.indptr.astype(np.int64)
    assert pairs_sha256(wide) == reference
    unsorted = csr_matrix((np.ones(3), np.array([2, 0, 1]), np.array([0, 2, 3])), shape=(2, 3))
    assert pairs_sha256(unsorted) == reference
    assert unsorted.indices.tolist() == [2, 0, 1]
    assert pairs_sha256(csr_matrix(dense.T)) != reference


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_a_checkout_or_nothing(monkeypatch, tmp_path):
    commit = git_commit()
    assert commit is None or len(commit) == 40
    monkeypatch.setattr(records, "__file__", str(tmp_path / "records.py"))
    assert git_commit() is None


def test_peak_memory_is_known_here():
    assert peak_rss_bytes() > 10**6
