"""SiameseXML: a label is the normalised weighted mean of its words and of a vector of its own."""

import numpy as np

from dexter.config import load_config
from dexter.training.presets import resolve_presets
from dexter.training.trainer import Trainer
from tests.conftest import SMALL


def test_labels_have_a_residual_of_their_own(world, tmp_path):
    config = resolve_presets(load_config("siamesexml", {**SMALL, "encoder.positions": False}), world)
    trainer = Trainer(config, world, tmp_path)
    for _ in range(15):
        trainer.take_step()
    encoder = trainer.encoder
    table, weights = (value.detach().numpy() for value in (encoder.table, encoder.token_weights))
    first_own = encoder.num_rows - world.num_labels
    found = encoder.embed(trainer.label_tokens)
    own_rows = set()
    for label in range(world.num_labels):
        tokens = trainer.label_tokens.select(np.array([label])).ids % encoder.num_rows
        own = [row for row in tokens if row >= first_own]
        assert len(own) == 1
        own_rows.add(int(own[0]))
        total = sum(np.exp(weights[row]) * table[row] for row in tokens)
        np.testing.assert_allclose(found[label], total / np.linalg.norm(total), atol=1e-5)
    assert len(own_rows) == world.num_labels
    assert np.abs(table[first_own:]).max() > 0
