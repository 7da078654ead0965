"""Predictor: a run folder becomes ranked labels for texts. The only path of the command line, evaluation and services."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from scipy.sparse import csr_matrix

from dexter.encoders.embed import embed
from dexter.errors import ModelError, UsageError
from dexter.index.exact import TopK, search
from dexter.model import Labels, Model, fingerprint

_TAIL_COUNT = 10
"""A label that was never trained gets the median prior of labels with fewer training queries than this."""
_BLOCK_TEXTS = 1_024


@dataclass(frozen=True)
class Prediction:
    """One label for one text."""

    id: str
    text: str
    score: float
    """Inner product of the two vectors: a cosine, plus the label's prior where the model has one."""


class Predictor:
    """Ranks the labels of a trained model; labels can be added and removed while it is in use."""

    def __init__(self, model: Model, *, fingerprint: str | None = None) -> None:
        self.model = model
        self.fingerprint = fingerprint
        """Hash of the published model that was loaded; None for one that only lives in memory."""
        self._vectors = model.label_vectors()

    @classmethod
    def load(cls, run: str | Path, *, device: str = "cpu") -> Predictor:
        """Open a run folder, or the model folder in it."""
        folder = Path(run)
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such run folder: train one with `dexter train DATA --out {folder}`")
        published = folder / "model"
        if not published.is_dir() and (folder / "config.toml").exists():
            raise ModelError(
                f"{folder}: the run has no model yet: let it finish, or continue it with `dexter train --resume`"
            )
        folder = published if published.is_dir() else folder
        return cls(Model.load(folder, device=device), fingerprint=fingerprint(folder))

    @property
    def labels(self) -> Labels:
        """The labels that can be predicted, in the order of the ids that `top` returns."""
        return self.model.labels

    def predict(self, texts: Sequence[str], k: int = 5) -> list[list[Prediction]]:
        """The k best labels of each text, best first."""
        if isinstance(texts, str):
            raise UsageError("predict takes a list of texts: write predict([text])")
        found = self.top(texts, k)
        return [
            [
                Prediction(self.labels.ids[label], self.labels.texts[label], float(score))
                for label, score in zip(ids, scores, strict=True)
                if label >= 0
            ]
            for ids, scores in zip(found.ids, found.scores, strict=True)
        ]

    def predict_stream(self, texts: Iterable[str], k: int = 5) -> Iterator[list[Prediction]]:
        """The same for any number of texts, in constant memory and in order."""
        remaining = iter(texts)
        while block := list(islice(remaining, _BLOCK_TEXTS)):
            yield from self.predict(block, k)

    def top(self, texts: Sequence[str], k: int, *, exclude: csr_matrix | None = None) -> TopK:
        """The k best labels of each text as positions in `labels`, without the pairs of `exclude`."""
        if k < 1:
            raise UsageError(f"k must be 1 or more, got {k}")
        return search(self.model.query_vectors(texts), self._vectors, min(k, len(self.labels.ids)), exclude=exclude)

    def add_labels(self, labels: Sequence[tuple[str, str]]) -> None:
        """Add labels given as (id, text): they are encoded and compete from now on, without training."""
        known = set(self.labels.ids)
        new_ids = [label_id for label_id, _ in labels]
        repeated = sorted(known.intersection(new_ids)) or sorted({i for i in new_ids if new_ids.count(i) > 1})
        if repeated:
            raise UsageError(f"label id {repeated[0]!r} is in use already: remove it first or choose another id")
        texts = [text for _, text in labels]
        tokens = self.model.encoder.tokenize(texts, side="label")
        new = embed(self.model.encoder, tokens, device=self.model.representations_LD.device)
        self._replace(
            Labels(
                [*self.labels.ids, *new_ids],
                [*self.labels.texts, *texts],
                np.concatenate([self.labels.counts, np.zeros(len(texts), dtype=np.int64)]),
            ),
            torch.cat([self.model.representations_LD, new]),
            self._priors_with(len(texts)),
        )

    def remove_labels(self, ids: Sequence[str]) -> None:
        """Take labels out of every later prediction."""
        missing = [label_id for label_id in ids if label_id not in set(self.labels.ids)]
        if missing:
            raise UsageError(f"no label has the id {missing[0]!r}")
        gone = set(ids)
        keep = np.array([label_id not in gone for label_id in self.labels.ids])
        if not keep.any():
            raise UsageError("a model needs at least one label: not removing the last one")
        rows = torch.from_numpy(np.flatnonzero(keep)).to(self.model.representations_LD.device)
        prior = self.model.head.prior
        self._replace(
            Labels(
                [label_id for label_id, kept in zip(self.labels.ids, keep, strict=True) if kept],
                [text for text, kept in zip(self.labels.texts, keep, strict=True) if kept],
                self.labels.counts[keep],
            ),
            self.model.representations_LD[rows],
            None if prior is None else prior.bias.detach()[rows],
        )

    def _priors_with(self, num_new: int) -> torch.Tensor | None:
        """The priors, and for new labels that of a typical rare one."""
        prior = self.model.head.prior
        if prior is None:
            return None
        bias = prior.bias.detach()
        rare = torch.from_numpy(self.labels.counts < _TAIL_COUNT).to(bias.device)
        typical = bias[rare].median() if rare.any() else bias.min()
        return torch.cat([bias, typical.expand(num_new)])

    def _replace(self, labels: Labels, representations_LD: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.model.labels, self.model.representations_LD = labels, representations_LD
        if self.model.head.prior is not None and bias is not None:
            self.model.head.prior.bias = torch.nn.Parameter(bias)
        self._vectors = self.model.label_vectors()
