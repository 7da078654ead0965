"""One writer at a time: a lock file that the system releases when its holder ends, however it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dexter.errors import ResourceError


@contextmanager
def locked(path: Path, *, purpose: str) -> Iterator[None]:
    """Hold the lock while the block runs; `ResourceError` at once where another process or thread has it.

    The file stays: removing it would let a third writer lock a new one while a second waits for the old.
    """
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ResourceError(f"{path}: cannot be opened for {purpose} ({error.strerror}): check permissions") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise ResourceError(f"{path}: process {holder} is {purpose}: wait until it is done and repeat") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
