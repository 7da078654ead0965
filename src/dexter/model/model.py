"""A trained dual encoder with its labels, in memory and as the folder that a run publishes.

model/      the encoder (a sentence-transformers folder where possible)
  dexter/   model.json (version, heads, facts), labels.jsonl (id, text, training count),
            heads.safetensors (projections, priors, classifier table), labels.safetensors (representations),
            training_queries.safetensors (see `dexter.model.training_queries`), scoring.json (what was tuned),
            new_labels.safetensors (see `dexter.model.unseen`), label_names.json (labels in other languages)
  MANIFEST.json   SHA-256 of every file, written last
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dexter.data.label_names import NAMES_FILE, LabelNames
from dexter.encoders import load_encoder
from dexter.encoders.head_arrays import ClassifierArrays, DualArrays
from dexter.errors import ModelError, UsageError
from dexter.files import atomic_folder, read_object, verified, write_json
from dexter.model.labels import Labels
from dexter.model.training_queries import TrainingQueries
from dexter.model.unseen import LabelGenerator, fill_unseen_rows
from dexter.processes import Processes, SingleProcess
from dexter.tensor_files import narrowed, read_tensors, release, write_tensors
from dexter.types import HEAD_NAMES, HeadName

if TYPE_CHECKING:
    from dexter.data.tokens import Tokens
    from dexter.encoders import TextEncoder
    from dexter.encoders.onnx import OnnxEncoder

FORMAT_VERSION = 1
_FOLDER = "dexter"
_TABLE = "classifier.table.weight"
_BLOCK_LABELS = 1_024
_RARE_COUNT = 10
"""A label without training data gets the median prior of labels with fewer training queries than this."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """Encoder, heads and labels, as arrays. Immutable: other labels make another model, which shares the encoder."""

    encoder: TextEncoder
    head: DualArrays
    classifier: ClassifierArrays | None = None
    labels: Labels
    representations_LD: NDArray[np.float32]
    """The encoder's output for the label texts."""
    facts: dict[str, Any]
    """Recipe, data set, seed and validation metrics, as published."""
    processes: Processes = field(default_factory=SingleProcess)
    """The processes that train it together; each holds the labels and vectors of its own shard only."""
    names: LabelNames | None = None
    """What labels are called in the languages of the vocabulary they came from."""
    training_queries: TrainingQueries | None = None
    """The kept training queries, if any."""
    examples: TrainingQueries | None = None
    """Texts that were labelled after training (see `dexter.model.examples`), if any."""
    generator: LabelGenerator | None = None
    """How new labels are made, if it was learned."""
    query_encoder: OnnxEncoder | None = None
    """Encodes queries in place of `encoder`, which always encodes labels."""
    has_filled_rows: bool = False
    """Whether labels without training data have classifier rows already (see `dexter.model.unseen`)."""
    device: str = "cpu"
    """Where labels are searched, and where a transformer encodes."""

    @property
    def has_prior(self) -> bool:
        """Whether the dual encoder has a learned label prior."""
        return self.head.prior_L is not None

    @property
    def default_dial(self) -> float:
        """The weight of the label prior as trained: 1, or 0 where none was learned."""
        return float(self.has_prior)

    @property
    def heads(self) -> tuple[HeadName, ...]:
        """The heads that can be searched."""
        return HEAD_NAMES if self.classifier is not None else ("encoder",)

    @property
    def default_head(self) -> HeadName:
        """The head that ranks where none was chosen: both where there are two."""
        return self.heads[-1]

    def query_vectors(self, texts: Sequence[str], *, head: HeadName | None = None) -> NDArray[np.float32]:
        """Encode query texts and return the vectors to search with."""
        return self.search_vectors(self.encode_queries(texts), head=head)

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the encoder's output for query texts, before any head."""
        return self.encode_tokens(self.encoder.tokenize(texts, side="query"), side="query")

    def encode_tokens(self, tokens: Tokens, *, side: Literal["query", "label"]) -> NDArray[np.float32]:
        """Return the encoder's output for tokenised texts of one side."""
        if side == "query" and self.query_encoder is not None:
            return self.query_encoder.embed(tokens)
        return self.encoder.embed(tokens)

    def search_vectors(
        self, representations_ND: NDArray[np.float32], *, head: HeadName | None = None, dial: float | None = None
    ) -> NDArray[np.float32]:
        """Return the vectors to search with, given the encoder's output; `dial` is the weight of the label prior."""
        head = self._resolve_head(head)
        weight = 1.0 if dial is None else dial
        parts = self.head.queries(representations_ND, weight) if head != "classifier" else []
        if head != "encoder" and self.classifier is not None:
            parts += self.classifier.queries(representations_ND, weight)
        if self._needs_frequency(dial):
            parts.append(np.full((len(representations_ND), 1), weight, dtype=np.float32))
        return np.concatenate(parts, axis=1)

    def label_vectors(self, *, head: HeadName | None = None, dial: float | None = None) -> NDArray[np.float32]:
        """Return the label vectors to search among.

        For a model without a learned prior, `dial` must be that of `search_vectors`; otherwise it has no effect.
        """
        head = self._resolve_head(head)
        num_labels = len(self.representations_LD)
        width = max(part.stop for part in self.score_slices(head=head, dial=dial).values())
        vectors_LD = np.empty((num_labels, width), dtype=np.float32)
        filled_LC = None if head == "encoder" else self._classifier_rows()
        # A block at a time, so that what is computed on the way stays in a cache.
        for start in range(0, num_labels, _BLOCK_LABELS):
            block = slice(start, start + _BLOCK_LABELS)
            parts = self.head.labels(self.representations_LD[block], block) if head != "classifier" else []
            if head != "encoder" and self.classifier is not None:
                rows_BC = self.classifier.rows(block) if filled_LC is None else filled_LC[block]
                parts += self.classifier.labels(rows_BC, block)
            np.concatenate(parts, axis=1, out=vectors_LD[block, : sum(part.shape[1] for part in parts)])
        if self._needs_frequency(dial):
            vectors_LD[:, -1] = frequency_prior(self.labels.counts, self.head.temperature)
        release(self.representations_LD, *([] if self.classifier is None else [self.classifier.table_LC]))
        return vectors_LD

    def score_slices(self, *, head: HeadName | None = None, dial: float | None = None) -> dict[str, slice]:
        """Return the elements of the search vectors that each part of a score is the inner product of."""
        head = self._resolve_head(head)
        widths: dict[str, int] = {}
        if head != "classifier":
            width = self.label_embeddings(self.representations_LD[:1]).shape[1]
            widths |= {"encoder": width, "encoder prior": int(self.has_prior)}
        if head != "encoder" and self.classifier is not None:
            width = self.classifier.table_LC.shape[1]
            widths |= {"classifier": width, "classifier prior": int(self.classifier.prior_L is not None)}
        widths["frequency"] = int(self._needs_frequency(dial))
        ends = np.cumsum(list(widths.values())).tolist()
        return {name: slice(end - width, end) for (name, width), end in zip(widths.items(), ends, strict=True) if width}

    def encode_labels(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the encoder's output for label texts."""
        return self.encode_tokens(self.encoder.tokenize(texts, side="label"), side="label")

    def encode_new_labels(self, texts: Sequence[str], examples: Sequence[Sequence[str]]) -> NDArray[np.float32]:
        """Return representations of labels from their texts and, where there are any, from texts that have them."""
        representations_ND = self.encode_labels(texts)
        if not any(examples):
            return representations_ND
        if self.generator is None:
            raise UsageError(
                "this model has not learned to make labels from examples: add them by their texts only, or train with "
                "recipe dexter and a validation split"
            )
        ends = np.cumsum([len(each) for each in examples])
        encoded_ED = self.encode_queries([text for each in examples for text in each])
        return self.generator.add_examples(representations_ND, np.split(encoded_ED, ends[:-1]))

    def label_embeddings(self, representations_ND: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Return the dual encoder's embeddings of labels (of all labels by default), without priors."""
        return self.head.vectors(self.representations_LD if representations_ND is None else representations_ND)

    def priors_for_new_labels(self) -> tuple[float, ...]:
        """Return the prior of a label without training data in each head that has priors.

        It is the one that was learned, else the median of rare labels.
        """
        if self.generator is not None:
            return self.generator.priors
        rare_L = self.labels.counts < _RARE_COUNT
        return tuple(
            _lower_median(bias_L[rare_L]) if rare_L.any() else float(bias_L.min()) for bias_L in self.prior_biases()
        )

    def append_labels(
        self,
        ids: Sequence[str],
        texts: Sequence[str],
        *,
        representations_ND: NDArray[np.float32],
        priors_NP: NDArray[np.float32],
    ) -> Model:
        """Return a model with more labels at the end, given the encoder's output for their texts and their priors.

        The columns of `priors_NP` are the heads that have priors, the dual encoder's first.
        """
        classifier, first = self.classifier, len(self.labels.ids)
        table_LC = None if classifier is None else np.pad(classifier.table_LC, ((0, len(ids)), (0, 0)))
        longer = self.with_labels(
            Labels(
                [*self.labels.ids, *ids],
                [*self.labels.texts, *texts],
                np.concatenate([self.labels.counts, np.zeros(len(ids), dtype=np.int64)]),
            ),
            np.concatenate([self.representations_LD, representations_ND]),
            biases=[
                np.concatenate([bias_L, prior_N])
                for bias_L, prior_N in zip(self.prior_biases(), priors_NP.T, strict=True)
            ],
            table_LC=table_LC,
            training_queries=None if self.training_queries is None else self.training_queries.append_labels(len(ids)),
        )
        if self.examples is not None:
            longer = replace(longer, examples=self.examples.append_labels(len(ids)))
        return longer._fill_rows(np.arange(first, first + len(ids))) if self.has_filled_rows else longer

    def fill_rows(self) -> Model:
        """Return the model with a classifier row for every label without training data, made from similar labels."""
        filled = replace(self, has_filled_rows=True)
        return filled if self.has_filled_rows else filled._fill_rows(np.flatnonzero(self.labels.counts == 0))

    def _fill_rows(self, unseen: NDArray[np.int64]) -> Model:
        """Return the model with the classifier rows of some labels without training data made anew."""
        if self.classifier is None or not len(unseen):
            return self
        used = np.concatenate([np.flatnonzero(self.labels.counts), unseen])
        rows_UC = fill_unseen_rows(
            self.classifier.rows(used),
            self.labels.counts[used],
            texts_UC=self.classifier.project(self.representations_LD[unseen]),
            label_vectors_LD=self.label_embeddings(self.representations_LD[used]),
            device=self.device,
        )[-len(unseen) :]
        table_LC = self.classifier.table_LC.copy()
        table_LC[unseen] = narrowed(rows_UC) if self.classifier.storage == "bfloat16" else rows_UC
        return replace(self, classifier=replace(self.classifier, table_LC=table_LC))

    def select_labels(self, rows: NDArray[np.int64]) -> Model:
        """Return a model with the labels of some rows, in the order given."""
        fewer = self.with_labels(
            self.labels.select(rows),
            self.representations_LD[rows],
            biases=[bias_L[rows] for bias_L in self.prior_biases()],
            table_LC=None if self.classifier is None else self.classifier.table_LC[rows],
            training_queries=None if self.training_queries is None else self.training_queries.select_labels(rows),
        )
        return fewer if self.examples is None else replace(fewer, examples=self.examples.select_labels(rows))

    def rename_labels(self, texts: Mapping[int, str], representations: Mapping[int, NDArray[np.float32]]) -> Model:
        """Return a model with other texts for some rows, and other representations for some."""
        changed_texts, changed_LD = list(self.labels.texts), self.representations_LD.copy()
        for row, text in texts.items():
            changed_texts[row] = text
        for row, vector_D in representations.items():
            changed_LD[row] = vector_D
        labels = Labels(self.labels.ids, changed_texts, self.labels.counts)
        renamed = replace(self, labels=labels, representations_LD=changed_LD)
        unseen = np.array([row for row in representations if not self.labels.counts[row]], dtype=np.int64)
        return renamed._fill_rows(unseen) if self.has_filled_rows else renamed

    def save(self, folder: Path, *, records: Mapping[str, object] | None = None) -> None:
        """Publish the model as a folder, atomically, in place of an older one; `records` are JSON files by name."""
        with atomic_folder(folder, replace=True) as temporary:
            self.encoder.save(temporary)
            own = temporary / _FOLDER
            own.mkdir()
            write_tensors(own / "labels.safetensors", {"representations": self.representations_LD})
            self._write_heads(own / "heads.safetensors")
            lines = [
                json.dumps({"id": label_id, "text": text, "count": int(count)}, ensure_ascii=False)
                for label_id, text, count in zip(self.labels.ids, self.labels.texts, self.labels.counts, strict=True)
            ]
            (own / "labels.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            described = {"format_version": FORMAT_VERSION, "heads": self._describe_heads(), "facts": self.facts}
            write_json(own / "model.json", described)
            for name, record in (records or {}).items():
                write_json(own / name, record)
            if self.names is not None:
                self.names.save(own / NAMES_FILE)
            if self.training_queries is not None:
                self.training_queries.save(own)
            if self.generator is not None:
                self.generator.save(own)

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "cpu") -> Model:
        """Read a published model, whose files are checked against the manifest."""
        with verified(folder) as view, ThreadPoolExecutor(1) as thread:
            encoder = thread.submit(load_encoder, view, device=device)
            return replace(cls._read(view / _FOLDER, encoder, device=device), names=_read_names(Path(folder), view))

    @classmethod
    def _read(cls, own: Path, loading: Future[TextEncoder], *, device: str) -> Model:
        """Read our own files while the encoder is loading: their work needs the interpreter's lock in turns."""
        described = read_object(own / "model.json")
        if described.get("format_version") != FORMAT_VERSION:
            raise ModelError(
                f"{own / 'model.json'}: format version {described.get('format_version')!r}, this program reads "
                f"{FORMAT_VERSION}: train again or use the version of dexter that wrote it"
            )
        labels = _read_labels(own / "labels.jsonl")
        representations = read_tensors(own / "labels.safetensors").get("representations", np.empty((0, 0)))
        state = read_tensors(own / "heads.safetensors")
        training_queries = TrainingQueries.load(
            own, num_labels=len(labels.ids), dimension=representations.shape[-1], device=device
        )
        encoder = loading.result()
        if representations.shape != (len(labels.ids), encoder.dimension):
            raise ModelError(f"{own}: expected {len(labels.ids)} label vectors of size {encoder.dimension}")
        try:
            heads, facts = dict(described["heads"]), dict(described["facts"])
            dual, classifier = _build_heads(heads, state, len(labels.ids), encoder.dimension)
        except (KeyError, TypeError) as error:
            raise ModelError(f"{own / 'model.json'}: not a model of this version ({error!r})") from None
        model = cls(
            encoder=encoder,
            head=dual,
            classifier=classifier,
            labels=labels,
            representations_LD=representations,
            facts=facts,
            training_queries=training_queries,
            has_filled_rows=bool(heads.get("filled_rows")),
            generator=LabelGenerator.load(
                own,
                dimension=encoder.dimension,
                num_priors=sum(part is not None and part.prior_L is not None for part in (dual, classifier)),
            ),
            device=device,
        )
        return model.fill_rows()

    def with_labels(
        self,
        labels: Labels,
        representations_LD: NDArray[np.float32],
        *,
        biases: Sequence[NDArray[np.float32]],
        table_LC: NDArray[Any] | None,
        training_queries: TrainingQueries | None = None,
    ) -> Model:
        """Return the model with other labels, sharing the encoder and the projections of the heads.

        `biases` are the labels' priors as `prior_biases` returns them, `table_LC` has their classifier rows, and
        `training_queries` columns for them.
        """
        left = iter(biases)
        dual = self.head.for_labels(None if self.head.prior_L is None else next(left))
        classifier = self.classifier
        if classifier is not None and table_LC is not None:
            classifier = classifier.for_labels(table_LC, None if classifier.prior_L is None else next(left))
        return replace(
            self,
            head=dual,
            classifier=classifier,
            labels=labels,
            representations_LD=representations_LD,
            training_queries=training_queries,
        )

    def prior_biases(self) -> list[NDArray[np.float32]]:
        """Return the label biases [L] of each head that has a prior, the dual encoder's first."""
        priors = (self.head.prior_L, None if self.classifier is None else self.classifier.prior_L)
        return [prior_L for prior_L in priors if prior_L is not None]

    def _needs_frequency(self, dial: float | None) -> bool:
        """Whether the dial weighs label frequencies because no prior was learned."""
        return bool(dial) and not self.has_prior

    def _resolve_head(self, head: HeadName | None) -> HeadName:
        head = head or self.default_head
        if head not in self.heads:
            raise UsageError(f"this model has no head {head!r}: choose one of {', '.join(self.heads)}")
        return head

    def _classifier_rows(self) -> NDArray[np.float32] | None:
        """Return the classifier rows with those of labels without training data filled in from similar labels.

        None where all are in the table already.
        """
        assert self.classifier is not None
        counts = self.labels.counts
        if self.has_filled_rows or (self.processes.size == 1 and (counts > 0).all()):
            return None
        texts_UC = self.classifier.project(self.representations_LD[counts == 0])
        return fill_unseen_rows(
            self.classifier.rows(),
            counts,
            texts_UC=texts_UC,
            label_vectors_LD=self.label_embeddings(),
            processes=self.processes,
            device=self.device,
        )

    def _write_heads(self, path: Path) -> None:
        state = {f"dual.{name}": value for name, value in self.head.state().items()}
        narrow: tuple[str, ...] = ()
        if self.classifier is not None:
            state |= {f"classifier.{name}": value for name, value in self.classifier.state().items()}
            narrow = (_TABLE,) if self.classifier.storage == "bfloat16" else ()
        write_tensors(path, state, bfloat16=narrow)

    def _describe_heads(self) -> dict[str, Any]:
        return {
            "temperature": self.head.temperature,
            "normalize": self.head.normalize,
            "projection": 0 if self.head.projection is None else len(self.head.projection.bias_P),
            "prior": self.has_prior,
            "classifier": None if self.classifier is None else self.classifier.storage,
            "filled_rows": self.has_filled_rows,
        }


def _read_names(folder: Path, view: Path) -> LabelNames | None:
    """Read the names of labels: those of the last synchronisation, else those of training, if there are any."""
    synchronised, trained = folder / NAMES_FILE, view / _FOLDER / NAMES_FILE
    if synchronised.exists():
        return LabelNames.load(synchronised)
    return LabelNames.load(trained, is_listed=True) if trained.exists() else None


def _read_labels(path: Path) -> Labels:
    try:
        # Only a line feed ends a line. All lines as one list take a third of the time.
        content = path.read_bytes().removesuffix(b"\n")
        entries = json.loads(b"[%b]" % content.replace(b"\n", b","))
        if len(entries) != content.count(b"\n") + 1:
            raise ValueError("no label or several in a line")
        ids, texts, counts = zip(*map(itemgetter("id", "text", "count"), entries), strict=True)
        labels = Labels(list(map(str, ids)), list(map(str, texts)), np.array(counts, dtype=np.int64))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path}: not the labels of a model ({error!r}): restore the folder from a copy") from None
    if not labels.ids or len(set(labels.ids)) != len(labels.ids):
        raise ModelError(f"{path}: {len(labels.ids)} labels: expected one or more, each with an id of its own")
    return labels


def _build_heads(
    described: dict[str, Any], state: dict[str, NDArray[Any]], num_labels: int, size: int
) -> tuple[DualArrays, ClassifierArrays | None]:
    """Build the heads as described, with the saved weights."""
    temperature, projection = float(described["temperature"]), int(described["projection"])
    storage = described["classifier"]
    expected: dict[str, tuple[int, ...]] = {}
    for name in ("dual.", "classifier.") if storage is not None else ("dual.",):
        if projection:
            expected |= {f"{name}project.0.weight": (projection, size), f"{name}project.0.bias": (projection,)}
        if described["prior"]:
            expected[f"{name}prior.bias"] = (num_labels,)
    if storage is not None:
        expected[_TABLE] = (num_labels, projection or size)
    found = {name: value.shape for name, value in state.items()}
    if found != expected:
        raise ModelError(f"heads.safetensors does not fit the model: it holds {found}, expected {expected}")
    dual, classifier = (
        {key.removeprefix(name): value for key, value in state.items() if key.startswith(name)}
        for name in ("dual.", "classifier.")
    )
    return (
        DualArrays.of(dual, temperature=temperature, normalize=bool(described["normalize"])),
        None if storage is None else ClassifierArrays.of(classifier, temperature=temperature),
    )


def frequency_prior(counts_L: NDArray[np.integer], temperature: float) -> NDArray[np.float32]:
    """Return what full frequency adds to each label's score: 0 for the most frequent label, less for others.

    It is what a learned prior starts from: the temperature times the logarithm of the label's count.
    """
    logarithms = np.log(np.asarray(counts_L, dtype=np.float64) + 0.5)
    return np.asarray(temperature * (logarithms - logarithms.max()), dtype=np.float32)


def _lower_median(values: NDArray[np.float32]) -> float:
    """Return the median, of two middle values the lower."""
    return float(np.sort(values)[(len(values) - 1) // 2])
