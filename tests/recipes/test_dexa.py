"""DEXA: a label is the normalised weighted sum of its words and of a vector that a cluster of labels shares."""

import numpy as np
import pytest

import dexter
from dexter.batches.clusters import balanced_clusters
from dexter.config import load_config
from dexter.encoders import load_encoder
from dexter.encoders.static_arrays import count_label_rows
from dexter.errors import UsageError
from dexter.evaluation.export_mean import export_mean
from dexter.training.presets import resolve_presets
from dexter.training.trainer import Trainer
from tests.conftest import SMALL


@pytest.fixture
def trainer(world, tmp_path):
    config = resolve_presets(load_config("dexa", {**SMALL, "encoder.positions": False}), world)
    return Trainer(config, world, tmp_path)


def shared_row(trainer, label):
    """The row of the table that a label has beside its words."""
    tokens = trainer.label_tokens.select(np.array([label])).ids % trainer.encoder.num_rows
    (row,) = (row for row in tokens if row >= trainer.encoder.tokens.first_label_row)
    return int(row)


def test_similar_labels_share_a_vector(trainer, world):
    before = trainer.encoder.embed(trainer.label_tokens)
    rows = [shared_row(trainer, label) for label in range(world.num_labels)]
    found = {tuple(np.flatnonzero(np.array(rows) == row)) for row in set(rows)}
    assert found == {tuple(members) for members in balanced_clusters(before, 3, seed=trainer.config.seed)}
    assert max(map(len, found)) <= 3 < world.num_labels
    assert len(found) == trainer.encoder.num_rows - trainer.encoder.tokens.first_label_row


def test_labels_are_words_and_shared_vectors(trainer, world):
    for _ in range(15):
        trainer.take_step()
    encoder = trainer.encoder
    table, weights = (value.detach().numpy() for value in (encoder.table, encoder.token_weights))
    found = encoder.embed(trainer.label_tokens)
    for label in range(world.num_labels):
        tokens = trainer.label_tokens.select(np.array([label])).ids % encoder.num_rows
        total = sum(np.exp(weights[row]) * table[row] for row in tokens)
        np.testing.assert_allclose(found[label], total / np.linalg.norm(total), atol=1e-5)
    assert np.abs(table[encoder.tokens.first_label_row :]).max() > 0


def test_queries_and_new_labels_have_no_shared_vector(trainer, world):
    encoder = trainer.encoder
    for tokens in (
        encoder.tokenize(world.label_texts, side="query"),
        encoder.tokenize([f"{text} again" for text in world.label_texts], side="label"),
    ):
        assert (tokens.ids % encoder.num_rows).max() < encoder.tokens.first_label_row


def test_a_saved_run_keeps_who_shares(world, tmp_path):
    run = dexter.train(world, recipe="dexa", out=tmp_path / "run", overrides={**SMALL, "train.epochs": 2})
    model = dexter.Predictor.load(run.path).model
    encoder = model.encoder
    labels = encoder.tokenize(world.label_texts, side="label")
    rows = labels.ids[labels.ids % encoder.tokens.num_rows >= encoder.tokens.first_label_row]
    assert len(rows) == world.num_labels
    assert len(set(rows.tolist())) == count_label_rows(world.num_labels, 3) < world.num_labels
    assert "vectors of whole label texts" in export_mean(run.path, tmp_path / "mean").left_out
    encoder.save(tmp_path / "copy")
    copy = load_encoder(tmp_path / "copy")
    np.testing.assert_array_equal(copy.embed(copy.tokenize(world.label_texts, side="label")), encoder.embed(labels))


def test_as_many_vectors_as_in_the_published_configuration():
    assert count_label_rows(131_073, 3) == 65_536
    assert [count_label_rows(number, 3) for number in (0, 1, 3, 4, 7)] == [0, 1, 1, 2, 4]
    assert count_label_rows(7, 1) == 7


@pytest.mark.parametrize("changes", [{"encoder.kind": "transformer"}, {"encoder.label_vectors": False}])
def test_what_has_no_label_vectors_refuses_to_share_them(changes):
    with pytest.raises(UsageError, match="labels_per_vector"):
        load_config("dexa", changes)
