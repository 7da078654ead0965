"""Bytes between processes: the ring's arithmetic, and who sends what."""

from dataclasses import replace

import pytest

from dexter.planning.network import gathered, refresh_exchanges, step_exchanges, summed
from tests.planning.test_memory import make


def ring(num_ranks, chunk_bytes, *, rounds):
    """Bytes that a rank sends when in every round it passes one chunk to its neighbour."""
    return sum(chunk_bytes for _ in range(rounds * (num_ranks - 1)))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_the_ring(num_ranks):
    payload = 24 * 1_000
    assert gathered("x", payload, num_ranks).sent == ring(num_ranks, payload // num_ranks, rounds=1)
    assert summed("x", payload, num_ranks).sent == ring(num_ranks, payload // num_ranks, rounds=2)


def test_one_rank_sends_nothing():
    sizes, config = make("unidec")
    assert step_exchanges(sizes, config, world_size=1) == []
    assert refresh_exchanges(sizes, config, world_size=1) == []


def test_a_step_of_all_labels():
    sizes, config = make("dexml", {"batch.size": 100}, num_queries=10_000)
    queries = -(-sizes.num_queries // -(-sizes.num_queries // 100))
    found = {exchange.name: exchange.payload for exchange in step_exchanges(sizes, config, world_size=4)}
    assert found == {
        "queries": queries * 100 * 4,
        "query gradients": queries * 100 * 4,
        "max": queries * 4,
        "sum": 4 * queries * 4,
        "gradients": (5_000 * 100 + 5_016) * 4,
    }


def test_bytes_do_not_depend_on_the_number_of_labels():
    few, config = make("unidec", num_labels=3_001)
    many, _ = make("unidec", num_labels=3_000_001)
    assert step_exchanges(few, config, world_size=8) == step_exchanges(many, config, world_size=8)


def test_both_heads_send_their_queries():
    sizes, config = make("unidec")
    one, _ = make("supconde")
    both = {exchange.name: exchange for exchange in step_exchanges(sizes, config, world_size=2)}
    without = replace(config, head=replace(config.head, classifier=False))
    single = {exchange.name: exchange for exchange in step_exchanges(one, without, world_size=2)}
    assert both["queries"].payload == 2 * single["queries"].payload


def test_touched_rows_travel_instead_of_the_table():
    sizes, config = make("dexml")
    sparse = replace(sizes, sparse=True, touched_rows=100)
    found = {exchange.name: exchange for exchange in step_exchanges(sparse, config, world_size=2)}
    assert found["gradients"].payload == 5_016 * 4
    assert 100 * (400 + 8) < found["table gradients"].payload < 2 * 100 * (400 + 8)


def test_mining_gathers_queries_and_each_ranks_best_labels():
    sizes, config = make("unidec")
    found = {exchange.name: exchange.payload for exchange in refresh_exchanges(sizes, config, world_size=2)}
    assert found["queries"] == sizes.num_queries * config.head.projection * 4
    assert found["top labels"] == 2 * sizes.num_queries * 30 * 12
