"""Several processes that answer on one port: the parent starts them, passes signals on and replaces those that die.

Each worker has its own socket on the port (SO_REUSEPORT), among which the kernel deals out connections, and its own
queue, limits and label follower. The tables of a run are mapped, and so are in memory once.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from dexter.errors import DexterError, ResourceError

log = logging.getLogger("dexter")
_SECONDS_BEFORE_RESTART = 1.0
"""Shortest time between two starts of a worker, so that one that cannot start does not use up the machine."""


def run_workers(num_workers: int, work: Callable[[int, Callable[[], object]], None]) -> None:
    """Run `work(number, tell_ready)` in forked processes until SIGTERM or SIGINT, which reach the workers as SIGTERM.

    SIGHUP reaches them too. A worker that ends is replaced; if one fails before any called `tell_ready`, all are ended.
    """
    parent = _Parent(work)
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        signal.signal(getattr(signal, name), parent.pass_on)
    for number in range(1, num_workers + 1):
        parent.start(number)
    parent.watch()


class _Parent:
    def __init__(self, work: Callable[[int, Callable[[], object]], None]) -> None:
        self._work = work
        self._workers: dict[int, tuple[int, float]] = {}
        """By process id: number of the worker, and when it was started."""
        self._is_stopping = False
        self._alive = os.pipe()
        """Nothing is ever written: the workers read its end when this process is gone."""
        self._ready = os.pipe()
        """Workers that are ready write a byte."""
        os.set_blocking(self._ready[0], False)

    def pass_on(self, signum: int, frame: object) -> None:
        """Send a signal to the workers."""
        if signum != signal.SIGHUP:
            self._is_stopping, signum = True, signal.SIGTERM
        for process in list(self._workers):
            os.kill(process, signum)

    def start(self, number: int) -> None:
        """Start a worker."""
        process = os.fork()
        if process == 0:
            self._be_worker(number)
        self._workers[process] = (number, time.monotonic())
        if self._is_stopping:  # the signal may have come in between
            os.kill(process, signal.SIGTERM)

    def watch(self) -> None:
        """Replace workers that end, until all have ended after a signal."""
        failure = 0
        while self._workers:
            process, status = os.wait()
            number, started = self._workers.pop(process)
            code = os.waitstatus_to_exitcode(status)
            if self._is_stopping:
                failure = failure or code
                continue
            if not self._was_ever_ready():
                self.pass_on(signal.SIGTERM, None)
                failure = code or ResourceError.exit_code
                continue
            log.error("worker %d (process %d) ended with %d: starting another", number, process, code)
            time.sleep(max(0.0, started + _SECONDS_BEFORE_RESTART - time.monotonic()))
            if not self._is_stopping:
                self.start(number)
        if failure:
            raise SystemExit(failure if failure > 0 else ResourceError.exit_code)

    def _was_ever_ready(self) -> bool:
        try:
            return bool(os.read(self._ready[0], 1)) and bool(os.write(self._ready[1], b"r"))
        except BlockingIOError:
            return False

    def _be_worker(self, number: int) -> NoReturn:
        """Work in the forked process, and end it; nothing of the parent's program runs in it."""
        code = ResourceError.exit_code
        try:
            os.setpgid(0, 0)  # Ctrl-C reaches the parent only, which passes it on
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            os.close(self._alive[1])
            threading.Thread(target=self._end_with_parent, daemon=True).start()
            self._work(number, lambda: os.write(self._ready[1], b"r"))
            code = 0
        except DexterError as error:
            log.error("%s", error)
            code = error.exit_code
        except BaseException:
            log.exception("worker %d", number)
        finally:
            os._exit(code)

    def _end_with_parent(self) -> None:
        os.read(self._alive[0], 1)
        os.kill(os.getpid(), signal.SIGTERM)
