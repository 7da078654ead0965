"""Micro-batching: texts of requests that arrive together are computed together, and each request gets its own results.

While a batch is computed in the worker thread, arriving requests queue; those that wait when the worker is free form
the next batch. A batch waits a few milliseconds to be as large as the last one: clients that were just answered often
ask again at once, and would otherwise split into two halves that take turns. Requests of clients that have disconnected
are left out. If a batch fails, its requests are computed one by one, so that a text that cannot be computed fails only
the request it came with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence, Sized
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dexter.serving.problems import Busy, Problem

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item", bound=Sized)
"""A text, or a text with more; its length is its number of characters."""
Result = TypeVar("Result")
IsDisconnected = Callable[[], bool]
"""Whether the client of a request has closed its connection."""
_MAX_CHARACTERS = 2**18
BATCH_WAIT_SECONDS = 0.004


class QueueFull(Busy):
    """Raised when the queue is full."""


class Disconnected(Problem):
    """Raised when the client has closed its connection before its texts were computed."""

    def __init__(self) -> None:
        super().__init__(400, "gone", "the client has closed the connection")


@dataclass(eq=False)
class _Job(Generic[Key, Item, Result]):
    """The texts of one request."""

    key: Key
    texts: Sequence[Item]
    answer: asyncio.Future[list[Result]]
    is_disconnected: IsDisconnected | None


class Batcher(Generic[Key, Item, Result]):
    """A queue in front of `work(key, texts)`, which returns one result per text and runs in `executor`.

    Args:
        work: computes texts with the same key together.
        executor: where `work` runs.
        max_texts: most texts of a batch; a request with more goes alone.
        max_queued: most texts that may wait.
        max_characters: most characters of a batch; a request with more goes alone.
        wait_seconds: how long a batch waits to be as large as the last one.
        observe: called with the number of texts of each batch.
    """

    def __init__(
        self,
        work: Callable[[Key, list[Item]], Sequence[Result]],
        executor: Executor,
        *,
        max_texts: int,
        max_queued: int,
        max_characters: int = _MAX_CHARACTERS,
        wait_seconds: float = BATCH_WAIT_SECONDS,
        observe: Callable[[int], None] = lambda num_texts: None,
    ) -> None:
        self._work, self._executor, self._observe = work, executor, observe
        self._max_texts, self._max_characters, self._max_queued = max_texts, max_characters, max_queued
        self._wait_seconds = wait_seconds
        self._jobs: dict[_Job[Key, Item, Result], None] = {}
        self.num_queued = 0
        """Texts that wait for a batch."""
        self._runner: asyncio.Task[None] | None = None
        self._is_filled = asyncio.Event()
        self._last_size = 1
        """Texts of the last batch; the next one starts as soon as this number of texts waits."""

    async def submit(
        self, key: Key, texts: Sequence[Item], *, is_disconnected: IsDisconnected | None = None
    ) -> list[Result]:
        """Return one result per text, in order; `is_disconnected` is called once, before the texts are computed."""
        if self._jobs and self.num_queued + len(texts) > self._max_queued:
            raise QueueFull(f"{self._max_queued} texts are waiting")
        job = _Job(key, texts, asyncio.get_running_loop().create_future(), is_disconnected)
        self._jobs[job] = None
        self.num_queued += len(texts)
        if self.num_queued >= self._last_size:
            self._is_filled.set()
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        try:
            return await job.answer
        finally:
            self._remove(job)

    def _remove(self, job: _Job[Key, Item, Result]) -> bool:
        """Take a job out of the queue; return False if it was not in there any more."""
        if job not in self._jobs:
            return False
        del self._jobs[job]
        self.num_queued -= len(job.texts)
        return True

    async def _run(self) -> None:
        """Compute batch after batch until the queue is empty."""
        try:
            while self._jobs:
                self._is_filled = asyncio.Event()  # belongs to the running event loop
                if self._wait_seconds and self.num_queued < self._last_size:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._is_filled.wait(), self._wait_seconds)
                if batch := self._take_batch():
                    await self._compute(batch)
        except Exception as error:
            for job in list(self._jobs):
                self._remove(job)
                _fail(job, error)
        finally:
            self._runner = None

    def _take_batch(self) -> list[_Job[Key, Item, Result]]:
        """Take the oldest job out of the queue, and those that can be computed with it."""
        batch: list[_Job[Key, Item, Result]] = []
        num_texts = num_characters = 0
        for job in list(self._jobs):
            if num_texts >= self._max_texts:
                break
            characters = sum(map(len, job.texts))
            fits = num_texts + len(job.texts) <= self._max_texts and num_characters + characters <= self._max_characters
            if batch and (job.key != batch[0].key or not fits):
                continue
            if job.is_disconnected is not None and job.is_disconnected():
                self._remove(job)
                _fail(job, Disconnected())
            elif self._remove(job):
                batch.append(job)
                num_texts, num_characters = num_texts + len(job.texts), num_characters + characters
        return batch

    async def _compute(self, batch: list[_Job[Key, Item, Result]]) -> None:
        """Compute a batch in the executor and give each job its results."""
        texts = [text for job in batch for text in job.texts]
        self._observe(len(texts))
        self._last_size = len(texts)
        loop = asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self._executor, self._work, batch[0].key, texts)
        except Exception as error:
            if len(batch) > 1:
                for job in batch:
                    await self._compute([job])
            else:
                _fail(batch[0], error)
            return
        position = 0
        for job in batch:
            if not job.answer.done():
                job.answer.set_result(list(results[position : position + len(job.texts)]))
            position += len(job.texts)


def _fail(job: _Job[Any, Any, Any], error: Exception) -> None:
    if not job.answer.done():
        job.answer.set_exception(error)
