"""The short schedules that the claims share, for 5,000 training queries and the static encoder."""

from __future__ import annotations

from typing import Any

from bench.claims.claim import Row

ALL_LABELS: dict[str, Any] = {"train.epochs": 3, "batch.size": 320}
"""For steps over all labels."""
MINED: dict[str, Any] = {
    "train.epochs": 6,
    "batch.size": 320,
    "batch.start": 1,
    "batch.refresh": 2,
    "train.head_learning_rate": 0.001,
}
"""For clusters and hard negatives: refreshed before the second, fourth and sixth epoch; clusters of 313 queries."""
SYSTEM: dict[str, Any] = {"train.epochs": 5, "batch.size": 320}
"""For the systems that the papers compare with."""
NGAME: dict[str, Any] = SYSTEM | {"train.epochs": 8, "batch.refresh": 2}
"""For NGAME and what is built on it, whose clusters grow from epoch to epoch."""
NGAME_STAGES = NGAME | {"head.classifier_start": 6}
MINILM: dict[str, Any] = {
    "train.epochs": 1,
    "batch.size": 32,
    "encoder.max_length_query": 16,
    "train.learning_rate": 1e-4,
}
"""For MiniLM on 750 queries: 24 steps, a rate at which so few change it, and titles only."""
MINILM_ALL_LABELS = MINILM | {"train.label_refresh": 4}
MINILM_MINED = MINILM_ALL_LABELS | {"train.epochs": 2, "batch.size": 48, "batch.start": 1, "batch.refresh": 1}
UNTRAINED = Row(
    name="untrained",
    recipe="untrained",
    measure="untrained",
    head="all",
    settings={"encoder.max_length_query": MINILM["encoder.max_length_query"]},
    only=("stackexchange4-mini",),
)
"""MiniLM as it was published, beside what so short a training makes of it."""
