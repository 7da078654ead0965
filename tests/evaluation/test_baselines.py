"""The baselines: popularity, and TF-IDF neighbours against a slow loop."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter.errors import DataError, UsageError
from dexter.evaluation import baselines
from dexter.evaluation.baselines import TfidfNeighbours, popularity, top_of_rows
from dexter.metrics import score


def test_popularity_ranks_by_training_count_and_breaks_ties_by_label(tiny_dataset):
    top = popularity(tiny_dataset, 25)
    counts = tiny_dataset.label_counts
    expected = sorted(range(20), key=lambda label: (-counts[label], label))
    assert top.ids.shape == (40, 25)
    assert top.ids[0].tolist() == expected + [-1] * 5
    assert (top.ids == top.ids[0]).all()


def test_popularity_needs_a_positive_k(tiny_dataset):
    with pytest.raises(UsageError, match="expected 1 or more"):
        popularity(tiny_dataset, 0)


def slow_votes(model, texts):
    vectors, train = model.vectorizer.transform(texts).toarray(), model.transposed.toarray().T
    votes = np.zeros((len(texts), model.relevance.shape[1]))
    for row in range(len(texts)):
        similarity = train @ vectors[row]
        for neighbour in np.argsort(-similarity, kind="stable")[: model.num_neighbours]:
            votes[row] += similarity[neighbour] ** model.power * model.relevance[neighbour].toarray()[0]
    return votes


@pytest.mark.parametrize("block", [1, 1000, 1 << 23])
def test_neighbours_vote_with_a_power_of_their_similarity(block, monkeypatch):
    monkeypatch.setattr(baselines, "_BLOCK_SIMILARITIES", block)
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{word}" for word in rng.integers(0, 60, 12)) for _ in range(90)]
    relevance = csr_matrix((rng.random((80, 9)) < 0.3) * rng.uniform(0.5, 2.0, (80, 9)))
    model = TfidfNeighbours.fit(texts[:80], relevance, num_neighbours=7, power=2.0)
    got = model.predict(texts[80:], 9)
    votes = slow_votes(model, texts[80:])
    for row in range(10):
        found = got.ids[row][got.ids[row] >= 0]
        np.testing.assert_allclose(got.scores[row][: len(found)], -np.sort(-votes[row])[: len(found)], rtol=1e-5)
        np.testing.assert_allclose(votes[row][found], got.scores[row][: len(found)], rtol=1e-5)
        assert set(found) == set(np.flatnonzero(votes[row]))


def test_neighbours_find_the_labels_that_the_words_give_away(tiny_dataset):
    model = TfidfNeighbours.fit(tiny_dataset.train.texts, tiny_dataset.train.relevance)
    test, train = tiny_dataset.test, tiny_dataset.train
    neighbours = score(model.predict(test.texts, 5).ids, test.relevance, train.relevance)
    common = score(popularity(tiny_dataset, 5).ids, test.relevance, train.relevance)
    assert neighbours["P@5"] > common["P@5"]
    assert neighbours["PSP@5"] > common["PSP@5"]


def test_a_text_without_known_words_has_no_prediction(tiny_dataset):
    model = TfidfNeighbours.fit(tiny_dataset.train.texts, tiny_dataset.train.relevance)
    top = model.predict(["zzz qqq", ""], 3)
    assert (top.ids == -1).all()
    assert (top.scores == -np.inf).all()
    assert model.predict([], 3).ids.shape == (0, 3)


def test_training_texts_without_words_are_named():
    with pytest.raises(DataError, match="no words to compare by"):
        TfidfNeighbours.fit(["", "a"], csr_matrix(np.eye(2)))
    with pytest.raises(UsageError, match="num_neighbours"):
        TfidfNeighbours.fit(["some text"], csr_matrix(np.eye(1)), num_neighbours=0)


def test_top_of_rows_breaks_ties_by_column():
    scores = csr_matrix(np.array([[0, 2.0, 1.0, 2.0], [0, 0, 0, 0]]))
    top = top_of_rows(scores, 3)
    assert top.ids.tolist() == [[1, 3, 2], [-1, -1, -1]]


@pytest.mark.slow
def test_neighbours_reach_the_known_figures_on_stackexchange4():
    shared = Path(os.environ.get("DEXTER_SHARED", Path(__file__).resolve().parents[3] / "shared"))
    folder = shared / "data" / "stackexchange4"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here: set DEXTER_SHARED to the folder that holds data/stackexchange4")
    formats = pytest.importorskip("dexter.data.formats")
    data = formats.load_dataset(folder)
    model = TfidfNeighbours.fit(data.train.texts, data.train.relevance)
    metrics = score(model.predict(data.test.texts, 5).ids, data.test.relevance, data.train.relevance)
    known = {"P@1": 64.64, "P@3": 41.23, "P@5": 29.99, "PSP@1": 42.83, "PSP@3": 48.37, "PSP@5": 56.14}
    assert {name: metrics[name] for name in known} == pytest.approx(known, abs=1.0)
