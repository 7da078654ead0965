"""What edits make of a model. Live edits, a restart and another process's edits all take this one way.

An entry is an edit that was accepted, with everything that is needed to repeat it without the encoder. Entries are
first folded into what they change in all, so that any number of them costs one pass over the labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dexter.errors import ModelError
from dexter.model.edits import LabelEdit
from dexter.model.model import Model, NewLabels


class Renamed(NamedTuple):
    """A label's new text."""

    id: str
    text: str
    encoded: bool
    """Whether it has a new vector too."""


class Added(NamedTuple):
    """A new label."""

    id: str
    text: str
    priors: tuple[float, ...]
    """Its prior for each head that has priors, the dual encoder's first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """An accepted edit."""

    version: int
    """The version of the labels that it leads to."""
    remove: Sequence[str] = ()
    rename: Sequence[Renamed] = ()
    add: Sequence[Added] = ()
    retired: Sequence[str] = ()
    """More ids that are not to be used again: of labels that came and went before a compaction."""
    vectors_ND: NDArray[np.float32]
    """What the encoder made of the new texts: of renamed labels that are `encoded`, then of added ones."""


@dataclass
class Folded:
    """What a list of entries changes in all."""

    removed: set[int] = field(default_factory=set)
    """Rows of the model's labels."""
    renamed: dict[int, tuple[str, NDArray[np.float32] | None]] = field(default_factory=dict)
    """New text, and new vector where there is one, by row of the model's labels."""
    added: dict[str, tuple[Added, NDArray[np.float32]]] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)


def make_entry(edit: LabelEdit, model: Model, *, version: int) -> Entry:
    """Encode what an edit brings; it was checked before."""
    encoded = [] if edit.keep_vectors else list(edit.rename)
    texts = [text for _, text in (*encoded, *edit.add)]
    vectors_ND = model.encode_labels(texts).cpu().numpy()
    priors = model.rare_priors()
    return Entry(
        version=version,
        remove=tuple(edit.remove),
        rename=tuple(Renamed(label_id, text, not edit.keep_vectors) for label_id, text in edit.rename),
        add=tuple(Added(label_id, text, priors) for label_id, text in edit.add),
        vectors_ND=vectors_ND,
    )


def fold(ids: Sequence[str], entries: Iterable[Entry]) -> Folded:
    """What the entries change in labels with these ids, in all."""
    rows = {label_id: row for row, label_id in enumerate(ids)}
    folded = Folded()
    for entry in entries:
        try:
            _fold_one(folded, rows, entry)
        except (KeyError, StopIteration) as error:
            raise ModelError(
                f"edit {entry.version} of the labels does not fit the model ({error!r}): restore the folder from a copy"
            ) from None
    return folded


def apply(model: Model, folded: Folded) -> Model:
    """The model with the changes; the given one stays as it is."""
    kept = np.setdiff1d(np.arange(len(model.labels.ids)), np.array(sorted(folded.removed), dtype=np.int64))
    if folded.removed:
        model = model.with_kept(kept)
    texts = {int(np.searchsorted(kept, row)): text for row, (text, _) in folded.renamed.items()}
    vectors = {
        int(np.searchsorted(kept, row)): torch.from_numpy(vector)
        for row, (_, vector) in folded.renamed.items()
        if vector is not None
    }
    if texts:
        model = model.with_renamed(texts, vectors)
    if folded.added:
        labels = [label for label, _ in folded.added.values()]
        model = model.with_added(
            NewLabels(
                ids=[label.id for label in labels],
                texts=[label.text for label in labels],
                representations_ND=torch.from_numpy(np.stack([vector for _, vector in folded.added.values()])),
                priors_NP=torch.tensor([label.priors for label in labels], dtype=torch.float32),
            )
        )
    return model


def compacted(ids: Sequence[str], folded: Folded, *, version: int, dimension: int) -> Entry:
    """One entry that changes labels with these ids as the folded ones did."""
    renamed = [Renamed(ids[row], text, vector is not None) for row, (text, vector) in folded.renamed.items()]
    vectors = [vector for _, vector in folded.renamed.values() if vector is not None]
    vectors += [vector for _, vector in folded.added.values()]
    return Entry(
        version=version,
        remove=[ids[row] for row in sorted(folded.removed)],
        rename=renamed,
        add=[label for label, _ in folded.added.values()],
        retired=sorted(folded.retired),
        vectors_ND=np.stack(vectors) if vectors else np.empty((0, dimension), dtype=np.float32),
    )


def _fold_one(folded: Folded, rows: dict[str, int], entry: Entry) -> None:
    vectors = iter(entry.vectors_ND)
    for label_id in entry.remove:
        if folded.added.pop(label_id, None) is None:
            row = rows.pop(label_id)
            folded.removed.add(row)
            folded.renamed.pop(row, None)
    for label_id, text, encoded in entry.rename:
        vector = next(vectors) if encoded else None
        if label_id in folded.added:
            label, old = folded.added[label_id]
            folded.added[label_id] = label._replace(text=text), old if vector is None else vector
        else:
            row = rows[label_id]
            folded.renamed[row] = text, folded.renamed.get(row, ("", None))[1] if vector is None else vector
    folded.retired.update(entry.remove, entry.retired)
    for label in entry.add:
        folded.added[label.id] = label, next(vectors)
        folded.retired.discard(label.id)
