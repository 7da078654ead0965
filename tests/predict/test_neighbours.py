"""Neighbours: votes and blend against a slow loop over all labels, what is stored, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from scipy.sparse import csr_matrix, random

from dexter import Predictor
from dexter.errors import ModelError, UsageError
from dexter.index.clustered import ClusteredIndex
from dexter.index.exact import ExactIndex, search
from dexter.model.lexical import LexicalIndex, split_words
from dexter.model.training_queries import TRAINING_QUERIES_FILE, TrainingQueries
from dexter.model.word_weights import WordWeights
from dexter.predict.neighbours import (
    DEFAULT_LEXICAL_VOTES,
    DEFAULT_VOTES,
    LabelVotes,
    add_votes,
    add_votes_to_one,
    count_votes,
    count_votes_on_one,
    vote_weights,
)
from dexter.predict.rank import RankingChoice, find_voters, vote_parts
from dexter.types import TopK


def randn(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


@pytest.fixture
def training_queries():
    relevance = random(29, 17, density=0.15, format="csr", random_state=0)
    uids, texts = [f"u{row}" for row in range(29)], [f"text {row} é" for row in range(29)]
    return TrainingQueries.of(randn(29, 8), relevance, uids, texts)


def slow_votes(training_queries, nearest, temperature):
    votes = np.zeros((len(nearest.ids), training_queries.relevance.shape[1]))
    for row, (ids, similarities) in enumerate(zip(nearest.ids, nearest.scores, strict=True)):
        weights = np.exp(np.float64(similarities) / temperature) * (similarities > 0)
        for place, weight in zip(ids, weights / weights.sum(), strict=True):
            votes[row] += weight * training_queries.relevance[place].toarray()[0]
    return votes


@pytest.mark.parametrize("neighbours", [1, 7, 29])
def test_votes_equal_a_slow_loop(training_queries, neighbours):
    nearest = training_queries.nearest(randn(5, 8), neighbours)
    found = count_votes(training_queries, nearest.ids, vote_weights(nearest.scores, 0.1)).toarray()
    np.testing.assert_allclose(found, slow_votes(training_queries, nearest, 0.1), atol=1e-5)


def test_a_text_that_is_near_to_nobody_gets_no_votes(training_queries):
    nearest = training_queries.nearest(np.zeros((2, 8), dtype=np.float32), 5)
    assert count_votes(training_queries, nearest.ids, vote_weights(nearest.scores, 0.1)).sum() == 0


@pytest.mark.parametrize("k", [1, 4, 17])
@pytest.mark.parametrize("excluding", [False, True])
@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("more", [0, 3])
def test_adding_votes_equals_scoring_every_label(training_queries, k, excluding, scale, more):
    queries, labels = randn(11, 6), randn(17, 6)
    nearest = training_queries.nearest(randn(11, 8), 6)
    votes = count_votes(training_queries, nearest.ids, vote_weights(nearest.scores, 0.2))
    exclude = random(11, 17, density=0.3, format="csr", random_state=1) if excluding else None
    found = search(queries, labels, k + more, exclude=exclude)
    blended = add_votes(found, scale * votes, queries, labels, k=k, exclude=exclude)
    dense = queries @ labels.T + scale * votes.toarray()
    if exclude is not None:
        dense[exclude.toarray() > 0] = -np.inf
    order = np.argsort(-dense, axis=1, kind="stable")[:, :k]
    scores = np.take_along_axis(dense, order, axis=1)
    np.testing.assert_array_equal(blended.ids, np.where(np.isfinite(scores), order, -1))
    np.testing.assert_allclose(blended.scores, scores, atol=1e-5)


@pytest.mark.parametrize("k", [1, 4, 17])
@pytest.mark.parametrize("excluding", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_one_text_gets_what_it_gets_among_others(training_queries, k, excluding, exact):
    queries, labels = randn(11, 6), randn(17, 6)
    nearest = training_queries.nearest(randn(11, 8), 6)
    votes = 3 * count_votes(training_queries, nearest.ids, vote_weights(nearest.scores, 0.2))
    exclude = random(11, 17, density=0.3, format="csr", random_state=1) if excluding else None
    found = search(queries, labels, k, exclude=exclude)
    together = add_votes(found, votes, queries, labels, exclude=exclude, exact=exact)
    for row in range(11):
        weights = 3 * vote_weights(nearest.scores[[row]], 0.2)[0]
        voted, gains = count_votes_on_one(training_queries, nearest.ids[row], weights)
        np.testing.assert_allclose(gains, votes[[row]].toarray()[0, voted], atol=1e-5)
        allowed = np.full(len(voted), True) if exclude is None else ~np.isin(voted, exclude[[row]].indices)
        one = TopK(found.ids[[row]], found.scores[[row]])
        kept = LabelVotes(voted[allowed], gains[allowed])
        alone = add_votes_to_one(one, kept, queries[row], labels, exact=exact)
        np.testing.assert_array_equal(alone.ids[0], together.ids[row])
        np.testing.assert_allclose(alone.scores[0], together.scores[row], atol=1e-5)


def test_votes_lift_labels_that_an_approximate_index_missed(training_queries):
    queries, labels = np.ones((1, 6), np.float32), np.ones((17, 6), np.float32)
    votes = csr_matrix(([0.01, 0.5], ([0, 0], [3, 5])), shape=(1, 17), dtype=np.float32)
    found = TopK(np.array([[7]]), np.array([[1.0]], dtype=np.float32))  # every label scores 6
    assert add_votes(found, votes, queries, labels, exact=False).ids.tolist() == [[5]]
    first = csr_matrix(([0.01], ([0], [3])), shape=(1, 17), dtype=np.float32)
    assert add_votes(found, first, queries, labels, exact=False).ids.tolist() == [[3]]


def test_no_votes_no_change(training_queries):
    queries, labels = randn(3, 6), randn(17, 6)
    found = search(queries, labels, 5)
    blended = add_votes(found, csr_matrix((3, 17), dtype=np.float32), queries, labels)
    np.testing.assert_array_equal(blended.ids, found.ids)
    np.testing.assert_array_equal(blended.scores, found.scores)


def test_nearest_with_a_label_are_the_nearest_of_those_that_have_it(training_queries):
    text = randn(3, 8)
    everyone = training_queries.nearest(text, 29)
    label = int(training_queries.relevance.indices[0])
    having = set(training_queries.relevance[:, [label]].nonzero()[0])
    found = training_queries.nearest(text, 3, label=label)
    expected = [[row for row in rows if row in having][:3] for rows in everyone.ids]
    assert found.ids.tolist() == expected
    unheard = TrainingQueries.of(randn(2, 8), csr_matrix((2, 4)), ["a", "b"], ["a", "b"])
    assert unheard.nearest(text, 3, label=2).ids.shape == (3, 0)


def test_labels_come_and_go(training_queries):
    wider = training_queries.append_labels(2)
    assert wider.relevance.shape == (29, 19)
    kept = wider.select_labels(np.array([18, 3, 0]))
    np.testing.assert_array_equal(kept.relevance.toarray(), wider.relevance.toarray()[:, [18, 3, 0]])


def test_saved_then_loaded_is_the_same(training_queries, tmp_path):
    training_queries.save(tmp_path)
    again = TrainingQueries.load(tmp_path, num_labels=17, dimension=8, device="cpu")
    np.testing.assert_array_equal(again.index.vectors_LD, training_queries.index.vectors_LD)
    assert (again.relevance != training_queries.relevance).nnz == 0
    assert [again.texts[row] for row in range(29)] == [f"text {row} é" for row in range(29)]
    assert [again.uids[row] for row in (0, 28)] == ["u0", "u28"]
    assert again.lexical is None
    assert TrainingQueries.load(tmp_path / "elsewhere", num_labels=17, dimension=8, device="cpu") is None


def test_many_are_kept_in_clusters(monkeypatch, tmp_path):
    monkeypatch.setattr("dexter.index.clustered.FEWEST", 300)
    monkeypatch.setattr("dexter.index.clustered._READ_PER_PLACE", 301)  # all are read
    relevance = csr_matrix(np.eye(17, dtype=np.float32)[np.arange(301) % 17])
    uids = [f"u{row}" for row in range(301)]
    kept = TrainingQueries.of(randn(301, 8), relevance, uids, uids)
    kept.save(tmp_path)
    scattered = TrainingQueries.load(tmp_path, num_labels=17, dimension=8, device="cpu")
    assert isinstance(scattered.index, ExactIndex), "clusters of scattered vectors are not worthwhile"
    monkeypatch.setattr("dexter.index.clustered._MOST_READ", 1.0)
    kept.save(tmp_path)
    again = TrainingQueries.load(tmp_path, num_labels=17, dimension=8, device="cpu")
    assert isinstance(again.index, ClusteredIndex) and isinstance(kept.index, ExactIndex)
    texts = randn(5, 8)
    exact = again.searched_exactly()
    np.testing.assert_array_equal(exact.nearest(texts, 4).ids, kept.nearest(texts, 4).ids)
    assert kept.searched_exactly() is kept
    for label in (None, 3):
        expected, found = (each.nearest(texts, 4, label=label) for each in (kept, again))
        np.testing.assert_array_equal(found.ids, expected.ids)
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-6)
    rows = again.nearest(texts, 4, label=3).ids
    assert (rows % 17 == 3).all()
    np.testing.assert_array_equal(again.index.vectors_LD, kept.index.vectors_LD)
    smaller = again.select_labels(np.array([3]))
    assert smaller.index is again.index
    tensors = load_file(tmp_path / TRAINING_QUERIES_FILE)
    tensors["cluster_rows"][0] = 301
    save_file(tensors, tmp_path / TRAINING_QUERIES_FILE)
    with pytest.raises(ModelError, match="not the training queries of this model"):
        TrainingQueries.load(tmp_path, num_labels=17, dimension=8, device="cpu")


@pytest.mark.parametrize("with_vectors", [True, False])
def test_words_are_stored_with_the_queries(training_queries, tmp_path, with_vectors):
    lexical = LexicalIndex.of([f"text {row} {row % 3}" for row in range(29)])
    index = training_queries.index if with_vectors else None
    replace(training_queries, index=index, lexical=lexical).save(tmp_path)
    again = TrainingQueries.load(tmp_path, num_labels=17, dimension=8, device="cpu")
    assert (len(again), again.index is not None) == (29, with_vectors)
    np.testing.assert_array_equal(again.lexical.nearest(["text 7"], 3).ids, lexical.nearest(["text 7"], 3).ids)


FORGERIES = {
    "another size": lambda t: t.update(vectors=t["vectors"][:, :3].clone()),
    "not finite": lambda t: t["vectors"].fill_(float("nan")),
    "a label too many": lambda t: t["labels"].fill_(17),
    "fewer texts": lambda t: t.update(text_ends=t["text_ends"][:-1].clone()),
    "nothing about labels": lambda t: t.pop("labels"),
    "neither vectors nor words": lambda t: (t.pop("vectors"), t.pop("words")),
    "words without their queries": lambda t: t.pop("word_queries"),
    "a word of a query too many": lambda t: t["word_queries"].fill_(29),
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_what_does_not_fit_is_refused(training_queries, tmp_path, kind):
    replace(training_queries, lexical=LexicalIndex.of([f"text {row}" for row in range(29)])).save(tmp_path)
    tensors = load_file(tmp_path / TRAINING_QUERIES_FILE)
    FORGERIES[kind](tensors)
    save_file(tensors, tmp_path / TRAINING_QUERIES_FILE)
    with pytest.raises(ModelError, match=r"not the training queries of this model|not finite"):
        TrainingQueries.load(tmp_path, num_labels=17, dimension=8, device="cpu")


def test_a_predictor_with_neighbours_adds_their_votes(trained, world):
    plain = Predictor.load(trained, neighbours=False)
    voting = plain.variant(replace(plain.choice, votes=DEFAULT_VOTES))
    texts = world.test.texts
    model = voting.model
    settings = voting.choice.votes
    nearest = model.training_queries.nearest(model.encode_queries(texts), settings.neighbours)
    votes = count_votes(model.training_queries, nearest.ids, vote_weights(nearest.scores, settings.temperature))
    before = plain.top(texts, len(world.label_ids))
    scores = np.empty(before.ids.shape)
    np.put_along_axis(scores, before.ids, before.scores, axis=1)
    scores += settings.weight * model.head.temperature * votes.toarray()
    found = voting.top(texts, 5)
    np.testing.assert_allclose(found.scores, -np.sort(-scores, axis=1)[:, :5], atol=1e-5)
    assert (found.ids != before.ids[:, :5]).any()


@pytest.fixture
def by_words(trained):
    """A predictor in which the training queries nearest by words vote, whatever was tuned."""
    model = Predictor.load(trained).model
    kept = model.training_queries
    kept = replace(kept, lexical=LexicalIndex.of([kept.texts[row] for row in range(len(kept))]))
    choice = RankingChoice(head="encoder", dial=1.0, votes=DEFAULT_VOTES, lexical_votes=DEFAULT_LEXICAL_VOTES)
    return Predictor(replace(model, training_queries=kept), choice)


def test_votes_by_words_are_added_to_the_others(by_words, world):
    texts, kept = [*world.test.texts, "zzz", ""], by_words.model.training_queries
    without = by_words.variant(replace(by_words.choice, lexical_votes=None)).top(texts, len(world.label_ids))
    scores = np.empty(without.ids.shape)
    np.put_along_axis(scores, without.ids, without.scores, axis=1)
    settings = DEFAULT_LEXICAL_VOTES
    nearest = kept.lexical.nearest(texts, settings.neighbours)
    votes = count_votes(kept, nearest.ids, vote_weights(nearest.scores, settings.temperature))
    assert votes[-2:].nnz == 0 or not votes[-2:].data.any()
    scores += settings.weight * by_words.model.head.temperature * votes.toarray()
    found = by_words.top(texts, 5)
    np.testing.assert_allclose(found.scores, -np.sort(-scores, axis=1)[:, :5], atol=1e-5)
    assert (found.ids != without.ids[:, :5]).any()


@pytest.fixture
def weighing_words(by_words):
    """The same with weights of words for labels."""
    table = np.random.default_rng(1).normal(size=2**12).astype(np.float16)
    num_labels = len(by_words.model.labels.ids)
    weights = WordWeights(table, np.arange(num_labels) * 16, np.full(num_labels, 16))
    model = by_words.model
    model = replace(model, training_queries=replace(model.training_queries, word_weights=weights))
    return Predictor(model, replace(by_words.choice, word_weight=6.0))


def test_words_count_for_the_labels_that_neighbours_vote_for(by_words, weighing_words, world):
    texts, num_labels = [*world.test.texts[:20], "zzz", ""], len(world.label_ids)
    model, choice = weighing_words.model, weighing_words.choice
    before = by_words.top(texts, num_labels)
    expected = np.empty(before.ids.shape)
    np.put_along_axis(expected, before.ids, before.scores, axis=1)
    voters = find_voters(model, texts, model.encode_queries(texts), choice)
    votes = vote_parts(by_words.model, voters, by_words.choice)
    voted = (votes["neighbours"] + votes["neighbours by words"]).toarray() > 0
    kept = model.training_queries
    for row, text in enumerate(texts):
        words = kept.lexical.weigh(kept.lexical.look_up(split_words(text)))
        for label in np.flatnonzero(voted[row]):
            gain = kept.word_weights.gains([words], np.array([0, 1]), np.array([label]))[0]
            expected[row, label] += 6.0 * model.head.temperature * gain
    found = weighing_words.top(texts, 5)
    np.testing.assert_allclose(found.scores, -np.sort(-expected, axis=1)[:, :5], atol=1e-5)
    assert (found.ids != before.ids[:, :5]).any()
    for row, text in enumerate(texts):
        alone = weighing_words.top([text], 5)
        np.testing.assert_allclose(alone.scores[0], found.scores[row], atol=1e-5)
        explained = weighing_words.explain_labels(text, [world.label_ids[label] for label in alone.ids[0]])
        for score, each in zip(alone.scores[0], explained, strict=True):
            assert sum(each.parts.values()) == pytest.approx(score, abs=1e-5)
    assert "words of the text" in explained[0].parts


def test_weights_of_words_are_stored_with_the_training_queries(weighing_words, tmp_path):
    kept = weighing_words.model.training_queries
    kept.save(tmp_path)
    dimension = kept.index.vectors_LD.shape[1]
    again = TrainingQueries.load(tmp_path, num_labels=kept.num_labels, dimension=dimension, device="cpu")
    np.testing.assert_array_equal(again.word_weights.table, kept.word_weights.table)
    arrays = load_file(tmp_path / TRAINING_QUERIES_FILE)
    arrays["word_label_ranges"] = arrays["word_label_ranges"][:, :-1].clone()
    save_file(arrays, tmp_path / TRAINING_QUERIES_FILE)
    with pytest.raises(ModelError, match="weights of words for other labels"):
        TrainingQueries.load(tmp_path, num_labels=kept.num_labels, dimension=dimension, device="cpu")


@pytest.mark.parametrize("voting", ["by_words", "weighing_words"])
def test_votes_by_words_follow_label_changes_and_filters(voting, request, world):
    by_words = request.getfixturevalue(voting)
    text = [world.test.texts[3]]
    before = [(p.id, p.score) for p in by_words.predict(text, k=40)[0]]
    filtered = [(p.id, p.score) for p in by_words.predict(text, k=40, exclude=["L0", before[0][0]])[0]]
    gone = {"L0", before[0][0]}
    expected = [(label, score) for label, score in before if label not in gone]
    assert [label for label, _ in filtered] == [label for label, _ in expected][: len(filtered)]
    by_words.remove_labels(sorted(gone))
    by_words.add_labels([("new", "river stone")])
    after = [(p.id, p.score) for p in by_words.predict(text, k=40)[0] if p.id != "new"]
    assert [label for label, _ in after] == [label for label, _ in expected][: len(after)]
    np.testing.assert_allclose([s for _, s in after], [s for _, s in expected][: len(after)], atol=1e-5)


def test_a_model_without_words_says_so(trained):
    model = Predictor.load(trained).model
    model = replace(model, training_queries=replace(model.training_queries, lexical=None))
    choice = RankingChoice(head="encoder", dial=1.0, lexical_votes=DEFAULT_LEXICAL_VOTES)
    with pytest.raises(UsageError, match="without keeping the words"):
        Predictor(model, choice).predict(["river"])


def test_the_nearest_training_queries_of_a_training_query_start_with_itself(trained, world):
    predictor = Predictor.load(trained)
    row = 5
    own = [world.label_ids[label] for label in world.train.relevance[row].indices]
    [[first, *others]] = predictor.nearest([world.train.texts[row]], k=4)
    assert (first.id, first.text, set(first.labels)) == (world.train.uids[row], world.train.texts[row], set(own))
    assert first.similarity == pytest.approx(1.0, abs=1e-3)
    assert len(others) == 3
    for neighbour in predictor.nearest([world.test.texts[0]], k=3, label="L7")[0]:
        assert "L7" in neighbour.labels
    with pytest.raises(UsageError, match="no label has the id 'nobody'"):
        predictor.nearest(["text"], label="nobody")


def test_live_labels_and_training_queries_go_together(trained, world):
    predictor = Predictor.load(trained, neighbours=True)
    predictor.remove_labels(["L0", "L9"])
    predictor.add_labels([("new", "river stone")])
    assert predictor.predict(["river stone"], k=3)
    kept = [label for label in world.label_ids if label not in ("L0", "L9")]
    again = Predictor.load(trained, neighbours=True)
    text = [world.test.texts[3]]
    expected = [(p.id, p.score) for p in again.predict(text, k=40)[0] if p.id in kept]
    found = [(p.id, p.score) for p in predictor.predict(text, k=40)[0] if p.id in kept]
    assert [i for i, _ in found] == [i for i, _ in expected]
    np.testing.assert_allclose([s for _, s in found], [s for _, s in expected], atol=1e-5)


def test_a_model_without_training_queries_says_so(trained, world):
    model = replace(Predictor.load(trained).model, training_queries=None)
    assert Predictor(model).predict(["river"], k=1)
    with pytest.raises(UsageError, match="without keeping its training queries"):
        Predictor(model, RankingChoice(head="encoder", dial=1.0, votes=DEFAULT_VOTES))
    with pytest.raises(UsageError, match="without keeping its training queries"):
        Predictor(model).nearest(["river"])


def test_top_of_no_texts(trained):
    assert isinstance(Predictor.load(trained, neighbours=True).top([], 3), TopK)
    assert Predictor.load(trained, neighbours=True).predict([]) == []
