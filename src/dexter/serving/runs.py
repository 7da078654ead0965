"""Runs that are served by name. A run predicts in one worker thread, in the order in which requests arrive.

Labels are changed in a second thread: the predictor swaps the new labels in when they are ready, so that predictions
continue meanwhile and each answer is of one version of the labels. A third thread explains.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from dexter.errors import DexterError, ModelError, ResourceError, UsageError
from dexter.predict import (
    ChangeResult,
    EmbeddedText,
    Explanation,
    LabelChange,
    LabelsBusy,
    Prediction,
    Predictor,
    RankingChoice,
    published_version,
)
from dexter.predict.filters import LabelFilter
from dexter.serving.batching import Batcher, IsDisconnected
from dexter.serving.problems import Problem
from dexter.serving.settings import ServeSettings
from dexter.types import HeadName

log = logging.getLogger("dexter")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIAL_DIGITS = 2
"""Digits that a dial is rounded to, so that a slider does not ask for a thousand predictors."""
_SEARCH_SECONDS, _ANSWERED_OF_LATE_SECONDS = 2.0, 5.0
"""How long a readiness check waits for a search, and for how long after an answer it needs none."""
_FOLLOW_SECONDS = 60.0
"""How long taking up a change, such as a new model, may take before readiness tells."""
T = TypeVar("T")
Side = Literal["query", "label"]


class PredictOptions(NamedTuple):
    """Options of a prediction; texts with equal options are computed together. None: as the run was tuned."""

    k: int
    threshold: float | None = None
    head: HeadName | None = None
    neighbours: bool | None = None
    dial: float | None = None
    labels: LabelFilter = LabelFilter()
    """The labels that may be returned."""


@dataclass(slots=True)
class IdentifiedText:
    """A text, and the id by which its own label is left out where the run does so; None: no id."""

    text: str
    id: str | None = None

    def __len__(self) -> int:
        return len(self.text)


class Answer(NamedTuple):
    """The labels of a text, best first."""

    version: int
    """The version of the labels that were ranked."""
    labels: list[Prediction]
    predictor: Predictor
    """The predictor that ranked them."""


class ServedRun:
    """A predictor with its queue and its threads.

    Args:
        name: the run's name in requests.
        source: a predictor, or a run folder. A folder is loaded, or waited for while its training has not published a
            model, and followed: new models, new indexes and labels changed by other processes are taken up.
        settings: of the service.
        observe_batch: called with the number of texts of each batch.
        computed: cleared while a batch is computed.
    """

    def __init__(
        self,
        name: str,
        source: Predictor | Path,
        settings: ServeSettings,
        observe_batch: Callable[[int], None] = lambda num_texts: None,
        computed: threading.Event | None = None,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise UsageError(f"run name {name!r}: expected letters, digits, dots, dashes: write NAME=FOLDER")
        self.name, self._settings = name, settings
        self._observe_batch, self._computed = observe_batch, computed or threading.Event()
        self.folder = source if isinstance(source, Path) else None
        """The run folder; None for a predictor that only lives in memory."""
        self._predictor = source if isinstance(source, Predictor) else None
        self._published: tuple[str, str | None] | None = None
        """Fingerprints of the model and the index that were loaded from the folder."""
        self._variants: OrderedDict[RankingChoice, tuple[Predictor, int, Predictor]] = OrderedDict()
        """By ranking: the predictor it was made from, the version of its labels, and the predictor."""
        self._answered_at = -math.inf
        """When a prediction succeeded last."""
        self._followed_at = time.monotonic()
        """When the follower of the folder last looked."""
        self._follow_error = ""
        self._is_last_write_lost = False
        if self.folder is not None:
            self._load_first(self.folder)
        self.start()

    def start(self) -> None:
        """Start the threads; after `stop`, start them again."""
        self._worker, self._editor, self._explainer = (
            ThreadPoolExecutor(1, thread_name_prefix=f"dexter-{self.name}{part}") for part in ("", "-labels", "-why")
        )
        max_texts, max_queued = self._settings.batch_texts, self._settings.max_queued_texts
        self._predicting = Batcher(
            self._predict, self._worker, max_texts=max_texts, max_queued=max_queued, observe=self._observe_batch
        )
        self._embedding = Batcher(self._embed, self._worker, max_texts=max_texts, max_queued=max_queued)
        self.is_running = True

    def stop(self) -> None:
        """End the threads when they have finished what is under way."""
        for thread in (self._worker, self._editor, self._explainer):
            thread.shutdown(wait=True, cancel_futures=True)
        self.is_running = False

    @property
    def is_ready(self) -> bool:
        """Whether there is a model."""
        return self._predictor is not None

    @property
    def predictor(self) -> Predictor:
        """The predictor in use; a newly published model replaces it."""
        if self._predictor is None:
            raise Problem(503, "no_model", "this run has no model yet", headers={"Retry-After": "5"})
        return self._predictor

    @property
    def num_queued(self) -> int:
        """Texts that wait for a batch."""
        return self._predicting.num_queued + self._embedding.num_queued

    async def predict(
        self,
        texts: Sequence[str],
        options: PredictOptions,
        *,
        ids: Sequence[str | None] | None = None,
        is_disconnected: IsDisconnected | None = None,
    ) -> list[Answer]:
        """Rank the labels of each text; all answers are of one version of the labels.

        `ids` are those of the texts, whose own labels are left out where the run does so.
        """
        items = [IdentifiedText(*each) for each in zip(texts, ids or [None] * len(texts), strict=True)]
        return await self._predicting.submit(options, items, is_disconnected=is_disconnected)

    async def explain(self, text: str, answer: Answer) -> list[Explanation] | None:
        """Explain each label of an answer; None if one of them was removed meanwhile. Predictions continue."""
        ids = [label.id for label in answer.labels]
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._explainer, answer.predictor.explain_labels, text, ids)
        except UsageError:
            return None

    async def embed(
        self, texts: Sequence[str], *, side: Side = "query", is_disconnected: IsDisconnected | None = None
    ) -> list[EmbeddedText]:
        """Embed each text as a query or as a label."""
        return await self._embedding.submit(side, texts, is_disconnected=is_disconnected)

    async def change_labels(
        self, change: LabelChange, *, expected: int | None = None, by: str | None = None
    ) -> ChangeResult:
        """Change the labels; with `expected`, only if that is their version. Predictions continue.

        `by` is who changes them, for the history.
        """
        return await self._edit(partial(self.predictor.edit_labels, change, expected=expected, by=by))

    async def add_examples(
        self,
        examples: Sequence[tuple[str, Sequence[str]]],
        *,
        ids: Sequence[str | None] | None = None,
        add_labels: bool = False,
        by: str | None = None,
    ) -> ChangeResult:
        """Add texts with labels, which vote from now on; see `Predictor.add_examples`. Predictions continue."""
        return await self._edit(partial(self.predictor.add_examples, examples, ids=ids, add_labels=add_labels, by=by))

    async def undo_labels(self, edit: int | None = None, *, by: str | None = None) -> ChangeResult:
        """Undo an edit of the labels, the last one that was not undone if left out. Predictions continue."""
        return await self._edit(partial(self.predictor.undo_labels, edit, by=by))

    async def _edit(self, edit: Callable[[], ChangeResult]) -> ChangeResult:
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._editor, edit)
        except LabelsBusy:
            raise
        except (ResourceError, OSError):
            self._is_last_write_lost = True
            raise
        self._is_last_write_lost = False
        return result

    async def read_labels(self, read: Callable[[Predictor], T]) -> tuple[int, T]:
        """Call `read` in a thread; return the version of the labels that it saw, and its result."""
        return await asyncio.to_thread(_read_one_version, self.predictor, read)

    async def follow_folder(self) -> None:
        """Take up what changes in the run folder, until cancelled; log an error once and try again."""
        while True:
            await asyncio.sleep(self._settings.follow_seconds)
            error = ""
            try:
                await asyncio.get_running_loop().run_in_executor(self._editor, self._take_up_changes)
            except DexterError as refused:
                error = str(refused)
            except Exception as unexpected:  # What caused it may be repaired.
                error = f"{self.folder}: what changed there cannot be taken up: {unexpected!r}"
            if error and error != self._follow_error:
                log.warning("%s", error)
            self._follow_error, self._followed_at = error, time.monotonic()

    async def check_ready(self) -> list[str]:
        """Raise a 503 unless texts are answered, by a search if there was none of late; return what else is wrong."""
        predictor = self.predictor
        if time.monotonic() - self._answered_at > _ANSWERED_OF_LATE_SECONDS:
            try:
                await asyncio.wait_for(self.predict(["ready"], PredictOptions(k=1)), _SEARCH_SECONDS)
            except Exception as error:
                log.warning("%s: not ready: %s", self.name, str(error) or type(error).__name__)
                detail = "a search fails or takes too long: the worker, the index or its database is to blame"
                raise Problem(503, "search", detail, headers={"Retry-After": "5"}) from None
        found = []
        if self.folder is not None:
            if self._follow_error:
                found.append("what changed in the run folder cannot be taken up: the log says why")
            elif time.monotonic() - self._followed_at > self._settings.follow_seconds + _FOLLOW_SECONDS:
                found.append("the run folder is not followed any more")
        if self._is_last_write_lost:
            found.append(f"the last label edit could not be written (the labels are at version {predictor.version})")
        return found

    def _load_first(self, folder: Path) -> None:
        try:
            self._load(folder, published_version(folder))
        except ModelError:
            if (folder / "model").is_dir() or not (folder / "config.toml").exists():
                raise
            log.info("%s: no model yet: waiting for the first", folder)

    def _load(self, folder: Path, published: tuple[str, str | None]) -> None:
        settings = self._settings
        self._predictor = Predictor.load(folder, persistent=settings.keep_edits, runtime=settings.runtime)
        self._published = published

    def _take_up_changes(self) -> None:
        folder = self.folder
        if folder is None or not (self.is_ready or (folder / "model").is_dir()):
            return
        published = published_version(folder)
        if published == self._published:
            self.predictor.refresh_labels()
        else:
            self._load(folder, published)
            log.info("%s: serving model %s", folder, published[0])

    def _predict(self, options: PredictOptions, items: list[IdentifiedText]) -> list[Answer]:
        """Rank the labels of texts; runs in the worker thread."""
        texts, ids, labels = [item.text for item in items], [item.id for item in items], options.labels

        def rank(base: Predictor) -> tuple[Predictor, list[list[Prediction]]]:
            predictor = self._variant(base, choose_ranking(base, options))
            return predictor, predictor.predict(
                texts,
                options.k,
                threshold=options.threshold,
                ids=ids,
                exclude=labels.exclude,
                only=labels.only,
                bands=labels.bands,
            )

        self._computed.clear()
        try:
            version, (predictor, found) = _read_one_version(self.predictor, rank)
        finally:
            self._computed.set()
        self._answered_at = time.monotonic()
        return [Answer(version, labels, predictor) for labels in found]

    def _variant(self, base: Predictor, choice: RankingChoice) -> Predictor:
        """Return the predictor of a ranking; it shares the model, and the label vectors of another with its head."""
        if choice == base.choice:
            return base
        source, version, predictor = self._variants.get(choice, (None, None, base))
        if (source, version) != (base, base.version):
            others = [other for *made_from, other in self._variants.values() if made_from == [base, base.version]]
            same_head = next((other for other in (base, *others) if other.choice.head == choice.head), base)
            predictor = same_head.variant(choice)
            self._variants[choice] = (base, base.version, predictor)
            if len(self._variants) > self._settings.max_variants:
                self._variants.popitem(last=False)
        self._variants.move_to_end(choice)
        return predictor

    def _embed(self, side: Side, texts: list[str]) -> list[EmbeddedText]:
        return self.predictor.embed(texts, side=side)


class ServedRuns:
    """The runs of a service by name; a request without a name asks the first."""

    def __init__(self, runs: Sequence[ServedRun], settings: ServeSettings) -> None:
        if not runs:
            raise UsageError("a service needs at least one run")
        self.default, self.settings = runs[0], settings
        self._runs: Mapping[str, ServedRun] = {run.name: run for run in runs}

    def get(self, name: str | None) -> ServedRun:
        """Return the run of a name, or the default."""
        run = self.default if name is None else self._runs.get(name)
        if run is None:
            raise Problem(404, "run", "no run has this name: GET /info lists them")
        return run

    def __iter__(self) -> Iterator[ServedRun]:
        return iter(self._runs.values())


def choose_ranking(predictor: Predictor, options: PredictOptions) -> RankingChoice:
    """Return how labels are ranked: the options of a request, and the predictor's own where they are left out."""
    dial = None if options.dial is None else round(options.dial, _DIAL_DIGITS)
    return predictor.choose(head=options.head, neighbours=options.neighbours, dial=dial)


def _read_one_version(predictor: Predictor, read: Callable[[Predictor], T]) -> tuple[int, T]:
    """Call `read`, and again if the labels have changed meanwhile; versions only grow, so equal ones are the same."""
    while True:
        version = predictor.version
        result = read(predictor)
        if predictor.version == version:
            return version, result
