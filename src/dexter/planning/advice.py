"""What would make a run fit: the smallest change of settings, or the number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dexter.config import Config
from dexter.errors import UsageError

Peak = Callable[[Config], float]
"""Bytes that a configuration needs."""
_MOST_RANKS = 1 << 20
_SMALLEST_MICRO_BATCH, _SMALLEST_BUDGET, _SMALLEST_BATCH, _SMALLEST_DIMENSION = 512, 16, 32, 32


@dataclass(frozen=True)
class Change:
    """A setting and the value that helps."""

    setting: str
    value: Any

    def __str__(self) -> str:
        return f"{self.setting}={self.value}"


def changes_that_fit(config: Config, limit: float, peak: Peak) -> list[Change] | None:
    """The first single change that fits, else changes one after the other, the most helpful first; None: none do.

    Settings that cost speed come before those that change what is learned.
    """
    if peak(config) <= limit:
        return []
    for kind in _CANDIDATES:
        for change in kind(config):
            if peak(_changed(config, change)) <= limit:
                return [change]
    return _greedy(config, limit, peak)


def ranks_that_fit(limit: float, peak: Callable[[int], float], *, least: int = 1) -> int | None:
    """The fewest ranks with which each stays below the limit; None where no number does."""
    most = least
    while peak(most) > limit:
        most *= 2
        if most > _MOST_RANKS:
            return None
    low = least
    while low < most:
        middle = (low + most) // 2
        low, most = (low, middle) if peak(middle) <= limit else (middle + 1, most)
    return most


def _greedy(config: Config, limit: float, peak: Peak) -> list[Change] | None:
    """Take the last value of every candidate, the one that saves most first, until it fits."""
    chosen: list[Change] = []
    kinds = list(_CANDIDATES)
    while peak(config) > limit:
        options = [(last, kind) for kind in kinds if (last := _last(kind(config))) is not None]
        savings = [(peak(config) - peak(_changed(config, change)), place) for place, (change, _) in enumerate(options)]
        if not savings or max(savings)[0] <= 0:
            return None
        change, kind = options[max(savings)[1]]
        kinds.remove(kind)
        config = _changed(config, change)
        chosen.append(change)
    return chosen


def _changed(config: Config, change: Change) -> Config:
    section, _, name = change.setting.partition(".")
    try:
        part: Any = replace(getattr(config, section), **{name: change.value})
        return dataclasses.replace(config, **{section: part})
    except UsageError:
        return config


def _last(changes: Iterator[Change]) -> Change | None:
    found = list(changes)
    return found[-1] if found else None


def _halves(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value


def _micro_batch(config: Config) -> Iterator[Change]:
    for tokens in _halves(config.train.tokens_per_micro_batch, _SMALLEST_MICRO_BATCH):
        yield Change("train.tokens_per_micro_batch", tokens)


def _tiles(config: Config) -> Iterator[Change]:
    for megabytes in _halves(config.loss.memory_megabytes, _SMALLEST_BUDGET):
        yield Change("loss.memory_megabytes", megabytes)


def _batch(config: Config) -> Iterator[Change]:
    for size in _halves(config.batch.size, _SMALLEST_BATCH):
        yield Change("batch.size", size)


def _storage(config: Config) -> Iterator[Change]:
    if config.head.classifier and config.head.storage == "float32":
        yield Change("head.storage", "bfloat16")


def _words(config: Config) -> Iterator[Change]:
    if config.encoder.kind == "static":
        for words in _halves(config.encoder.words, 1_000):
            yield Change("encoder.words", words)


def _projection(config: Config) -> Iterator[Change]:
    for size in _halves(config.head.projection, _SMALLEST_DIMENSION):
        yield Change("head.projection", size)


def _dimension(config: Config) -> Iterator[Change]:
    for size in _halves(config.encoder.dimension or 1024, _SMALLEST_DIMENSION):
        yield Change("encoder.dimension", size)


_CANDIDATES: tuple[Callable[[Config], Iterator[Change]], ...] = (
    _micro_batch,
    _tiles,
    _storage,
    _batch,
    _words,
    _projection,
    _dimension,
)
