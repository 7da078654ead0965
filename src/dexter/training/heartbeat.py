"""Signs of life: every rank beats, and a rank that waits for the others can say whom it is waiting for.

A rank meets the others in collectives. One that is stopped or cut off never arrives, and the others would wait in
silence. So a thread of every rank publishes a beat that says how far its rank is, and watches those of the others
while its own rank waits:

- a rank that has not beaten for `seconds` is gone: it is named, and this process ends (its launcher starts all again);
- a rank that beats but is behind is busy: it is named in a warning, again and again, until it arrives.

Knows no process group: only a store of short texts that all ranks can reach, and its own clock.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

_LEFT = "left"
_EXIT_CODE = 5
log = logging.getLogger("dexter")


class Store(Protocol):
    """Short texts by name, shared by all ranks."""

    def set(self, name: str, text: str) -> None:
        """Write a text."""
        ...

    def multi_get(self, names: list[str]) -> list[bytes]:
        """Read some texts."""
        ...


@dataclass
class _Sight:
    """What was last seen of a rank."""

    beat: str = ""
    meetings: int = 0
    doing: str = ""
    changed: float = 0.0


class Heartbeat:
    """Beats for one rank from its start until `leave`."""

    def __init__(
        self, store: Store, *, rank: int, size: int, seconds: float, end: Callable[[str], None] | None = None
    ) -> None:
        """Start beating.

        Args:
            store: where beats are published.
            rank: of this process.
            size: number of ranks.
            seconds: a rank that has not beaten for so long is gone.
            end: what to do when one is; by default say so on stderr and end the process.
        """
        self._store, self._rank, self._seconds = store, rank, seconds
        self._end = end or _end_process
        self._names = [f"beat/{other}" for other in range(size)]
        self._sights = [_Sight(changed=time.monotonic()) for _ in range(size)]
        self._meetings = 0
        self._waiting: tuple[str, float] | None = None
        self._warned = 0.0
        self._beats = 0
        self._over = threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to watch; every rank must have been constructed by now."""
        self._thread.start()

    def meet(self, name: str) -> None:
        """This rank has arrived at a meeting and waits there."""
        self._meetings += 1
        self._waiting = (name, time.monotonic())

    def go_on(self) -> None:
        """This rank waits no more."""
        self._waiting = None

    def leave(self) -> None:
        """This rank has finished."""
        self._over.set()
        self._thread.join(timeout=self._seconds)

    def _run(self) -> None:
        lost_at: float | None = None
        while not self._over.wait(self._seconds / 10):
            try:
                self._publish()
                self._look()
                lost_at = None
            except Exception as error:
                # The store is gone with the process that kept it, or about to answer again.
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > self._seconds:
                    self._end(f"rank {self._rank} cannot reach the launcher's store any more ({error})")
                    return
            if (accusation := self._accuse(time.monotonic())) is not None:
                self._end(accusation)
                return
        try:
            self._store.set(self._names[self._rank], _LEFT)
        except Exception:
            log.debug("the store closed before rank %d could say goodbye", self._rank)

    def _publish(self) -> None:
        self._beats += 1
        waiting = self._waiting
        doing = f"waiting in {waiting[0]}" if waiting else "working"
        self._store.set(self._names[self._rank], f"{self._beats}/{self._meetings}/{doing}")

    def _look(self) -> None:
        for sight, text in zip(self._sights, self._store.multi_get(self._names), strict=True):
            beat = text.decode()
            if beat != sight.beat:
                sight.beat, sight.changed = beat, time.monotonic()
                if beat != _LEFT:
                    _, meetings, sight.doing = beat.split("/", 2)
                    sight.meetings = int(meetings)

    def _accuse(self, now: float) -> str | None:
        """Who is to blame for waiting too long: a text that ends this process, or a warning that is logged."""
        waiting = self._waiting
        if waiting is None or now - waiting[1] < self._seconds / 2:
            return None
        others = [(rank, sight) for rank, sight in enumerate(self._sights) if rank != self._rank]
        gone = [rank for rank, sight in others if now - sight.changed >= self._seconds or sight.beat == _LEFT]
        if gone:
            return (
                f"{_named(gone)} gave no sign of life for {self._seconds:.0f} s while rank {self._rank} waited in "
                f"{waiting[0]}: stopped, cut off or dead; start again with --resume, or use torchrun --max-restarts"
            )
        behind = [f"rank {rank} ({sight.doing})" for rank, sight in others if sight.meetings < self._meetings]
        if behind and now - max(self._warned, waiting[1]) >= self._seconds / 2:
            self._warned = now
            log.warning(
                "rank %d has waited %.0f s in %s for %s",
                self._rank, now - waiting[1], waiting[0], ", ".join(behind),
            )  # fmt: skip
        return None


def _named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _end_process(message: str) -> None:
    # The main thread sits in a collective that nothing can interrupt. What it wrote is whole or under temporary names.
    print(f"dexter: error: {message}", file=sys.stderr, flush=True)
    os._exit(_EXIT_CODE)
