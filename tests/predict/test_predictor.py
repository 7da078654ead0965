"""Predictions: order, ids, odd texts; labels that come and go without training; the folder they are loaded from."""

import itertools
import shutil
import threading
import time
import weakref

import numpy as np
import pytest

from dexter import Prediction, Predictor
from dexter.errors import ModelError, UsageError
from dexter.predict.predictor import _BLOCK_TEXTS, _blocks
from dexter.predict.scoring import SCORING_FILE
from tests.conftest import WORDS


@pytest.fixture
def predictor(trained):
    return Predictor.load(trained)


def ids(ranked):
    return [[label.id for label in labels] for labels in ranked]


def test_best_first_with_id_text_and_score(predictor, world):
    ranked = predictor.predict(world.test.texts, k=4)
    assert len(ranked) == len(world.test)
    texts = dict(zip(world.label_ids, world.label_texts, strict=True))
    for labels in ranked:
        assert len(labels) == len({label.id for label in labels}) == 4
        assert [label.score for label in labels] == sorted((label.score for label in labels), reverse=True)
        assert all(isinstance(label, Prediction) and label.text == texts[label.id] for label in labels)


def test_a_text_gets_the_same_labels_alone_and_among_others(predictor, world):
    together = predictor.predict(world.test.texts, k=3)
    for row in (0, 7, len(world.test) - 1):
        alone = predictor.predict([world.test.texts[row]], k=3)[0]
        assert ids([alone]) == ids([together[row]])
        np.testing.assert_allclose([a.score for a in alone], [b.score for b in together[row]], atol=1e-6)


def test_more_than_all_labels_are_all_labels(predictor, world):
    [labels] = predictor.predict(["river"], k=10**6)
    assert sorted(label.id for label in labels) == sorted(world.label_ids)


@pytest.mark.parametrize("text", ["", " ", "\n", "zzz unknown", "\x00\x01", "\ud800", "🙂" * 1000, "a" * 10**6, "ا‏ب"])
def test_odd_texts_get_labels_with_finite_scores(predictor, text):
    [labels] = predictor.predict([text], k=3)
    assert len(labels) == 3
    assert np.isfinite([label.score for label in labels]).all()


def test_no_texts_no_predictions(predictor):
    assert predictor.predict([]) == []
    assert list(predictor.predict_stream([])) == []


def test_ten_megabytes_are_cut_and_fast(predictor):
    text = "violin copper " * 750_000
    spent, found = [], []
    for each in (text[:100_000], text):
        started = time.process_time()
        found.append(predictor.predict([each], k=1)[0])
        spent.append(time.process_time() - started)
    assert found[0] == found[1]
    assert spent[1] < 10 * spent[0] + 0.1, "a hundred times as long, and not read"


def test_wrong_arguments_are_named(predictor):
    with pytest.raises(UsageError, match=r"predict\(\[text\]\)"):
        predictor.predict("text")
    with pytest.raises(UsageError, match="k must be 1 or more"):
        predictor.predict(["text"], k=0)
    with pytest.raises(UsageError, match=r"remove_labels\(\[id\]\)"):
        predictor.remove_labels("L1")


def test_a_stream_keeps_order_and_reads_no_further_than_a_block(predictor, world):
    taken = []

    def texts():
        for number in itertools.count():
            taken.append(number)
            yield world.test.texts[number % len(world.test)]

    stream = predictor.predict_stream(texts(), k=2)
    ranked = list(itertools.islice(stream, _BLOCK_TEXTS + 10))
    assert len(taken) <= 2 * _BLOCK_TEXTS
    expected = ids(predictor.predict(world.test.texts, k=2))
    assert ids(ranked) == [expected[number % len(world.test)] for number in range(len(ranked))]


def test_long_texts_make_small_blocks():
    sizes = [len(block) for block in _blocks(iter([("x" * 2**23, None)] * 5))]
    assert sizes == [2, 2, 1]
    assert [len(block) for block in _blocks([("x", "uid")] * (_BLOCK_TEXTS + 1))] == [_BLOCK_TEXTS, 1]


def new_pair(world):
    """Two words that no label joins yet."""
    pairs = (f"{a} {b}" for a, b in itertools.combinations(WORDS, 2))
    return next(pair for pair in pairs if pair not in world.label_texts)


def test_a_new_label_is_predicted_at_once(predictor, world):
    pair = new_pair(world)
    question = f"some very old {pair}"
    before = predictor.predict([question], k=3)[0]
    predictor.add_labels([("new", pair)])
    after = predictor.predict([question], k=4)[0]
    assert (after[0].id, after[0].text) == ("new", pair)
    assert ids([[label for label in after if label.id != "new"]]) == ids([before])


def test_a_new_label_has_the_prior_of_a_rare_one(predictor, world):
    priors = predictor.model.head.prior_L
    predictor.add_labels([("a", "river stone"), ("b", "cloud")])
    new = predictor.model.head.prior_L
    assert len(new) == len(priors) + 2
    assert priors.min() <= new[-1] == new[-2] <= np.median(priors)


def test_removed_labels_are_gone_and_the_others_stay(predictor, world):
    before = predictor.predict(world.test.texts, k=len(world.label_ids))
    predictor.remove_labels(["L3", "L0", "L36"])
    after = predictor.predict(world.test.texts, k=len(world.label_ids))
    assert ids(after) == [[i for i in row if i not in {"L3", "L0", "L36"}] for row in ids(before)]


def test_added_and_removed_again_is_as_before(predictor, world):
    before = predictor.predict(world.test.texts, k=5)
    predictor.add_labels([("x", "river"), ("y", "stone")])
    predictor.remove_labels(["x", "y"])
    assert predictor.predict(world.test.texts, k=5) == before
    predictor.remove_labels(["L4"])
    predictor.add_labels([("L4", world.label_texts[4])], reuse_ids=True)
    assert "L4" in ids(predictor.predict([world.label_texts[4]], k=1))[0]


def test_nothing_to_add_or_remove_is_fine(predictor, world):
    predictor.add_labels([])
    predictor.remove_labels([])
    assert list(predictor.labels.ids) == list(world.label_ids)


BAD_LABELS = {
    "in use": [("fine", "x"), ("L1", "y")],
    "twice": [("fine", "x"), ("fine", "y")],
    "empty id": [("fine", "x"), ("", "y")],
    "id of another type": [("fine", "x"), (3, "y")],
    "text of another type": [("fine", "x"), ("z", None)],
    "half a character": [("fine", "x"), ("z", "\ud800")],
}


@pytest.mark.parametrize("kind", BAD_LABELS)
def test_one_bad_label_and_none_is_added(predictor, world, kind):
    before = predictor.predict(world.test.texts, k=5)
    with pytest.raises(UsageError):
        predictor.add_labels(BAD_LABELS[kind])
    assert list(predictor.labels.ids) == list(world.label_ids)
    assert predictor.predict(world.test.texts, k=5) == before


def test_one_unknown_id_and_none_is_removed(predictor, world):
    with pytest.raises(UsageError, match="no label has the id 'nobody'"):
        predictor.remove_labels(["L1", "nobody"])
    with pytest.raises(UsageError, match="at least one label"):
        predictor.remove_labels(list(world.label_ids))
    assert list(predictor.labels.ids) == list(world.label_ids)


def test_predictions_never_mix_old_and_new_labels(predictor, world):
    """One thread changes the labels while another predicts: every label has its own text."""
    failures, done = [], threading.Event()

    def predict():
        while not done.is_set():
            for label in predictor.predict(["river stone cloud"], k=50)[0]:
                if label.id.startswith("n") and label.text != f"text of {label.id}":
                    failures.append(label)

    thread = threading.Thread(target=predict)
    thread.start()
    for number in range(30):
        predictor.add_labels([(f"n{number}", f"text of n{number}")])
        predictor.remove_labels([f"n{number}" if number % 2 else f"L{number}"])
    done.set()
    thread.join()
    assert not failures


def test_a_run_folder_and_its_model_folder_are_the_same(trained, world):
    run, model = Predictor.load(trained), Predictor.load(trained / "model")
    assert run.fingerprint == model.fingerprint
    assert run.predict(world.test.texts[:5]) == model.predict(world.test.texts[:5])


def test_saved_then_loaded_predicts_the_same(predictor, world, tmp_path):
    predictor.add_labels([("new", "river stone")])
    predictor.model.save(tmp_path / "model", records={SCORING_FILE: predictor.scoring.to_json()})
    assert Predictor.load(tmp_path).predict(world.test.texts, k=7) == predictor.predict(world.test.texts, k=7)


def test_what_is_not_a_run_says_what_to_do(trained, tmp_path):
    with pytest.raises(ModelError, match="no such run folder: train one with"):
        Predictor.load(tmp_path / "missing")
    with pytest.raises(ModelError, match="not a run folder: give one that"):
        Predictor.load(tmp_path)
    shutil.copy(trained / "config.toml", tmp_path)
    with pytest.raises(ModelError, match="the run has no model yet"):
        Predictor.load(tmp_path)


def test_a_predictor_that_is_let_go_is_gone(trained):
    """Its memory is that of all label vectors: it must not wait for the garbage collector."""
    predictor = Predictor.load(trained)
    predictor.add_labels([("x", "river")])
    left = weakref.ref(predictor.model)
    del predictor
    assert left() is None


def test_a_variant_ranks_as_a_predictor_of_its_own_and_shares_what_is_the_same(trained, world):
    texts, predictor = world.test.texts[:20], Predictor.load(trained)
    assert predictor.model.has_prior
    turned = predictor.variant(predictor.choose(dial=0.3))
    assert turned.index is predictor.index
    assert turned.predict(texts) == Predictor.load(trained, dial=0.3).predict(texts)
    for head in predictor.model.heads:
        assert predictor.variant(predictor.choose(head=head)).predict(texts) == Predictor.load(
            trained, head=head
        ).predict(texts)
    assert predictor.variant().predict(texts) == predictor.predict(texts)
    predictor.add_labels([("new", texts[0])])
    assert "new" in predictor.variant(predictor.choose(dial=0.3)).labels.ids and "new" not in turned.labels.ids
    turned.remove_labels([turned.labels.ids[0]])
    assert len(turned.index.vectors_LD) == len(turned.labels.ids) == world.num_labels - 1
