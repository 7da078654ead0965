"""Floating-point operations of a step: what time on another machine follows from."""

from __future__ import annotations

from dexter.config import Config
from dexter.planning.sizes import Sizes, batch_size, pool_size, texts_per_step
from dexter.planning.terms import score_width

_CACHED_PASSES = 4
"""Forward without graph, forward again, and a backward pass that costs two: gradient caching."""
_PRODUCTS = 4
"""Scores twice, and the gradients of both sides."""


def operations_per_step(sizes: Sizes, config: Config, *, world_size: int = 1) -> float:
    """Of one rank: its share of the encoding, and all queries against its share of the labels."""
    queries, encoder = batch_size(sizes, config), sizes.encoder
    tokens = queries * sizes.tokens_per_query + texts_per_step(sizes, config) * sizes.tokens_per_label
    encoding = _CACHED_PASSES * tokens * encoder.operations_per_token
    heads = 2 if config.head.classifier else 1
    scoring = _PRODUCTS * 2 * queries * pool_size(sizes, config) * score_width(sizes, config) * heads
    return (encoding + scoring) / world_size
