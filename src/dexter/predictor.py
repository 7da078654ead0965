"""Predictor: a run folder becomes ranked labels for texts. The one path of command line, evaluation and services."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix
from torch import Tensor

from dexter.encoders.heads import HeadName
from dexter.errors import ModelError, UsageError
from dexter.index.exact import search
from dexter.model import Labels, Model, fingerprint
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


class _Ranking(NamedTuple):
    """Labels and their vectors, replaced as one: a prediction under way never mixes old and new labels."""

    labels: Labels
    vectors_LD: Tensor


class Predictor:
    """Ranks the labels of a trained model; labels can be added and removed while it is in use."""

    def __init__(self, model: Model, *, head: HeadName | None = None, fingerprint: str | None = None) -> None:
        self.model = model
        self.head = head or model.default_head
        """Which of the model's heads ranks the labels."""
        self.fingerprint = fingerprint
        """Hash of the published model that was loaded; None for one that only lives in memory."""
        self._ranking = self._rank()

    @classmethod
    def load(cls, run: str | Path, *, head: HeadName | None = None, device: str = "cpu") -> Predictor:
        """Open a run folder, or the model folder in it.

        `head` is "encoder", or for a model with a classifier also "classifier" or "unified" (its default).
        """
        folder = Path(run)
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such run folder: train one with `dexter train DATA --out {folder}`")
        published = folder / "model"
        if not published.is_dir() and (folder / "config.toml").exists():
            raise ModelError(
                f"{folder}: the run has no model yet: let it finish, or continue it with `dexter train --resume`"
            )
        folder = published if published.is_dir() else folder
        return cls(Model.load(folder, device=device), head=head, fingerprint=fingerprint(folder))

    @property
    def labels(self) -> Labels:
        """The labels that can be predicted, in the order of the ids that `top` returns."""
        return self._ranking.labels

    def predict(self, texts: Sequence[str], k: int = 5) -> list[list[Prediction]]:
        """The k best labels of each text, best first; all of them where there are fewer."""
        if isinstance(texts, str):
            raise UsageError("predict takes a list of texts: write predict([text])")
        ranking = self._ranking
        found, labels = self._search(ranking, texts, k), ranking.labels
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
        return self._search(self._ranking, texts, k, exclude=exclude)

    def add_labels(self, labels: Sequence[tuple[str, str]]) -> None:
        """Add labels given as (id, text): they are encoded and compete from now on, without training.

        Either all of them are added or, when one is refused, none.
        """
        _check_new(self.labels.ids, labels)
        self.model.add([label_id for label_id, _ in labels], [text for _, text in labels])
        self._ranking = self._rank()

    def remove_labels(self, ids: Sequence[str]) -> None:
        """Take labels out of every later prediction; when one is unknown, none is taken out."""
        if isinstance(ids, str):
            raise UsageError("remove_labels takes a list of ids: write remove_labels([id])")
        gone = set(ids)
        missing = gone.difference(self.labels.ids)
        if missing:
            raise UsageError(f"no label has the id {min(missing)!r}")
        keep = np.array([label_id not in gone for label_id in self.labels.ids])
        if not keep.any():
            raise UsageError("a model needs at least one label: not removing the last one")
        self.model.keep(np.flatnonzero(keep))
        self._ranking = self._rank()

    def _rank(self) -> _Ranking:
        return _Ranking(self.model.labels, self.model.label_vectors(head=self.head))

    def _search(self, ranking: _Ranking, texts: Sequence[str], k: int, *, exclude: csr_matrix | None = None) -> TopK:
        if k < 1:
            raise UsageError(f"k must be 1 or more, got {k}")
        queries_ND = self.model.query_vectors(texts, head=self.head)
        return search(queries_ND, ranking.vectors_LD, min(k, len(ranking.labels.ids)), exclude=exclude)


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


def _check_new(known: Sequence[str], labels: Sequence[tuple[str, str]]) -> None:
    """New labels need ids that nobody has, and ids and texts that a file can hold."""
    taken = set(known)
    for label_id, text in labels:
        if not (isinstance(label_id, str) and isinstance(text, str)):
            raise UsageError(f"a label is its id and its text, both strings: got {label_id!r} and {text!r}")
        if not label_id or any("\ud800" <= character <= "\udfff" for character in label_id + text):
            raise UsageError(
                f"label id {label_id!a}: an id must not be empty, nor id or text hold half a surrogate pair"
            )
        if label_id in taken:
            raise UsageError(f"label id {label_id!r} is in use already: remove it first or choose another id")
        taken.add(label_id)
