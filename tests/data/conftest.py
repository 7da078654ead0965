"""What the tests of reading and writing share."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The lines that reading and writing log during a test."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dexter")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(before)
