"""Examples: they change the next prediction; undone, restored, compacted, exported, refused and damaged."""

import sqlite3

import numpy as np
import pytest

from dexter import Predictor
from dexter.data.formats import load_dataset, save_dataset
from dexter.errors import ModelError, UsageError
from dexter.model import label_file
from dexter.model.edits import LabelRefused
from tests.model.conftest import same_labels

TEXT = "the old ferry timetable of the harbor office"


def first(predictor, text=TEXT, **options):
    return predictor.predict([text], k=1, **options)[0][0].id


@pytest.fixture
def live(run):
    return Predictor.load(run, persistent=True)


@pytest.fixture
def wrong(live):
    """A label that the text does not get by itself."""
    return live.predict([TEXT], k=30)[0][-1].id


@pytest.mark.parametrize("neighbours", [None, True])
def test_an_example_changes_the_next_prediction_of_texts_like_it_alone(run, world, wrong, neighbours):
    live = Predictor.load(run, persistent=True, neighbours=neighbours)
    before = live.predict(world.test.texts, k=5)
    live.add_examples([(TEXT, [wrong])])
    assert first(live) == wrong
    assert live.predict([TEXT, *world.test.texts], k=5)[0][0].id == wrong, "in a batch as alone"
    after = live.predict(world.test.texts, k=5)
    assert sum(one != other for one, other in zip(before, after, strict=True)) <= 2
    same_labels(Predictor.load(run, neighbours=neighbours), live, [TEXT, *world.test.texts])


def test_one_text_and_many_get_the_same_scores_from_examples(live, world):
    labels = list(live.labels.ids)
    live.add_examples([(text, [labels[row % 37]]) for row, text in enumerate(world.test.texts[:20])])
    texts = world.test.texts[:30]
    for text, found in zip(texts, live.predict(texts, k=6), strict=True):
        [alone] = live.predict([text], k=6)
        assert [each.id for each in alone] == [each.id for each in found]
        np.testing.assert_allclose([each.score for each in alone], [each.score for each in found], rtol=1e-5)


def test_the_votes_of_examples_are_a_part_of_the_explained_score(live, wrong):
    live.add_examples([(TEXT, [wrong])])
    explanation = live.explain(TEXT, wrong)
    assert explanation.parts["examples"] == pytest.approx(20 * live.model.head.temperature, rel=1e-3)
    assert sum(explanation.parts.values()) == pytest.approx(live.predict([TEXT], k=1)[0][0].score, rel=1e-4)
    assert live.preview_label(TEXT, "harbor office").rank is not None


def test_examples_do_not_vote_where_neighbours_are_switched_off(run, live, wrong):
    live.add_examples([(TEXT, [wrong])])
    voting = Predictor.load(run, neighbours=True)
    assert voting.choice.uses_neighbours and first(voting) == wrong
    silent = voting.variant(voting.choose(neighbours=False))
    assert first(silent) != wrong or not voting.scoring.choice.uses_neighbours


def test_a_second_annotation_of_a_text_replaces_the_first_and_undo_returns_to_it(run, live, wrong):
    live.add_examples([(TEXT, [wrong])], by="ada")
    live.add_examples([(TEXT, ["L1", "L2"])])
    [example] = live.examples
    assert example.labels == ("L1", "L2") and len(live.labels.ids) == 37
    assert [edit.describe() for edit in live.label_history()] == ["1 example added", "1 example added"]
    assert live.label_history()[-1].author == "ada"
    with pytest.raises(UsageError, match="edit 1 cannot be undone: edit 2"):
        live.undo_labels(1)
    live.undo_labels()
    assert live.examples[0].labels == (wrong,) and first(live) == wrong
    live.undo_labels()
    assert live.examples == [] and first(live) != wrong
    live.undo_labels(4)
    assert live.examples[0].labels == (wrong,), "undoing can be undone"
    same_labels(Predictor.load(run), live, [TEXT])


def test_an_example_is_removed_and_its_removal_undone(run, live, wrong):
    live.add_examples([(TEXT, [wrong]), ("another text", ["L3"])], ids=["a", None])
    follower = Predictor.load(run)
    live.remove_examples(["a"])
    assert [each.text for each in live.examples] == ["another text"] and first(live) != wrong
    assert follower.refresh_labels() and first(follower) != wrong
    live.undo_labels()
    assert follower.refresh_labels() and first(follower) == first(live) == wrong
    with pytest.raises(LabelRefused, match="no example has the id 'b'"):
        live.remove_examples(["a", "b"])
    assert len(live.examples) == 2


def test_labels_that_the_run_lacks_are_refused_or_added_as_one_edit(live):
    with pytest.raises(LabelRefused, match=r"no label 'ferries'.*--add-labels"):
        live.add_examples([(TEXT, ["ferries"])])
    assert live.version == 0 and not live.examples
    live.add_examples([(TEXT, ["ferries", "L1"])], add_labels=True)
    assert live.version == 1 and first(live) in ("ferries", "L1")
    live.undo_labels()
    assert "ferries" not in live.labels.ids and not live.examples


def test_a_label_may_be_named_by_its_text(live, world):
    live.add_examples([(TEXT, [world.label_texts[4]])])
    assert live.examples[0].labels == ("L4",)


@pytest.mark.parametrize("example", [("", ["L1"]), (TEXT, []), (TEXT, "L1"), ("\ud800", ["L1"]), (TEXT, [1])])
def test_what_is_no_example_is_refused(live, example):
    with pytest.raises(UsageError):
        live.add_examples([example])
    assert live.version == 0


def test_a_label_that_takes_the_id_of_a_removed_one_starts_without_its_examples(run, live):
    live.add_examples([(TEXT, ["L5"])])
    live.remove_labels(["L5"])
    live.add_labels([("L5", "quite another meaning")], reuse_ids=True)
    assert first(live) != "L5"
    same_labels(Predictor.load(run), live, [TEXT])
    live.undo_labels()
    live.undo_labels()
    assert first(live) == "L5"


def test_compaction_forgets_the_texts_of_removed_and_changed_examples(run, live, wrong):
    live.add_examples([("a secret text", [wrong]), (TEXT, [wrong]), ("kept", ["L1"])], ids=["a", "b", "c"])
    live.add_examples([("another secret", ["L2"])], ids=["b"])
    live.remove_examples(["a"])
    live.compact_labels()
    assert b"secret text" not in (run / "model" / "labels.sqlite").read_bytes()
    assert live.label_history()[0].describe() == "1 example removed"
    for edit in (2, 3):
        with pytest.raises(UsageError, match="cannot be undone any more"):
            live.undo_labels(edit)
    same_labels(Predictor.load(run), live, [TEXT, "kept"])


def test_a_backup_has_the_examples(run, live, wrong, tmp_path):
    live.add_examples([(TEXT, [wrong])])
    store = live._live.store
    store.backup(tmp_path / "copy")
    live.add_examples([("more", ["L1"])])
    live.remove_examples([live.examples[0].id])
    store.restore(tmp_path / "copy")
    live.refresh_labels()
    assert [each.text for each in live.examples] == [TEXT] and first(live) == wrong
    live.undo_labels(live.version)
    assert [each.text for each in live.examples] == ["more"]


def test_examples_may_follow_label_changes_and_compaction(run, live):
    live.add_labels([("a", "river stone")])
    assert live.label_history()[0].examples_added == 0
    live.compact_labels()
    live.add_examples([(TEXT, ["a"])])
    assert live._live.store.verify() == 1
    same_labels(Predictor.load(run), live, [TEXT])


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM examples",
        "UPDATE examples SET text = 'altered'",
        "UPDATE examples SET labels = '[1]'",
        "UPDATE examples SET labels = 'x'",
        "UPDATE examples SET kind = 'x'",
        "UPDATE examples SET representation = x'00'",
        "UPDATE examples SET version = 'x'",
        "UPDATE examples SET id = ''",
    ],
)
@pytest.mark.parametrize("signed", [False, True])
def test_altered_examples_are_noticed(run, live, change, signed):
    live.add_examples([(TEXT, ["L1"])])
    path = run / "model" / "labels.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(change)
        rows = connection.execute(label_file.EXAMPLES).fetchall()
        if signed and rows:
            connection.execute("UPDATE examples SET sha256 = ?", [label_file.checksum(*rows[0][:-1])])
    if signed and "altered" in change:
        assert Predictor.load(run).examples[0].text == "altered"
        return
    with pytest.raises(ModelError, match="damaged"):
        Predictor.load(run)


def test_a_predictor_in_memory_has_examples_too(run, wrong):
    predictor = Predictor.load(run)
    predictor.add_examples([(TEXT, [wrong])])
    assert first(predictor) == wrong and not Predictor.load(run).examples


def test_examples_are_a_data_set_to_train_on(live, world, tmp_path):
    with pytest.raises(UsageError, match="no examples"):
        live.example_dataset()
    known = world.train.texts[3]
    live.add_examples([(TEXT, ["new", "L1"]), (known, ["L2"])], add_labels=True)
    alone = live.example_dataset()
    assert alone.train.texts == (TEXT, known) and len(alone.label_ids) == 38
    joined = live.example_dataset(world)
    assert len(joined.train) == len(world.train) + 1 and joined.train.texts.count(known) == 1
    assert list(joined.label_ids) == [*world.label_ids, "new"] and joined.test.num_labels == 38
    for name, made in (("alone", alone), ("joined", joined)):
        save_dataset(made, tmp_path / name)
        read = load_dataset(tmp_path / name)
        assert read.train.texts == made.train.texts and (read.train.relevance != made.train.relevance).nnz == 0
