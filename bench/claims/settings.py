"""The short schedules that the claims share, for 5,000 training queries and the static encoder."""

from __future__ import annotations

from typing import Any

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
EPOCHS = {"train.epochs": 6}
MINILM: dict[str, Any] = {"train.epochs": 1, "batch.size": 64, "encoder.max_length_query": 32}
"""For MiniLM on 2,000 queries."""
MINILM_MINED = MINILM | {"train.epochs": 2, "batch.start": 1, "batch.refresh": 1}
