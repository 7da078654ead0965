"""Bytes between processes in a step, kind by kind, under the names that `training.distributed` counts its traffic by.

Queries are split over the processes by rows and labels by columns. A step
- gathers the vectors of the `queries`, so that every process scores all of them against its labels;
- reduces a few numbers per query, `max` and `sum`: the largest score, the sum of exponentials, sums over positives;
- sums the `query gradients`, to which the labels of every process contribute;
- sums the `gradients` of the weights that every process has a copy of: the encoder and the heads' projections. Where a
  static encoder's table is updated row by row, its touched rows are gathered instead: `table gradients`.
Classifier rows, label priors and their moments belong to one process each and are never sent.

Bytes are those that one process of W sends with ring algorithms: (W - 1) / W of the result for rows that are gathered,
and twice that for numbers that are summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dexter.batches.mining import shortlist_length
from dexter.config import Config
from dexter.encoders.head_arrays import num_prior_elements
from dexter.planning.sizes import Sizes, batch_size, needs_refresh, num_heads, score_width

_FLOAT = 4
_MAXIMA = {"softmax": 1, "decoupled_softmax": 1, "psl": 1, "soft_topk": 2}
_SUMS = {"softmax": 4, "decoupled_softmax": 4, "psl": 4, "soft_topk": 25, "bce": 1}
"""Numbers per query that a loss reduces over all processes; soft top-k takes several rounds to find a root."""
_ROW_NUMBER = 8
_HEAPS_EXPONENT = 0.6
"""Heaps' law: 1 / W of the texts have about W^-0.6 of the words."""


@dataclass(frozen=True)
class Exchange:
    """The cost of one kind of collective to each process."""

    name: str
    payload: int
    """Bytes of the result that every process ends up with."""
    sent: int
    """Bytes that a process sends."""


def gathered(name: str, payload: float, world_size: int) -> Exchange:
    """All-gather: every process has a part and receives all parts."""
    return Exchange(name, round(payload), round(payload * (world_size - 1) / world_size))


def summed(name: str, payload: float, world_size: int) -> Exchange:
    """All-reduce: every process has numbers and receives their sums or maxima."""
    return Exchange(name, round(payload), round(2 * payload * (world_size - 1) / world_size))


def step_exchanges(sizes: Sizes, config: Config, *, world_size: int) -> list[Exchange]:
    """What each process sends in a step."""
    return [exchange for exchange in _step(sizes, config, world_size) if exchange.sent]


def refresh_exchanges(sizes: Sizes, config: Config, *, world_size: int) -> list[Exchange]:
    """What a refresh of clusters and hard negatives sends: all query vectors, and each process's best labels."""
    if not needs_refresh(config):
        return []
    exchanges = [gathered("queries", _FLOAT * sizes.num_queries * score_width(sizes, config), world_size)]
    kept = 12 * shortlist_length(config.batch, sizes.num_labels) * sizes.num_queries
    exchanges.append(gathered("top labels", kept * world_size, world_size))
    return [exchange for exchange in exchanges if exchange.sent]


def _step(sizes: Sizes, config: Config, world_size: int) -> Iterator[Exchange]:
    queries, head, loss = batch_size(sizes, config), config.head, config.loss
    trained_heads = (head.encoder_weight > 0) + (head.encoder_weight < 1) if head.classifier else 1
    width = score_width(sizes, config)
    vectors = _FLOAT * trained_heads * queries * (width + (num_prior_elements(width) if loss.prior else 0))
    yield gathered("queries", vectors, world_size)
    yield summed("query gradients", vectors, world_size)
    yield summed("max", _FLOAT * trained_heads * queries * _MAXIMA.get(loss.name, 0), world_size)
    numbers = 1 + 2 * loss.num_negatives if loss.name == "triplet" else _SUMS[loss.name]
    yield summed("sum", _FLOAT * trained_heads * queries * numbers, world_size)
    encoder = sizes.encoder
    weights = encoder.weights + num_heads(config) * head.projection * (encoder.dimension + 1)
    yield summed("gradients", _FLOAT * (weights + (0 if sizes.sparse else encoder.table_elements)), world_size)
    if sizes.sparse:
        own = sizes.touched_rows * world_size**-_HEAPS_EXPONENT * (_FLOAT * encoder.dimension + _ROW_NUMBER)
        yield gathered("table gradients", own * world_size, world_size)
