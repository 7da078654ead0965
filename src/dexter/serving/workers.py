"""Several processes that answer on one port: the parent starts them, passes signals on and replaces those that end.

Each worker has its own socket on the port (SO_REUSEPORT), among which the kernel deals out connections, and its own
queue, limits and label follower. The tables of a run are mapped, and so are in memory once. The event loop of a worker
gives a sign of life ten times a second, as a byte in shared memory; a worker without any is killed and replaced.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from dexter.errors import DexterError, ResourceError

log = logging.getLogger("dexter")
_LOOK_SECONDS = 0.1
"""Time between two looks at the workers."""
_HUNG_SECONDS = 20.0
"""A worker without a sign of life for this long is killed."""
_MIN_WAIT, _MAX_WAIT = 1.0, 60.0
"""Seconds before a worker that ended is replaced: doubled each time that it worked for less than the longest wait."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if os.name == "posix" else ()


def run_workers(num_workers: int, work: Callable[[int, Callable[[], None]], None], *, end_seconds: float) -> None:
    """Run `work(number, beat)` in forked processes until SIGTERM or SIGINT, which reach the workers as SIGTERM.

    SIGHUP reaches them too. `beat` is the sign of life; its first call says that the worker is ready. A worker that
    ends or hangs is replaced; if one fails before any was ready, all are ended. What has not ended `end_seconds` after
    the signal is killed.
    """
    parent = _Parent(num_workers, work, end_seconds)
    for number in _SIGNALS:
        signal.signal(number, parent.pass_on)
    parent.watch()


@dataclass
class _Worker:
    """A worker and the process that it is at the moment."""

    number: int
    process: int = 0
    """0: none."""
    started: float = 0.0
    start_at: float = 0.0
    """When to start the next process."""
    wait: float = _MIN_WAIT
    beat: int = 0
    """The last sign of life; 0: none yet."""
    silent_looks: int = 0
    """Looks since then. Not seconds: they would also pass while the whole machine is halted."""

    def kill(self) -> None:
        os.kill(self.process, signal.SIGKILL)


class _Parent:
    def __init__(self, num_workers: int, work: Callable[[int, Callable[[], None]], None], end_seconds: float) -> None:
        self._work, self._end_seconds = work, end_seconds
        self._workers = [_Worker(number) for number in range(num_workers)]
        self._beats = mmap.mmap(-1, num_workers)
        self._was_ready = False
        self._end_at: float | None = None
        """When workers that are left are killed; None: there was no signal to stop."""
        self._failure = 0
        self._alive = os.pipe()
        """Nothing is ever written: the workers read its end when this process is gone."""

    def pass_on(self, signum: int, frame: object) -> None:
        """Send a signal to the workers."""
        if signum != signal.SIGHUP:
            self._end_at, signum = time.monotonic() + self._end_seconds, signal.SIGTERM
        for worker in self._workers:
            if worker.process:
                with suppress(ProcessLookupError):
                    os.kill(worker.process, signum)

    def watch(self) -> None:
        """Start workers and replace those that end or hang, until all have ended after a signal."""
        while self._end_at is None or any(worker.process for worker in self._workers):
            for worker in self._workers:
                if worker.process:
                    self._look_after(worker)
                elif self._end_at is None and time.monotonic() >= worker.start_at:
                    self._start(worker)
            time.sleep(_LOOK_SECONDS)
        if self._failure:
            raise SystemExit(self._failure if self._failure > 0 else ResourceError.exit_code)

    def _start(self, worker: _Worker) -> None:
        self._beats[worker.number] = worker.beat = worker.silent_looks = 0
        # A signal waits until this process knows the new one, and that one has its own way with signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        process = os.fork()
        if process == 0:
            self._be_worker(worker.number)
        worker.process, worker.started = process, time.monotonic()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _look_after(self, worker: _Worker) -> None:
        process, status = os.waitpid(worker.process, os.WNOHANG)
        if process:
            self._note_end(worker, os.waitstatus_to_exitcode(status))
        elif self._end_at is not None:
            if time.monotonic() > self._end_at:
                log.error("worker %d (process %d) hangs: ending without it", worker.number + 1, worker.process)
                worker.kill()
        elif (beat := self._beats[worker.number]) != worker.beat:
            worker.beat, worker.silent_looks, self._was_ready = beat, 0, True
        elif worker.beat:
            worker.silent_looks += 1
            if worker.silent_looks * _LOOK_SECONDS <= _HUNG_SECONDS:
                return
            silence = "worker %d (process %d) gave no sign of life for %g s: killing it"
            log.error(silence, worker.number + 1, worker.process, _HUNG_SECONDS)
            worker.silent_looks = 0
            worker.kill()

    def _note_end(self, worker: _Worker, code: int) -> None:
        process, worker.process = worker.process, 0
        now = time.monotonic()
        if self._end_at is not None:
            if code != -signal.SIGTERM:  # of one that was not ready yet
                self._failure = self._failure or code
        elif not (self._was_ready or self._beats[worker.number]):
            self.pass_on(signal.SIGTERM, None)
            self._failure = code or ResourceError.exit_code
        else:
            wait = 0.0 if now - worker.started > _MAX_WAIT else worker.wait
            worker.start_at, worker.wait = now + wait, min(_MAX_WAIT, max(_MIN_WAIT, 2 * wait))
            message = "worker %d (process %d) ended with %d: starting another in %g s"
            log.error(message, worker.number + 1, process, code, wait)

    def _beat(self, number: int) -> None:
        self._beats[number] = self._beats[number] % 255 + 1

    def _be_worker(self, number: int) -> NoReturn:
        """Work in the forked process, and end it; nothing of the parent's program runs in it."""
        code = ResourceError.exit_code
        try:
            os.setpgid(0, 0)  # Ctrl-C reaches the parent only, which passes it on
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            os.close(self._alive[1])
            threading.Thread(target=self._end_with_parent, daemon=True).start()
            self._work(number + 1, lambda: self._beat(number))
            code = 0
        except DexterError as error:
            log.error("%s", error)
            code = error.exit_code
        except BaseException:
            log.exception("worker %d", number + 1)
        finally:
            os._exit(code)

    def _end_with_parent(self) -> None:
        os.read(self._alive[0], 1)
        os.kill(os.getpid(), signal.SIGTERM)
