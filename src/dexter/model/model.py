"""A trained dual encoder with its labels, in memory and as the folder that a run publishes.

model/      the encoder (a sentence-transformers folder where possible)
  dexter/   model.json (version, heads, facts), labels.jsonl (id, text, training count),
            heads.safetensors (projections, priors, classifier table), labels.safetensors (representations),
            training_queries.safetensors (see `dexter.model.training_queries`), scoring.json (what was tuned)
  MANIFEST.json   SHA-256 of every file, written last
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.encoders import embed, load_encoder
from dexter.encoders.classifier import ClassifierTable
from dexter.encoders.folder import read_object
from dexter.encoders.heads import ClassifierHead, DualHead, LabelPrior
from dexter.errors import ModelError, UsageError
from dexter.files import atomic_folder, verify_manifest, write_json
from dexter.model.labels import Labels
from dexter.model.training_queries import TrainingQueries
from dexter.model.unseen import fill_unseen_rows
from dexter.processes import Processes, SingleProcess
from dexter.types import HEAD_NAMES, HeadName

if TYPE_CHECKING:
    from dexter.data.tokens import Tokens
    from dexter.encoders import TextEncoder
    from dexter.encoders.onnx import OnnxEncoder

FORMAT_VERSION = 1
_FOLDER = "dexter"
_RARE_COUNT = 10
"""A label without training data gets the median prior of labels with fewer training queries than this."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """Encoder, heads and labels. Immutable: other labels make another model, which shares the encoder."""

    encoder: TextEncoder
    head: DualHead
    classifier: ClassifierHead | None = None
    labels: Labels
    representations_LD: Tensor
    """The encoder's output for the label texts."""
    facts: dict[str, Any]
    """Recipe, data set, seed and validation metrics, as published."""
    processes: Processes = field(default_factory=SingleProcess)
    """The processes that train it together; each holds the labels and vectors of its own shard only."""
    training_queries: TrainingQueries | None = None
    """The kept training queries, if any."""
    query_encoder: OnnxEncoder | None = None
    """Encodes queries in place of `encoder`, which always encodes labels."""

    @property
    def has_prior(self) -> bool:
        """Whether the dual encoder has a learned label prior."""
        return self.head.prior is not None

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

    def query_vectors(self, texts: Sequence[str], *, head: HeadName | None = None) -> Tensor:
        """Encode query texts and return the vectors to search with."""
        return self.search_vectors(self.encode_queries(texts), head=head)

    def encode_queries(self, texts: Sequence[str]) -> Tensor:
        """Return the encoder's output for query texts, before any head."""
        return self.encode_tokens(self.encoder.tokenize(texts, side="query"), side="query")

    def encode_tokens(self, tokens: Tokens, *, side: Literal["query", "label"]) -> Tensor:
        """Return the encoder's output for tokenised texts of one side."""
        device = self.representations_LD.device
        if side == "query" and self.query_encoder is not None:
            return self.query_encoder.embed(tokens).to(device)
        return embed(self.encoder, tokens, device=device)

    def search_vectors(
        self, representations_ND: Tensor, *, head: HeadName | None = None, dial: float | None = None
    ) -> Tensor:
        """Return the vectors to search with, given the encoder's output; `dial` is the weight of the label prior."""
        head = self._resolve_head(head)
        weight = 1.0 if dial is None else dial
        with torch.inference_mode():
            parts = [self.head.queries(representations_ND, prior_weight=weight)] if head != "classifier" else []
            if head != "encoder" and self.classifier is not None:
                parts.append(self.classifier.queries(representations_ND, search=True, prior_weight=weight))
            vectors_ND = torch.cat(parts, dim=1)
            return _with_element(vectors_ND, weight) if self._needs_frequency(dial) else vectors_ND

    def label_vectors(self, *, head: HeadName | None = None, dial: float | None = None) -> Tensor:
        """Return the label vectors to search among.

        For a model without a learned prior, `dial` must be that of `search_vectors`; otherwise it has no effect.
        """
        if self._needs_frequency(dial):
            prior_L = frequency_prior(self.labels.counts, self.head.temperature)
            return _with_element(self.label_vectors(head=head), prior_L.to(self.representations_LD.device))
        head = self._resolve_head(head)
        with torch.inference_mode():
            parts = [self.head.labels(self.representations_LD)] if head != "classifier" else []
            if head != "encoder" and self.classifier is not None:
                parts.append(self.classifier.search_labels(self._classifier_rows()))
            return torch.cat(parts, dim=1)

    def score_slices(self, *, head: HeadName | None = None, dial: float | None = None) -> dict[str, slice]:
        """Return the elements of the search vectors that each part of a score is the inner product of."""
        head = self._resolve_head(head)
        widths: dict[str, int] = {}
        if head != "classifier":
            width = self.label_embeddings(self.representations_LD[:1]).shape[1]
            widths |= {"encoder": width, "encoder prior": int(self.head.prior is not None)}
        if head != "encoder" and self.classifier is not None:
            rows = self.classifier.table.weight.shape[1]
            widths |= {"classifier": rows, "classifier prior": int(self.classifier.prior is not None)}
        widths["frequency"] = int(self._needs_frequency(dial))
        ends = np.cumsum(list(widths.values())).tolist()
        return {name: slice(end - width, end) for (name, width), end in zip(widths.items(), ends, strict=True) if width}

    def encode_labels(self, texts: Sequence[str]) -> Tensor:
        """Return the encoder's output for label texts."""
        return self.encode_tokens(self.encoder.tokenize(texts, side="label"), side="label")

    def label_embeddings(self, representations_ND: Tensor | None = None) -> Tensor:
        """Return the dual encoder's embeddings of labels (of all labels by default), without priors."""
        with torch.inference_mode():
            return self.head.vectors(self.representations_LD if representations_ND is None else representations_ND)

    def priors_for_new_labels(self) -> tuple[float, ...]:
        """Return the prior of a label without training data in each head that has priors: the median of rare labels."""
        rare_L = torch.from_numpy(self.labels.counts < _RARE_COUNT).to(self.representations_LD.device)
        return tuple(float(bias_L[rare_L].median() if rare_L.any() else bias_L.min()) for bias_L in self.prior_biases())

    def append_labels(
        self, ids: Sequence[str], texts: Sequence[str], *, representations_ND: Tensor, priors_NP: Tensor
    ) -> Model:
        """Return a model with more labels at the end, given the encoder's output for their texts and their priors.

        The columns of `priors_NP` are the heads that have priors, the dual encoder's first.
        """
        device = self.representations_LD.device
        priors = priors_NP.to(device).unbind(1)
        return self.with_labels(
            Labels(
                [*self.labels.ids, *ids],
                [*self.labels.texts, *texts],
                np.concatenate([self.labels.counts, np.zeros(len(ids), dtype=np.int64)]),
            ),
            torch.cat([self.representations_LD, representations_ND.to(device)]),
            biases=[torch.cat([bias_L, prior_N]) for bias_L, prior_N in zip(self.prior_biases(), priors, strict=True)],
            table=None if self.classifier is None else self.classifier.table.appended(len(ids)),
            training_queries=None if self.training_queries is None else self.training_queries.append_labels(len(ids)),
        )

    def select_labels(self, rows: NDArray[np.int64]) -> Model:
        """Return a model with the labels of some rows, in the order given."""
        rows_M = torch.from_numpy(rows).to(self.representations_LD.device)
        return self.with_labels(
            self.labels.select(rows),
            self.representations_LD[rows_M],
            biases=[bias_L[rows_M] for bias_L in self.prior_biases()],
            table=None if self.classifier is None else self.classifier.table.selected(rows_M),
            training_queries=None if self.training_queries is None else self.training_queries.select_labels(rows),
        )

    def rename_labels(self, texts: Mapping[int, str], representations: Mapping[int, Tensor]) -> Model:
        """Return a model with other texts for some rows, and other representations for some."""
        changed_texts, changed_LD = list(self.labels.texts), self.representations_LD.clone()
        for row, text in texts.items():
            changed_texts[row] = text
        for row, vector_D in representations.items():
            changed_LD[row] = vector_D.to(changed_LD)
        labels = Labels(self.labels.ids, changed_texts, self.labels.counts)
        return replace(self, labels=labels, representations_LD=changed_LD)

    def save(self, folder: Path, *, records: Mapping[str, object] | None = None) -> None:
        """Publish the model as a folder, atomically, in place of an older one; `records` are JSON files by name."""
        from safetensors.torch import save_file

        with atomic_folder(folder, replace=True) as temporary:
            self.encoder.save(temporary)
            own = temporary / _FOLDER
            own.mkdir()
            save_file(
                {"representations": self.representations_LD.detach().cpu().contiguous()}, own / "labels.safetensors"
            )
            save_file(self._head_state(), own / "heads.safetensors")
            lines = [
                json.dumps({"id": label_id, "text": text, "count": int(count)}, ensure_ascii=False)
                for label_id, text, count in zip(self.labels.ids, self.labels.texts, self.labels.counts, strict=True)
            ]
            (own / "labels.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            described = {"format_version": FORMAT_VERSION, "heads": self._describe_heads(), "facts": self.facts}
            write_json(own / "model.json", described)
            for name, record in (records or {}).items():
                write_json(own / name, record)
            if self.training_queries is not None:
                self.training_queries.save(own)

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "cpu") -> Model:
        """Read a published model, after checking every file against the manifest."""
        folder = Path(folder)
        verify_manifest(folder)
        own = folder / _FOLDER
        described = read_object(own / "model.json")
        if described.get("format_version") != FORMAT_VERSION:
            raise ModelError(
                f"{own / 'model.json'}: format version {described.get('format_version')!r}, this program reads "
                f"{FORMAT_VERSION}: train again or use the version of dexter that wrote it"
            )
        labels = _read_labels(own / "labels.jsonl")
        encoder = load_encoder(folder, device=device)
        representations = _read_tensors(own / "labels.safetensors", device).get("representations")
        if representations is None or representations.shape != (len(labels.ids), encoder.dimension):
            raise ModelError(f"{own}: expected {len(labels.ids)} label vectors of size {encoder.dimension}")
        state = _read_tensors(own / "heads.safetensors", device)
        try:
            heads, facts = dict(described["heads"]), dict(described["facts"])
            dual, classifier = _build_heads(heads, state, len(labels.ids), encoder.dimension, device)
        except (KeyError, TypeError) as error:
            raise ModelError(f"{own / 'model.json'}: not a model of this version ({error!r})") from None
        return cls(
            encoder=encoder,
            head=dual,
            classifier=classifier,
            labels=labels,
            representations_LD=representations,
            facts=facts,
            training_queries=TrainingQueries.load(
                own, num_labels=len(labels.ids), dimension=encoder.dimension, device=device
            ),
        )

    def with_labels(
        self,
        labels: Labels,
        representations_LD: Tensor,
        *,
        biases: Sequence[Tensor],
        table: ClassifierTable | None,
        training_queries: TrainingQueries | None = None,
    ) -> Model:
        """Return the model with other labels, sharing the encoder and the projections of the heads.

        `biases` are the labels' priors as `prior_biases` returns them, `table` has their classifier rows, and
        `training_queries` columns for them.
        """
        left = iter(biases)
        dual = self.head.for_labels(None if self.head.prior is None else next(left))
        classifier = self.classifier
        if classifier is not None and table is not None:
            classifier = classifier.for_labels(table, None if classifier.prior is None else next(left))
        return replace(
            self,
            head=dual,
            classifier=classifier,
            labels=labels,
            representations_LD=representations_LD,
            training_queries=training_queries,
        )

    def prior_biases(self) -> list[Tensor]:
        """Return the label biases [L] of each head that has a prior, the dual encoder's first."""
        priors = (self.head.prior, None if self.classifier is None else self.classifier.prior)
        return [prior.bias.detach() for prior in priors if prior is not None]

    def _needs_frequency(self, dial: float | None) -> bool:
        """Whether the dial weighs label frequencies because no prior was learned."""
        return bool(dial) and not self.has_prior

    def _resolve_head(self, head: HeadName | None) -> HeadName:
        head = head or self.default_head
        if head not in self.heads:
            raise UsageError(f"this model has no head {head!r}: choose one of {', '.join(self.heads)}")
        return head

    def _classifier_rows(self) -> Tensor:
        """Return the classifier rows, with those of labels without training data filled in from similar labels."""
        assert self.classifier is not None
        rows_LC, counts = self.classifier.table.rows(), self.labels.counts
        if self.processes.size == 1 and (counts > 0).all():
            return rows_LC
        unseen = torch.from_numpy(np.flatnonzero(counts == 0)).to(self.representations_LD.device)
        texts_UC = self.classifier.project(self.representations_LD[unseen])
        return fill_unseen_rows(
            rows_LC, counts, texts_UC=texts_UC, label_vectors_LD=self.label_embeddings(), processes=self.processes
        )

    def _head_state(self) -> dict[str, Tensor]:
        state = {f"dual.{name}": value for name, value in self.head.state_dict().items()}
        if self.classifier is not None:
            state |= {f"classifier.{name}": value for name, value in self.classifier.state_dict().items()}
        return {name: value.detach().cpu().contiguous() for name, value in state.items()}

    def _describe_heads(self) -> dict[str, Any]:
        return {
            "temperature": self.head.temperature,
            "normalize": self.head.normalize,
            "projection": self.head.project[0].out_features if len(self.head.project) else 0,
            "prior": self.head.prior is not None,
            "classifier": None if self.classifier is None else self.classifier.table.storage,
        }


def _read_labels(path: Path) -> Labels:
    try:
        # Only a line feed ends a line: label texts may hold other characters that `splitlines` would cut at.
        entries = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        counts = np.array([entry["count"] for entry in entries], dtype=np.int64)
        labels = Labels([str(entry["id"]) for entry in entries], [str(entry["text"]) for entry in entries], counts)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path}: not the labels of a model ({error!r}): restore the folder from a copy") from None
    if not labels.ids or len(set(labels.ids)) != len(labels.ids):
        raise ModelError(f"{path}: {len(labels.ids)} labels: expected one or more, each with an id of its own")
    return labels


def _read_tensors(path: Path, device: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path, device=device)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: missing or damaged ({error}): restore the folder from a copy") from None
    for name, tensor in tensors.items():
        # A sum is finite only if all values are, or else may have overflowed: the quick test comes first.
        if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            raise ModelError(f"{path}: {name} holds values that are not finite: restore the folder from a copy")
    return tensors


def _build_heads(
    described: dict[str, Any], state: dict[str, Tensor], num_labels: int, size: int, device: str
) -> tuple[DualHead, ClassifierHead | None]:
    """Build the heads as described, with the saved weights."""
    temperature, projection = float(described["temperature"]), int(described["projection"])

    def prior() -> LabelPrior | None:
        return LabelPrior(np.zeros(num_labels, dtype=np.int64), 1) if described["prior"] else None

    dual = DualHead(
        temperature=temperature,
        prior=prior(),
        input_size=size,
        projection=projection,
        normalize=bool(described["normalize"]),
    )
    classifier = None
    if described["classifier"] is not None:
        table = ClassifierTable(num_labels, projection or size, storage=described["classifier"])
        classifier = ClassifierHead(
            table, temperature=temperature, input_size=size, projection=projection, prior=prior()
        )
    try:
        for name, head in (("dual.", dual), ("classifier.", classifier)):
            if head is not None:
                own = {key.removeprefix(name): value for key, value in state.items() if key.startswith(name)}
                head.load_state_dict(own)
                head.to(device).eval()
    except RuntimeError as error:
        raise ModelError(f"heads.safetensors does not fit the model ({error})") from None
    return dual, classifier


def frequency_prior(counts_L: NDArray[np.integer], temperature: float) -> Tensor:
    """Return what full frequency adds to each label's score: 0 for the most frequent label, less for others.

    It is what a learned prior starts from: the temperature times the logarithm of the label's count.
    """
    logarithms = np.log(np.asarray(counts_L, dtype=np.float64) + 0.5)
    return torch.from_numpy(temperature * (logarithms - logarithms.max())).float()


def _with_element(vectors_ND: Tensor, element: Tensor | float) -> Tensor:
    """Append one element to each vector, the same to all or one for each."""
    column_N1 = torch.as_tensor(element, dtype=vectors_ND.dtype, device=vectors_ND.device).reshape(-1, 1)
    return torch.cat([vectors_ND, column_N1.expand(len(vectors_ND), 1)], dim=1)
