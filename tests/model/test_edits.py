"""Edits: what is refused, and that the labels after any history are the same live, reloaded and compacted."""

import shutil
import threading

import numpy as np
import pytest

from dexter import Predictor
from dexter.errors import ModelError, UsageError
from dexter.model.edits import LabelChange, VersionConflict
from dexter.model.examples import make_example
from tests.model.conftest import same_labels


def test_every_change_has_a_version_of_its_own(run):
    predictor = Predictor.load(run, persistent=True)
    assert predictor.version == 0
    assert predictor.add_labels([("a", "river stone"), ("b", "old kettle")]).version == 1
    assert predictor.rename_labels([("L3", "new kettle")]).version == 2
    assert predictor.remove_labels(["a"]).version == predictor.version == 3
    assert predictor.add_labels([]).version == 3, "nothing to do is not a change"
    with pytest.raises(UsageError):
        predictor.remove_labels(["a"])
    assert predictor.version == Predictor.load(run).version == 3


def test_random_histories_are_the_same_live_reloaded_refreshed_and_compacted(run, world):
    generator = np.random.default_rng(3)
    live, follower = Predictor.load(run, persistent=True), Predictor.load(run)
    fingerprint = live.fingerprint
    for step in range(25):
        live.edit_labels(random_edit(generator, live, step))
        if step % 6 == 5:
            live.compact_labels()
        if step % 4 == 3:
            assert follower.refresh_labels() and not follower.refresh_labels()
            same_labels(follower, live, [*world.test.texts, *(each.text for each in live.examples)])
    reloaded = Predictor.load(run)
    assert live.examples
    same_labels(reloaded, live, [*world.test.texts, *(each.text for each in live.examples)])
    assert reloaded.fingerprint == fingerprint, "the published model is as it was"
    assert [path.name for path in (run / "model").glob("*labels*")] == ["labels.sqlite"]


def random_edit(generator, predictor, step):
    """Some labels go, some get another text, some come; now and then one comes back."""
    known = list(predictor.labels.ids)
    texts = [f"text {number} of needle orchid" for number in generator.integers(9, size=generator.integers(0, 3))]
    chosen = [str(label_id) for label_id in generator.choice(known, size=4, replace=False)]
    gone, renamed = chosen[: generator.integers(0, 3)], chosen[2:]
    back = [(label_id, "back again") for label_id in gone if generator.random() < 0.3]
    return LabelChange(
        remove=gone,
        rename=[(label_id, f"river {step}") for label_id in renamed],
        add=[(f"n{step}-{number}", f"stone {number} amber") for number in range(generator.integers(0, 4))] + back,
        keep_vectors=bool(generator.random() < 0.3),
        reuse_ids=True,
        add_examples=[make_example(text, [str(generator.choice(sorted(set(known) - set(gone))))]) for text in texts],
        remove_examples=[each.id for each in predictor.examples if generator.random() < 0.2],
    )


def test_ids_are_not_used_again_unless_asked_for(run):
    Predictor.load(run, persistent=True).remove_labels(["L5"])
    Predictor.load(run, persistent=True).compact_labels()
    predictor = Predictor.load(run, persistent=True)
    with pytest.raises(UsageError, match=r"'L5' belonged to a label that was removed.*--reuse-ids"):
        predictor.add_labels([("L5", "again")])
    with pytest.raises(UsageError, match="no label has the id 'L5': it was removed before"):
        predictor.remove_labels(["L5"])
    predictor.add_labels([("L5", "again")], reuse_ids=True)
    row = Predictor.load(run).labels.ids.index("L5")
    assert Predictor.load(run).labels.counts[row] == 0, "it starts anew"


def test_a_new_text_is_what_a_label_is_found_by(run):
    # Votes of training queries for other labels could come first.
    predictor = Predictor.load(run, persistent=True, neighbours=False)
    predictor.add_labels([("mine", "zzz")])
    predictor.rename_labels([("mine", "orchid lantern quartz")])
    found = Predictor.load(run, neighbours=False).predict(["orchid lantern quartz"], k=1)[0][0]
    assert (found.id, found.text) == ("mine", "orchid lantern quartz")
    predictor.rename_labels([("mine", "shown")], keep_vectors=True)
    assert predictor.predict(["orchid lantern quartz"], k=1)[0][0].text == "shown"


def test_a_rename_keeps_what_the_label_learned(run):
    predictor = Predictor.load(run, persistent=True)
    before, prior = predictor.labels.counts.copy(), predictor.model.head.prior_L.copy()
    predictor.rename_labels([("L7", "something else")])
    np.testing.assert_array_equal(predictor.labels.counts, before)
    np.testing.assert_array_equal(predictor.model.head.prior_L, prior)


@pytest.mark.parametrize(
    "edit",
    [
        LabelChange(remove=["L1", "L1"]),
        LabelChange(remove=["L1", "nobody"]),
        LabelChange(rename=[("L1", "x"), ("L1", "y")]),
        LabelChange(remove=["L1"], rename=[("L1", "x")]),
        LabelChange(remove=["L1"], add=[("L1", "x")]),
        LabelChange(rename=[("L1", None)]),
        LabelChange(rename=[("L1", "\ud800")]),
        LabelChange(add=[("x", "y"), "zz"]),
    ],
    ids=str,
)
def test_a_refused_edit_changes_nothing(run, world, edit):
    predictor = Predictor.load(run, persistent=True)
    with pytest.raises(UsageError):
        predictor.edit_labels(edit)
    assert predictor.version == 0 and not (run / "model" / "labels.sqlite").exists()
    same_labels(predictor, Predictor.load(run), world.test.texts)


@pytest.mark.parametrize("place", ["encode", "apply", "index", "disk"])
def test_a_failure_in_the_middle_leaves_everything_as_it_was(run, world, monkeypatch, place):
    predictor = Predictor.load(run, persistent=True)

    def fail(*_, **__):
        raise MemoryError

    broken = {
        "encode": "dexter.encoders.static_arrays.StaticArrays.embed",
        "apply": "dexter.encoders.head_arrays.DualArrays.for_labels",
        "index": "dexter.model.model.Model.label_vectors",
        "disk": "dexter.model.label_writer.LabelWriter.write",
    }
    with monkeypatch.context() as patched:
        patched.setattr(broken[place], fail)
        with pytest.raises(MemoryError):
            predictor.edit_labels(LabelChange(remove=["L2"], add=[("new", "river")]))
    assert predictor.version == 0
    same_labels(predictor, Predictor.load(run), world.test.texts)
    assert predictor.add_labels([("new", "river")]).version == 1, "and the next edit works"


def test_threads_that_edit_at_once_lose_nothing(run):
    predictor = Predictor.load(run, persistent=True)

    def add(name):
        for number in range(5):
            predictor.add_labels([(f"{name}{number}", f"river {name}")])

    threads = [threading.Thread(target=add, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert predictor.version == 15
    assert len(Predictor.load(run).labels.ids) == 37 + 15


def test_changes_in_memory_stay_there(run):
    predictor = Predictor.load(run)
    predictor.add_labels([("x", "river")])
    assert predictor.version == 1 and not (run / "model" / "labels.sqlite").exists()
    Predictor.load(run, persistent=True).add_labels([("y", "stone")])
    Predictor.load(run, persistent=True).add_labels([("z", "stone")])
    with pytest.raises(UsageError, match="only in memory"):
        predictor.refresh_labels()


def test_a_removed_file_returns_to_the_published_labels(run, world):
    published, live = Predictor.load(run), Predictor.load(run, persistent=True)
    live.add_labels([("x", "river")])
    live.remove_labels(["L1"])
    (run / "model" / "labels.sqlite").unlink()
    assert live.refresh_labels()
    same_labels(live, published, world.test.texts)


def test_a_saved_predictor_has_the_present_labels_and_ranks_as_tuned(run, world, tmp_path):
    predictor = Predictor.load(run)
    predictor.add_labels([("x", "river")])
    predictor.remove_labels(["L1"])
    predictor.save(tmp_path / "published")
    again = Predictor.load(tmp_path / "published")
    assert again.version == 0 and again.scoring == predictor.scoring
    assert list(again.labels.ids) == list(predictor.labels.ids)
    assert again.predict(world.test.texts) == predictor.predict(world.test.texts)


def test_a_model_that_may_still_be_replaced_is_not_changed(run):
    (run / "run.json").unlink()
    with pytest.raises(ModelError, match="its run has not ended"):
        Predictor.load(run, persistent=True).add_labels([("x", "river")])


def test_a_replaced_model_is_noticed(run, tmp_path):
    predictor = Predictor.load(run, persistent=True)
    other = Predictor.load(run)
    other.remove_labels(["L1"])
    shutil.rmtree(run / "model")
    other.model.save(run / "model")
    with pytest.raises(ModelError, match="was replaced since it was loaded"):
        predictor.add_labels([("x", "river")])


def test_an_edit_for_another_version_is_refused_also_when_another_process_made_it(run):
    ours, theirs = (Predictor.load(run, persistent=True) for _ in range(2))
    theirs.add_labels([("theirs", "zebra")])
    with pytest.raises(VersionConflict, match="at version 1, the edit is for 0"):
        ours.edit_labels(LabelChange(add=[("ours", "zither")]), expected=0)
    assert "ours" not in Predictor.load(run).labels.ids
    assert ours.edit_labels(LabelChange(add=[("ours", "zither")]), expected=1).version == 2


def test_the_history_says_who_did_what(run):
    predictor = Predictor.load(run, persistent=True)
    predictor.add_labels([("a", "river stone"), ("b", "old kettle")], by="anna")
    predictor.edit_labels(LabelChange(remove=["a"], rename=[("L3", "new kettle")]), by="ben")
    predictor.rename_labels([("b", "kettle")])
    edits = Predictor.load(run).label_history()
    assert [(edit.version, edit.author, edit.describe()) for edit in edits] == [
        (3, None, "1 renamed"),
        (2, "ben", "1 renamed, 1 removed"),
        (1, "anna", "2 added"),
    ]
    assert [edit.version for edit in predictor.label_history("b")] == [3, 1]
    predictor.compact_labels()
    assert [edit.version for edit in predictor.label_history("b")] == [3, 1], "who added it is still known"
    assert predictor.label_history("nobody") == []


def test_random_edits_are_undone_step_by_step(run, world):
    """Undo goes back to each version in turn, and undoing the undoing returns; live, followed and reloaded."""
    generator = np.random.default_rng(8)
    live, follower = Predictor.load(run, persistent=True), Predictor.load(run)
    seen = [live.predict(world.test.texts, k=7)]
    for step in range(8):
        live.edit_labels(random_edit(generator, live, step))
        seen.append(live.predict(world.test.texts, k=7))
    for step in reversed(range(8)):
        live.undo_labels()
        assert live.predict(world.test.texts, k=7) == seen[step]
        if step % 3 == 0:
            assert follower.refresh_labels()
            same_labels(follower, live, world.test.texts)
            same_labels(Predictor.load(run), live, world.test.texts)
    with pytest.raises(UsageError, match="no such edit to undo"):
        live.undo_labels()
    live.undo_labels(16)
    assert live.predict(world.test.texts, k=7) == seen[1], "the first edit is back"
    assert live.undo_labels().version == 18 and live.predict(world.test.texts, k=7) == seen[0]


def test_an_edit_is_not_undone_under_a_later_one(run):
    predictor = Predictor.load(run, persistent=True)
    predictor.add_labels([("a", "river"), ("b", "stone")])
    predictor.rename_labels([("a", "brook")])
    predictor.add_labels([("c", "kettle")])
    with pytest.raises(UsageError, match="edit 1 cannot be undone: edit 2 changed some of its labels again"):
        predictor.undo_labels(1)
    assert predictor.version == Predictor.load(run).version == 3
    predictor.undo_labels(2)
    with pytest.raises(UsageError, match="edit 2 was undone already"):
        predictor.undo_labels(2)
    predictor.undo_labels(1)
    assert list(predictor.labels.ids)[-1] == "c" and "a" not in predictor.labels.ids
    with pytest.raises(UsageError, match="edit 4 cannot be undone: edit 5 changed"):
        predictor.undo_labels(4)
    predictor.compact_labels()
    with pytest.raises(UsageError, match="edit 3 cannot be undone any more"):
        predictor.undo_labels(3)
    with pytest.raises(UsageError, match="that are kept on disk can be undone"):
        Predictor.load(run).undo_labels()


def test_undoing_never_takes_the_last_label(run):
    predictor = Predictor.load(run, persistent=True)
    published = list(predictor.labels.ids)
    predictor.add_labels([("only", "river")])
    predictor.remove_labels(published)
    with pytest.raises(UsageError, match="at least one label"):
        predictor.undo_labels(1)
    assert list(Predictor.load(run).labels.ids) == list(predictor.labels.ids) == ["only"]


def test_a_label_that_returns_takes_no_place_of_another(run):
    predictor = Predictor.load(run, persistent=True)
    predictor.add_labels([("a", "river")])
    predictor.undo_labels()
    predictor.add_labels([("b", "stone")])
    predictor.undo_labels(2)
    assert set(Predictor.load(run).labels.ids) - {f"L{number}" for number in range(37)} == {"a", "b"}
    same_labels(Predictor.load(run), predictor, ["river", "stone"])


def test_a_file_with_another_history_is_taken_up_whole(run):
    """The same version, or a later one, of a copy that went another way: nothing of the old way stays."""
    follower, one = Predictor.load(run), Predictor.load(run, persistent=True)
    one.add_labels([("a", "river")])
    follower.refresh_labels()
    (run / "model" / "labels.sqlite").unlink()
    other = Predictor.load(run, persistent=True)
    other.add_labels([("b", "stone")])
    assert follower.refresh_labels() and list(follower.labels.ids)[-2:] == ["L36", "b"]
    one.add_labels([("c", "kettle")])
    assert list(one.labels.ids)[-3:] == ["L36", "b", "c"] == list(Predictor.load(run).labels.ids)[-3:]
