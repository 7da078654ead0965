"""Labels held out of training: gone from it without a trace, and found by their texts all the same."""

import shutil

import numpy as np
import pytest

from dexter.errors import ModelError, UsageError
from dexter.evaluation.unseen import choose_labels, evaluate_unseen, without_labels


def test_the_choice_depends_on_ids_and_seed_alone(world):
    first = choose_labels(world.label_ids, 0.3)
    assert 0 < first.sum() < len(first)
    again = choose_labels([*reversed(world.label_ids), "more"], 0.3)
    assert again[:-1][::-1].tolist() == first.tolist()
    assert choose_labels(world.label_ids, 0.3, seed=1).tolist() != first.tolist()
    assert choose_labels(world.label_ids, 1e-9).sum() == 1


def test_held_out_labels_leave_no_trace_in_training(world):
    held_out = choose_labels(world.label_ids, 0.3)
    reduced = without_labels(world, held_out)
    assert reduced.num_labels == world.num_labels - held_out.sum()
    assert not set(reduced.label_ids) & {world.label_ids[label] for label in np.flatnonzero(held_out)}
    assert reduced.train.relevance.getnnz(axis=1).min() >= 1
    kept = dict(zip(reduced.train.uids, range(len(reduced.train)), strict=True))
    for row, uid in enumerate(world.train.uids):
        left = [world.label_ids[label] for label in world.train.relevance[row].indices if not held_out[label]]
        found = (
            [reduced.label_ids[label] for label in reduced.train.relevance[kept[uid]].indices] if uid in kept else []
        )
        assert found == left


def test_unseen_labels_are_found_by_their_texts(trained, world, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    report = evaluate_unseen(run, world, share=0.2)
    held_out = choose_labels(world.label_ids, 0.2)
    assert report.num_held_out == held_out.sum()
    assert report.num_queries == (world.test.relevance[:, np.flatnonzero(held_out)].getnnz(axis=1) > 0).sum()
    chance = 100 * world.test.relevance[:, np.flatnonzero(held_out)].nnz / report.num_queries / report.num_held_out
    assert report.alone["unseen"]["P@1"] > 3 * chance
    assert report.among_all["unseen"]["R@10"] > 50
    assert report.among_all["unseen"]["R@10"] <= report.alone["unseen"].get("R@10", 100)
    assert len(report.render().splitlines()) == 6
    assert evaluate_unseen(run, world, share=0.2) == report, "the second time nothing is trained"


def test_what_cannot_be_held_out_says_why(trained, world, tmp_path):
    for share in (0.0, 1.0, -1.0):
        with pytest.raises(UsageError, match="between 0 and 1"):
            evaluate_unseen(trained, world, share=share)
    with pytest.raises(ModelError, match="not a run folder"):
        evaluate_unseen(tmp_path, world)
