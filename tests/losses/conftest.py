"""Cases that the loss tests share, and a summary of the largest errors seen (`pytest tests/losses -s`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch


class ErrorLog:
    """The largest relative error of each loss's value and gradients."""

    def __init__(self) -> None:
        self.largest: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    def add(self, name: str, errors: list[float]) -> None:
        self.largest[name] = [max(old, new) for old, new in zip(self.largest[name], errors, strict=True)]


@pytest.fixture(scope="session")
def error_log() -> Iterator[ErrorLog]:
    log = ErrorLog()
    yield log
    if log.largest:
        print("\nlargest error against the float64 double loop, relative to the largest entry (value, dq, dy):")
    for name, errors in sorted(log.largest.items()):
        print(f"  {name:18s}" + "  ".join(f"{error:.1e}" for error in errors))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
