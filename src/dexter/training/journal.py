"""What a run says while it goes: `metrics.jsonl`, a progress bar on a terminal, optionally TensorBoard."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

log = logging.getLogger("dexter")
_QUIET_SECONDS = 30.0
"""Where there is no terminal, one line of progress every so many seconds."""


class SilentJournal:
    """For the ranks that leave it to the first to speak."""

    def record(self, step: int, kind: str, **values: Any) -> None:
        """Say nothing."""

    def advance(self, step: int, *, loss: float, texts_per_second: float) -> None:
        """Say nothing."""

    def close(self) -> None:
        """There is nothing to close."""


class Journal(SilentJournal):
    """Writes one JSON object per line, and shows where the run stands."""

    def __init__(self, path: Path, *, num_steps: int, first_step: int, tensorboard: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _forget_after(path, first_step)
        self._file = path.open("a", encoding="utf-8")
        self._bar = tqdm(
            total=num_steps, initial=first_step, unit="step", disable=not sys.stderr.isatty(), dynamic_ncols=True
        )
        self._writer = _tensorboard_writer(path.parent / "tensorboard") if tensorboard else None
        self._spoke = time.monotonic()
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
        if self._bar.disable and now - self._spoke > _QUIET_SECONDS:
            self._spoke = now
            left = (now - self._started) / max(1, step - self._first_step) * (self._num_steps - step)
            log.info(
                "step %d/%d, loss %.4f, %.0f texts/s, %.0f s left", step, self._num_steps, loss, texts_per_second, left
            )

    def close(self) -> None:
        """Finish the bar and the files."""
        self._bar.close()
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def resident_megabytes() -> int:
    """Memory that this process holds now."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 2**20
    except (OSError, ValueError):
        return 0


def _forget_after(path: Path, step: int) -> None:
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
