"""Long texts: windows that lose no word, pooled scores against a slow loop, and the choice on validation."""

from dataclasses import replace

import numpy as np
import pytest

import dexter
from dexter import Predictor
from dexter.data import Dataset, Split
from dexter.predict.windows import encode_texts, encode_windows
from dexter.training import tuning
from dexter.training.tuning import Trial
from tests.conftest import SMALL

FILLER = "about some very old new small "


@pytest.fixture
def predictor(trained):
    return Predictor.load(trained)


def lengthen(text):
    """The text after more words than the encoder reads."""
    return FILLER * 40 + text


def test_windows_hold_every_word_once_and_are_read_whole(predictor, world):
    text = " ".join(world.test.texts)
    windows = predictor.model.encoder.split_query(text)
    assert len(windows) > 2 and " ".join(windows).split() == text.split()
    assert all(predictor.model.encoder.split_query(window) == [window] for window in windows)
    assert encode_windows(predictor.model, world.test.texts) is None, "short texts are not cut"


@pytest.mark.parametrize("pooling", ["first", "mean", "max"])
@pytest.mark.parametrize("neighbours", [False, True])
def test_short_texts_keep_their_scores(predictor, world, pooling, neighbours):
    choice = predictor.choose(neighbours=neighbours)
    pooled = predictor.variant(replace(choice, windows=pooling))
    found, expected = (one.predict(world.test.texts, k=5) for one in (pooled, predictor.variant(choice)))
    assert [[each.id for each in labels] for labels in found] == [[each.id for each in labels] for labels in expected]
    scores = [[each.score for labels in rows for each in labels] for rows in (found, expected)]
    np.testing.assert_allclose(*scores, rtol=1e-5)


@pytest.mark.parametrize("neighbours", [False, True])
def test_max_is_the_best_score_of_the_windows(predictor, world, neighbours):
    choice = replace(predictor.choose(neighbours=neighbours), windows="max")
    pooled = predictor.variant(choice)
    texts = [lengthen(world.test.texts[0]), world.test.texts[1], " ".join(world.test.texts)]
    for text, found in zip(texts, pooled.predict(texts, k=6, exclude=["L2"]), strict=True):
        windows = predictor.model.encoder.split_query(text)
        best = {}
        for labels in predictor.variant(replace(choice, windows="first")).predict(windows, k=36, exclude=["L2"]):
            for label in labels:
                best[label.id] = max(best.get(label.id, -9.0), label.score)
        expected = sorted(best.values(), reverse=True)[:6]
        np.testing.assert_allclose([label.score for label in found], expected, rtol=1e-5)
        assert len({label.id for label in found}) == 6


def test_mean_is_the_mean_of_the_vectors(predictor, world):
    choice = replace(predictor.choose(neighbours=False), windows="mean")
    text = " ".join(world.test.texts)
    model = predictor.model
    mean_1D = model.encode_queries(model.encoder.split_query(text)).mean(axis=0, keepdims=True)
    scores_L = (model.search_vectors(mean_1D, head=choice.head, dial=choice.dial) @ predictor.index.vectors_LD.T)[0]
    [found] = predictor.variant(choice).predict([text], k=4)
    np.testing.assert_allclose([label.score for label in found], np.sort(scores_L)[::-1][:4], rtol=1e-5)


def test_training_reads_long_texts_whole_where_validation_says_so(world, tmp_path, caplog):
    def last(split):
        return Split([lengthen(text) for text in split.texts], split.uids, split.relevance)

    caplog.set_level("INFO", logger="dexter")
    train = Split(
        [*world.train.texts, *map(lengthen, world.train.texts)],
        [*world.train.uids, *(f"{uid}-long" for uid in world.train.uids)],
        type(world.train.relevance)(np.concatenate([world.train.relevance.toarray()] * 2)),
    )
    data = Dataset("long", world.label_texts, world.label_ids, train, last(world.test))
    dexter.train(data, out=tmp_path / "run", overrides={**SMALL, "train.epochs": 5})
    predictor = Predictor.load(tmp_path / "run")
    assert predictor.choice.windows != "first" and "validation texts are beyond the encoder's length" in caplog.text
    cut = predictor.variant(replace(predictor.choice, windows="first"))

    world_relevance = world.test.relevance.toarray()
    counts = [
        sum(world_relevance[row, int(labels[0].id[1:])] for row, labels in enumerate(one.predict(data.test.texts, k=1)))
        for one in (cut, predictor)
    ]
    assert counts[1] > counts[0] + 8


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_tuning_ranks_as_predictions_do_where_some_texts_are_long(predictor, world, pooling, neighbours):
    texts = [lengthen(text) if row % 3 else text for row, text in enumerate(world.test.texts)]
    validation = Split(texts, world.test.uids, world.test.relevance)
    trial = Trial(predictor.model, world.train, validation, metric="P@3")
    choice = replace(predictor.choose(neighbours=neighbours), windows=pooling)
    before = trial.rank(replace(choice, windows="first"), 5)
    np.testing.assert_array_equal(trial.rank(choice, 5).ids, predictor.variant(choice).top(texts, 5).ids)
    np.testing.assert_array_equal(trial.rank(replace(choice, windows="first"), 5).ids, before.ids)


def test_a_pooling_is_tried_on_a_bounded_number_of_long_texts(predictor, world, monkeypatch):
    tried = []

    def encode(model, texts, choice, windows):
        tried.append(list(texts))
        return encode_texts(model, texts, choice, windows=windows)

    monkeypatch.setattr(tuning, "_TRIED_LONG_TEXTS", 4)
    monkeypatch.setattr(tuning, "encode_texts", encode)
    texts = [lengthen(text) for text in world.test.texts]
    trial = Trial(predictor.model, world.train, Split(texts, world.test.uids, world.test.relevance), metric="P@3")
    trial.choose_windows(predictor.choose(neighbours=False))
    long_texts = [texts[row] for row in trial._long_texts]
    assert len(long_texts) > 8
    assert tried == [long_texts[:: -(-len(long_texts) // 4)]] * 2
