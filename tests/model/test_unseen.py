"""Labels that no training query had: their classifier rows, and that they compete with trained labels."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix

import dexter
from dexter import Predictor
from dexter.data import Dataset, Split
from dexter.encoders.head_arrays import unit_rows
from dexter.errors import ModelError, UsageError
from dexter.index import search
from dexter.model.unseen import LabelGenerator, fill_unseen_rows
from tests.conftest import SMALL

NUM_KNOWN = 30
SETTINGS = {
    "with a prior": ("dexter", {"head.classifier": True, "encoder.normalize": False}),
    "normalised": ("dexml", {"head.classifier": True, "encoder.normalize": False, "head.projection": 24}),
}


def unit(*shape, seed=0):
    return unit_rows(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def test_filled_rows_equal_a_slow_loop():
    dual = unit(12, 3)
    rows = unit(12, 4, seed=1) * np.arange(1, 13, dtype=np.float32)[:, None]
    counts = np.array([1, 0, 2, 5, 0, 1, 1, 1, 4, 0, 2, 0])
    seen, unseen = np.flatnonzero(counts), np.flatnonzero(counts == 0)
    texts = 5 * unit(len(unseen), 4, seed=2)
    found = fill_unseen_rows(rows, counts, texts_UC=texts, label_vectors_LD=7 * dual, num_neighbours=3)
    np.testing.assert_array_equal(found[seen], rows[seen])
    for place, label in enumerate(unseen):
        nearest = rows[sorted(seen, key=lambda other: -float(dual[label] @ dual[other]))[:3]]
        borrowed = unit_rows(unit_rows(nearest).mean(axis=0, keepdims=True))
        direction = unit_rows(borrowed + texts[place] / 5)[0]
        np.testing.assert_allclose(found[label], direction * np.linalg.norm(nearest, axis=1).mean(), atol=1e-5)


def test_filling_at_the_edges():
    dual, rows = unit(3, 2), unit(3, 2, seed=1)
    texts, none = rows[[1, 1]], rows[:0]
    filled = fill_unseen_rows(rows, np.ones(3, dtype=int), texts_UC=none, label_vectors_LD=dual)
    np.testing.assert_array_equal(filled, rows)
    assert not fill_unseen_rows(rows, np.zeros(3, dtype=int), texts_UC=rows, label_vectors_LD=dual).any()
    filled = fill_unseen_rows(rows, np.array([0, 4, 0]), texts_UC=texts, label_vectors_LD=dual)
    np.testing.assert_allclose(filled, rows[[1, 1, 1]], atol=1e-6)


def test_counts_must_be_those_of_the_labels():
    with pytest.raises(UsageError, match="2 labels for 3 vectors"):
        fill_unseen_rows(
            np.zeros((3, 2)), np.array([1, 0]), texts_UC=np.zeros((1, 2)), label_vectors_LD=np.zeros((3, 2))
        )


def test_examples_turn_a_label_as_a_slow_formula_says(tmp_path):
    queries = unit(50, 5) * np.linspace(1, 3, 5, dtype=np.float32)
    texts, examples = 3 * unit(3, 5, seed=1), [queries[:2], queries[:0], queries[4:9]]
    generator = LabelGenerator.of_queries(queries, priors=(-1.5, 2.0), word_weight=4.0)
    made = generator.add_examples(texts, examples)
    np.testing.assert_array_equal(made[1], texts[1])
    covariance = np.cov(queries.T, bias=True)
    for row in (0, 2):
        difference = examples[row].mean(axis=0) - queries.mean(axis=0)
        turned = np.linalg.inv(covariance + 3 * np.trace(covariance) / 5 * np.eye(5)) @ difference
        direction = texts[row] / 3 + 0.5 * turned / np.linalg.norm(turned)
        np.testing.assert_allclose(made[row], 3 * direction / np.linalg.norm(direction), atol=1e-5)
    generator.save(tmp_path)
    read = LabelGenerator.load(tmp_path, dimension=5, num_priors=2)
    assert read.priors == (-1.5, 2.0)
    np.testing.assert_array_equal(read.add_examples(texts, examples), made)
    for dimension, num_priors in ((4, 2), (5, 1)):
        with pytest.raises(ModelError, match=r"new_labels\.safetensors: .* does not fit this model"):
            LabelGenerator.load(tmp_path, dimension=dimension, num_priors=num_priors)


@pytest.fixture(scope="module", params=SETTINGS)
def predictor(request, world, tmp_path_factory):
    """A model that was trained on the first labels, and to which the others were added."""
    relevance = csr_matrix(world.train.relevance[:, :NUM_KNOWN])
    rows = np.flatnonzero(np.diff(relevance.indptr))
    train = Split([world.train.texts[row] for row in rows], [world.train.uids[row] for row in rows], relevance[rows])
    known = Dataset("known", world.label_texts[:NUM_KNOWN], world.label_ids[:NUM_KNOWN], train, None)
    recipe, settings = SETTINGS[request.param]
    out = tmp_path_factory.mktemp("unseen") / "run"
    dexter.train(known, recipe=recipe, out=out, overrides={**SMALL, **settings, "train.epochs": 4})
    found = Predictor.load(out, head="unified")
    found.add_labels(list(zip(world.label_ids, world.label_texts, strict=True))[NUM_KNOWN:])
    return found


def recall(world, model, labels_LD, kind):
    """The share of the relevant labels of a kind that are among the first five."""
    top = search(model.query_vectors(world.test.texts, head="unified"), labels_LD, 5).ids
    relevant = world.test.relevance.toarray()[:, kind] > 0
    hits = [np.isin(np.arange(37)[kind], row) for row in top]
    return float((relevant & np.array(hits)).sum() / relevant.sum())


def test_new_labels_are_found_and_the_others_stay(predictor, world):
    model, new, known = predictor.model, slice(NUM_KNOWN, None), slice(NUM_KNOWN)
    filled_LD = model.label_vectors(head="unified")
    width = model.label_vectors(head="encoder").shape[1]
    empty_LD = filled_LD.copy()
    empty_LD[new, width : width + model.classifier.table_LC.shape[1]] = 0
    np.testing.assert_array_equal(filled_LD[known], empty_LD[known])
    assert recall(world, model, filled_LD, new) > max(0.7, recall(world, model, empty_LD, new))
    assert recall(world, model, filled_LD, known) > 0.7
