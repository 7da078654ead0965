"""Bytes between ranks in a step, kind by kind, under the names that `training.distributed` counts its traffic by.

Queries are split over the ranks by rows and labels by columns. A step
- gathers the vectors of the `queries`, so that every rank scores all of them against its labels;
- reduces a few numbers per query, `max` and `sum`: the largest score, the sum of exponentials, sums over positives;
- sums the `query gradients`, to which every rank's labels contribute;
- sums the `gradients` of what every rank has a copy of: the encoder and the heads' projections. A static encoder's
  table that is updated row by row has its touched rows gathered instead: `table gradients`.
Classifier rows, label priors and their moments belong to one rank each and never travel.

Bytes are those that one rank sends when ranks stand in a ring: of W ranks' result, (W - 1) / W for rows that are
gathered and twice that for numbers that are summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dexter.config import Config
from dexter.planning.sizes import Sizes, batch_size, needs_refresh
from dexter.planning.terms import FLOAT, score_width

_LARGEST = {"softmax": 1, "decoupled_softmax": 1, "psl": 1, "soft_topk": 2}
_SUMMED = {"softmax": 4, "decoupled_softmax": 4, "psl": 4, "soft_topk": 25, "bce": 1}
"""Numbers per query whose largest, and whose sum, a loss asks of all ranks; soft top-k takes rounds to find a root."""
_ROW_NUMBER = 8
_SHARING = 0.6
"""Heaps' law: a part of 1 / W of the texts has about W^-0.6 of the words."""


@dataclass(frozen=True)
class Exchange:
    """What a kind of meeting costs each rank."""

    name: str
    payload: int
    """Bytes of the result that every rank ends up with."""
    sent: int
    """Bytes that a rank sends."""


def gathered(name: str, payload: float, world_size: int) -> Exchange:
    """Every rank has a part and gets all of it."""
    return Exchange(name, round(payload), round(payload * (world_size - 1) / world_size))


def summed(name: str, payload: float, world_size: int) -> Exchange:
    """Every rank has numbers and gets their sums (or the largest)."""
    return Exchange(name, round(payload), round(2 * payload * (world_size - 1) / world_size))


def step_exchanges(sizes: Sizes, config: Config, *, world_size: int) -> list[Exchange]:
    """What a step sends."""
    return [exchange for exchange in _step(sizes, config, world_size) if exchange.sent]


def refresh_exchanges(sizes: Sizes, config: Config, *, world_size: int) -> list[Exchange]:
    """What a refresh of clusters and hard negatives sends: all query vectors, and each rank's best labels of each."""
    if not needs_refresh(config):
        return []
    exchanges = [gathered("queries", FLOAT * sizes.num_queries * score_width(sizes, config), world_size)]
    if config.batch.hard_negatives:
        kept = min(config.batch.hard_negatives * config.batch.refresh, sizes.num_labels)
        exchanges.append(gathered("top labels", 12 * kept * sizes.num_queries * world_size, world_size))
    return [exchange for exchange in exchanges if exchange.sent]


def _step(sizes: Sizes, config: Config, world_size: int) -> Iterator[Exchange]:
    queries, head, loss = batch_size(sizes, config), config.head, config.loss
    num_heads = (config.head.encoder_weight > 0) + (config.head.encoder_weight < 1) if head.classifier else 1
    vectors = FLOAT * num_heads * queries * (score_width(sizes, config) + loss.prior)
    yield gathered("queries", vectors, world_size)
    yield summed("query gradients", vectors, world_size)
    yield summed("max", FLOAT * num_heads * queries * _LARGEST.get(loss.name, 0), world_size)
    numbers = 1 + 2 * loss.num_negatives if loss.name == "triplet" else _SUMMED[loss.name]
    yield summed("sum", FLOAT * num_heads * queries * numbers, world_size)
    yield from _gradients(sizes, config, world_size)


def _gradients(sizes: Sizes, config: Config, world_size: int) -> Iterator[Exchange]:
    encoder, head = sizes.encoder, config.head
    weights = encoder.weights + (2 if head.classifier else 1) * head.projection * (encoder.dimension + 1)
    if not sizes.sparse:
        weights += encoder.table_elements
    yield summed("gradients", FLOAT * weights, world_size)
    if sizes.sparse:
        own = sizes.touched_rows * world_size**-_SHARING * (FLOAT * encoder.dimension + _ROW_NUMBER)
        yield gathered("table gradients", own * world_size, world_size)
