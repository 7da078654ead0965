"""Predictor: a run folder becomes ranked labels for texts. The one path of command line, evaluation and services."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from torch import Tensor

from dexter.errors import UsageError
from dexter.index import Index
from dexter.model.edits import ChangeResult, LabelChange, LiveModel, LiveState
from dexter.model.labels import LabelPage, Labels, search_labels
from dexter.model.model import Model
from dexter.model.similar import SimilarLabel, find_similar
from dexter.model.store import LabelStore, encoder_fingerprint, fingerprint, model_folder
from dexter.predict.calibration import NUM_PLACES, Calibration
from dexter.predict.explain import Explanation, Parts, explain_scores
from dexter.predict.indexing import RunIndex, index_labels, open_run_index
from dexter.predict.neighbours import TrainingQueries, add_votes
from dexter.predict.scoring import checked_dial
from dexter.types import HeadName, TopK

if TYPE_CHECKING:
    from dexter.encoders import TextEncoder
    from dexter.encoders.transformer import TransformerEncoder

log = logging.getLogger("dexter")
Runtime = Literal["torch", "onnx"]
"""What encodes queries."""

_BLOCK_TEXTS, _BLOCK_CHARACTERS = 1_024, 2**24
"""A stream is predicted in blocks of so many texts, fewer where they are long."""


@dataclass(frozen=True)
class Prediction:
    """One label for one text."""

    id: str
    text: str
    score: float
    """Inner product of the two vectors: a cosine, plus the label's prior where the model has one, plus votes."""
    probability: float | None = None
    """How likely it is to be right, by validation; None where the labels are not ranked as the run was tuned."""


class EmbeddedText(NamedTuple):
    """The embedding of a text, and the number of tokens that were read."""

    vector_D: NDArray[np.float32]
    num_tokens: int


@dataclass(frozen=True)
class Neighbour:
    """A training query near a text."""

    id: str
    text: str
    """Its beginning."""
    similarity: float
    """The cosine of the two."""
    labels: tuple[str, ...]
    """The ids of its labels."""


class Predictor:
    """Ranks the labels of a trained model; labels can be added, renamed and removed while it is in use."""

    def __init__(
        self,
        model: Model,
        *,
        head: HeadName | None = None,
        neighbours: bool | None = None,
        dial: float | None = None,
        fingerprint: str | None = None,
        store: LabelStore | None = None,
        persistent: bool = False,
        reload: Callable[[], Model] | None = None,
        stored: RunIndex | None = None,
        index: Index | None = None,
    ) -> None:
        self.head = head or model.default_head
        """Which of the model's heads ranks the labels."""
        self.uses_neighbours = (
            model.scoring.use_neighbours and model.training_queries is not None if neighbours is None else neighbours
        )
        """Whether the nearest training queries vote."""
        self.dial = model.default_dial if dial is None else checked_dial(dial)
        """Weight of the label prior, from 0 to 1."""
        self.fingerprint = fingerprint
        """Hash of the published model that was loaded; None for one that only lives in memory."""
        if self.uses_neighbours:
            _checked_training_queries(model)
        # Not `self`, which a state would then keep alive and which keeps its states.
        chosen, weight = self.head, self.dial
        self._live = LiveModel(
            model,
            make_index=lambda current: (
                index
                if index is not None and current is model
                else index_labels(current, head=chosen, dial=weight, stored=stored)
            ),
            store=store,
            persistent=persistent,
            reload=reload,
        )

    @classmethod
    def load(
        cls,
        run: str | Path,
        *,
        head: HeadName | None = None,
        neighbours: bool | None = None,
        dial: float | None = None,
        device: str = "cpu",
        persistent: bool = False,
        index: Literal["exact"] | None = None,
        runtime: Runtime = "torch",
    ) -> Predictor:
        """Open a run folder, or the model folder in it, with the labels as they were last changed on disk.

        Args:
            run: the folder.
            head: "encoder", or for a model with a classifier also "classifier" or "unified" (its default).
            neighbours: whether the nearest training queries vote with their labels; None: as tuned on validation.
            dial: weight of the label prior, from 0 (rare labels up) to 1 (common labels up); None: as tuned, or as
                trained. A model that learned no prior has 0 as trained, and gets the labels' log frequency from it.
            device: where to compute.
            persistent: whether changes of labels are written to the folder too, or live in this predictor only.
            index: "exact" to look at every label; None: the run's index where it has one.
            runtime: "onnx" encodes queries, on a CPU, with what `dexter export` made.
        """
        folder = model_folder(run)
        reload = partial(_load_model, folder, device=device, runtime=runtime)
        model, known = reload(), fingerprint(folder)
        store = LabelStore(folder, fingerprint=known, dimension=model.encoder.dimension)
        return cls(
            model,
            head=head,
            neighbours=neighbours,
            dial=dial,
            fingerprint=known,
            store=store,
            persistent=persistent,
            reload=reload,
            stored=None if index == "exact" else open_run_index(folder),
        )

    def variant(
        self, *, head: HeadName | None = None, neighbours: bool | None = None, dial: float | None = None
    ) -> Predictor:
        """A predictor of the labels as they are now that ranks in another way; what is left out stays as it is here.

        It shares the model, and the label vectors where only neighbours or dial differ. Later edits do not reach it.
        """
        state = self._live.state
        head, dial = head or self.head, self.dial if dial is None else checked_dial(dial)
        is_same = head == self.head and (state.model.has_prior or dial == self.dial)
        return Predictor(
            state.model,
            head=head,
            neighbours=self.uses_neighbours if neighbours is None else neighbours,
            dial=dial,
            fingerprint=self.fingerprint,
            index=state.index if is_same else None,
        )

    @property
    def index(self) -> Index:
        """What finds the best labels."""
        return self._live.state.index

    @property
    def model(self) -> Model:
        """The model with the labels that can be predicted."""
        return self._live.state.model

    @property
    def labels(self) -> Labels:
        """The labels that can be predicted, in the order of the ids that `top` returns."""
        return self.model.labels

    @property
    def heads(self) -> tuple[HeadName, ...]:
        """The heads that can rank the labels."""
        return self.model.heads

    @property
    def dimension(self) -> int:
        """The dimension of the encoder's embeddings."""
        return self.model.encoder.dimension

    @property
    def facts(self) -> dict[str, Any]:
        """What is known about the training: recipe, data set, seed, validation metrics."""
        return self.model.facts

    @property
    def has_training_queries(self) -> bool:
        """Whether the training queries were kept, so that they can vote and explain."""
        return self.model.training_queries is not None

    @property
    def version(self) -> int:
        """How often the labels were changed since the model was published; grows with every change."""
        return self._live.state.version

    @property
    def scoring(self) -> dict[str, Any]:
        """What the ranking depends on besides the model, as plain values."""
        return {"dial": self.dial, "neighbours": asdict(self.model.scoring.votes) if self.uses_neighbours else None}

    @property
    def calibration(self) -> Calibration | None:
        """Probabilities, where labels are ranked as they were when these were learned."""
        tuned = self.model.scoring
        same = (self.head, self.dial, self.uses_neighbours) == (
            tuned.head,
            self.model.default_dial,
            tuned.use_neighbours,
        )
        return tuned.calibration if same else None

    def predict(
        self, texts: Sequence[str], k: int | None = None, *, threshold: float | None = None
    ) -> list[list[Prediction]]:
        """The best labels of each text, best first.

        Args:
            texts: what to label.
            k: at most so many labels, all of them where there are fewer. If left out, 5, or with a threshold as many as
                reach it.
            threshold: only labels that are right with at least this probability; see `find_threshold`.
        """
        if isinstance(texts, str):
            raise UsageError("predict takes a list of texts: write predict([text])")
        state, labels = self._live.state, self._live.state.model.labels
        found, probabilities = self._find(state, texts, k, threshold)
        return [
            [
                Prediction(
                    labels.ids[label], labels.texts[label], float(score), None if chance is None else float(chance)
                )
                for label, score, chance in zip(ids, scores, chances, strict=True)
                if label >= 0 and (threshold is None or chance >= threshold)
            ]
            for ids, scores, chances in zip(found.ids, found.scores, probabilities, strict=True)
        ]

    def predict_stream(
        self, texts: Iterable[str], k: int | None = None, *, threshold: float | None = None
    ) -> Iterator[list[Prediction]]:
        """The same for any number of texts, in constant memory and in order."""
        for block in _blocks(texts):
            yield from self.predict(block, k, threshold=threshold)

    def find_threshold(self, *, precision: float | None = None) -> float:
        """The lowest threshold with at least this precision on validation; that of the best F1 if left out."""
        return self._checked_calibration().threshold_for(precision)

    def top(self, texts: Sequence[str], k: int, *, exclude: csr_matrix | None = None) -> TopK:
        """The k best labels of each text as positions in `labels`, without the pairs of `exclude`."""
        return self._search(self._live.state, texts, k, exclude=exclude)

    def top_encoded(self, representations_ND: Tensor, k: int, *, exclude: csr_matrix | None = None) -> TopK:
        """The same for texts that the model has encoded already (`Model.encode_queries`)."""
        return self._rank(self._live.state, representations_ND, k, exclude=exclude)

    def nearest(self, texts: Sequence[str], k: int = 5, *, label: str | None = None) -> list[list[Neighbour]]:
        """The k training queries most similar to each text, best first; with `label` (an id) only those that have it.

        They are what the memory's votes come from, and what explains a prediction.
        """
        model = self.model
        kept = _checked_training_queries(model)
        column = None if label is None else model.labels.rows([label])[0]
        found = kept.nearest(model.encode_queries(texts), k, label=column)
        return [
            _neighbours(kept, model.labels, rows, similarities)
            for rows, similarities in zip(found.ids, found.scores, strict=True)
        ]

    def explain(self, text: str, label_id: str, *, num_neighbours: int = 3) -> Explanation:
        """Why a text gets a label, or does not: the parts of its score, the words that carry it, training queries."""
        return self.explain_labels(text, [label_id], num_neighbours=num_neighbours)[0]

    def explain_labels(self, text: str, label_ids: Sequence[str], *, num_neighbours: int = 3) -> list[Explanation]:
        """The same for several labels of a text, for little more than one costs."""
        state = self._live.state
        labels, kept = state.model.labels, state.model.training_queries
        rows = labels.rows(label_ids)
        parts, words = explain_scores(text, len(rows), partial(self._score_parts, state, rows=rows))
        near: list[list[Neighbour]] = [[] for _ in rows]
        if kept is not None:
            representations_ND = state.model.encode_queries([text])
            found = [kept.nearest(representations_ND, num_neighbours, label=row) for row in rows]
            near = [_neighbours(kept, labels, top.ids[0], top.scores[0]) for top in found]
        return [
            Explanation(
                id=labels.ids[row],
                text=labels.texts[row],
                parts=parts[place],
                words=words[place],
                neighbours=near[place],
                count=int(labels.counts[row]),
            )
            for place, row in enumerate(rows)
        ]

    def add_labels(self, labels: Sequence[tuple[str, str]], *, reuse_ids: bool = False) -> ChangeResult:
        """Add labels given as (id, text): they are encoded and compete from now on, without training.

        Either all of them are added or, when one is refused, none. Ids of removed labels are refused unless
        `reuse_ids`; the label then starts anew.
        """
        return self.edit_labels(LabelChange(add=labels, reuse_ids=reuse_ids))

    def remove_labels(self, ids: Sequence[str]) -> ChangeResult:
        """Take labels out of every later prediction; when one is unknown, none is taken out."""
        return self.edit_labels(LabelChange(remove=ids))

    def rename_labels(self, labels: Sequence[tuple[str, str]], *, keep_vectors: bool = False) -> ChangeResult:
        """Give labels new texts, as (id, text); they are found by these from now on, and keep what else they learned.

        With `keep_vectors` only the texts that are shown change.
        """
        return self.edit_labels(LabelChange(rename=labels, keep_vectors=keep_vectors))

    def edit_labels(self, change: LabelChange, *, expected: int | None = None) -> ChangeResult:
        """Remove, rename and add labels as one change: all of it, or nothing; on disk first if `persistent`.

        With `expected` only if that is the labels' version, what other processes changed on disk included.
        """
        return self._live.change(change, expected=expected)

    def refresh_labels(self) -> bool:
        """Take up what other processes changed in the folder since; whether there was anything."""
        return self._live.refresh()

    def compact_labels(self) -> None:
        """Give unused space of the file of label changes back; the labels and their version stay."""
        self._live.compact()

    def search_labels(self, query: str = "", *, limit: int | None = 20, offset: int = 0) -> LabelPage:
        """Labels whose id or text holds the query, those that begin with it first; an empty query lists all."""
        return search_labels(self.labels, query, limit=limit, offset=offset)

    def similar_labels(self, text: str, k: int = 5) -> list[SimilarLabel]:
        """The labels that mean nearly the same as a text would as a label."""
        return find_similar(self.model, [text], k)[0]

    def embed(self, texts: Sequence[str], *, side: Literal["query", "label"] = "query") -> list[EmbeddedText]:
        """Embed texts as queries or as labels. Inner products of both are the encoder's scores without priors."""
        model = self.model
        tokens = model.encoder.tokenize(texts, side=side)
        with torch.inference_mode():
            vectors_ND = model.head.vectors(model.encode_tokens(tokens, side=side))
        return [EmbeddedText(*each) for each in zip(vectors_ND.cpu().numpy(), tokens.lengths.tolist(), strict=True)]

    def sample_training_texts(self, count: int) -> list[str]:
        """Return about `count` training queries at equal distances; none if they were not kept."""
        kept = self.model.training_queries
        return [] if kept is None else [kept.texts[row] for row in range(0, len(kept), max(1, len(kept) // count))]

    def label_embeddings(self) -> NDArray[np.float32]:
        """Return the embeddings of all labels, without priors, as labels x dimensions."""
        return self.model.label_embeddings().cpu().numpy()

    def _find(
        self, state: LiveState, texts: Sequence[str], k: int | None, threshold: float | None
    ) -> tuple[TopK, NDArray[Any]]:
        """The labels that may be shown, and their probabilities (None where they are not known)."""
        calibration = self.calibration if threshold is None else self._checked_calibration()
        if threshold is not None and not 0.0 < threshold <= 1.0:
            raise UsageError(f"the threshold is {threshold}: expected a probability above 0 and up to 1")
        wanted = k if k is not None else 5 if threshold is None else NUM_PLACES
        if calibration is None:
            found = self._search(state, texts, wanted)
            return found, np.full(found.ids.shape, None)
        if wanted < 1:
            raise UsageError(f"k must be 1 or more, got {k}")
        places = max(wanted, NUM_PLACES)
        found = self._search(state, texts, places)
        while k is None and threshold is not None and places < len(state.model.labels.ids):
            if calibration.is_exhausted(found, threshold).all():
                break
            wanted = places = 2 * places
            found = self._search(state, texts, places)
        probabilities = calibration.probabilities(found, state.model.labels.counts)
        return TopK(found.ids[:, :wanted], found.scores[:, :wanted]), probabilities[:, :wanted]

    def _checked_calibration(self) -> Calibration:
        if self.calibration is None:
            raise UsageError(
                "no probabilities for labels ranked this way: leave head, neighbours and dial as tuned, or learn "
                "them with `dexter tune RUN DATA` (it needs validation queries)"
            )
        return self.calibration

    def _search(self, state: LiveState, texts: Sequence[str], k: int, *, exclude: csr_matrix | None = None) -> TopK:
        if k < 1:
            raise UsageError(f"k must be 1 or more, got {k}")
        return self._rank(state, state.model.encode_queries(texts), k, exclude=exclude)

    def _rank(self, state: LiveState, representations_ND: Tensor, k: int, *, exclude: csr_matrix | None) -> TopK:
        model, index = state.model, state.index
        queries_ND = model.search_vectors(representations_ND, head=self.head, dial=self.dial)
        found = index.search(queries_ND, min(k, len(model.labels.ids)), exclude=exclude)
        if not self.uses_neighbours:
            return found
        votes = _votes(model, representations_ND)
        return add_votes(found, votes, queries_ND, index.vectors_LD, scale=_vote_scale(model), exclude=exclude)

    def _score_parts(self, state: LiveState, texts: Sequence[str], *, rows: list[int]) -> Parts:
        """What the scores of texts for some labels are made of."""
        model, labels_KD = state.model, state.index.vectors_LD[rows]
        representations_ND = model.encode_queries(texts)
        queries_ND = model.search_vectors(representations_ND, head=self.head, dial=self.dial)
        parts = {
            name: (queries_ND[:, elements] @ labels_KD[:, elements].T).cpu().numpy()
            for name, elements in model.score_slices(head=self.head, dial=self.dial).items()
        }
        if self.uses_neighbours:
            parts["neighbours"] = _votes(model, representations_ND)[:, rows].toarray() * _vote_scale(model)
        return parts


def check_exportable(encoder: TextEncoder) -> TransformerEncoder:
    """The encoder, which must be a transformer."""
    from dexter.encoders.transformer import TransformerEncoder

    if not isinstance(encoder, TransformerEncoder):
        raise UsageError(
            "this run has a static encoder, which looks its tokens up in a table: ONNX is for transformers, and would "
            "make nothing faster here"
        )
    return encoder


def _load_model(folder: Path, *, device: str, runtime: Runtime) -> Model:
    """The published model, with queries encoded by the runtime."""
    if runtime == "onnx" and device != "cpu":
        raise UsageError(f"runtime onnx encodes on a CPU, the device is {device!r}: leave one of them out")
    model = Model.load(folder, device=device)
    if runtime == "torch":
        return model
    encoder = check_exportable(model.encoder)
    from dexter.encoders.onnx_folder import export_folder, open_export

    exported, facts = open_export(export_folder(folder), encoder, fingerprint=encoder_fingerprint(folder))
    log.info("queries are encoded by ONNX Runtime, %s", facts.describe_loss() or facts.precision)
    return replace(model, query_encoder=exported)


def _votes(model: Model, representations_ND: Tensor) -> csr_matrix:
    """What the nearest training queries say of each label."""
    kept, blend = _checked_training_queries(model), model.scoring.votes
    return kept.votes(kept.nearest(representations_ND, blend.neighbours), blend.temperature)


def _vote_scale(model: Model) -> float:
    """What a unanimous vote adds to a score."""
    return model.scoring.votes.weight * model.head.temperature


def _neighbours(
    kept: TrainingQueries, labels: Labels, rows: Iterable[int], similarities: Iterable[float]
) -> list[Neighbour]:
    """Training queries of the memory, as they are shown."""
    return [
        Neighbour(
            kept.uids[row],
            kept.texts[row],
            float(similarity),
            tuple(labels.ids[column] for column in kept.labels_of(row)),
        )
        for row, similarity in zip(rows, similarities, strict=True)
    ]


def _checked_training_queries(model: Model) -> TrainingQueries:
    if model.training_queries is None:
        raise UsageError(
            "this model was trained without keeping its training queries: train with scoring.neighbours at least "
            "their number"
        )
    return model.training_queries


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
