"""What a new release of a vocabulary changes in the labels of a model, as one `LabelChange`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dexter.data.label_names import DEFAULT_PARTS, LabelNames
from dexter.errors import UsageError
from dexter.model.edits import LabelChange
from dexter.model.labels import Labels

if TYPE_CHECKING:
    from dexter.data.formats.vocabulary import LabelVocabulary


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
