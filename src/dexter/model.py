"""A trained dual encoder with its labels: in memory, and as the folder that a run publishes.

model/    the encoder (a sentence-transformers folder where its kind allows that), and beside it
  dexter/   model.json (version, temperature, counts), labels.jsonl (id, text, training count),
            labels.safetensors (representations of the labels, prior)
  MANIFEST.json   SHA-256 of every file, written last
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dexter.encoders import load_encoder
from dexter.encoders.embed import embed
from dexter.encoders.heads import DualHead, LabelPrior
from dexter.errors import ModelError
from dexter.files import MANIFEST, atomic_folder, verify_manifest, write_json

if TYPE_CHECKING:
    from dexter.encoders import TextEncoder

FORMAT_VERSION = 1
_FOLDER = "dexter"


@dataclass(frozen=True)
class Labels:
    """The labels a model knows, in the order of its vectors."""

    ids: Sequence[str]
    texts: Sequence[str]
    counts: NDArray[np.int64]
    """Training queries of each label."""


@dataclass
class Model:
    """Everything that turns a text into ranked labels."""

    encoder: TextEncoder
    head: DualHead
    labels: Labels
    representations_LD: Tensor
    """What the encoder made of the label texts."""
    facts: dict[str, Any]
    """What else a reader wants to know: recipe, data set, seed, validation figures."""

    def query_vectors(self, texts: Sequence[str]) -> Tensor:
        """The vectors to search with."""
        tokens = self.encoder.tokenize(texts, side="query")
        with torch.inference_mode():
            return self.head.queries(embed(self.encoder, tokens, device=self.representations_LD.device))

    def label_vectors(self, *, prior_weight: float = 1.0) -> Tensor:
        """The vectors to search among."""
        with torch.inference_mode():
            return self.head.labels(self.representations_LD, weight=prior_weight)

    def save(self, folder: Path) -> None:
        """Publish the model as a folder, whole or not at all; an older one in its place is replaced."""
        from safetensors.torch import save_file

        with atomic_folder(folder, replace=True) as temporary:
            self.encoder.save(temporary)
            own = temporary / _FOLDER
            own.mkdir()
            tensors = {"representations": self.representations_LD.detach().cpu().contiguous()}
            if self.head.prior is not None:
                tensors["prior"] = self.head.prior.bias.detach().cpu().contiguous()
            save_file(tensors, own / "labels.safetensors")
            lines = [
                json.dumps({"id": label_id, "text": text, "count": int(count)}, ensure_ascii=False)
                for label_id, text, count in zip(self.labels.ids, self.labels.texts, self.labels.counts, strict=True)
            ]
            (own / "labels.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            described = {"format_version": FORMAT_VERSION, "temperature": self.head.temperature, "facts": self.facts}
            write_json(own / "model.json", described)

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "cpu") -> Model:
        """Read a published model, after checking every file against the manifest."""
        from safetensors.torch import load_file

        folder = Path(folder)
        verify_manifest(folder)
        own = folder / _FOLDER
        described = json.loads((own / "model.json").read_text(encoding="utf-8"))
        if described.get("format_version") != FORMAT_VERSION:
            raise ModelError(
                f"{own / 'model.json'}: format version {described.get('format_version')!r}, this program reads "
                f"{FORMAT_VERSION}: train again or use the version of dexter that wrote it"
            )
        labels = _read_labels(own / "labels.jsonl")
        tensors = load_file(own / "labels.safetensors", device=device)
        if len(tensors["representations"]) != len(labels.ids):
            raise ModelError(f"{own}: {len(tensors['representations'])} vectors for {len(labels.ids)} labels")
        head = DualHead(temperature=described["temperature"], prior=_prior(tensors.get("prior")))
        encoder = load_encoder(folder, device=device)
        return cls(encoder, head.to(device), labels, tensors["representations"], described["facts"])


def fingerprint(folder: Path) -> str:
    """A short hash that changes when any file of a published model does."""
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:16]


def _read_labels(path: Path) -> Labels:
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    counts = np.array([entry["count"] for entry in entries], dtype=np.int64)
    return Labels([entry["id"] for entry in entries], [entry["text"] for entry in entries], counts)


def _prior(bias: Tensor | None) -> LabelPrior | None:
    if bias is None:
        return None
    prior = LabelPrior(np.zeros(len(bias), dtype=np.int64), 1)
    prior.bias = nn.Parameter(bias)
    return prior
