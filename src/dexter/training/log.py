"""What a run reports and listens to: metrics, progress, the time of its phases, signals."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from tqdm import tqdm

log = logging.getLogger("dexter")
_SECONDS_BETWEEN_LINES = 30.0
"""Without a terminal, one line of progress is logged this often."""


class SilentLog:
    """The log of the processes that leave reporting to the first one: does nothing."""

    def record(self, step: int, kind: str, **values: Any) -> None:
        """Ignore the record."""

    def advance(self, step: int, *, loss: float, texts_per_second: float) -> None:
        """Ignore the progress."""

    def close(self) -> None:
        """Do nothing."""


class TrainingLog(SilentLog):
    """Writes `metrics.jsonl`, one JSON object per line, shows progress, and optionally writes TensorBoard files."""

    def __init__(self, path: Path, *, num_steps: int, first_step: int, tensorboard: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_records_after(path, first_step)
        self._file = path.open("a", encoding="utf-8")
        self._bar = tqdm(
            total=num_steps, initial=first_step, unit="step", disable=not sys.stderr.isatty(), dynamic_ncols=True
        )
        self._writer = _tensorboard_writer(path.parent / "tensorboard") if tensorboard else None
        self._logged_at = time.monotonic()
        self._num_steps = num_steps
        self._started, self._first_step = time.monotonic(), first_step

    def record(self, step: int, kind: str, **values: Any) -> None:
        """Append one record and flush it."""
        self._file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)

    def advance(self, step: int, *, loss: float, texts_per_second: float) -> None:
        """Show that a step is done."""
        self._bar.update()
        self._bar.set_postfix_str(f"loss {loss:.4f}, {texts_per_second:,.0f} texts/s, {resident_megabytes():,} MB")
        now = time.monotonic()
        if self._bar.disable and now - self._logged_at > _SECONDS_BETWEEN_LINES:
            self._logged_at = now
            left = (now - self._started) / max(1, step - self._first_step) * (self._num_steps - step)
            log.info(
                "step %d/%d, loss %.4f, %.0f texts/s, %.0f s left", step, self._num_steps, loss, texts_per_second, left
            )

    def close(self) -> None:
        """Close the progress bar and the files."""
        self._bar.close()
        self._file.close()
        if self._writer is not None:
            self._writer.close()


class Stopwatch:
    """Sums the time of this process by phase: `with watch("loss"): ...`.

    A phase inside another one is counted in both. Asynchronous work of a device is counted where the process waits for
    it. A reading takes about a microsecond.

    Args:
        clock: returns seconds; the processor time of this process unless another one is given.
    """

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of each phase so far."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time of the block to the phase, also when it raises."""
        started = self._clock()
        try:
            yield
        finally:
            self.seconds[phase] += self._clock() - started


class Interrupts:
    """While entered, keeps the first SIGINT or SIGTERM in `received`; a second one ends the process at once.

    The training loop looks at `received` between two steps.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, signal.SIG_DFL)


def resident_megabytes() -> int:
    """Resident memory of this process in megabytes; 0 where it is not known."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 2**20
    except (OSError, ValueError):
        return 0


def _drop_records_after(path: Path, step: int) -> None:
    """Drop the records of steps that a resumed run is about to repeat, and a line that a kill cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step and step > 0:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def _tensorboard_writer(folder: Path) -> Any:
    from dexter.errors import require

    require("tensorboard", extra="track", purpose="writing TensorBoard files")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
