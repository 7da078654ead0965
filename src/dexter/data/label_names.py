"""The labels of a vocabulary in each of its languages, as a data set and a run keep them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from dexter.errors import ModelError, UsageError
from dexter.files import read_regular, write_text

NAMES_FILE = "label_names.json"
"""In the `dexter` folder of a model as it was trained; in the model folder itself after labels were synchronised."""

PARTS = ("label", "alternatives", "broader", "definition")
"""What the text of a vocabulary's label can be made of."""
_MAX_BYTES = 256 * 1024**2
DEFAULT_PARTS = ("label",)
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class LabelNames:
    """What label texts were made of, and how the labels are called in other languages."""

    language: str
    """The language of the label texts."""
    parts: Sequence[str] = DEFAULT_PARTS
    """What the label texts were made of, in the order of `PARTS`."""
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By language, the preferred label of each label id that has one."""

    broader: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By id, the ids of the concepts directly above it; a run does not keep them."""

    def in_language(self, language: str) -> Mapping[str, str]:
        """Return the names by label id in a language; one that no label has is an error."""
        found = best_language(self.names, language)
        if found is None:
            raise UsageError(f"no label has a name in {language!r}: choose one of {', '.join(sorted(self.names))}")
        return found

    def merge(self, newer: LabelNames) -> LabelNames:
        """Return the names of both; where both have one, the newer."""
        languages = {**self.names, **newer.names}
        names = {one: {**self.names.get(one, {}), **newer.names.get(one, {})} for one in languages}
        return replace(newer, names=names)

    def save(self, path: Path) -> None:
        """Write a file, all but the hierarchy, with its own SHA-256."""
        content = json.dumps({"language": self.language, "parts": self.parts, "names": self.names}, ensure_ascii=False)
        write_text(path, f"{hashlib.sha256(content.encode()).hexdigest()}\n{content}\n")

    @classmethod
    def load(cls, path: Path, *, is_listed: bool = False) -> LabelNames:
        """Read what `save` wrote; raise `ModelError` if a byte was altered.

        A file that a manifest lists has been opened already, and may be a link to that.
        """
        try:
            raw = path.read_bytes() if is_listed else read_regular(path, limit=_MAX_BYTES)
            digest, content = raw.decode().removesuffix("\n").split("\n")
            if hashlib.sha256(content.encode()).hexdigest() != digest:
                raise ValueError("the checksum differs")
            value = json.loads(content)
            names = {language: dict(by_id) for language, by_id in value["names"].items()}
            if not all(isinstance(name, str) for by_id in names.values() for name in by_id.values()):
                raise ValueError("a name is no string")
            return cls(language=str(value["language"]), parts=check_parts(value["parts"]), names=names)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{path}: not the names of labels ({error}): restore the folder from a copy") from None


def best_language(texts: Mapping[str, _T], language: str) -> _T | None:
    """Return the text in a language: that very tag, else a regional variant or the main language, else no language."""
    if language in texts:
        return texts[language]
    main = language.partition("-")[0]
    for tag in sorted(texts):
        if tag and tag.partition("-")[0] == main:
            return texts[tag]
    return texts.get("")


def check_parts(parts: Sequence[str]) -> tuple[str, ...]:
    """Return the parts of a label's text in the order of `PARTS`, or raise `UsageError`."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown or "label" not in parts:
        raise UsageError(f"a label's text is made of {', '.join(PARTS)}, label always: got {', '.join(parts)}")
    return tuple(part for part in PARTS if part in parts)
