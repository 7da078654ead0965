"""The bytes that ranks are said to send are those that they do send."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dexter.config import load_config
from dexter.planning.network import step_exchanges
from dexter.planning.sizes import shape_of, sizes_from_data
from dexter.training.presets import resolve_presets
from dexter.training.trainer import Trainer
from tests.conftest import SMALL, make_world
from tests.training.ranks import run_ranks

STEPS = 3


def said_and_sent(world, recipe, changes):
    """What the planner expects of a step, and what a rank sent on average."""
    data = make_world(num_train=1_000, num_labels=150)
    config = resolve_presets(load_config(recipe, {**SMALL, **changes}), data)
    trainer = Trainer(config, data, Path(tempfile.gettempdir()), world)
    world.traffic.clear()
    for _ in range(STEPS):
        trainer.take_step()
    sizes = sizes_from_data(data, config)
    # So small a vocabulary is estimated too roughly to decide between sparse and dense updates.
    touched = len(np.unique(trainer._first_ids() % trainer.encoder.num_rows))
    shape, sparse = shape_of(trainer.encoder), trainer.encoder.sparse
    sizes = replace(sizes, encoder=shape, sparse=sparse, touched_rows=touched)
    said = step_exchanges(sizes, config, world_size=world.size)
    sent = {name: traffic.bytes / STEPS for name, traffic in world.traffic.items()}
    return {exchange.name: exchange.sent for exchange in said}, sent


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("dexml", {}),
        pytest.param("infonce", {"loss.prior": True}, marks=pytest.mark.slow),
        ("unidec", {"head.projection": 24}),
        pytest.param("bce", {}, marks=pytest.mark.slow),
        # A table of which a step touches few rows.
        ("infonce", {"encoder.ngrams": 2, "encoder.ngram_buckets": 20_000}),
    ],
)
def test_a_step_sends_what_the_plan_says(recipe, changes):
    for said, sent in run_ranks(2, said_and_sent, recipe, changes):
        for name in ("queries", "query gradients", "gradients"):
            # Batches are equal within one query; a few scalars that belong to no label travel too.
            assert said[name] == pytest.approx(sent[name], rel=0.04), name
        assert said.get("max", 0) + said["sum"] == pytest.approx(sent["max"] + sent["sum"], rel=0.2, abs=300)
        assert ("table gradients" in said) == ("table gradients" in sent)
        if "table gradients" in said:
            assert said["table gradients"] == pytest.approx(sent["table gradients"], rel=0.5)
