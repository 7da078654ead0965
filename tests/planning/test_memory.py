"""The formulas: what adds up, what is split over ranks, what a setting changes."""

from dataclasses import replace

import pytest

from dexter.config import load_config
from dexter.planning.memory import (
    FLOAT,
    MIB,
    MemoryEstimate,
    Term,
    activations_per_token,
    checkpoint_bytes,
    estimate_disk,
    estimate_memory,
    search_bytes,
    tile_bytes,
    weights_bytes,
)
from dexter.planning.sizes import (
    EncoderShape,
    Sizes,
    batch_size,
    pool_size,
    shape_from_config,
    sizes_from_counts,
    sizes_from_data,
    steps_per_epoch,
    texts_per_step,
)
from dexter.training.presets import resolve_counts, resolve_presets
from dexter.training.trainer import Trainer
from tests.conftest import SMALL

STATIC = EncoderShape(kind="static", dimension=100, table_rows=5_000, weights=5_016)


def make(recipe="dexml", overrides=None, *, num_queries=10_007, num_labels=3_001, encoder=STATIC, **counts):
    config = load_config(recipe, {"train.device": "cpu", **(overrides or {})})
    config = resolve_counts(config, num_queries=num_queries, num_labels=num_labels)
    counts = {"tokens_per_text": 20, **counts}
    return sizes_from_counts(config, encoder, num_queries=num_queries, num_labels=num_labels, **counts), config


def by_name(needs):
    return {(term.name, term.phase): term.bytes for term in needs.terms}


def test_the_peak_is_what_is_always_there_and_the_largest_phase():
    terms = (
        Term("a", 10, ""),
        Term("b", 5, "", phase="step"),
        Term("c", 4, "", phase="step"),
        Term("d", 8, "", phase="refresh"),
        Term("e", 100, "", phase="validation", location="process"),
        Term("f", 2, "", phase="trained"),
        Term("g", 12, "", phase="start"),
    )
    assert MemoryEstimate(terms, separate=False).peak() == 112
    assert MemoryEstimate(terms, separate=True).peak("device") == 22
    assert MemoryEstimate(terms, separate=True).peak("process") == 100
    assert MemoryEstimate(terms, separate=True).busiest == "start"
    later = tuple(term for term in terms if term.phase != "start")
    assert [term.name for term in MemoryEstimate(later, separate=True).at_peak()] == ["a", "b", "c", "f"]


def test_the_largest_term_is_one_that_a_setting_shrinks():
    terms = (Term("fixed", 10, ""), Term("large", 9, "", "batch.size"), Term("small", 1, "", "encoder.words"))
    assert MemoryEstimate(terms, separate=False).largest.name == "large"


def test_labels_are_split_over_processes_and_the_encoder_is_not():
    sizes, config = make("unidec", num_labels=3_000)
    one, three = (by_name(estimate_memory(sizes, config, world_size=ranks)) for ranks in (1, 3))
    for name in (("classifier table", "always"), ("classifier's Adam moments", "trained")):
        assert three[name] * 3 == one[name]
    for name in (("token table", "always"), ("token table's Adam moments", "trained"), ("texts and pairs", "always")):
        assert three[name] == one[name]
    uneven = by_name(estimate_memory(make("dexml")[0], make("dexml")[1], world_size=2))
    whole = by_name(estimate_memory(*make("dexml")))
    name = ("label representations and gradients", "step")
    assert uneven[name] == whole[name] * 1_501 / 3_001


def test_known_sizes_of_table_and_classifier():
    sizes, config = make("unidec", {"head.projection": 64})
    found = by_name(estimate_memory(sizes, config))
    assert found["token table", "always"] == 5_000 * 100 * FLOAT
    assert found["token table's Adam moments", "trained"] == 2 * 5_000 * 100 * FLOAT
    assert found["classifier table", "always"] == 3_001 * 64 * FLOAT
    narrow = by_name(estimate_memory(sizes, replace(config, head=replace(config.head, storage="bfloat16"))))
    assert narrow["classifier table", "always"] == 3_001 * 64 * 2
    assert found["classifier's Adam moments", "trained"] == 3_001 * (2 * 64 * FLOAT + 4)


def test_bfloat16_moments_are_those_of_the_optimizer(world, tmp_path):
    settings = {**SMALL, "head.projection": 24, "head.storage": "bfloat16", "batch.start": 9, "train.device": "cpu"}
    config = resolve_presets(load_config("unidec", settings), world)
    trainer = Trainer(config, world, tmp_path)
    trainer.take_step()
    held = sum(
        value.numel() * value.element_size()
        for name, value in trainer.optimizers.state(by_label=True).items()
        if name.startswith("classifier/")
    )
    sizes = sizes_from_data(world, config)
    found = by_name(estimate_memory(sizes, config))
    assert found["classifier's Adam moments", "trained"] == held == world.num_labels * (2 * 24 * 2 + 4)
    single = replace(config, head=replace(config.head, storage="float32"))
    elements = world.num_labels * 24
    assert checkpoint_bytes(sizes, single) - checkpoint_bytes(sizes, config) == elements * (3 * FLOAT - 3 * 2)


def test_a_row_sparse_table_needs_gradients_of_touched_rows_only():
    sizes, config = make()
    dense = by_name(estimate_memory(sizes, config))["token table's gradient", "step"]
    sparse = by_name(estimate_memory(replace(sizes, sparse=True, touched_rows=50), config))[
        "token table's gradient", "step"
    ]
    assert dense == 2 * 5_000 * 100 * FLOAT
    assert sparse == 4 * 50 * 100 * FLOAT


@pytest.mark.parametrize("megabytes", [1, 16, 256])
def test_score_tiles_stay_within_their_budget(megabytes):
    config = load_config("dexml", {"loss.memory_megabytes": megabytes})
    # Two more buffers of one cache-sized tile serve intermediate results.
    assert tile_bytes(config, 1_024, 1_000_000) <= megabytes * MIB + 2 * 2 * MIB
    assert tile_bytes(config, 32, 500) <= 3 * 32 * 500 * FLOAT


def test_a_search_never_takes_more_than_its_budget():
    assert search_bytes(3, 1_000) == 15_000
    assert search_bytes(10**6, 10**7) == 5 * 512 * 2_048


def test_mining_counts_only_where_it_will_happen():
    sizes, config = make("dexml-hnm")
    assert any(term.phase == "refresh" for term in estimate_memory(sizes, config).terms)
    short = replace(config, train=replace(config.train, epochs=config.batch.start))
    assert not any(term.phase == "refresh" for term in estimate_memory(sizes, short).terms)


def test_pools_and_steps():
    sizes, config = make("dexml")
    assert pool_size(sizes, config) == 3_001
    assert steps_per_epoch(sizes, config) == -(-sizes.num_queries // config.batch.size)
    sizes, config = make("unidec", num_labels=10**6, labels_per_query=2)
    assert steps_per_epoch(sizes, config) == 128
    # Queries of a cluster share labels; a batch is the 128th part of the queries.
    assert pool_size(sizes, config) == round(0.4 * (2 * config.batch.size + 6 * batch_size(sizes, config)))
    sizes, config = make("renee")
    assert texts_per_step(sizes, config) == 0
    assert sizes.num_queries > 10_007  # the labels are queries too


def test_checkpoints_hold_weights_and_moments():
    sizes, config = make("dexml")
    assert checkpoint_bytes(sizes, config) == 3 * weights_bytes(sizes, config)
    assert {term.name for term in estimate_disk(sizes, config)} == {
        "checkpoints",
        "model",
        "training queries",
        "metrics",
    }


def test_a_known_transformer_has_the_weights_it_has():
    for name, millions in (("minilm", 22.7), ("distilbert-base-uncased", 66.4), ("bert-base-uncased", 109.5)):
        config = load_config("dexml", {"encoder.kind": "transformer", "encoder.pretrained": name})
        assert shape_from_config(config.encoder).weights == pytest.approx(millions * 1e6, rel=0.01)


def test_activations_follow_the_micro_batch():
    config = load_config("dexml", {"encoder.kind": "transformer"})
    sizes, config = make("dexml", {"encoder.kind": "transformer"}, encoder=shape_from_config(config.encoder))
    halved = replace(
        config, train=replace(config.train, tokens_per_micro_batch=config.train.tokens_per_micro_batch // 2)
    )
    name = ("activations", "step")
    assert by_name(estimate_memory(sizes, halved))[name] * 2 == by_name(estimate_memory(sizes, config))[name]


def test_half_precision_and_recomputed_layers_shrink_activations():
    name = ("activations", "step")

    def activations(**changes):
        settings = {"encoder.kind": "transformer", "encoder.pretrained": "distilbert-base-uncased", **changes}
        shape = shape_from_config(load_config("dexml", settings).encoder)
        return by_name(estimate_memory(*make("dexml", settings, encoder=shape)))

    whole, half = (activations(**{"train.precision": precision}) for precision in ("float32", "float16"))
    recomputed = activations(**{"train.activation_checkpointing": True})
    assert recomputed[name] * 4 < whole[name]
    assert half[name] == pytest.approx(0.73 * whole[name], rel=0.01)
    assert half["half-precision weights", "step"] * 2 == whole["encoder weights", "always"]


@pytest.mark.parametrize(
    ("budget", "tokens"),
    [
        (100_000, 100 * 20 + 500 * 10),  # both sides in one micro-batch each: their graphs are kept
        (1_999, 1_999),  # both in several
        (3_000, 3_000),  # the queries in one: its graph is gone before the labels are encoded again
    ],
)
def test_activations_are_those_of_the_texts_encoded_with_a_graph_at_once(budget, tokens):
    settings = {"encoder.kind": "transformer", "batch.size": 100, "validation.fraction": 0.0}
    settings["train.tokens_per_micro_batch"] = budget
    shape = shape_from_config(load_config("dexml", settings).encoder)
    sizes, config = make("dexml", settings, num_queries=1_000, num_labels=500, encoder=shape, tokens_per_label=10)
    per_token = 4 * activations_per_token(sizes, config)
    assert by_name(estimate_memory(sizes, config))["activations", "step"] == tokens * per_token


def test_sizes_are_a_plain_record():
    sizes, _ = make()
    assert isinstance(sizes, Sizes)
    assert sizes.query_tokens == sizes.num_queries * 20
