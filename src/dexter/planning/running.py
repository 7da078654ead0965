"""What a run says of itself at its start: the memory and disk it will need, and after its first steps the time.

Sizes are exact here, since texts are tokenised and the encoder is built; the time is that of real steps. Nothing is
probed, so that a run does nothing it would not do anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dexter.config import Config
from dexter.data import Dataset
from dexter.data.tokens import Tokens
from dexter.planning.counts import characters, characters_per_query, pool_positives, text_bytes
from dexter.planning.report import in_bytes, in_time
from dexter.planning.shapes import shape_of
from dexter.planning.sizes import Sizes
from dexter.planning.storage import disk
from dexter.planning.terms import memory

if TYPE_CHECKING:
    from dexter.encoders import TextEncoder

_SKIPPED_STEPS, _TIMED_STEPS = 2, 5
"""The first steps warm up; the time of the next ones is what is printed."""


def sizes_of_run(
    config: Config,
    dataset: Dataset,
    encoder: TextEncoder,
    *,
    query_tokens: Tokens,
    label_tokens: Tokens,
    num_label_texts: int,
    num_validation: int,
    touched_rows: int,
) -> Sizes:
    """The sizes of a run that is about to begin; `label_tokens` are those of the texts that this rank holds."""
    return Sizes(
        encoder=shape_of(encoder),
        num_queries=len(query_tokens),
        num_validation=num_validation,
        num_labels=dataset.num_labels,
        num_label_texts=num_label_texts,
        num_pairs=int(dataset.train.relevance.nnz),
        tokens_per_query=len(query_tokens.ids) / max(1, len(query_tokens)),
        tokens_per_label=len(label_tokens.ids) / max(1, len(label_tokens)),
        characters=characters(dataset),
        characters_per_query=characters_per_query(dataset),
        text_bytes=text_bytes(dataset),
        pool_positives=pool_positives(dataset, config),
        touched_rows=touched_rows,
        sparse=bool(getattr(encoder, "sparse", False)),
    )


def describe_needs(sizes: Sizes, config: Config, *, world_size: int = 1) -> str:
    """One line: peak memory of a rank, its largest term and what shrinks it, and disk."""
    separate = config.train.device != "cpu"
    needs = memory(sizes, config, world_size=world_size, separate=separate)
    largest, peak = needs.largest, needs.peak("device") if separate else needs.peak()
    remedy = f"; smaller with {largest.setting}" if largest.setting else ""
    return (
        f"needs about {in_bytes(peak)} of memory{' per rank' if world_size > 1 else ''} (largest: {largest.name}, "
        f"{in_bytes(largest.bytes)}{remedy}) and {in_bytes(sum(term.bytes for term in disk(sizes, config)))} of disk"
    )


class Pace:
    """Says once, after the first steps, how long an epoch will take."""

    def __init__(
        self, *, first_step: int, num_steps: int, steps_per_epoch: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_step, self._num_steps, self._steps_per_epoch = first_step, num_steps, steps_per_epoch
        self._clock = clock
        self._started: float | None = None

    def after_step(self, step: int) -> str | None:
        """To be called after every step; the line, once there is one."""
        done = step - self._first_step
        if done == _SKIPPED_STEPS:
            self._started = self._clock()
        if done != _SKIPPED_STEPS + _TIMED_STEPS or self._started is None:
            return None
        seconds = (self._clock() - self._started) / _TIMED_STEPS
        left = (self._num_steps - step) * seconds
        return (
            f"about {in_time(seconds)} per step: {in_time(seconds * self._steps_per_epoch)} per epoch, "
            f"{in_time(left)} to go (validation comes on top)"
        )
