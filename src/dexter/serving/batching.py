"""Micro-batching: texts of requests that arrive together are computed together, each request gets its own part.

While a batch is computed in the worker thread, arriving requests queue; what is there when the worker is free forms the
next batch. It waits a moment to be as large as the last one: clients that were just answered often ask again at once,
and would otherwise fall into two halves that take turns. Requests whose sender has gone are left out when a batch is
formed. Where a batch fails, its requests are repeated one by one, so that a text that cannot be computed fails only the
request it came with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class Limits(NamedTuple):
    """How large a batch and the queue may be, and how long a batch waits to be as large as the last one."""

    max_texts: int
    max_characters: int
    max_queued: int
    wait_seconds: float = 0.0


class QueueFull(Exception):
    """As many texts wait as may."""


class SenderGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass(eq=False)
class _Job(Generic[Key, Result]):
    key: Key
    texts: Sequence[str]
    answer: asyncio.Future[list[Result]]
    gone: Callable[[], Awaitable[bool]] | None


class Batcher(Generic[Key, Result]):
    """A queue in front of `work(key, texts)`, which gives one result per text and runs in `executor`."""

    def __init__(
        self,
        work: Callable[[Key, list[str]], Sequence[Result]],
        executor: Executor,
        limits: Limits,
        *,
        observe: Callable[[int], None] = lambda num_texts: None,
    ) -> None:
        self._work, self._executor, self._limits, self._observe = work, executor, limits, observe
        self._jobs: dict[_Job[Key, Result], None] = {}
        self.num_queued = 0
        """Texts that wait for a batch."""
        self._runner: asyncio.Task[None] | None = None
        self._enough = asyncio.Event()
        self._awaited = 1
        """Texts that make it worth to start: as many as the last batch had, whose senders may be about to ask again."""

    async def submit(
        self, key: Key, texts: Sequence[str], *, gone: Callable[[], Awaitable[bool]] | None = None
    ) -> list[Result]:
        """One result per text, in order. `gone` tells whether the sender has left; it is asked once, before the work.

        Only texts with the same key are computed together.
        """
        if self._jobs and self.num_queued + len(texts) > self._limits.max_queued:
            raise QueueFull
        job = _Job(key, texts, asyncio.get_running_loop().create_future(), gone)
        self._jobs[job] = None
        self.num_queued += len(texts)
        if self.num_queued >= self._awaited:
            self._enough.set()
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        try:
            return await job.answer
        finally:
            self._remove(job)

    def _remove(self, job: _Job[Key, Result]) -> bool:
        """Take a job out of the queue; False where it is out already."""
        if job not in self._jobs:
            return False
        del self._jobs[job]
        self.num_queued -= len(job.texts)
        return True

    async def _run(self) -> None:
        """Answer batch after batch until nothing waits."""
        try:
            while self._jobs:
                await self._fill()
                if batch := await self._take():
                    await self._answer(batch)
        except Exception as error:
            for job in list(self._jobs):
                self._remove(job)
                _fail(job, error)
        finally:
            self._runner = None

    async def _fill(self) -> None:
        """Where the last batch had more texts than wait now, give others the time to join."""
        self._enough = asyncio.Event()  # of the loop that runs now
        if self._limits.wait_seconds and self.num_queued < self._awaited:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._enough.wait(), self._limits.wait_seconds)

    async def _take(self) -> list[_Job[Key, Result]]:
        """Take the oldest job and those that can be computed with it."""
        batch: list[_Job[Key, Result]] = []
        num_texts = num_characters = 0
        for job in list(self._jobs):
            characters = sum(map(len, job.texts))
            fits = (
                num_texts + len(job.texts) <= self._limits.max_texts
                and num_characters + characters <= self._limits.max_characters
            )
            if batch and (job.key != batch[0].key or not fits):
                continue
            if job.gone is not None and await job.gone():
                self._remove(job)
                _fail(job, SenderGone())
            elif self._remove(job):
                batch.append(job)
                num_texts, num_characters = num_texts + len(job.texts), num_characters + characters
        return batch

    async def _answer(self, batch: list[_Job[Key, Result]]) -> None:
        texts = [text for job in batch for text in job.texts]
        self._observe(len(texts))
        self._awaited = len(texts)
        loop = asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self._executor, self._work, batch[0].key, texts)
        except Exception as error:
            if len(batch) > 1:
                for job in batch:
                    await self._answer([job])
            else:
                _fail(batch[0], error)
            return
        position = 0
        for job in batch:
            if not job.answer.done():
                job.answer.set_result(list(results[position : position + len(job.texts)]))
            position += len(job.texts)


def _fail(job: _Job[Any, Any], error: Exception) -> None:
    if not job.answer.done():
        job.answer.set_exception(error)
