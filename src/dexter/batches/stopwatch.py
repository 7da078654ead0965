"""Where the time of a run goes: seconds by phase, always on because a reading takes a microsecond."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Sum the time of this process by phase: `with watch("loss"): ...`.

    A phase within another one is counted in both. Work that a device does asynchronously is counted where the process
    waits for it.

    Args:
        clock: returns seconds; the processor time of this process unless another one is given.
    """

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of each phase so far."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count what the block does as a part of the phase, also when it raises."""
        started = self._clock()
        try:
            yield
        finally:
            self.seconds[phase] += self._clock() - started
