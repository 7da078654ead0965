"""The scikit-learn classifier: scikit-learn's own checks, and the tools that are used around an estimator."""

import gc
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix, issparse
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import f1_score, label_ranking_average_precision_score
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import validate_data

from dexter.errors import DexterError, ModelError
from dexter.sklearn import DexterClassifier
from dexter.training import train
from tests.conftest import SMALL
from tests.test_readme import ROOT, blocks

QUICK = {**SMALL, "train.epochs": 5}


class OfNumbers(DexterClassifier):
    """Reads texts off numbers, because scikit-learn's checks have no others: one word for each rounded feature."""

    def _texts(self, X, *, reset=False):
        checked = validate_data(self, X, reset=reset)
        return [" ".join(f"f{column}v{value:.0f}" for column, value in enumerate(row)) for row in checked * 2]

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array, tags.input_tags.one_d_array, tags.input_tags.string = True, False, False
        return tags


EXPECTED_FAILURES = {
    "check_classifiers_multilabel_output_format_predict_proba": "sparse: the best labels of each text",
    "check_methods_subset_invariance": "scores are float32: one text and a batch differ by 1e-6, the check allows 1e-7",
}


SETTINGS = {name: value for name, value in QUICK.items() if name != "validation.fraction"} | {"train.epochs": 12}
"""Epochs enough that rounding does not change what is predicted: a check wants 83% of 300 texts right."""


@parametrize_with_checks(
    [OfNumbers(settings=SETTINGS)],
    expected_failed_checks=lambda _: EXPECTED_FAILURES,
    xfail_strict=False,  # rounding sometimes agrees
)
def test_checks_of_scikit_learn(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


@pytest.fixture(scope="module")
def texts(world):
    return list(world.train.texts)


@pytest.fixture(scope="module")
def tests(world):
    return list(world.test.texts)


@pytest.fixture(scope="module")
def fitted(world, texts):
    """Fitted on a sparse indicator matrix, with label texts: look, do not touch."""
    return DexterClassifier(settings=QUICK, label_texts=world.label_texts).fit(texts, world.train.relevance)


def lists_of(relevance, names):
    return [[names[column] for column in row.indices] for row in relevance]


def test_a_sparse_indicator_gives_a_sparse_indicator(fitted, world, tests):
    predicted = fitted.predict(tests)
    assert issparse(predicted) and predicted.shape == world.test.relevance.shape
    assert f1_score(world.test.relevance, predicted, average="micro") > 0.6


def test_probabilities_are_the_best_labels_of_each_text(fitted, tests):
    found = fitted.set_params(top_k=4).predict_proba(tests)
    assert issparse(found) and np.diff(found.indptr).tolist() == [4] * len(tests)
    for row, predicted in zip(found, fitted.predictor_.predict(tests, k=4), strict=True):
        assert {(fitted.classes_[i], p) for i, p in zip(row.indices, row.data, strict=True)} == {
            (int(label.id), label.probability) for label in predicted
        }


def test_predict_returns_what_reaches_the_threshold(fitted, tests):
    every = clone(fitted).set_params(top_k=len(fitted.classes_))
    every.__setstate__({**fitted.__getstate__(), "top_k": len(fitted.classes_)})
    expected = every.predict_proba(tests) >= fitted.threshold_
    assert (fitted.predict(tests).astype(bool) != expected).nnz == 0


def test_the_decision_has_a_score_of_every_label(fitted, world, tests):
    scores = fitted.decision_function(tests)
    assert scores.shape == world.test.relevance.shape and np.isfinite(scores).all()
    assert label_ranking_average_precision_score(world.test.relevance.toarray(), scores) > 0.9
    best = fitted.predictor_.predict(tests, k=1)
    assert [fitted.classes_[row.argmax()] for row in scores] == [int(labels[0].id) for labels in best]


def test_lists_of_labels_give_lists_of_labels(world, texts, tests):
    names = world.label_ids
    meanings = dict(zip(names, world.label_texts, strict=True)) | {"never seen": "zeppelin crossing"}
    classifier = DexterClassifier(settings=QUICK, label_texts=meanings)
    classifier.fit(texts, [set(labels) for labels in lists_of(world.train.relevance, names)])
    assert list(classifier.classes_) == sorted(meanings)
    found, wanted = classifier.predict(tests), lists_of(world.test.relevance, names)
    hits = sum(len(set(a) & set(b)) for a, b in zip(found, wanted, strict=True))
    assert hits / sum(map(len, wanted)) > 0.7
    [scores] = classifier.decision_function(["a zeppelin crossing"])
    assert "never seen" in classifier.classes_[np.argsort(-scores)[:3]]


def test_a_label_is_added_without_training(fitted):
    classifier = pickle.loads(pickle.dumps(fitted))
    text = "some very old zeppelin of copper"
    before = classifier.predict([text]).shape[1]
    classifier.add_labels(["zeppelin copper"])
    assert classifier.classes_[-1] == before
    assert classifier.predict([text])[0, before] == 1
    assert pickle.loads(pickle.dumps(classifier)).predict([text])[0, before] == 1
    assert fitted.predict([text]).shape[1] == before
    with pytest.raises(DexterError, match="next columns"):
        classifier.add_labels({"zeppelin": "zeppelin"})


def test_a_pickle_predicts_the_same_and_has_only_its_own_state(fitted, tests):
    loaded = pickle.loads(pickle.dumps(fitted))
    assert (loaded.decision_function(tests) == fitted.decision_function(tests)).all()
    state = fitted.__getstate__()
    assert {type(content) for content in state["_files"].values()} == {bytes}
    assert {Path(name).suffix for name in state["_files"]} == {".json", ".jsonl", ".safetensors"}
    assert b"torch" not in pickle.dumps(fitted)


def test_an_altered_pickle_is_refused(fitted):
    state = fitted.__getstate__()
    name = "dexter/labels.jsonl"
    state["_files"] = {**state["_files"], name: state["_files"][name].replace(b"river", b"rivet")}
    with pytest.raises(ModelError, match="altered"):
        DexterClassifier().__setstate__(state)
    state["_files"] = {**state["_files"], "MANIFEST.json": b'{"files": {"../x": {"bytes": 1, "sha256": ""}}}'}
    with pytest.raises(ModelError, match="elsewhere"):
        DexterClassifier().__setstate__(state)


def test_the_folder_goes_with_the_estimator(fitted):
    loaded = pickle.loads(pickle.dumps(fitted))
    folder = loaded._folder.path
    assert folder.is_dir()
    del loaded
    gc.collect()
    assert not folder.exists()


def test_cross_validation_and_search(world, texts):
    Y = world.train.relevance
    pipeline = make_pipeline(
        FunctionTransformer(lambda given: [text.upper() for text in given]),
        DexterClassifier(settings=QUICK, label_texts=world.label_texts),
    )
    predicted = cross_val_predict(pipeline, texts, Y, cv=2)
    assert issparse(predicted) and f1_score(Y, predicted, average="micro") > 0.5
    dense = Y.toarray().astype(int)  # scikit-learn encodes the labels, and does not know sparse ones here
    likely = cross_val_predict(pipeline, texts, dense, cv=2, method="predict_proba")
    assert issparse(likely) and likely.shape == Y.shape
    grid = {"dexterclassifier__settings": [{**QUICK, "train.epochs": 1, "train.learning_rate": 1e-6}, QUICK]}
    search = GridSearchCV(pipeline, grid, scoring="f1_micro", cv=2).fit(texts, Y)
    assert search.best_params_["dexterclassifier__settings"] == QUICK
    assert (search.best_estimator_[-1].classes_ == np.arange(Y.shape[1])).all()


def test_the_seed_is_that_of_the_estimator(world, texts):
    def scores(seed):
        classifier = DexterClassifier(settings={**QUICK, "train.epochs": 1}, random_state=seed)
        return classifier.fit(texts, world.train.relevance).decision_function(texts[:5])

    assert (scores(3) == scores(3)).all()
    assert (scores(3) != scores(4)).any()
    assert (scores(np.random.RandomState(0)) == scores(np.random.RandomState(0))).all()


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        ("one text", ["a"], "X is a str"),
        ([], [], "shape"),
        ([["a"], ["b"]], ["a", "b"], "one dimension"),
        (["a", 3], ["a", "b"], "row 1 of X is a int"),
        (["a", "b"], ["a"], "2 texts and labels of 1"),
        (["a", "b"], np.array([[1, 2], [0, 1]]), "Multioutput|values 0 and 1"),
        (["a", "b"], [["a"], [3, "b"]], "several types"),
        (["a", "b"], None, "y is None"),
    ],
)
def test_wrong_input_is_refused(X, y, message):
    with pytest.raises(ValueError, match=message):
        DexterClassifier(settings=QUICK).fit(X, y)


def test_label_texts_must_fit_the_labels():
    with pytest.raises(DexterError, match="1 label texts for 2 columns"):
        DexterClassifier(label_texts=["a"]).fit(["x", "y"], csr_matrix([[0, 1], [1, 0]]))
    with pytest.raises(DexterError, match="texts by label"):
        DexterClassifier(label_texts=["a"]).fit(["x", "y"], ["a", "b"])


def test_what_is_not_fitted_says_so():
    for method in (DexterClassifier().predict, DexterClassifier().predict_proba, DexterClassifier().decision_function):
        with pytest.raises(NotFittedError):
            method(["a text"])


def test_few_texts_have_labels_but_no_probabilities(world):
    settings = {name: value for name, value in QUICK.items() if name != "validation.fraction"}
    classifier = DexterClassifier(settings=settings).fit(list(world.train.texts[:90]), world.train.relevance[:90])
    assert classifier.threshold_ is None
    assert set(np.diff(classifier.predict(["river stone", "amber"]).indptr)) == {2}
    with pytest.raises(DexterError, match="no probabilities"):
        classifier.predict_proba(["river stone"])


def test_the_code_of_the_document_runs(world, tmp_path, monkeypatch, capsys):
    def quick(data, *, overrides, **others):
        return train(data, overrides={**SMALL, **overrides}, **others)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dexter.training.train", quick)
    given = {
        "articles": list(world.train.texts),
        "topics": lists_of(world.train.relevance, world.label_ids),
        "meaning_of": dict(zip(world.label_ids, world.label_texts, strict=True)),
    }
    code = "\n".join(blocks((ROOT / "docs" / "sklearn.md").read_text(encoding="utf-8"), "python"))
    exec(compile(code, "sklearn.md", "exec"), given)
    assert capsys.readouterr().out.splitlines()[-1] == f"(1, {world.num_labels + 1})"
    assert (tmp_path / "model" / "MANIFEST.json").exists()
