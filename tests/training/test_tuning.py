"""What is chosen on validation: kept with the model, no worse there than as trained, refused where it cannot be."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

import dexter
from dexter import Predictor
from dexter.config import load_config
from dexter.data import load_dataset
from dexter.errors import ModelError, UsageError
from dexter.evaluation.runs import dial_curve, predict_columns
from dexter.index import ExactIndex
from dexter.metrics import Ratio, score
from dexter.model.lexical import LexicalIndex
from dexter.model.model import Model
from dexter.predict.calibration import FITTED_PLACES
from dexter.predict.neighbours import DEFAULT_LEXICAL_VOTES, DEFAULT_VOTES, VoteSettings
from dexter.predict.rank import RankingChoice
from dexter.predict.scoring import Scoring, read_scoring
from dexter.training.presets import resolve_presets
from dexter.training.run import make_splits
from dexter.training.trainer import Trainer
from dexter.training.tuning import Trial, choose_scoring, drop_unused, keep_training_queries
from tests.conftest import SMALL, make_world


@pytest.fixture
def run(trained, tmp_path):
    """A copy of a finished run that may be changed."""
    return shutil.copytree(trained, tmp_path / "run")


def splits(run, world):
    return make_splits(world, load_config(run / "config.toml"))


def test_training_ends_with_training_queries_and_a_choice(trained, world):
    train, _ = splits(trained, world)
    predictor = Predictor.load(trained)
    model, scoring = predictor.model, predictor.scoring
    assert len(model.training_queries) == len(train)
    np.testing.assert_array_equal(model.training_queries.relevance.toarray() > 0, train.relevance.toarray() > 0)
    assert scoring.metric == "nDCG@5"
    assert scoring.validation["tuned"]["nDCG@5"] >= scoring.validation["model"]["nDCG@5"]


@pytest.mark.parametrize("metric", ["P@1", "PSP@3", "nDCG@4"])
def test_what_is_stored_is_what_predictions_give(run, world, metric):
    scoring = dexter.tune(run, world, metric=metric)
    train, validation = splits(run, world)
    top_ids = Predictor.load(run).top(validation.texts, 5).ids
    found = score(top_ids, validation.relevance, train.relevance, ks=(1, 3, 4))
    assert found[metric] == pytest.approx(scoring.validation["tuned"][metric], abs=1e-9)
    assert scoring == Predictor.load(run).scoring
    plain = Predictor.load(run, neighbours=False, dial=1.0).top(validation.texts, 5).ids
    before = score(plain, validation.relevance, train.relevance, ks=(1, 3, 4))
    assert before[metric] == pytest.approx(scoring.validation["model"][metric], abs=1e-9)
    assert found[metric] >= before[metric]


def test_tuning_twice_is_tuning_once(run, world):
    assert dexter.tune(run, world, metric="PSP@5") == dexter.tune(run, world, metric="PSP@5")


def test_tuning_leaves_changed_labels_and_the_models_files_alone(run, world):
    before = Predictor.load(run, persistent=True)
    before.add_labels([("new", "river stone")])
    dexter.tune(run, world, metric="PSP@5")
    after = Predictor.load(run)
    assert after.fingerprint == before.fingerprint
    assert list(after.labels.ids) == [*world.label_ids, "new"]
    assert after.scoring.metric == "PSP@5"


def test_a_damaged_or_foreign_choice_is_refused(run, world):
    dexter.tune(run, world)
    path = run / "model" / "tuned.json"
    good = json.loads(path.read_text())
    for change in ({"sha256": "0"}, {"model": "0"}, {"scoring": 3}, {"scoring": {**good["scoring"], "dial": 0.25}}):
        path.write_text(json.dumps(good | change))
        with pytest.raises(ModelError, match=r"tuned\.json"):
            Predictor.load(run)
    path.unlink()
    assert Predictor.load(run).scoring.metric == "nDCG@5"


def test_a_trial_ranks_as_the_predictor_does(trained, world):
    train, validation = splits(trained, world)
    predictor = Predictor.load(trained, dial=0.4, neighbours=True)
    trial = Trial(predictor.model, train, validation, metric="P@1")
    found = trial.rank(predictor.choice, 6)
    np.testing.assert_array_equal(found.ids, predictor.top(validation.texts, 6).ids)


def test_a_run_is_tuned_on_what_its_validation_found(world, tmp_path, monkeypatch):
    given = []

    def choose(trial, **settings):
        fresh = Trial(trial.model, trainer.train_split, trial.split, metric=trial.metric)
        as_trained = RankingChoice(head=trial.model.default_head, dial=trial.model.default_dial)
        given.extend(each.rank(as_trained, FITTED_PLACES) for each in (trial, fresh))
        return choose_scoring(trial, **settings)

    monkeypatch.setattr("dexter.training.trainer.choose_scoring", choose)
    config = resolve_presets(load_config("dexter", SMALL), world)
    trainer = Trainer(config, world, tmp_path)
    trainer.run()
    assert given[0].ids is not given[1].ids
    np.testing.assert_allclose(given[0].scores, given[1].scores, atol=1e-5)
    assert (given[0].ids == given[1].ids).mean() > 0.99  # labels with equal scores may change places


def test_heads_that_are_only_tried_are_ranked_among_what_was_found(world, tmp_path, monkeypatch):
    """The best places by another head are those of exact search while the model as trained found enough labels."""
    dexter.train(world, out=tmp_path / "run", overrides=SMALL)
    train, validation = splits(tmp_path / "run", world)
    model = Predictor.load(tmp_path / "run").model
    as_trained = RankingChoice(head="unified", dial=model.default_dial)
    exact = Trial(model, train, validation, metric="P@3")
    trial = Trial(model, train, validation, metric="P@3", found=exact.rank(as_trained, world.num_labels))
    searched = []
    monkeypatch.setattr(ExactIndex, "search", lambda *arguments, **settings: searched.append(arguments))
    for head in ("encoder", "classifier"):
        found = trial.rank(replace(as_trained, head=head), 3)
        queries = model.search_vectors(trial.representations_ND, head=head, dial=as_trained.dial)
        scores = queries @ model.label_vectors(head=head, dial=as_trained.dial).T
        np.testing.assert_allclose(found.scores, -np.sort(-scores)[:, :3], rtol=1e-5)
    assert not searched
    monkeypatch.undo()
    deep = trial.rank(replace(as_trained, head="encoder"), 20)
    np.testing.assert_array_equal(deep.ids, exact.rank(replace(as_trained, head="encoder"), 20).ids)


AS_TRAINED = RankingChoice(head="encoder", dial=1.0)
VOTING = replace(AS_TRAINED, votes=DEFAULT_VOTES)


def scored(gains):
    """A stand-in for scoring a choice: votes gain so much on each query, compared with the model as trained."""
    gains = np.array(gains, dtype=np.float64)

    def score(trial, choice):
        hits = gains if choice.votes is not None and choice.lexical_votes is None else np.zeros_like(gains)
        names = [trial.metric, *(f"{name}@{k}" for name in ("P", "PSP") for k in (1, 3, 5))]
        return dict.fromkeys(names, Ratio(hits, np.ones_like(gains)))

    return score


@pytest.mark.parametrize(
    ("gains", "is_better"),
    [
        ([1] * 6 + [0] * 30, True),  # 6 is more than 0.5 x 2.24
        ([1] * 20 + [-1] * 16, True),  # 4 is more than 0.5 x 5.96
        ([1] * 18 + [-1] * 16 + [0] * 2, False),  # 2 is less than 0.5 x 5.82, though better
        ([0] * 36, False),
        ([-1] * 36, False),
    ],
)
def test_a_ranking_is_chosen_only_if_it_is_better_by_more_than_luck(trained, world, monkeypatch, gains, is_better):
    train, validation = splits(trained, world)
    model = Predictor.load(trained).model
    monkeypatch.setattr(Trial, "_score", scored(gains))
    assert Trial(model, train, validation, metric="P@1").is_likely_better(AS_TRAINED, VOTING) == is_better
    scoring = choose_scoring(Trial(model, train, validation, metric="P@1"))
    assert (scoring.choice.votes is not None) == is_better


def test_tuning_finds_the_votes_of_neighbours_where_the_model_alone_is_bad(trained, world):
    train, validation = splits(trained, world)
    model = Predictor.load(trained).model
    shuffled = replace(model, representations_LD=model.representations_LD[::-1])
    scoring = choose_scoring(Trial(shuffled, train, validation, metric="P@1"))
    assert scoring.choice.votes is not None
    assert scoring.validation["tuned"]["P@1"] > scoring.validation["model"]["P@1"] + 10


def test_words_are_kept_only_where_their_votes_pay(trained, world):
    stored = load_file(trained / "model" / "dexter" / "training_queries.safetensors")
    chosen = Predictor.load(trained).scoring.choice
    assert ("words" in stored) == (chosen.lexical_votes is not None)
    train, validation = splits(trained, world)
    model = Predictor.load(trained).model
    shuffled = replace(model, representations_LD=model.representations_LD[::-1].copy())
    kept = model.training_queries
    without_vectors = replace(kept, index=ExactIndex(0.0 * kept.index.vectors_LD))
    for texts, pays in ((train.texts, True), (["zzz"] * len(train), False)):
        kept = replace(without_vectors, lexical=LexicalIndex.of(texts))
        model = replace(shuffled, training_queries=kept)
        scoring = choose_scoring(Trial(model, train, validation, metric="P@1"))
        assert (scoring.choice.lexical_votes is not None) == pays


def test_words_are_weighed_for_labels_only_where_that_pays(trained, world):
    train, validation = splits(trained, world)
    model = Predictor.load(trained).model
    kept = model.training_queries
    for texts in (train.texts, ["zzz"] * len(train)):
        trial = Trial(
            replace(model, training_queries=replace(kept, lexical=LexicalIndex.of(texts))),
            train,
            validation,
            metric="nDCG@5",
        )
        start = replace(AS_TRAINED, votes=DEFAULT_VOTES, lexical_votes=DEFAULT_LEXICAL_VOTES)
        trial.learn_words(start)
        learned = trial.model.training_queries
        assert learned.word_weights.table.any()
        best = trial.add_word_weights(start)
        assert best.word_weight > 0
        # What is remembered for other weights of the same votes is what a new trial computes.
        again = Trial(replace(model, training_queries=learned), train, validation, metric="nDCG@5")
        again.add_word_weights(start)
        assert again.metrics(best) == trial.metrics(best)
        for choice in (start, best):
            left = drop_unused(learned, choice).word_weights
            assert (left is None) == (choice.word_weight == 0)
    assert drop_unused(learned, None).word_weights is None
    plain = Trial(model, train, validation, metric="nDCG@5")
    plain.learn_words(replace(start, lexical_votes=None))
    assert plain.model.training_queries.word_weights is None
    assert plain.add_word_weights(AS_TRAINED) == AS_TRAINED


@pytest.mark.parametrize("maximum", [1000, 50, 1])
def test_of_many_training_queries_only_the_words_are_kept(trained, world, maximum):
    config = load_config(trained / "config.toml", {"scoring.neighbours": maximum})
    train, validation = make_splits(world, config)
    model = Model.load(trained / "model")
    kept = keep_training_queries(model, train, model.encoder.tokenize(train.texts, side="query"), config)
    if maximum == 1:
        assert kept is None
        return
    assert (kept.index is None) == (maximum == 50)
    assert len(kept) == len(train) and kept.lexical is not None
    voting = replace(AS_TRAINED, lexical_votes=DEFAULT_LEXICAL_VOTES)
    assert drop_unused(kept, voting) is kept
    dropped = drop_unused(kept, AS_TRAINED)
    assert dropped is None if maximum == 50 else dropped.lexical is None
    if maximum == 50:
        model = replace(model, training_queries=kept)
        scoring = choose_scoring(Trial(model, train, validation, metric="P@1"))
        assert scoring.choice.votes is None
        predictor = Predictor(model, voting)
        assert predictor.choose(neighbours=True).lexical_votes is not None
        [near] = predictor.nearest([train.texts[7]], k=3)
        assert near[0].id == train.uids[7] and {neighbour.by for neighbour in near} == {"words"}
        label = world.label_ids[train.relevance[7].indices[0]]
        assert {n.by for n in predictor.explain(train.texts[7], label).neighbours} == {"words"}


def test_no_training_queries_are_kept_on_demand(world, tmp_path):
    run = dexter.train(world, out=tmp_path / "run", overrides={**SMALL, "train.epochs": 1, "scoring.neighbours": 0})
    assert Predictor.load(run.path).model.training_queries is None
    assert not (run.path / "model" / "dexter" / "training_queries.safetensors").exists()


def test_label_texts_that_were_trained_as_queries_do_not_vote(trained, world):
    config = load_config(trained / "config.toml", {"batch.label_queries": True})
    train, _ = make_splits(world, config)
    model = Model.load(trained / "model")
    kept = keep_training_queries(model, train, model.encoder.tokenize(train.texts, side="query"), config)
    assert len(kept) == len(train) - world.num_labels


def test_what_cannot_be_tuned_says_why(run, world, tmp_path):
    with pytest.raises(ModelError, match="no such run folder"):
        dexter.tune(tmp_path / "nowhere", world)
    with pytest.raises(UsageError, match="other data"):
        dexter.tune(run, make_world(seed=3))
    with pytest.raises(UsageError, match=r"such as P@1"):
        dexter.tune(run, world, metric="accuracy")


def test_a_damaged_scoring_is_refused(tmp_path):
    votes = VoteSettings(neighbours=3, temperature=0.1, weight=2.0)
    scoring = Scoring(metric="P@1", choice=RankingChoice(head="encoder", dial=0.5, votes=votes))
    path = tmp_path / "dexter" / "scoring.json"
    path.parent.mkdir()
    assert read_scoring(tmp_path, fingerprint="") == Scoring()
    path.write_text(json.dumps(scoring.to_json()))
    assert read_scoring(tmp_path, fingerprint="") == scoring
    older = scoring.to_json()
    del older["choice"]["lexical_votes"]  # A run of a version without such votes.
    path.write_text(json.dumps(older))
    assert read_scoring(tmp_path, fingerprint="") == scoring
    choices = ('{"votes": 3}', '{"head": "encoder", "dial": 7, "votes": null}', "[]")
    for content in ("{", "[]", "{}", *(f'{{"choice": {choice}, "calibration": null}}' for choice in choices)):
        path.write_text(content)
        with pytest.raises(ModelError):
            read_scoring(tmp_path, fingerprint="")


def test_propensity_constants_are_those_of_the_data(run, world, tmp_path):
    """PSP of validation in training, of the choice at its end, and of `tune` changes with them; P does not."""
    usual, amazon = world, replace(world, propensity=(0.6, 2.6))
    settings = {**SMALL, "train.epochs": 1}
    first, second = (
        dexter.train(data, recipe="dexml", out=tmp_path / str(number), overrides=settings)
        for number, data in enumerate((usual, amazon))
    )
    assert first.best["P@3"] == second.best["P@3"]
    assert first.best["PSP@3"] != second.best["PSP@3"]
    chosen = [Predictor.load(one.path).scoring.validation["model"] for one in (first, second)]
    assert chosen[0]["P@3"] == chosen[1]["P@3"]
    assert chosen[0]["PSP@3"] != chosen[1]["PSP@3"]
    tuned = [dexter.tune(run, data).validation["model"] for data in (usual, amazon)]
    assert tuned[0]["P@3"] == tuned[1]["P@3"]
    assert tuned[0]["PSP@3"] != tuned[1]["PSP@3"]


def test_a_run_keeps_to_the_fields_it_was_trained_on(world, tmp_path, caplog):
    """The same files read as titles and as full texts are two data sets: to resume and to tune, and to evaluate."""
    folder = tmp_path / "files"
    folder.mkdir()
    labels = [
        {"uid": uid, "title": text, "content": "more"}
        for uid, text in zip(world.label_ids, world.label_texts, strict=True)
    ]
    (folder / "lbl.json").write_text("".join(json.dumps(label) + "\n" for label in labels))
    for name, split in (("trn", world.train), ("tst", world.test)):
        rows = [
            {"uid": uid, "title": text, "content": "more", "target_ind": split.relevance[row].indices.tolist()}
            for row, (uid, text) in enumerate(zip(split.uids, split.texts, strict=True))
        ]
        (folder / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    titles, full = (load_dataset(folder, text_fields=fields) for fields in (["title"], ["title", "content"]))
    out = tmp_path / "run"
    settings = {**SMALL, "train.epochs": 1}
    dexter.train(titles, recipe="dexml", out=out, overrides=settings)
    with pytest.raises(UsageError, match="other data than files read as title,content"):
        dexter.train(full, recipe="dexml", out=out, overrides=settings, resume=True)
    with pytest.raises(UsageError, match="other data than files read as title,content"):
        dexter.tune(out, full)
    dexter.evaluate(out, titles, num_resamples=0)
    assert "the title alone" not in caplog.text
    predictor = Predictor.load(out)
    for evaluate in (
        lambda: dexter.evaluate(out, full, num_resamples=0),
        lambda: dial_curve(predictor, full, dials=[0.0]),
        lambda: predict_columns(predictor, full, full.test, 3),  # as compare does
    ):
        caplog.clear()
        evaluate()
        assert caplog.text.count("texts of the run were the title alone, these are title and content") == 1
