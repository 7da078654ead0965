"""Filters per request: exclude, only and bands against brute force, with votes and probabilities; own labels by id."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter import Predictor
from dexter.errors import UsageError
from dexter.index import ExactIndex, build
from dexter.predict.filters import LabelFilter, UnknownLabel
from dexter.predict.rank import MAX_SEARCHED_PAST, RankingChoice, rank
from dexter.types import BANDS

NUM_LABELS, NUM_QUERIES, DIMENSION = 2_003, 21, 16


@pytest.fixture(scope="module")
def vectors():
    generator = np.random.default_rng(0)
    return tuple(generator.standard_normal((n, DIMENSION), dtype=np.float32) for n in (NUM_LABELS, NUM_QUERIES))


@pytest.fixture(scope="module", params=["exact", "hnsw"])
def index(request, vectors):
    if request.param == "exact":
        return ExactIndex(vectors[0])
    pytest.importorskip("faiss")
    return build("hnsw", vectors[0])


def rank_vectors(index, queries_ND, k, **filters):
    model = SimpleNamespace(
        search_vectors=lambda vectors, head, dial: vectors, labels=SimpleNamespace(ids=range(NUM_LABELS))
    )
    return rank(model, index, queries_ND, RankingChoice(head="encoder", dial=0.0), k, voters=None, **filters)


def brute_force(vectors, k, allowed, exclude=None):
    labels_LD, queries_ND = vectors
    scores = queries_ND @ labels_LD.T
    scores[:, np.setdiff1d(np.arange(NUM_LABELS), allowed)] = -np.inf
    if exclude is not None:
        scores[exclude.nonzero()] = -np.inf
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


@pytest.mark.parametrize("size", [1, 3, 7, 500, NUM_LABELS - MAX_SEARCHED_PAST - 1])
def test_a_subset_is_ranked_exactly_by_every_index(index, vectors, size):
    allowed = np.sort(np.random.default_rng(size).choice(NUM_LABELS, size, replace=False))
    own = csr_matrix(
        (np.ones(NUM_QUERIES), (np.arange(NUM_QUERIES), np.resize(allowed, NUM_QUERIES))), (NUM_QUERIES, NUM_LABELS)
    )
    found = rank_vectors(index, vectors[1], 5, allowed=allowed)
    np.testing.assert_array_equal(found.ids, brute_force(vectors, 5, allowed)[:, : min(5, size)])
    without = rank_vectors(index, vectors[1], 5, allowed=allowed, exclude=own)
    kept = min(5, size - 1)
    np.testing.assert_array_equal(without.ids[:, :kept], brute_force(vectors, 5, allowed, own)[:, :kept])
    assert (without.ids[:, kept : min(5, size)] == -1).all()


@pytest.mark.parametrize("num_excluded", [1, MAX_SEARCHED_PAST])
def test_an_index_searches_past_the_best_labels(index, vectors, num_excluded):
    best = brute_force(vectors, 100, np.arange(NUM_LABELS))
    excluded = np.unique(best[:, :4])[:num_excluded]
    allowed = np.setdiff1d(np.arange(NUM_LABELS), excluded)
    found = rank_vectors(index, vectors[1], 10, allowed=allowed).ids
    assert not np.isin(found, [*excluded, -1]).any()
    expected = brute_force(vectors, 10, allowed)
    shared = np.mean([len(np.intersect1d(*rows)) / 10 for rows in zip(found, expected, strict=True)])
    assert shared == 1.0 if index.backend == "exact" else shared >= index.recall - 0.02


@pytest.fixture(scope="module", params=[False, True], ids=["model alone", "with votes"])
def predictor(request, trained):
    return Predictor.load(trained, neighbours=request.param)


def ids(ranked):
    return [[label.id for label in labels] for labels in ranked]


@pytest.mark.parametrize(
    "filters",
    [
        {"exclude": ["L0", "L5", "L9"]},
        {"only": ["L3", "L1", "L30"]},
        {"only": ["L3", "L1", "L30"], "exclude": ["L1"]},
        {"bands": ["torso"]},
        {"bands": ["torso", "frequent"], "exclude": ["L0"]},
    ],
    ids=str,
)
def test_filters_equal_removal_from_all_labels(predictor, world, filters):
    texts = world.test.texts[:20]
    allowed = LabelFilter.of(**filters).allowed_rows(predictor.labels)
    names = {world.label_ids[row] for row in allowed}
    every = predictor.predict(texts, k=world.num_labels)
    for found, all_labels in zip(predictor.predict(texts, 5, **filters), every, strict=True):
        expected = [label for label in all_labels if label.id in names][:5]
        assert [label.id for label in found] == [label.id for label in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.score == pytest.approx(theirs.score, abs=1e-5)
            assert mine.probability == (theirs.probability and pytest.approx(theirs.probability, abs=1e-4))


def test_a_threshold_counts_the_allowed_labels_only(trained, world):
    predictor = Predictor.load(trained)
    texts, only = world.test.texts[:10], world.label_ids[:9]
    every = predictor.predict(texts, k=world.num_labels)
    for found, all_labels in zip(predictor.predict(texts, threshold=0.05, only=only), every, strict=True):
        assert [one.id for one in found] == [one.id for one in all_labels if one.id in only and one.probability >= 0.05]


def test_no_label_is_allowed(predictor):
    assert predictor.predict(["river", "stone"], only=["L1"], exclude=["L1"]) == [[], []]
    assert predictor.predict(["river"], only=[]) == [[]]
    assert predictor.predict([], only=["L1"]) == []


@pytest.mark.parametrize("filters", [{"only": ["nobody"]}, {"exclude": ["nobody"]}, {"bands": ["middle"]}])
def test_unknown_names_are_errors(predictor, filters):
    with pytest.raises(UnknownLabel, match=r"nobody|expected frequent, torso, tail, unseen"):
        predictor.predict(["river"], **filters)


def test_a_string_is_no_list_of_ids(predictor):
    with pytest.raises(UsageError, match=r"write exclude=\['L1'\]"):
        predictor.predict(["river"], exclude="L1")


def test_bands_are_those_of_the_training_counts(predictor):
    rows = np.concatenate([LabelFilter(bands=(band,)).allowed_rows(predictor.labels) for band in BANDS])
    assert sorted(rows) == list(range(len(predictor.labels.ids)))


def without_own_labels(predictor, **decided):
    facts = predictor.model.facts | {"own_labels": {"setting": "auto", **decided}}
    return Predictor(replace(predictor.model, facts=facts), predictor.choice, scoring=predictor.scoring)


def test_own_labels_are_left_out_by_id_and_by_text(predictor, world):
    text = world.label_texts[4]
    assert predictor.predict([text], 1, ids=["L4"])[0][0].id == "L4"
    by_id = without_own_labels(predictor, by_id=True)
    assert "L4" not in ids(by_id.predict([text], 37, ids=["L4"]))[0]
    assert len(by_id.predict([text], 37, ids=["L4"])[0]) == 36
    assert ids(by_id.predict([text, text], 1, ids=[None, "of nobody"])) == [["L4"], ["L4"]]
    assert ids(by_id.predict([text], 1)) == [["L4"]]
    by_text = without_own_labels(predictor, by_text=True)
    assert "L4" not in ids(by_text.predict([f"  {text.upper()} "], 37))[0]
    streamed = by_id.predict_stream(iter([text] * 3), 1, ids=iter(["L4", None, "L4"]))
    first = by_id.predict([text], 1, ids=["L4"])[0][0].id
    assert ids(streamed) == [[first], ["L4"], [first]]


def test_own_labels_follow_label_changes(predictor):
    changed = without_own_labels(predictor, by_id=True)
    changed.add_labels([("new", "river stone falcon")])
    assert "new" in ids(changed.predict(["river stone falcon"], 38))[0]
    assert "new" not in ids(changed.predict(["river stone falcon"], 38, ids=["new"]))[0]


def test_there_is_an_id_for_every_text(predictor):
    with pytest.raises(UsageError, match="got 1 ids for 2 texts"):
        predictor.predict(["river", "stone"], ids=["L1"])
