"""Explanations: parts that add up to the score, words that carry it, training queries that have the label."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import dexter
from dexter import Predictor
from dexter.errors import UsageError
from dexter.model.lexical import LexicalIndex
from dexter.predict.explain import explain_scores
from dexter.predict.neighbours import DEFAULT_LEXICAL_VOTES
from dexter.types import band_of
from tests.cli.test_main import error_line, run  # noqa: F401 - fixtures
from tests.conftest import FILLER, SMALL


@pytest.fixture(scope="module")
def unified(world, tmp_path_factory):
    """A run with a classifier, priors and a training_queries."""
    out = tmp_path_factory.mktemp("explained") / "run"
    settings = {"head.classifier": True, "encoder.normalize": False, "head.projection": 16}
    dexter.train(world, recipe="dexter", out=out, overrides={**SMALL, **settings})
    return out


def test_word_weights_are_what_is_lost_without_the_word():
    seen = []

    def count_letters(texts):
        seen.extend(texts)
        vowels = [[sum(letter in "aeiou" for letter in text)] for text in texts]
        return {"vowels": np.array(vowels, dtype=np.float32), "ones": np.ones((len(texts), 1), dtype=np.float32)}

    [parts], [words] = explain_scores("Über c++, don't: read-only x.y", 1, count_letters)
    assert parts == {"vowels": 5.0, "ones": 1.0}
    assert [word.text for word in words] == ["Über", "c++", "don't", "read-only", "x.y"]
    assert [word.weight for word in words] == [1, 0, 1, 3, 0]
    assert all("Über c++, don't: read-only x.y"[word.start : word.end] == word.text for word in words)
    assert len(seen) == 6 and seen[2] == "Über , don't: read-only x.y"


@pytest.mark.parametrize(
    "options", [{"head": "encoder"}, {"head": "classifier"}, {}, {"dial": 0.3}, {"neighbours": True}]
)
def test_parts_add_up_to_the_predicted_score(unified, world, options):
    predictor = Predictor.load(unified, **options)
    for text in world.test.texts[:5]:
        predicted = predictor.predict([text], k=4)[0]
        for label, explained in zip(predicted, predictor.explain_labels(text, [p.id for p in predicted]), strict=True):
            assert (explained.id, explained.text) == (label.id, label.text)
            assert explained.score == pytest.approx(label.score, abs=1e-5)
            assert sum(explained.parts.values()) == pytest.approx(label.score, abs=1e-5)
    names = {
        "encoder": {"encoder", "encoder prior"},
        "classifier": {"classifier", "classifier prior"},
    }.get(predictor.choice.head, {"encoder", "encoder prior", "classifier", "classifier prior"})
    votes = {"neighbours": predictor.choice.votes, "neighbours by words": predictor.choice.lexical_votes}
    assert set(explained.parts) == names | {name for name, settings in votes.items() if settings is not None}


def test_a_model_without_prior_and_its_frequency(world, tmp_path):
    dexter.train(world, recipe="dexml", out=tmp_path / "run", overrides={**SMALL, "train.epochs": 1})
    for dial, names in ((None, {"encoder"}), (0.5, {"encoder", "frequency"})):
        predictor = Predictor.load(tmp_path / "run", dial=dial, neighbours=False)
        label = predictor.predict(["river stone"], k=1)[0][0]
        explained = predictor.explain("river stone", label.id)
        assert set(explained.parts) == names
        assert explained.score == pytest.approx(label.score, abs=1e-5)


def test_the_words_of_the_label_carry_it(unified, world):
    predictor = Predictor.load(unified, head="encoder", neighbours=False)
    hits = 0
    for row in range(10):
        text = f"the {world.label_texts[row]} of some"
        explained = predictor.explain(text, world.label_ids[row])
        strongest = sorted(explained.words, key=lambda word: -word.weight)[:2]
        hits += len({word.text for word in strongest} - set(FILLER))
        without = text[: strongest[0].start] + text[strongest[0].end :]
        lost = explained.score - predictor.explain(without, world.label_ids[row]).score
        assert lost == pytest.approx(strongest[0].weight, abs=1e-5)
    assert hits >= 18


def test_training_queries_that_have_the_label(unified, world):
    predictor = Predictor.load(unified)
    predictor = predictor.variant(replace(predictor.choice, lexical_votes=None))
    explained = predictor.explain("river stone", "L4", num_neighbours=2)
    assert len(explained.neighbours) == 2
    assert explained.neighbours[0].similarity >= explained.neighbours[1].similarity
    assert all("L4" in neighbour.labels for neighbour in explained.neighbours)
    assert explained.count == int(predictor.labels.counts[4]) and explained.band == band_of(explained.count)


def test_training_queries_that_voted_by_words_follow(unified):
    plain = Predictor.load(unified)
    kept = plain.model.training_queries
    kept = replace(kept, lexical=LexicalIndex.of([kept.texts[row] for row in range(len(kept))]))
    choice = replace(plain.choice, lexical_votes=DEFAULT_LEXICAL_VOTES)
    predictor = Predictor(replace(plain.model, training_queries=kept), choice)
    text = kept.texts[int(kept.queries_of(4)[-1])]
    explained = predictor.explain(text, "L4", num_neighbours=3)
    by_words = [neighbour for neighbour in explained.neighbours if neighbour.by == "words"]
    assert [neighbour.by for neighbour in explained.neighbours] == ["vectors"] * 3 + ["words"] * len(by_words)
    assert len({neighbour.id for neighbour in explained.neighbours}) == len(explained.neighbours)
    assert all("L4" in neighbour.labels and 0 < neighbour.similarity <= 1.001 for neighbour in by_words)
    assert explained.parts["neighbours by words"] > 0


def test_a_label_that_was_added_has_no_training_queries(unified):
    predictor = Predictor.load(unified)
    predictor.add_labels([("new", "river stone")])
    explained = predictor.explain("some river stone", "new")
    assert (explained.neighbours, explained.count, explained.band) == ([], 0, "unseen")


@pytest.mark.parametrize("text", ["", "\n", "...", "zzz", "a" * 10**6, "river " * 10**5, "🙂 \ud800"])
def test_odd_texts(unified, text):
    explained = Predictor.load(unified).explain(text, "L1")
    assert np.isfinite([explained.score, *(word.weight for word in explained.words)]).all()
    assert len(explained.words) <= 256


def test_an_unknown_label(unified):
    with pytest.raises(UsageError, match="no label has the id 'nobody'"):
        Predictor.load(unified).explain("river", "nobody")


@pytest.mark.parametrize(("count", "band"), [(0, "unseen"), (1, "tail"), (9, "tail"), (10, "torso"), (101, "frequent")])
def test_bands(count, band):
    assert band_of(count) == band


def test_a_model_without_training_queries(unified, tmp_path):
    from dexter.files import write_manifest

    place = shutil.copytree(unified, tmp_path / "run")
    (place / "model" / "dexter" / "training_queries.safetensors").unlink()
    write_manifest(place / "model")
    assert Predictor.load(place, neighbours=False).explain("river", "L1").neighbours == []


def test_the_command_line(run, unified):  # noqa: F811
    code, shown, _ = run("predict", unified, "some old river stone", "-k", 2, "--explain")
    assert code == 0
    assert shown.count("\n           = +") + shown.count("\n           = -") == 2
    assert shown.count("           words: ") == 2 and "training queries (" in shown
    code, shown, _ = run("predict", unified, "some old river stone", "-k", 2, "--explain", "--format", "jsonl")
    labels = json.loads(shown)["labels"]
    assert all(label["explanation"]["score"] == pytest.approx(label["score"], abs=1e-5) for label in labels)
    assert {"start", "end", "weight", "text"} == set(labels[0]["explanation"]["words"][0])
    assert "--explain" in error_line(run("predict", unified, "x", "--explain", "--format", "tsv"), 2)
