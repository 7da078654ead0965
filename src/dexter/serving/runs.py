"""Named runs behind one address. What a run predicts is computed in its one worker thread, in order of arrival.

Labels are edited in a second thread: the predictor swaps them in at once when they are ready, so that predictions go
on meanwhile and each is of one version of the labels.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from dexter.errors import UsageError
from dexter.model.edits import ChangeResult, LabelChange
from dexter.predict.explain import Explanation
from dexter.predict.predictor import Prediction, Predictor
from dexter.serving.batching import Batcher, Limits
from dexter.serving.embedding import Embedded, Side, embed_texts
from dexter.serving.settings import ServeSettings
from dexter.types import HeadName

Gone = Callable[[], Awaitable[bool]]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIAL_DIGITS = 2
"""A dial is rounded to so many digits, so that a slider does not ask for a thousand predictors."""
T = TypeVar("T")


class Variant(NamedTuple):
    """The choices of a request that need a predictor of their own; None is the run's own choice."""

    head: HeadName | None = None
    neighbours: bool | None = None
    dial: float | None = None

    def resolved(self, base: Predictor) -> Variant:
        """With the run's choices filled in."""
        dial = base.dial if self.dial is None else round(self.dial, _DIAL_DIGITS)
        return Variant(
            self.head or base.head, base.uses_neighbours if self.neighbours is None else self.neighbours, dial
        )


class Question(NamedTuple):
    """What is asked of a text; texts with the same question are computed together."""

    k: int
    threshold: float | None
    variant: Variant


class Answer(NamedTuple):
    """The labels of a text, and the version of the labels that they are of."""

    version: int
    labels: list[Prediction]
    predictor: Predictor
    """Who found them."""


class Seen(NamedTuple, Generic[T]):
    """What was found, and the version of the labels that it is of."""

    version: int
    answer: T


def _seen(predictor: Predictor, ask: Callable[[Predictor], T]) -> Seen[T]:
    """Ask, and ask again where the labels have changed meanwhile: versions only grow, so equal ones are the same."""
    while True:
        version = predictor.version
        answer = ask(predictor)
        if predictor.version == version:
            return Seen(version, answer)


class _Derived(NamedTuple):
    """The predictor of a variant, and what it was made from."""

    base: Predictor
    version: int
    predictor: Predictor


class NotReady(Exception):
    """The run has no model yet."""


class Run:
    """A predictor with its queue, its worker thread and the versions of its labels."""

    def __init__(
        self,
        name: str,
        predictor: Predictor | None,
        settings: ServeSettings,
        *,
        folder: Path | None = None,
        observe: Callable[[int], None] = lambda num_texts: None,
    ) -> None:
        self.name = name
        self.folder = folder
        """Where the run is on disk; None for a predictor that only lives in memory."""
        self._current = predictor
        self._variants: OrderedDict[Variant, _Derived] = OrderedDict()
        self._max_variants = settings.max_variants
        self._limits = Limits(
            max_texts=settings.batch_texts,
            max_characters=settings.batch_characters,
            max_queued=settings.max_queued_texts,
            wait_seconds=settings.batch_wait_seconds,
        )
        self._observe = observe
        self.open()

    def open(self) -> None:
        """Start the threads; also again, after `close`, where a service is started a second time in its process."""
        self._worker, self._editor, self._explainer = (
            ThreadPoolExecutor(1, thread_name_prefix=f"dexter-{self.name}{part}") for part in ("", "-labels", "-why")
        )
        self._predicting = Batcher(self._predict, self._worker, self._limits, observe=self._observe)
        self._embedding = Batcher(self._embed, self._worker, self._limits)
        self.is_open = True

    @property
    def is_ready(self) -> bool:
        """Whether there is a model."""
        return self._current is not None

    @property
    def predictor(self) -> Predictor:
        """What answers now; it may be another one later."""
        if self._current is None:
            raise NotReady
        return self._current

    @predictor.setter
    def predictor(self, predictor: Predictor) -> None:
        self._current = predictor

    @property
    def num_queued(self) -> int:
        """Texts that wait."""
        return self._predicting.num_queued + self._embedding.num_queued

    async def predict(
        self,
        texts: Sequence[str],
        k: int,
        *,
        threshold: float | None = None,
        variant: Variant | None = None,
        gone: Gone | None = None,
    ) -> list[Answer]:
        """The k best labels of each text, or those of them that reach the threshold; all of one version."""
        question = Question(k, threshold, variant or Variant())
        return await self._predicting.submit(question, texts, gone=gone)

    async def explain(self, text: str, answer: Answer) -> list[Explanation] | None:
        """Why a text got its labels; None where one of them was removed meanwhile. Predictions of others go on."""
        ids = [label.id for label in answer.labels]
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._explainer, answer.predictor.explain_labels, text, ids)
        except UsageError:
            return None

    async def embed(self, texts: Sequence[str], *, side: Side = "query", gone: Gone | None = None) -> list[Embedded]:
        """The vector of each text."""
        return await self._embedding.submit(side, texts, gone=gone)

    async def edit(self, edit: LabelChange, *, expected: int | None = None) -> ChangeResult:
        """Change the labels; with `expected`, only if that is their version."""
        return await self.in_editor(lambda: self.predictor.edit_labels(edit, expected=expected))

    async def look(self, ask: Callable[[Predictor], T]) -> Seen[T]:
        """Ask the predictor something about its labels, and know of which version the answer is."""
        return await asyncio.to_thread(_seen, self.predictor, ask)

    async def in_editor(self, work: Callable[[], T]) -> T:
        """Do something to the labels: one after the other, while predictions go on."""
        return await asyncio.get_running_loop().run_in_executor(self._editor, work)

    def close(self) -> None:
        """End the threads once they have done what they were given."""
        for thread in (self._worker, self._editor, self._explainer):
            thread.shutdown(wait=True, cancel_futures=True)
        self.is_open = False

    def _predict(self, question: Question, texts: list[str]) -> list[Answer]:
        def ask(base: Predictor) -> tuple[Predictor, list[list[Prediction]]]:
            predictor = self._predictor(base, question.variant.resolved(base))
            return predictor, predictor.predict(texts, question.k, threshold=question.threshold)

        version, (predictor, found) = _seen(self.predictor, ask)
        return [Answer(version, labels, predictor) for labels in found]

    def _predictor(self, base: Predictor, variant: Variant) -> Predictor:
        """The predictor of a variant: it shares the model, and the label vectors of another with its head."""
        if variant == Variant().resolved(base):
            return base
        derived = self._variants.get(variant)
        if derived is None or (derived.base, derived.version) != (base, base.version):
            made = [other.predictor for other in self._variants.values() if other[:2] == (base, base.version)]
            source = next((predictor for predictor in (base, *made) if predictor.head == variant.head), base)
            predictor = source.variant(head=variant.head, neighbours=variant.neighbours, dial=variant.dial)
            derived = self._variants[variant] = _Derived(base, base.version, predictor)
            if len(self._variants) > self._max_variants:
                self._variants.popitem(last=False)
        self._variants.move_to_end(variant)
        return derived.predictor

    def _embed(self, side: Side, texts: list[str]) -> list[Embedded]:
        return embed_texts(self.predictor.model, texts, side=side)


class Runs:
    """The runs of a service by name; the first is the one that is asked when no name is given."""

    def __init__(self, runs: Mapping[str, Run]) -> None:
        if not runs:
            raise UsageError("a service needs at least one run")
        for name in runs:
            if not _NAME.fullmatch(name):
                raise UsageError(f"run name {name!r}: expected letters, digits, dots, dashes: write NAME=FOLDER")
        self._runs = dict(runs)

    @property
    def default(self) -> Run:
        """The first one."""
        return next(iter(self._runs.values()))

    def find(self, name: str | None) -> Run | None:
        """The run of a name; None where there is none."""
        return self.default if name is None else self._runs.get(name)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())
