"""The ranking that was chosen on validation and its probabilities, stored with the model.

Training writes `scoring.json`, one of the model's own files. `dexter tune` leaves these as they are: it writes
`tuned.json` beside them, which is read instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dexter.errors import ModelError
from dexter.files import read_object, write_json
from dexter.model.model import Model
from dexter.predict.calibration import Calibration
from dexter.predict.neighbours import DEFAULT_LEXICAL_VOTES, DEFAULT_VOTES, VoteSettings
from dexter.predict.rank import RankingChoice
from dexter.types import HeadName

SCORING_FILE, TUNED_FILE = "scoring.json", "tuned.json"


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What was chosen on validation; without arguments, that nothing was."""

    metric: str | None = None
    """What it was chosen for, such as P@1."""
    choice: RankingChoice | None = None
    """The chosen ranking; None: as trained."""
    calibration: Calibration | None = None
    """Probabilities of labels ranked this way; None where validation had too few correct labels to fit them."""
    validation: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics on the validation queries: `model` as trained, `tuned` as chosen here."""

    def describe(self) -> str:
        """Describe in one line what was chosen and what it gave."""
        if self.metric is None or self.choice is None:
            return "as trained"
        before, after = (self.validation[name][self.metric] for name in ("model", "tuned"))
        kinds = {"neighbours": self.choice.votes, "neighbours by words": self.choice.lexical_votes}
        votes = " and ".join(
            f"{settings.neighbours} {name} at temperature {settings.temperature:g} and weight {settings.weight:g}"
            for name, settings in kinds.items()
            if settings is not None
        )
        return (
            f"validation {self.metric} {before:.2f} as trained, {after:.2f} with head {self.choice.head}, "
            f"{votes or 'no neighbours'}, "
            f"{f'words for their labels at weight {self.choice.word_weight:g}, ' if self.choice.word_weight else ''}"
            f"dial {self.choice.dial:g}"
            f"{'' if self.choice.windows == 'first' else f', the {self.choice.windows} of the windows of long texts'}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values, from which `from_json` makes it again."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], path: Path) -> Scoring:
        """Make it from plain values; `path` is named where they are not those of a scoring."""
        try:
            choice, calibration = values["choice"], values["calibration"]
            if choice is not None:
                # A run of an older version has no lexical votes.
                kinds = {name: choice.get(name) for name in ("votes", "lexical_votes")}
                votes = {name: None if kind is None else VoteSettings(**kind) for name, kind in kinds.items()}
                choice = RankingChoice(**(choice | votes))
            if calibration is not None:
                calibration = Calibration.from_json(calibration)
            return cls(**(dict(values) | {"choice": choice, "calibration": calibration}))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"{path}: not the scoring of this version ({error}): restore or tune it again") from None


def choose_ranking(
    model: Model,
    scoring: Scoring,
    *,
    head: HeadName | None = None,
    neighbours: bool | None = None,
    dial: float | None = None,
) -> RankingChoice:
    """Return the ranking that was tuned, else that of the model as trained, with another head, dial or votes if given.

    By default training queries vote only if that was tuned and the model keeps them.
    """
    choice = scoring.choice or RankingChoice(head=model.default_head, dial=model.default_dial)
    if neighbours is False or (neighbours is None and model.training_queries is None):
        # Where tuning let none vote, that is what is asked for; examples vote as they do by default.
        examples = neighbours is None or not choice.uses_neighbours
        choice = replace(choice, votes=None, lexical_votes=None, word_weight=0.0, examples=examples)
    elif neighbours and not choice.uses_neighbours:
        by_words = model.training_queries is not None and model.training_queries.index is None
        if by_words:
            choice = replace(choice, lexical_votes=DEFAULT_LEXICAL_VOTES)
        else:
            choice = replace(choice, votes=DEFAULT_VOTES)
    return replace(choice, head=head or choice.head, dial=choice.dial if dial is None else float(dial))


def read_scoring(model_folder: Path, *, fingerprint: str) -> Scoring:
    """Read what was chosen for a published model, last by `dexter tune` or else in training.

    A choice that was made for a model with another fingerprint is refused.
    """
    path = model_folder / TUNED_FILE
    if not path.exists():
        path = model_folder / "dexter" / SCORING_FILE
        return Scoring.from_json(read_object(path), path) if path.exists() else Scoring()
    stored = read_object(path)
    values = stored.get("scoring")
    if not isinstance(values, dict) or stored.get("sha256") != _checksum(values):
        raise ModelError(f"{path}: damaged: restore it, or remove it and run `dexter tune` again")
    if stored.get("model") != fingerprint:
        raise ModelError(f"{path}: chosen for another model: remove it and run `dexter tune` again")
    return Scoring.from_json(values, path)


def write_tuned(model_folder: Path, scoring: Scoring, *, fingerprint: str) -> None:
    """Store a later choice beside a published model, whose own files and manifest stay as they are."""
    values = scoring.to_json()
    write_json(model_folder / TUNED_FILE, {"model": fingerprint, "sha256": _checksum(values), "scoring": values})


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
