"""A model whose labels change while it is in use: every change is prepared whole, put on disk, then swapped in."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Generic, NamedTuple, TypeVar

from dexter.errors import UsageError
from dexter.model.edits import EditResult, LabelEdit, VersionConflict, check_edit
from dexter.model.journal import LabelJournal
from dexter.model.model import Model
from dexter.model.replay import Entry, apply, compacted, fold, make_entry
from dexter.model.similar import Duplicate, SimilarLabel, duplicates, similar_labels

log = logging.getLogger("dexter")
Derived = TypeVar("Derived")
_SHOWN_DUPLICATES = 3
_MOST_PAIRS = 10**9
"""So many pairs of new and known labels are compared by vector: about 20 seconds; of more, only the texts are."""


class LiveState(NamedTuple, Generic[Derived]):
    """The labels at one moment. Replaced as one, so that nobody sees parts of two."""

    model: Model
    derived: Derived
    """What the user of the model made of it."""
    version: int
    """How many changes the labels have seen."""
    number: int
    """Which files of the journal it was read from."""
    retired: frozenset[str]
    """Ids of labels that were removed."""


class LiveModel(Generic[Derived]):
    """Holds the newest state; edits follow each other, readers take `state` and are never disturbed.

    Args:
        model: the published model.
        derive: what else belongs to a state, such as vectors to search among; when it fails, nothing has changed.
        journal: where the edits of a published model are; what it holds already is applied first.
        persistent: whether edits are written there; otherwise they live in memory only.
        reload: reads the published model again.
    """

    def __init__(
        self,
        model: Model,
        *,
        derive: Callable[[Model], Derived],
        journal: LabelJournal | None = None,
        persistent: bool = False,
        reload: Callable[[], Model] | None = None,
    ) -> None:
        if persistent and (journal is None or reload is None):
            raise UsageError("labels of a model that only lives in memory cannot be kept on disk: load a run")
        self._derive, self._journal, self._persistent, self._reload = derive, journal, persistent, reload
        self._editing = threading.Lock()
        self._only_in_memory = False
        self.state: LiveState[Derived] = self._read(model)

    def edit(self, edit: LabelEdit, *, expected: int | None = None) -> EditResult:
        """Change the labels: on disk and then in memory, or not at all; with `expected`, only at that version."""
        with self._editing, self._writing():
            state = self.state
            if expected is not None and expected != state.version:
                raise VersionConflict(expected=expected, version=state.version)
            check_edit(edit, state.model.labels.ids, state.retired)
            if not (edit.remove or edit.rename or edit.add):
                return EditResult(state.version, [])
            entry = make_entry(edit, state.model, version=state.version + 1)
            changed = self._after(state, [entry], number=state.number)
            alike = _duplicates(changed.model, [*edit.rename, *edit.add])
            if self._persistent and self._journal is not None:
                self._journal.append(entry)
            self._only_in_memory |= not self._persistent
            self.state = changed
        return EditResult(changed.version, alike)

    def refresh(self) -> bool:
        """Take up what other processes changed on disk since; whether there was anything."""
        with self._editing:
            return self._catch_up()

    def compact(self) -> None:
        """Make the files on disk as small as the changes they amount to; labels and version stay."""
        if self._journal is None or self._reload is None or not self._persistent:
            raise UsageError("only labels that are kept on disk can be compacted")
        with self._editing, self._writing():
            published = self._reload()
            head, entries = self._journal.read()
            folded = fold(published.labels.ids, entries)
            dimension = published.encoder.dimension
            self._journal.compact(compacted(published.labels.ids, folded, version=head.version, dimension=dimension))
            self.state = self.state._replace(number=head.number + 1)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Be the only writer, with what others wrote before taken up first."""
        persistent = self._journal if self._persistent else None
        with nullcontext() if persistent is None else persistent.writing():
            if persistent is not None:
                self._catch_up()
            yield

    def _catch_up(self) -> bool:
        if self._journal is None or self._reload is None:
            return False
        state, head = self.state, self._journal.head()
        if head.version == state.version and head.number == state.number:
            return False
        if self._only_in_memory:
            raise UsageError(
                "this predictor has labels that are only in memory: they cannot be joined with those on disk"
            )
        if head.number == state.number:
            _, entries = self._journal.read()
            later = [entry for entry in entries if entry.version > state.version]
            self.state = self._after(state, later, number=head.number)
        else:
            self.state = self._read(self._reload())
        return True

    def _read(self, published: Model) -> LiveState[Derived]:
        """The published model with every edit on disk."""
        if self._journal is None:
            return LiveState(published, self._derive(published), 0, 0, frozenset())
        head, entries = self._journal.read()
        folded = fold(published.labels.ids, entries)
        model = apply(published, folded)
        return LiveState(model, self._derive(model), head.version, head.number, frozenset(folded.retired))

    def _after(self, state: LiveState[Derived], entries: Sequence[Entry], *, number: int) -> LiveState[Derived]:
        folded = fold(state.model.labels.ids, entries)
        model = apply(state.model, folded)
        retired = (state.retired - folded.added.keys()) | folded.retired
        return LiveState(model, self._derive(model), entries[-1].version, number, retired)


def find_similar(model: Model, texts: Sequence[str], k: int) -> list[list[SimilarLabel]]:
    """The labels nearest to each text, as if it were a label's."""
    vectors_ND = model.meanings(model.encode_labels(texts))
    return similar_labels(texts, vectors_ND, model.labels, model.meanings(), k)


def _duplicates(model: Model, changed: Sequence[tuple[str, str]]) -> list[Duplicate]:
    """Which of the labels that were just added or renamed look like others."""
    if not changed:
        return []
    ids, texts = [label_id for label_id, _ in changed], [text for _, text in changed]
    rows = {label_id: row for row, label_id in enumerate(model.labels.ids)}
    meanings_LD = model.meanings()
    by_vector = len(changed) * len(rows) <= _MOST_PAIRS
    if not by_vector:
        log.warning("%s new labels: compared with the others by text only", f"{len(changed):,}")
    vectors_ND = meanings_LD[[rows[label_id] for label_id in ids]]
    # One more than is shown, because a label is the nearest to itself.
    k = _SHOWN_DUPLICATES + 1
    found = similar_labels(texts, vectors_ND, model.labels, meanings_LD, k, by_vector=by_vector)
    return duplicates(ids, texts, found)
