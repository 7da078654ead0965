"""Predictor: a run folder becomes ranked labels for texts. The one path of command line, evaluation and services."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from scipy.sparse import csr_matrix

from dexter.encoders.heads import HeadName
from dexter.errors import UsageError
from dexter.index import Index
from dexter.indexing import RunIndex, index_labels, open_run_index
from dexter.live.catalog import LabelPage, search_labels
from dexter.live.edits import EditResult, LabelEdit
from dexter.live.journal import LabelJournal
from dexter.live.live_model import LiveModel, LiveState, find_similar
from dexter.live.similar import SimilarLabel
from dexter.model import Labels, Model, fingerprint, model_folder
from dexter.ranking import TopK

_BLOCK_TEXTS, _BLOCK_CHARACTERS = 1_024, 2**24
"""A stream is predicted in blocks of so many texts, fewer where they are long."""


@dataclass(frozen=True)
class Prediction:
    """One label for one text."""

    id: str
    text: str
    score: float
    """Inner product of the two vectors: a cosine, plus the label's prior where the model has one."""


class Predictor:
    """Ranks the labels of a trained model; labels can be added, renamed and removed while it is in use."""

    def __init__(
        self,
        model: Model,
        *,
        head: HeadName | None = None,
        fingerprint: str | None = None,
        journal: LabelJournal | None = None,
        persistent: bool = False,
        reload: Callable[[], Model] | None = None,
        stored: RunIndex | None = None,
    ) -> None:
        self.head = head or model.default_head
        """Which of the model's heads ranks the labels."""
        self.fingerprint = fingerprint
        """Hash of the published model that was loaded; None for one that only lives in memory."""
        chosen = self.head  # not `self`, which a state would then keep alive and which keeps its states
        self._live = LiveModel(
            model,
            derive=lambda model: index_labels(model, head=chosen, stored=stored),
            journal=journal,
            persistent=persistent,
            reload=reload,
        )

    @classmethod
    def load(
        cls,
        run: str | Path,
        *,
        head: HeadName | None = None,
        device: str = "cpu",
        persistent: bool = False,
        index: Literal["exact"] | None = None,
    ) -> Predictor:
        """Open a run folder, or the model folder in it, with the labels as they were last changed on disk.

        Args:
            run: the folder.
            head: "encoder", or for a model with a classifier also "classifier" or "unified" (its default).
            device: where to compute.
            persistent: whether changes of labels are written to the folder too, or live in this predictor only.
            index: "exact" to look at every label; None: the run's index where it has one.
        """
        folder = model_folder(run)
        reload = partial(Model.load, folder, device=device)
        model, known = reload(), fingerprint(folder)
        journal = LabelJournal(folder, fingerprint=known, dimension=model.encoder.dimension)
        stored = None if index == "exact" else open_run_index(folder)
        return cls(
            model, head=head, fingerprint=known, journal=journal, persistent=persistent, reload=reload, stored=stored
        )

    @property
    def index(self) -> Index:
        """What finds the best labels."""
        return self._live.state.derived

    @property
    def model(self) -> Model:
        """The model with the labels that can be predicted."""
        return self._live.state.model

    @property
    def labels(self) -> Labels:
        """The labels that can be predicted, in the order of the ids that `top` returns."""
        return self.model.labels

    @property
    def version(self) -> int:
        """How often the labels were changed since the model was published; grows with every change."""
        return self._live.state.version

    def predict(self, texts: Sequence[str], k: int = 5) -> list[list[Prediction]]:
        """The k best labels of each text, best first; all of them where there are fewer."""
        if isinstance(texts, str):
            raise UsageError("predict takes a list of texts: write predict([text])")
        state = self._live.state
        found, labels = self._search(state, texts, k), state.model.labels
        return [
            [
                Prediction(labels.ids[label], labels.texts[label], float(score))
                for label, score in zip(ids, scores, strict=True)
                if label >= 0
            ]
            for ids, scores in zip(found.ids, found.scores, strict=True)
        ]

    def predict_stream(self, texts: Iterable[str], k: int = 5) -> Iterator[list[Prediction]]:
        """The same for any number of texts, in constant memory and in order."""
        for block in _blocks(texts):
            yield from self.predict(block, k)

    def top(self, texts: Sequence[str], k: int, *, exclude: csr_matrix | None = None) -> TopK:
        """The k best labels of each text as positions in `labels`, without the pairs of `exclude`."""
        return self._search(self._live.state, texts, k, exclude=exclude)

    def add_labels(self, labels: Sequence[tuple[str, str]], *, reuse_ids: bool = False) -> EditResult:
        """Add labels given as (id, text): they are encoded and compete from now on, without training.

        Either all of them are added or, when one is refused, none. Ids of removed labels are refused unless
        `reuse_ids`; the label then starts anew.
        """
        return self.edit_labels(LabelEdit(add=labels, reuse_ids=reuse_ids))

    def remove_labels(self, ids: Sequence[str]) -> EditResult:
        """Take labels out of every later prediction; when one is unknown, none is taken out."""
        return self.edit_labels(LabelEdit(remove=ids))

    def rename_labels(self, labels: Sequence[tuple[str, str]], *, keep_vectors: bool = False) -> EditResult:
        """Give labels new texts, as (id, text); they are found by these from now on, and keep what else they learned.

        With `keep_vectors` only the texts that are shown change.
        """
        return self.edit_labels(LabelEdit(rename=labels, keep_vectors=keep_vectors))

    def edit_labels(self, edit: LabelEdit) -> EditResult:
        """Remove, rename and add labels as one change: all of it, or nothing; on disk first if `persistent`."""
        return self._live.edit(edit)

    def refresh_labels(self) -> bool:
        """Take up what other processes changed in the folder since; whether there was anything."""
        return self._live.refresh()

    def compact_labels(self) -> None:
        """Make the files of changed labels as small as what they amount to; labels and version stay."""
        self._live.compact()

    def search_labels(self, query: str = "", *, limit: int | None = 20, offset: int = 0) -> LabelPage:
        """Labels whose id or text holds the query, those that begin with it first; an empty query lists all."""
        return search_labels(self.labels, query, limit=limit, offset=offset)

    def similar_labels(self, text: str, k: int = 5) -> list[SimilarLabel]:
        """The labels that mean nearly the same as a text would as a label."""
        return find_similar(self.model, [text], k)[0]

    def _search(
        self, state: LiveState[Index], texts: Sequence[str], k: int, *, exclude: csr_matrix | None = None
    ) -> TopK:
        if k < 1:
            raise UsageError(f"k must be 1 or more, got {k}")
        queries_ND = state.model.query_vectors(texts, head=self.head)
        return state.derived.search(queries_ND, min(k, len(state.model.labels.ids)), exclude=exclude)


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    block: list[str] = []
    num_characters = 0
    for text in texts:
        block.append(text)
        num_characters += len(text)
        if len(block) >= _BLOCK_TEXTS or num_characters >= _BLOCK_CHARACTERS:
            yield block
            block, num_characters = [], 0
    if block:
        yield block
