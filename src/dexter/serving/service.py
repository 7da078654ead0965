"""What the endpoints share: the runs, the limits on texts, and how a question's failures are told."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from dexter.serving.batching import QueueFull, SenderGone
from dexter.serving.limits import Traffic
from dexter.serving.metrics import Metrics
from dexter.serving.problems import Problem, busy
from dexter.serving.runs import Run, Runs
from dexter.serving.settings import ServeSettings

T = TypeVar("T")


class Texts(NamedTuple):
    """The texts of a request, cut to the limits."""

    texts: list[str]
    truncated: list[bool]
    num_left_out: int


@dataclass(frozen=True)
class Service:
    """Everything an endpoint needs."""

    runs: Runs
    settings: ServeSettings
    metrics: Metrics
    traffic: Traffic = field(default_factory=Traffic)

    def run(self, name: str | None) -> Run:
        """The run of a name, or the default; a problem where there is none."""
        run = self.runs.find(name)
        if run is None:
            raise Problem(404, "run", "no run has this name: GET /info lists them")
        return run

    def read_texts(self, texts: Sequence[str]) -> Texts:
        """Cut texts to the limits, in number and in length; a problem where there is nothing to read."""
        kept = texts[: self.settings.max_inputs]
        if not kept:
            raise Problem(422, "empty", "there is no text in the request")
        for position, text in enumerate(kept):
            if not text.strip():
                raise Problem(422, "empty", f"text {position} of the request is empty")
        limit = self.settings.max_characters
        return Texts([text[:limit] for text in kept], [len(text) > limit for text in kept], len(texts) - len(kept))

    async def ask(self, answer: Awaitable[T]) -> T:
        """Wait for a run's answer."""
        try:
            return await answer
        except QueueFull:
            raise busy(f"{self.settings.max_queued_texts} texts are waiting") from None
        except SenderGone:
            raise Problem(400, "gone", "the sender has closed the connection") from None
