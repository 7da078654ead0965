"""Where the time of a run goes: processor seconds by phase, always on because a reading takes a microsecond."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Sums the processor time of this process by phase: `with watch("loss"): ...`.

    A phase within another one is counted in both. Work that a device does behind the processor's back is counted where
    the processor waits for it.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Processor seconds of each phase so far."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count what the block does as a part of the phase, also when it raises."""
        started = time.process_time()
        try:
            yield
        finally:
            self.seconds[phase] += time.process_time() - started
