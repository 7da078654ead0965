"""Predictor: open a run and rank its labels for texts, while labels may be added, renamed and removed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dexter.data.own_labels import OwnLabelFinder, OwnLabels
from dexter.errors import UsageError, require
from dexter.index import Index
from dexter.model.edits import ChangeResult, LabelChange, LiveModel
from dexter.model.examples import find_labels, join_examples, lacking_labels, make_example
from dexter.model.hub import find_run
from dexter.model.label_file import Example, LabelEdit
from dexter.model.labels import LabelPage, Labels
from dexter.model.model import Model
from dexter.model.published import encoder_fingerprint, fingerprint, model_folder
from dexter.model.similar import SimilarLabel, find_similar
from dexter.model.store import LabelStore
from dexter.predict.calibration import NUM_PLACES, Calibration, level
from dexter.predict.explain import Explanation, LabelPreview, explain_labels, preview_label
from dexter.predict.filters import LabelFilter
from dexter.predict.neighbours import Neighbour, find_lexical_neighbours, find_neighbours, kept_queries
from dexter.predict.rank import RankingChoice
from dexter.predict.run_index import RunIndex, index_labels, open_run_index
from dexter.predict.scoring import SCORING_FILE, Scoring, choose_ranking, read_scoring
from dexter.predict.windows import encode_texts, rank_texts
from dexter.types import HeadName, TopK

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

    from dexter.data import Dataset

log = logging.getLogger("dexter")
Runtime = Literal["torch", "onnx"]
"""What encodes queries."""

_DEFAULT_K = 5
_BLOCK_TEXTS, _BLOCK_CHARACTERS = 1_024, 2**24
"""Texts of a stream that are predicted together, and their characters at most."""


@dataclass(frozen=True)
class Prediction:
    """One label for one text."""

    id: str
    text: str
    score: float
    """Inner product of the two vectors: a cosine, plus the label's prior where the model has one, plus votes."""
    probability: float | None = None
    """How likely the label is right, by validation; None where labels are not ranked as the run was tuned."""


class EmbeddedText(NamedTuple):
    """The embedding of a text, and the number of tokens that were read."""

    vector_D: NDArray[np.float32]
    num_tokens: int


class _Limits(NamedTuple):
    """How many labels of each text are wanted, and which may be returned."""

    k: int | None
    threshold: float | None
    own: csr_matrix | None
    """Texts x labels; pairs that are never returned."""
    allowed: NDArray[np.int64] | None
    """Rows of labels, ascending; None: all."""


class Predictor:
    """Ranks the labels of a trained model; labels can be added, renamed and removed while it is in use.

    Most users want `Predictor.load`.

    Args:
        model: the trained model.
        choice: head, dial and votes; if left out those that were tuned, else as trained.
        scoring: what was tuned for this model.
        fingerprint: hash of the published model; None for one that was never saved.
        store: where label changes of the published model are stored.
        persistent: whether label changes are written there.
        reload: reads the published model again.
        run_index: the index that is stored with the run.
        index: an index over the model's labels that is there already.
    """

    def __init__(
        self,
        model: Model,
        choice: RankingChoice | None = None,
        *,
        scoring: Scoring | None = None,
        fingerprint: str | None = None,
        store: LabelStore | None = None,
        persistent: bool = False,
        reload: Callable[[], Model] | None = None,
        run_index: RunIndex | None = None,
        index: Index | None = None,
    ) -> None:
        self.scoring = scoring or Scoring()
        """What was tuned on validation."""
        self.choice = choice or choose_ranking(model, self.scoring)
        """How labels are ranked."""
        self.fingerprint = fingerprint
        """Hash of the published model; None for one that was never saved."""
        self._finder: tuple[Labels, OwnLabelFinder | None] | None = None
        """Finds own labels among the labels given; None where they are not left out."""
        if self.choice.uses_neighbours:
            kept_queries(model)
        # Not `self`, which a state would then keep alive and which keeps its states.
        head, dial = self.choice.head, self.choice.dial
        self._live = LiveModel(
            model,
            make_index=lambda current: (
                index
                if index is not None and current is model
                else index_labels(current, head=head, dial=dial, run_index=run_index)
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
        revision: str | None = None,
        head: HeadName | None = None,
        neighbours: bool | None = None,
        dial: float | None = None,
        device: str = "cpu",
        persistent: bool = False,
        index: Literal["exact"] | None = None,
        runtime: Runtime = "torch",
    ) -> Predictor:
        """Open a run folder, or the model folder in it, with the label changes that are stored there.

        Args:
            run: the folder; or "organisation/name", a model on the Hugging Face hub (extra `hub`).
            revision: the commit, tag or branch of a model on the hub.
            head: "encoder", or for a model with a classifier also "classifier" or "unified"; None: as tuned.
            neighbours: whether the nearest training queries vote for their labels; None: as tuned.
            dial: weight of the label prior, from 0 (rare labels up) to 1 (common labels up); None: as tuned, else as
                trained. A model without a learned prior was trained at 0, and uses the labels' log frequency above it.
            device: where labels are searched, and where a transformer encodes.
            persistent: whether label changes are also written to the folder, or live in this predictor only.
            index: "exact" to score every label; None: the run's index where it has one.
            runtime: "onnx" encodes queries on a CPU with what `dexter export` made.
        """
        folder = model_folder(find_run(run, revision=revision))
        reload = partial(_load_model, folder, device=device, runtime=runtime)
        known = fingerprint(folder)
        model = reload()
        while known != fingerprint(folder):  # Another model was published meanwhile.
            known = fingerprint(folder)
            model = reload()
        scoring = read_scoring(folder, fingerprint=known)
        return cls(
            model,
            choose_ranking(model, scoring, head=head, neighbours=neighbours, dial=dial),
            scoring=scoring,
            fingerprint=known,
            store=LabelStore.for_model(folder, model, fingerprint=known),
            persistent=persistent,
            reload=reload,
            run_index=None if index == "exact" else open_run_index(folder),
        )

    def choose(
        self, *, head: HeadName | None = None, neighbours: bool | None = None, dial: float | None = None
    ) -> RankingChoice:
        """Return this predictor's choice with another head, other votes or another dial, for `variant`.

        With `neighbours` training queries vote as tuned, or by default settings.
        """
        return choose_ranking(
            self.model,
            self.scoring,
            head=head or self.choice.head,
            neighbours=self.choice.uses_neighbours if neighbours is None else neighbours,
            dial=self.choice.dial if dial is None else dial,
        )

    def variant(self, choice: RankingChoice | None = None, *, model: Model | None = None) -> Predictor:
        """Return a predictor that ranks the present labels in another way, or those of another model in this way.

        It shares the model, and the index where the label vectors are the same. Later label changes do not reach it.

        Args:
            choice: how it ranks; as this predictor if left out.
            model: ranks the labels of this model, by exact search.
        """
        state, choice = self._live.state, choice or self.choice
        is_same_index = choice.head == self.choice.head and (state.model.has_prior or choice.dial == self.choice.dial)
        made = Predictor(
            model or state.model,
            choice,
            scoring=self.scoring,
            fingerprint=self.fingerprint,
            index=state.index if model is None and is_same_index else None,
        )
        made._finder = self._finder
        return made

    @property
    def index(self) -> Index:
        """What finds the best labels."""
        return self._live.state.index

    @property
    def model(self) -> Model:
        """The model with the present labels."""
        return self._live.state.model

    @property
    def labels(self) -> Labels:
        """The present labels, in the order of the positions that `top` returns."""
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
        """How often the labels were changed since the model was published."""
        return self._live.state.version

    @cached_property
    def calibration(self) -> Calibration | None:
        """The probabilities, where labels are ranked as they were when these were fitted."""
        return self.scoring.calibration if self.choice == self.scoring.choice else None

    @property
    def own_labels(self) -> OwnLabels:
        """Whether the label that a text itself is about is left out, as decided in training."""
        return OwnLabels.from_json(self.facts.get("own_labels"))

    def predict(
        self,
        texts: Sequence[str],
        k: int | None = None,
        *,
        threshold: float | None = None,
        ids: Sequence[str | None] | None = None,
        exclude: Iterable[str] | None = None,
        only: Iterable[str] | None = None,
        bands: Iterable[str] | None = None,
        language: str | None = None,
    ) -> list[list[Prediction]]:
        """Return the best labels of each text, best first.

        Args:
            texts: the texts.
            k: labels per text at most. If left out: 5, or with a threshold all that reach it.
            threshold: only labels that are right with at least this probability; see `find_threshold`.
            ids: an id for each text, or None. Where the run leaves own labels out, the label with this id is not
                returned. Labels with the same text as the query are left out then without an id too, if the training
                data had them.
            exclude: ids of labels that are not returned.
            only: ids of the labels that may be returned; if left out, any.
            bands: bands of frequency whose labels may be returned: frequent, torso, tail, unseen; if left out, any.
            language: texts of labels are their names in this language of the run's vocabulary, where they have one.
        """
        if isinstance(texts, str):
            raise UsageError("predict takes a list of texts: write predict([text])")
        if ids is not None and len(ids) != len(texts):
            raise UsageError(f"got {len(ids)} ids for {len(texts)} texts: give one each, None where there is none")
        state = self._live.state
        model, labels = state.model, state.model.labels
        is_filtered = not (exclude is None and only is None and bands is None)
        allowed = LabelFilter.of(exclude, only, bands).allowed_rows(labels) if is_filtered else None
        if allowed is not None and not len(allowed):
            return [[] for _ in texts]
        names = self.names(language)
        limits = _Limits(k, threshold, self._own_pairs(labels, texts, ids), allowed)
        found, probabilities = self._find(model, state.index, texts, limits)
        if threshold is not None:
            found.ids[probabilities < np.float32(threshold)] = -1
        return [
            [
                Prediction(labels.ids[row], names.get(labels.ids[row], labels.texts[row]), score, chance)
                for row, score, chance in zip(*places, strict=True)
                if row >= 0
            ]
            for places in zip(found.ids.tolist(), found.scores.tolist(), probabilities.tolist(), strict=True)
        ]

    def predict_stream(
        self,
        texts: Iterable[str],
        k: int | None = None,
        *,
        threshold: float | None = None,
        ids: Iterable[str | None] | None = None,
        exclude: Iterable[str] | None = None,
        only: Iterable[str] | None = None,
        bands: Iterable[str] | None = None,
        language: str | None = None,
    ) -> Iterator[list[Prediction]]:
        """Predict any number of texts in order, in constant memory; arguments as in `predict`."""
        chosen = LabelFilter.of(exclude, only, bands)
        named = zip(texts, repeat(None)) if ids is None else zip(texts, ids, strict=True)
        for block in _blocks(named):
            yield from self.predict(
                [text for text, _ in block],
                k,
                threshold=threshold,
                ids=[uid for _, uid in block],
                exclude=chosen.exclude,
                only=chosen.only,
                bands=chosen.bands,
                language=language,
            )

    def names(self, language: str | None) -> Mapping[str, str]:
        """Return the names of labels by id in a language of the run's vocabulary; none if no language is given."""
        if language is None:
            return {}
        if self.model.names is None:
            raise UsageError("the labels of this run have no names in other languages: train it with a vocabulary")
        return self.model.names.in_language(language)

    def find_threshold(self, *, precision: float | None = None) -> float:
        """Return the lowest threshold with at least this precision on validation; that of the best F1 if left out."""
        return self._checked_calibration().threshold_for(precision)

    def top(self, texts: Sequence[str], k: int, *, exclude: csr_matrix | None = None) -> TopK:
        """Return the k best labels of each text as positions in `labels`, without the pairs of `exclude`."""
        _check_k(k)
        state = self._live.state
        encoded = encode_texts(state.model, texts, self.choice)
        return rank_texts(state.model, state.index, encoded, self.choice, k, exclude=exclude)

    def nearest(self, texts: Sequence[str], k: int = 5, *, label: str | None = None) -> list[list[Neighbour]]:
        """Find the k training queries most similar to each text, best first; with `label` only those that have it.

        They are examples that explain a prediction: near by vectors where these are kept, else by words.
        """
        model = self.model
        row = None if label is None else model.labels.rows([label])[0]
        if model.training_queries is not None and model.training_queries.index is None:
            return find_lexical_neighbours(model, texts, k, label=row)
        return find_neighbours(model, model.encode_queries(texts), k, label=row)

    def explain(self, text: str, label_id: str, *, num_neighbours: int = 3) -> Explanation:
        """Explain why a text gets a label: parts of its score, words that carry it, similar training queries."""
        return self.explain_labels(text, [label_id], num_neighbours=num_neighbours)[0]

    def explain_labels(self, text: str, label_ids: Sequence[str], *, num_neighbours: int = 3) -> list[Explanation]:
        """Explain several labels of one text; the text is encoded once."""
        state = self._live.state
        rows = state.model.labels.rows(label_ids)
        return explain_labels(state.model, state.index, self.choice, text, rows, num_neighbours=num_neighbours)

    def preview_label(self, text: str, label_text: str) -> LabelPreview:
        """Rank a label that does not exist yet for a text (if that is not empty), without adding it."""
        state = self._live.state
        return preview_label(state.model, state.index, self.choice, text, label_text)

    def add_labels(
        self,
        labels: Sequence[tuple[str, str]],
        *,
        examples: Mapping[str, Sequence[str]] | None = None,
        reuse_ids: bool = False,
        by: str | None = None,
    ) -> ChangeResult:
        """Add labels given as (id, text), without training: they are encoded and ranked from now on.

        All of them are added or, when one is refused, none. `examples` are texts that have a label, by its id; they are
        used too, where the run has learned how. Ids of removed labels are refused unless `reuse_ids`; such a label
        starts anew. `by` is who adds them, for the history.
        """
        return self.edit_labels(LabelChange(add=labels, examples=examples or {}, reuse_ids=reuse_ids), by=by)

    def remove_labels(self, ids: Sequence[str], *, by: str | None = None) -> ChangeResult:
        """Remove labels from every later prediction; when one is unknown, none is removed."""
        return self.edit_labels(LabelChange(remove=ids), by=by)

    def rename_labels(
        self, labels: Sequence[tuple[str, str]], *, keep_vectors: bool = False, by: str | None = None
    ) -> ChangeResult:
        """Give labels new texts, as (id, text); they are encoded anew, and keep their priors and classifier rows.

        With `keep_vectors` only the displayed text changes.
        """
        return self.edit_labels(LabelChange(rename=labels, keep_vectors=keep_vectors), by=by)

    @property
    def examples(self) -> list[Example]:
        """The texts that were labelled after training, in the order of their last changes."""
        return list(self._live.state.examples.values())

    def add_examples(
        self,
        examples: Sequence[tuple[str, Sequence[str]]],
        *,
        ids: Sequence[str | None] | None = None,
        add_labels: bool = False,
        by: str | None = None,
    ) -> ChangeResult:
        """Add texts with labels, without training: texts like them get these labels from now on.

        All of them are added or, when one is refused, none. An example replaces one with the same id, or with the same
        text if it has none.

        Args:
            examples: (text, labels): ids of labels, or texts that only one label has.
            ids: an id for each example, or None.
            add_labels: whether labels that the run lacks are added, with their names as ids and texts.
            by: who adds them, for the history.
        """
        if ids is not None and len(ids) != len(examples):
            raise UsageError(
                f"got {len(ids)} ids for {len(examples)} examples: give one each, None where there is none"
            )
        made = [
            make_example(text, labels, example_id=example_id)
            for (text, labels), example_id in zip(examples, ids or [None] * len(examples), strict=True)
        ]
        found = find_labels({example.id: example for example in made}.values(), self.labels)
        add = [(name, name) for name in lacking_labels(found, self.labels)] if add_labels else []
        return self.edit_labels(LabelChange(add=add, add_examples=found), by=by)

    def remove_examples(self, ids: Sequence[str], *, by: str | None = None) -> ChangeResult:
        """Remove examples, which do not vote any more; when one is unknown, none is removed."""
        return self.edit_labels(LabelChange(remove_examples=ids), by=by)

    def edit_labels(self, change: LabelChange, *, expected: int | None = None, by: str | None = None) -> ChangeResult:
        """Remove, rename and add labels as one change: all of it, or nothing; on disk first if `persistent`.

        With `expected` only if that is the labels' version, changes by other processes included.
        """
        return self._live.change(change, expected=expected, by=by)

    def undo_labels(self, edit: int | None = None, *, by: str | None = None) -> ChangeResult:
        """Undo an edit of the history, as one more edit; the last one that was not undone if left out.

        It is refused if a later edit changed the same labels again.
        """
        return self._live.undo(edit, by=by)

    def label_history(self, label_id: str | None = None) -> list[LabelEdit]:
        """Return the edits that were written to the folder, newest first; with a label those that changed it."""
        return [] if self._live.store is None else self._live.store.history(label_id)

    def refresh_labels(self) -> bool:
        """Apply label changes that other processes wrote to the folder; return whether there were any."""
        return self._live.refresh()

    def compact_labels(self) -> None:
        """Forget what undoing edits needs, and give unused space on disk back; the labels and their version stay."""
        self._live.stored("compacted").compact()

    def save(self, folder: str | Path) -> None:
        """Publish the model with its present labels, and how it was tuned, as a model folder of its own."""
        self.model.save(Path(folder), records={SCORING_FILE: self.scoring.to_json()})

    def search_labels(self, query: str = "", *, limit: int | None = 20, offset: int = 0) -> LabelPage:
        """Find labels whose id or text contains the query, those that begin with it first; all if it is empty."""
        return self.labels.search(query, limit=limit, offset=offset)

    def similar_labels(self, text: str, k: int = 5) -> list[SimilarLabel]:
        """Find the labels nearest to a text, were it a label."""
        return find_similar(self.model, [text], k)[0]

    def embed(self, texts: Sequence[str], *, side: Literal["query", "label"] = "query") -> list[EmbeddedText]:
        """Embed texts as queries or as labels. Inner products of both are the encoder's scores without priors."""
        model = self.model
        tokens = model.encoder.tokenize(texts, side=side)
        vectors_ND = model.head.vectors(model.encode_tokens(tokens, side=side))
        return [EmbeddedText(*each) for each in zip(vectors_ND, tokens.lengths.tolist(), strict=True)]

    def example_dataset(self, data: Dataset | None = None) -> Dataset:
        """Return the examples as a data set to train on, with the present labels; after the training split of `data`.

        Raises `UsageError` where there is none.
        """
        state = self._live.state
        return join_examples(self.examples, state.model.labels, data)

    def sample_training_texts(self, count: int) -> list[str]:
        """Return about `count` training queries at equal distances; none if they were not kept."""
        kept = self.model.training_queries
        return [] if kept is None else [kept.texts[row] for row in range(0, len(kept), max(1, len(kept) // count))]

    def label_embeddings(self) -> NDArray[np.float32]:
        """Return the embeddings of all labels, without priors, as labels x dimensions."""
        return self.model.label_embeddings()

    def _own_pairs(self, labels: Labels, texts: Sequence[str], ids: Sequence[str | None] | None) -> csr_matrix | None:
        """Return the own labels of texts, texts x labels; None where they are not left out or there are none."""
        if self._finder is None or self._finder[0] is not labels:
            own_labels = self.own_labels
            self._finder = labels, own_labels.finder(labels.ids, labels.texts) if own_labels.excludes else None
        finder = self._finder[1]
        if finder is None:
            return None
        ids = ids or [None] * len(texts)
        # One text seldom has an own label, and a matrix takes longer to make than the rest of its ranking.
        if len(texts) == 1 and not finder.find(ids[0], texts[0]):
            return None
        return finder.matrix(ids, texts)

    def _find(self, model: Model, index: Index, texts: Sequence[str], limits: _Limits) -> tuple[TopK, NDArray[Any]]:
        """Rank the labels as far as they may be shown, with their probabilities (None where these are not known)."""
        k, threshold, own, allowed = limits
        calibration = self.calibration if threshold is None else self._checked_calibration()
        if threshold is not None and not 0.0 < threshold <= 1.0:
            raise UsageError(f"the threshold is {threshold}: expected a probability above 0 and up to 1")
        wanted = k if k is not None else _DEFAULT_K if threshold is None else NUM_PLACES
        _check_k(wanted)
        encoded = encode_texts(model, texts, self.choice)
        search = partial(rank_texts, model, index, encoded, self.choice, exclude=own)
        if calibration is None:
            found = search(wanted, allowed=allowed)
            return found, np.full(found.ids.shape, None)
        # Probabilities compare a label with the best of all labels, whichever may be returned.
        places = max(wanted, NUM_PLACES)
        found = search(places, allowed=allowed)
        levels_N = level(found.scores if allowed is None else search(NUM_PLACES).scores)
        while k is None and threshold is not None and places < len(model.labels.ids if allowed is None else allowed):
            if calibration.is_exhausted(found, threshold, levels_N=levels_N).all():
                break
            wanted = places = 2 * places
            found = search(places, allowed=allowed)
        found = TopK(found.ids[:, :wanted], found.scores[:, :wanted])
        return found, calibration.probabilities(found, model.labels.counts, levels_N=levels_N)

    def _checked_calibration(self) -> Calibration:
        if self.scoring.calibration is None:
            raise UsageError(
                "this run has no probabilities, because it had no validation queries or too few labels were right on "
                "them: train it with more data or a larger validation.fraction; -k works without"
            )
        if self.calibration is None:
            raise UsageError(
                "no probabilities for labels ranked this way: leave head, neighbours and dial as tuned, or choose "
                "them with `dexter tune RUN DATA`"
            )
        return self.calibration


def _load_model(folder: Path, *, device: str, runtime: Runtime) -> Model:
    """Load the published model, with queries encoded by the runtime."""
    if runtime == "onnx" and device != "cpu":
        raise UsageError(f"runtime onnx encodes on a CPU, the device is {device!r}: leave one of them out")
    model = Model.load(folder, device=device)
    if runtime == "torch":
        return model
    require("torch", extra="train", purpose="runtime onnx")
    from dexter.encoders.onnx import check_exportable, export_folder, open_export

    encoder = check_exportable(model.encoder)
    exported, facts = open_export(export_folder(folder), encoder, fingerprint=encoder_fingerprint(folder))
    log.info("queries are encoded by ONNX Runtime, %s", facts.describe_changes() or facts.precision)
    return replace(model, query_encoder=exported)


def _check_k(k: int) -> None:
    if k < 1:
        raise UsageError(f"k must be 1 or more, got {k}")


def _blocks(named: Iterable[tuple[str, str | None]]) -> Iterator[list[tuple[str, str | None]]]:
    """Split texts with their ids into blocks that are predicted together."""
    block: list[tuple[str, str | None]] = []
    num_characters = 0
    for text, uid in named:
        block.append((text, uid))
        num_characters += len(text)
        if len(block) >= _BLOCK_TEXTS or num_characters >= _BLOCK_CHARACTERS:
            yield block
            block, num_characters = [], 0
    if block:
        yield block
