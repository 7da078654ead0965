"""How a model's scores become its predictions: dial, memory's blend and probabilities, as chosen on validation.

Stored with the model as `scoring.json`, so that whoever loads it predicts as it was tuned. What is chosen again after
training goes to `tuned.json` beside the model's files, which never change, and takes the place of the former.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dexter.encoders.folder import read_object
from dexter.errors import ModelError, UsageError
from dexter.files import write_json
from dexter.predict.calibration import Calibration
from dexter.predict.neighbours import VoteSettings

SCORING_FILE, TUNED_FILE = "scoring.json", "tuned.json"
DEFAULT_VOTES = VoteSettings(neighbours=20, temperature=0.06, weight=4.0)
"""What a memory does whose blend was never tuned."""


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What was chosen on validation; the defaults are those of a model as it was trained."""

    metric: str | None = None
    """What it was chosen for, such as P@1; None where nothing was tuned."""
    head: str | None = None
    """The head it was chosen with."""
    dial: float | None = None
    """Weight of the label prior; None: as trained."""
    votes: VoteSettings = DEFAULT_VOTES
    """What the memory does where it is used."""
    use_neighbours: bool = False
    """Whether the memory is used unless somebody says otherwise."""
    calibration: Calibration | None = None
    """Probabilities of labels that are ranked this way; None where there was too little to learn them from."""
    validation: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics on the validation queries: `model` as trained, `tuned` as chosen here."""

    def __post_init__(self) -> None:
        if self.dial is not None:
            checked_dial(self.dial)

    def describe(self) -> str:
        """What was chosen and what it gave, in one line."""
        if self.metric is None:
            return "as trained"
        before, after = (self.validation[name][self.metric] for name in ("model", "tuned"))
        votes = "no neighbours"
        if self.use_neighbours:
            votes = (
                f"{self.votes.neighbours} neighbours at temperature {self.votes.temperature:g} and weight "
                f"{self.votes.weight:g}"
            )
        head = "" if self.head is None else f"head {self.head}, "
        dial = "dial as trained" if self.dial is None else f"dial {self.dial:g}"
        return f"validation {self.metric} {before:.2f} as trained, {after:.2f} with {head}{votes}, {dial}"

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)

    def save(self, folder: Path) -> None:
        """Write `scoring.json`."""
        write_json(folder / SCORING_FILE, self.to_json())

    @classmethod
    def load(cls, folder: Path) -> Scoring:
        """Read `scoring.json`; the defaults where there is none."""
        path = folder / SCORING_FILE
        return cls._of(read_object(path), path) if path.exists() else cls()

    @classmethod
    def _of(cls, values: dict[str, Any], path: Path) -> Scoring:
        try:
            stored = values.get("calibration")
            calibration = None if stored is None else Calibration.of_json(stored)
            return cls(**(values | {"votes": VoteSettings(**values["votes"]), "calibration": calibration}))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"{path}: not the scoring of this version ({error}): restore or tune it again") from None


def write_tuned(model_folder: Path, scoring: Scoring, *, fingerprint: str) -> None:
    """Put what was chosen later beside a published model, whose own files and manifest stay as they are."""
    values = scoring.to_json()
    write_json(model_folder / TUNED_FILE, {"model": fingerprint, "sha256": _checksum(values), "scoring": values})


def read_tuned(model_folder: Path, *, fingerprint: str) -> Scoring | None:
    """What was chosen later for a published model; None where nothing was."""
    path = model_folder / TUNED_FILE
    if not path.exists():
        return None
    stored = read_object(path)
    values = stored.get("scoring")
    if not isinstance(values, dict) or stored.get("sha256") != _checksum(values):
        raise ModelError(f"{path}: damaged: restore it, or remove it and run `dexter tune` again")
    if stored.get("model") != fingerprint:
        raise ModelError(f"{path}: chosen for another model: remove it and run `dexter tune` again")
    return Scoring._of(values, path)


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def checked_dial(dial: float) -> float:
    """The dial's value, if it is one."""
    if not 0.0 <= dial <= 1.0:
        raise UsageError(f"the dial is {dial}: expected a number from 0 (no label prior) to 1 (all of it)")
    return float(dial)
