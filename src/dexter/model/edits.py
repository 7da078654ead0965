"""Change the labels of a model while it is in use: one `LabelChange`, checked once, written to disk, then swapped in.

A change becomes a list of `ChangedLabel`, which holds all that is needed to repeat it without the encoder. An edit in
this process, a restart and the edits of other processes all go through `apply_changes` with such a list. `plan_sync`
makes the change that a new release of a vocabulary asks for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from dexter.data.label_names import DEFAULT_PARTS, LabelNames
from dexter.errors import ModelError, UsageError
from dexter.index import Index
from dexter.model.examples import encode_examples, lacking_labels, with_examples
from dexter.model.label_file import ChangedLabel, Example, LabelsOnDisk, latest_examples
from dexter.model.labels import Labels
from dexter.model.model import Model
from dexter.model.similar import Duplicate, find_duplicates
from dexter.model.store import LabelStore

if TYPE_CHECKING:
    from dexter.data.formats.vocabulary import LabelVocabulary


class LabelRefused(UsageError):
    """Raised when a change does not fit the labels; `reason` and `position` say why without quoting an id."""

    def __init__(
        self,
        message: str,
        *,
        reason: Literal["unknown", "repeated", "taken", "retired", "last", "example label", "example"],
        position: int = 0,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.position = position
        """Which of the labels to remove, rename or add, or of the examples, it is about."""


@dataclass(frozen=True, kw_only=True)
class LabelChange:
    """Labels to remove, rename and add, in this order, and then examples: all of it happens, or nothing."""

    remove: Sequence[str] = ()
    """Ids of labels to remove."""
    rename: Sequence[tuple[str, str]] = ()
    """(id, new text) of labels to rename."""
    add: Sequence[tuple[str, str]] = ()
    """(id, text) of new labels."""
    examples: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By id of a new label, texts that have it, from which it is learned too, without training."""
    keep_vectors: bool = False
    """Whether renamed labels keep the vectors of their old texts, so that only the displayed text changes."""
    reuse_ids: bool = False
    """Whether new labels may have the ids of removed labels."""
    add_examples: Sequence[Example] = ()
    """Texts with labels, as `dexter.model.examples.make_example` makes them; one with a known id replaces that."""
    remove_examples: Sequence[str] = ()
    """Ids of examples to remove."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to change."""
        return not (self.remove or self.rename or self.add or self.add_examples or self.remove_examples)

    def check(self, labels: Labels, retired: Collection[str]) -> None:
        """Raise `LabelRefused` unless the change fits the present labels; `retired` are the ids of removed ones."""
        self._check_strings()
        ids, removed = set(labels.ids), set(self.remove)
        _check_known(self.remove, ids, retired)
        ids -= removed
        _check_known([label_id for label_id, _ in self.rename], ids, retired)
        for position, (label_id, _) in enumerate(self.add):
            if label_id in ids:
                message = f"label id {label_id!r} is in use already: choose another id, or rename that label"
                raise LabelRefused(message, reason="taken", position=position)
            if not self.reuse_ids and (label_id in retired or label_id in removed):
                message = (
                    f"label id {label_id!r} belonged to a label that was removed, and ids are not used again: choose "
                    "another id, or ask for it with reuse_ids=True (--reuse-ids)"
                )
                raise LabelRefused(message, reason="retired", position=position)
            ids.add(label_id)
        if not ids:
            raise LabelRefused("a model needs at least one label: not removing the last one", reason="last")

    def check_examples(self, labels: Labels, known: Collection[str]) -> None:
        """Raise `LabelRefused` unless the examples fit the labels as they are after the change, and the known ones."""
        missing = set(lacking_labels(self.add_examples, labels))
        for position, example in enumerate(self.add_examples):
            unknown = next((label for label in example.labels if label in missing), None)
            if unknown is not None:
                message = (
                    f"the run has no label {unknown!r}, which an example has: correct it, add it with `dexter labels "
                    "add`, or let missing labels be added (--add-labels)"
                )
                raise LabelRefused(message, reason="example label", position=position)
        for position, example_id in enumerate(self.remove_examples):
            if example_id not in known:
                message = f"no example has the id {example_id!r}: `dexter examples list` shows them"
                raise LabelRefused(message, reason="example", position=position)

    def _check_strings(self) -> None:
        """Raise `UsageError` unless ids and texts are strings that can be written to a file."""
        if isinstance(self.remove, str):
            raise UsageError("labels to remove are a list of ids: write remove_labels([id])")
        for pair in (*self.add, *self.rename, *((label_id, "") for label_id in self.remove)):
            if not _is_pair(pair):
                raise UsageError(f"a label is its id and its text, both strings: got {pair!r}")
            label_id, text = pair
            if not label_id or any("\ud800" <= character <= "\udfff" for character in label_id + text):
                raise UsageError(
                    f"label id {label_id!a}: an id must not be empty, nor id or text hold half a surrogate pair"
                )
        for label_id, text in (*self.add, *self.rename):
            if not text.strip():
                raise UsageError(f"label {label_id!r} has no text: a label is found by its text, give it one")
        for label_id in self.examples.keys() - {label_id for label_id, _ in self.add}:
            raise UsageError(f"examples of {label_id!r}, which is not added: give them with the label that they have")
        for label_id, texts in self.examples.items():
            if isinstance(texts, str) or not all(isinstance(text, str) and text.strip() for text in texts):
                raise UsageError(f"the examples of label {label_id!r} are a list of texts, none of them empty")


class ChangeResult(NamedTuple):
    """The outcome of a label change."""

    version: int
    """The version of the labels after it."""
    duplicates: Sequence[Duplicate]
    """Added or renamed labels that resemble others."""


class VersionConflict(UsageError):
    """Raised when the labels have changed since the version that a change was made for."""

    def __init__(self, *, expected: int, version: int) -> None:
        super().__init__(
            f"the labels are at version {version}, the edit is for {expected}: read the labels again, then repeat"
        )


@dataclass(frozen=True, eq=False)
class LiveState:
    """The labels at one version. Replaced as a whole, so that readers never see parts of two versions."""

    model: Model
    index: Index
    """Finds the nearest labels of the model."""
    version: int = 0
    """Number of changes since the model was published."""
    edit: bytes = b""
    """Names the edit on disk that led to this version."""
    retired: frozenset[str] = frozenset()
    """Ids of removed labels."""
    added_in: Mapping[str, int] = field(default_factory=dict)
    """The version of the labels that added each label that was not published, by its id."""
    examples: Mapping[str, Example] = field(default_factory=dict)
    """By their ids, with their whole texts."""


class LiveModel:
    """A model whose labels change: changes follow each other under a lock, readers take `state` and never wait.

    Args:
        model: the published model.
        make_index: builds the index of a model's labels; if it fails, nothing has changed.
        store: the label changes of a published model; those on disk are applied first.
        persistent: whether changes are written there, or stay in memory.
        reload: loads the published model again.
    """

    def __init__(
        self,
        model: Model,
        *,
        make_index: Callable[[Model], Index],
        store: LabelStore | None = None,
        persistent: bool = False,
        reload: Callable[[], Model] | None = None,
    ) -> None:
        if persistent and store is None:
            raise UsageError("labels of a model that only lives in memory cannot be kept on disk: load a run")
        self._make_index, self.store, self._persistent, self._reload = make_index, store, persistent, reload
        self._changing = threading.Lock()
        self._has_changes_in_memory = False
        self.state = self._build(model, LabelsOnDisk(0, b"", [], True) if store is None else store.read())

    def change(self, change: LabelChange, *, expected: int | None = None, by: str | None = None) -> ChangeResult:
        """Change the labels, on disk first if persistent; with `expected`, only if that is their version.

        `by` is who changes them, for the history.
        """
        store = self.store if self._persistent else None
        with self._changing:
            with nullcontext() if store is None else store.writing() as writer:
                if store is not None:
                    self._catch_up()
                state = self.state
                if expected is not None and expected != state.version:
                    raise VersionConflict(expected=expected, version=state.version)
                change.check(state.model.labels, state.retired)
                if change.is_empty:
                    return ChangeResult(state.version, [])
                version = state.version + 1
                changed = encode_change(state.model, change, version=version)
                removed = [Example(example_id, None, version=version) for example_id in change.remove_examples]
                added = encode_examples(state.model, change.add_examples, version=version)
                examples = latest_examples([*removed, *added])
                after = self._apply(state, version, changed, examples)
                change.check_examples(after.model.labels, state.examples)
                duplicates = find_duplicates(after.model, [*change.rename, *change.add])
                if writer is not None:
                    after = replace(after, edit=writer.write(version, changed, examples, by=by))
            self._has_changes_in_memory |= store is None
            self.state = after
        return ChangeResult(version, duplicates)

    def refresh(self) -> bool:
        """Apply what other processes changed on disk since; return whether there was anything."""
        with self._changing:
            return self._catch_up()

    def undo(self, edit: int | None = None, *, by: str | None = None) -> ChangeResult:
        """Undo an edit of the history, the last one that was not undone if left out; see `LabelWriter.undo`."""
        store = self.stored("undone")
        with self._changing:
            with store.writing() as writer:
                self._catch_up()
                writer.undo(edit, by=by)
                after = self._build(self._published(), writer.read())
                if not after.model.labels.ids:
                    raise LabelRefused("a model needs at least one label: not removing the last one", reason="last")
            self.state = after
        return ChangeResult(after.version, [])

    def stored(self, done: str) -> LabelStore:
        """Return the label changes on disk; raise `UsageError` where changes stay in memory."""
        if self.store is None or not self._persistent:
            raise UsageError(f"only changes of labels that are kept on disk can be {done}: load with persistent=True")
        return self.store

    def _catch_up(self) -> bool:
        state = self.state
        if self.store is None or self._reload is None or self.store.last_edit() == (state.version, state.edit):
            return False
        if self._has_changes_in_memory:
            raise UsageError(
                "this predictor has labels that are only in memory: they cannot be joined with those on disk"
            )
        found = self.store.read(since=state.version, edit=state.edit)
        if found.is_whole:  # Something was undone, or the file was removed or replaced by another copy.
            self.state = self._build(self._published(), found)
        else:
            after = self._apply(state, found.version, found.changed, found.examples)
            self.state = replace(after, edit=found.edit)
        return True

    def _published(self) -> Model:
        assert self._reload is not None, "a model on disk can be loaded again"
        return self._reload()

    def _build(self, published: Model, found: LabelsOnDisk) -> LiveState:
        """Return the published model with the label changes on disk."""
        model = apply_changes(published, found.changed, since=0)
        retired = frozenset(label.id for label in found.changed if label.text is None)
        added_in = {label.id: label.added_in for label in found.changed if label.added_in is not None}
        examples = {example.id: example for example in found.examples if example.text is not None}
        index = self._make_index(model)
        if examples:
            model = with_examples(model, list(examples.values()), added_in)
        return LiveState(model, index, found.version, found.edit, retired, added_in, examples)

    def _apply(
        self, state: LiveState, version: int, changed: Sequence[ChangedLabel], changed_examples: Sequence[Example]
    ) -> LiveState:
        model, index = state.model, state.index
        retired, added_in, examples = set(state.retired), dict(state.added_in), dict(state.examples)
        if changed:
            model = apply_changes(model, changed, since=state.version)
            index = self._make_index(model)
        for label in changed:
            (retired.add if label.text is None else retired.discard)(label.id)
            if label.added_in is not None:
                added_in[label.id] = label.added_in
        for example in changed_examples:
            examples.pop(example.id, None)
            if example.text is not None:
                examples[example.id] = example
        if changed_examples or (changed and examples):
            model = with_examples(model, list(examples.values()), added_in)
        return LiveState(model, index, version, b"", frozenset(retired), added_in, examples)


def encode_change(model: Model, change: LabelChange, *, version: int = 1) -> list[ChangedLabel]:
    """Encode the new texts of a change; `version` is the version of the labels that it leads to."""
    encoded = [*(() if change.keep_vectors else change.rename), *change.add]
    examples = [change.examples.get(label_id, ()) for label_id, _ in encoded]
    vectors = iter(model.encode_new_labels([text for _, text in encoded], examples))
    priors = model.priors_for_new_labels()
    added = {label_id for label_id, _ in change.add}
    return [
        *(ChangedLabel(label_id, None) for label_id in change.remove if label_id not in added),
        *(
            ChangedLabel(label_id, text, None if change.keep_vectors else next(vectors))
            for label_id, text in change.rename
        ),
        *(ChangedLabel(label_id, text, next(vectors), priors, version) for label_id, text in change.add),
    ]


def apply_changes(model: Model, changed: Sequence[ChangedLabel], *, since: int = 0) -> Model:
    """Return the model with the changed labels; the given model stays as it is.

    Args:
        model: with the labels of version `since`.
        changed: the labels that have changed after that version. Added ones become the last labels, in this order.
        since: version of the model's labels; 0 as published.
    """
    if not changed:
        return model
    row_by_id = {label_id: row for row, label_id in enumerate(model.labels.ids)}
    new = [label for label in changed if label.added_in is not None and label.added_in > since]
    new_ids = {label.id for label in new}
    gone = [row_by_id.get(label.id) for label in changed if label.text is None or label.id in new_ids]
    kept = np.setdiff1d(np.arange(len(row_by_id)), [row for row in gone if row is not None])
    if len(kept) < len(row_by_id):
        model = model.select_labels(kept)
    renamed = [label for label in changed if label.text is not None and label.id not in new_ids]
    unknown = next((label.id for label in renamed if label.id not in row_by_id), None)
    if unknown is not None:
        raise ModelError(f"no label has the id {unknown!r}, which was renamed: restore the folder from a copy")
    if renamed:
        rows = np.searchsorted(kept, [row_by_id[label.id] for label in renamed])
        model = model.rename_labels(
            {int(row): label.text or "" for row, label in zip(rows, renamed, strict=True)},
            {
                int(row): label.representation_D
                for row, label in zip(rows, renamed, strict=True)
                if label.representation_D is not None
            },
        )
    if new:
        vectors = [label.representation_D for label in new if label.representation_D is not None]
        model = model.append_labels(
            [label.id for label in new],
            [label.text or "" for label in new],
            representations_ND=np.stack(vectors),
            priors_NP=np.array([label.priors for label in new], dtype=np.float32),
        )
    return model


@dataclass(frozen=True)
class VocabularySync:
    """The change that makes a model's labels those of a vocabulary, and what it leaves alone."""

    change: LabelChange
    num_same: int
    """Labels whose text is that of the vocabulary already."""
    missing: Sequence[str]
    """Ids of labels that the vocabulary does not have and that are kept."""
    names: LabelNames
    """What the labels are called in every language."""

    def describe(self) -> str:
        """Return the counts in a few words."""
        change = self.change
        counts = {"added": change.add, "renamed": change.rename, "removed": change.remove}
        done = ", ".join(f"{len(labels):,} {name}" for name, labels in counts.items())
        kept = f"; {len(self.missing):,} that it does not have are kept" if self.missing else ""
        return f"{done}, {self.num_same:,} as before{kept}"


def plan_sync(
    labels: Labels,
    vocabulary: LabelVocabulary,
    *,
    names: LabelNames | None = None,
    language: str | None = None,
    keep_missing: bool = False,
) -> VocabularySync:
    """Compare labels with a vocabulary.

    Current concepts that the model lacks are added, and labels with another text renamed. Deprecated concepts are
    removed, and so are labels that the vocabulary does not have any more, unless `keep_missing`.

    Args:
        labels: those of the model.
        vocabulary: the new release.
        names: how the label texts of the model were made; their language and parts are used again.
        language: of the label texts, if `names` does not say it.
        keep_missing: keep labels that are not in the vocabulary, for models with labels from elsewhere.
    """
    if language is None and names is not None:
        language = names.language
    language, parts = vocabulary.choose_language(language), DEFAULT_PARTS if names is None else names.parts
    texts = {one.id: text for one in vocabulary.current() if (text := vocabulary.text(one.id, language, parts))}
    present = dict(zip(labels.ids, labels.texts, strict=True))
    if not vocabulary.concepts.keys() & present.keys():
        raise UsageError(
            f"{vocabulary.path}: no label of the run is in it (the run has {labels.ids[0]!r}, it has "
            f"{next(iter(vocabulary.concepts))!r}): give the vocabulary that the run was trained with"
        )
    missing = [one for one in present if one not in vocabulary.concepts]
    deprecated = [one for one in present if one in vocabulary.concepts and vocabulary.concepts[one].is_deprecated]
    rename = [(one, texts[one]) for one, text in present.items() if one in texts and texts[one] != text]
    change = LabelChange(
        remove=deprecated + ([] if keep_missing else missing),
        rename=rename,
        add=[(one, text) for one, text in texts.items() if one not in present],
        reuse_ids=True,
    )
    num_same = len(present) - len(missing) - len(deprecated) - len(rename)
    newer = LabelNames(language=language, parts=parts, names=vocabulary.names(list(texts)))
    merged = newer if names is None else names.merge(newer)
    return VocabularySync(change, num_same, missing if keep_missing else (), merged)


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _check_known(ids: Sequence[str], known: Collection[str], retired: Collection[str]) -> None:
    """Raise `LabelRefused` unless the ids are known and distinct."""
    seen: set[str] = set()
    for position, label_id in enumerate(ids):
        if label_id not in known:
            message = f"no label has the id {label_id!r}" + (": it was removed before" if label_id in retired else "")
            raise LabelRefused(message, reason="unknown", position=position)
        if label_id in seen:
            raise LabelRefused(
                f"label id {label_id!r} is given twice: give it once", reason="repeated", position=position
            )
        seen.add(label_id)
