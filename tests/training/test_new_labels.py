"""What is learned about labels that are added later: their prior, and how examples make them."""

import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
from starlette.testclient import TestClient

import dexter
from dexter import Predictor
from dexter.cli import main as cli
from dexter.errors import UsageError
from dexter.evaluation.unseen import without_labels
from dexter.model.model import Model
from dexter.serving.app import create_app
from dexter.training.new_labels import choose_scores, largest_offset
from tests.conftest import SMALL, make_world

NEW = 20
"""Number of labels that training does not see; the world has 100."""


@pytest.fixture(scope="module")
def data():
    return make_world(num_train=1200, num_test=200, num_labels=100)


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A run without the last labels; its encoder never saw them, but all of their words."""
    out = tmp_path_factory.mktemp("new") / "run"
    held_out = np.arange(data.num_labels) >= data.num_labels - NEW
    settings = {**SMALL, "train.epochs": 4, "validation.fraction": 0.3}
    dexter.train(without_labels(data, held_out), recipe="dexter", out=out, overrides=settings)
    return out


def add_new(predictor, data, **more):
    pairs = list(zip(data.label_ids, data.label_texts, strict=True))[-NEW:]
    predictor.add_labels(pairs, **more)
    return predictor


def recall(predictor, data, kind):
    top = predictor.top(data.test.texts, 5).ids
    relevant = data.test.relevance.toarray()[:, kind] > 0
    hits = np.array([np.isin(np.arange(data.num_labels)[kind], row) for row in top])
    return float((relevant & hits).sum() / relevant.sum())


def test_the_largest_offset_equals_a_slow_loop():
    generator = np.random.default_rng(0)
    margins = generator.standard_normal((60, 17), dtype=np.float32) - 2
    relevant = generator.random((60, 17)) < 1 / (1 + np.exp(-2 * margins - 2))
    offsets = []
    for right in (0.05, 0.2, 0.3):
        allowed = []
        for offset in -margins.ravel():
            hits = relevant[margins >= -offset]
            if hits.sum() >= 20 and hits.sum() * (1 - right) >= 2 * right * (~hits).sum():
                allowed.append(float(offset))
        assert largest_offset(margins, relevant, right) == max(allowed)
        offsets.append(max(allowed))
    assert offsets[0] > offsets[1] > 0, "the more often others are right, the less is added"
    assert largest_offset(margins, np.zeros_like(relevant), 0.2) is None


def test_a_learned_prior_finds_no_fewer_new_labels_and_keeps_the_others(run, data):
    loaded = Predictor.load(run)
    assert loaded.model.generator is not None
    plain = loaded.variant(model=replace(loaded.model, generator=None))
    new, known = slice(-NEW, None), slice(-NEW)
    learned, fixed = add_new(loaded, data), add_new(plain, data)
    assert (learned.model.head.prior_L[new] >= fixed.model.head.prior_L[new]).all()
    assert recall(learned, data, new) >= recall(fixed, data, new)
    assert recall(learned, data, known) > recall(fixed, data, known) - 0.02


def test_examples_make_a_label_whose_text_says_nothing(run, data):
    label = data.num_labels - 1
    having = np.flatnonzero(data.train.relevance[:, [label]].toarray())[:5]
    nothing = (data.label_ids[label], "unnamed")
    wanting = np.flatnonzero(data.test.relevance[:, [label]].toarray())
    scores = []
    for examples in ({}, {nothing[0]: [data.train.texts[row] for row in having]}):
        predictor = Predictor.load(run)
        predictor.add_labels([nothing], examples=examples)
        texts = [data.test.texts[row] for row in wanting]
        found = predictor.predict(texts, 1, only=[nothing[0]])
        scores.append(np.mean([ranked[0].score for ranked in found]))
    assert scores[1] > scores[0]


def test_examples_reach_the_model_from_the_command_line_and_over_http(run, data, tmp_path, monkeypatch):
    folder, examples = tmp_path / "run", data.train.texts[:3]
    shutil.copytree(run, folder)
    expected = Predictor.load(run)
    expected.add_labels([("bare", "unnamed"), ("x", "unnamed")], examples={"x": examples})
    bare, made = expected.model.representations_LD[-2:]
    assert not np.allclose(bare, made, atol=1e-3)
    options = [part for text in examples for part in ("--example", text)]
    monkeypatch.setattr(sys, "argv", ["dexter", "labels", "add", str(folder), "x", "unnamed", *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    np.testing.assert_allclose(Predictor.load(folder).model.representations_LD[-1], made, atol=1e-6)
    predictor = Predictor.load(run)
    with TestClient(create_app(predictor), base_url="http://localhost") as client:
        label = {"id": "x", "text": "unnamed", "examples": examples}
        assert client.post("/v1/labels", json={"labels": [label]}).status_code == 200
        np.testing.assert_allclose(predictor.model.representations_LD[-1], made, atol=1e-6)


def test_examples_are_refused_where_they_cannot_be_used(run, trained, data, tmp_path):
    predictor = Predictor.load(run)
    with pytest.raises(UsageError, match="'other', which is not added"):
        predictor.add_labels([("x", "some text")], examples={"other": ["a text"]})
    with pytest.raises(UsageError, match="a list of texts"):
        predictor.add_labels([("x", "some text")], examples={"x": "a text"})
    older = replace(predictor.model, generator=None)
    older.save(tmp_path / "model")
    assert Model.load(tmp_path / "model").generator is None
    plain = predictor.variant(model=older)
    with pytest.raises(UsageError, match="has not learned"):
        plain.add_labels([("x", "some text")], examples={"x": ["a text"]})
    assert "x" not in predictor.labels.ids


def test_words_of_a_new_label_speak_for_it_in_one_text_and_in_many(run, data):
    """The share of a label's words that a text has, squared and weighed, is a part of its score."""
    loaded = Predictor.load(run)
    generator = replace(loaded.model.generator, word_weight=6.0)
    predictor = loaded.variant(model=replace(loaded.model, generator=generator))
    silent = loaded.variant(model=replace(loaded.model, generator=replace(generator, word_weight=0.0)))
    first, second = (each.lower() for each in data.label_texts[0].split())
    new = [("both", f"{first} {second}"), ("half", f"{first} zyzzyva"), ("none", "zyzzyva xylem")]
    for each in (predictor, silent):
        each.add_labels(new)
    text, k = f"a {second} and a {first}", len(predictor.labels.ids)
    with_words, without = ({p.id: p.score for p in each.predict([text], k=k)[0]} for each in (predictor, silent))
    temperature = loaded.model.head.temperature * (2 if loaded.choice.head == "unified" else 1)
    for label, share in (("both", 1.0), ("half", 0.5), ("none", 0.0)):
        assert with_words[label] - without[label] == pytest.approx(6.0 * temperature * share**2, abs=1e-5), label
    assert all(with_words[label] == pytest.approx(without[label], abs=1e-5) for label in data.label_ids[:20])
    many = predictor.predict([text, "unrelated", text], k=k)
    for ranked in (many[0], many[2]):
        assert {p.id: p.score for p in ranked} == pytest.approx(with_words, abs=1e-5)
    explained = predictor.explain(text, "both")
    assert explained.parts["words of the label"] == pytest.approx(6.0 * temperature)
    assert explained.score == pytest.approx(with_words["both"], abs=1e-5)


def test_words_count_only_where_hidden_labels_are_right_because_of_them():
    generator = np.random.default_rng(0)
    relevant = generator.random((200, 30)) < 0.1
    margins = generator.standard_normal((200, 30), dtype=np.float32) - 4
    telling = (relevant & (generator.random((200, 30)) < 0.7)).astype(np.float32)
    blind = generator.permutation(telling.ravel()).reshape(telling.shape)
    offset, weight = choose_scores(margins, telling, relevant, 0.3)
    found = margins + weight * telling + offset >= 0
    assert weight > 0 and (relevant & found).sum() > 200
    assert relevant[found].mean() / (1 - relevant[found].mean()) >= 2 * 0.3 / 0.7
    assert choose_scores(margins, blind, relevant, 0.3) == (0.0, 0.0)
