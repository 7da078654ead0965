"""A trial, one run of one method on one sample with one seed, and its record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dexter.files import write_json

RECORDS = Path(__file__).parent / "records"
ENCODERS: dict[str, dict[str, Any]] = {
    "static": {},
    "MiniLM": {"encoder.kind": "transformer", "encoder.max_length_query": 64},
}
"""What an encoder changes in every trial that uses it."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is run: everything that the figures depend on, except the version of the code."""

    sample: str
    recipe: str
    """A recipe, or the name of another measure of `bench.claims.measures`."""
    measure: str = "recipe"
    encoder: str = "static"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the recipe by dotted name, or arguments of the measure."""
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the trial as plain values."""
        return {**vars(self), "settings": dict(sorted(self.settings.items()))}

    @property
    def identity(self) -> str:
        """A short hash of all that defines the trial."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:10]

    def path(self, folder: Path = RECORDS) -> Path:
        """Return where its record is."""
        return folder / self.sample / f"{self.recipe}-{self.identity}.json"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The outcome of a trial."""

    trial: Trial
    metrics: Mapping[str, Mapping[str, float]]
    """Figures by head (`encoder`, `classifier`, `unified`) or, for what has no heads, `all`."""
    cpu_seconds: float
    """Processor time of training, without loading the data and scoring."""
    peak_megabytes: float
    """Largest resident size of the process that ran it, data and libraries included."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Sizes that the trial had: queries, labels, steps, labels in a pool."""


def write_record(record: Record, folder: Path = RECORDS) -> None:
    """Write a record; it is whole or absent."""
    metrics = {head: {name: round(value, 4) for name, value in found.items()} for head, found in record.metrics.items()}
    write_json(record.trial.path(folder), {**vars(record), "trial": record.trial.to_json(), "metrics": metrics})


def read_record(trial: Trial, folder: Path = RECORDS) -> Record | None:
    """Return the record of a trial, or None where it has not been run."""
    path = trial.path(folder)
    if not path.exists():
        return None
    return Record(**{**json.loads(path.read_text(encoding="utf-8")), "trial": trial})


def read_all(folder: Path = RECORDS) -> list[Record]:
    """Return every record of a folder, by the paths of their files."""
    read = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/*.json"))]
    return [Record(**{**values, "trial": Trial(**values["trial"])}) for values in read]
