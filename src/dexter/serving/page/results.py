"""What evaluations have left in a run folder: figures by frequency band, and texts whose labels were missed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dexter.evaluation.misses import Miss, read_misses
from dexter.types import BANDS

_METRICS = ("P@1", "P@5", "PSP@5", "R@10", "nDCG@5")
_MOST_BYTES = 4 * 2**20


@dataclass(frozen=True)
class BandTable:
    """The metrics of an evaluation: a row for all labels, and one for each band."""

    title: str
    metrics: Sequence[str]
    rows: Sequence[tuple[str, Mapping[str, float | None]]]


def read_tables(folder: Path) -> list[BandTable]:
    """The evaluations of a run, newest first; files that are not result records are passed over."""
    found = sorted((folder / "results").glob("*.json"), key=lambda path: -path.stat().st_mtime)
    return [table for path in found if (table := _table(path)) is not None]


def missed_texts(folder: Path, label_id: str) -> list[Miss]:
    """Test texts that have the label and did not get it, from all evaluations of the run."""
    files = sorted((folder / "results").glob("*.misses.jsonl"))
    return [miss for path in files for miss in read_misses(path) if miss.label == label_id]


def _table(path: Path) -> BandTable | None:
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        record: Any = json.loads(path.read_text(encoding="utf-8"))
        overall, by_band = dict(record["metrics"]), dict(record["by_frequency"])
        head = record.get("model", {}).get("head") or "?"
        metrics = [name for name in _METRICS if name in overall]
        rows = [("all", overall), *((name, dict(by_band[name])) for name in BANDS if name in by_band)]
        return BandTable(f"{record['data']['name']}, {record['data']['split']}, {head}", metrics, rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
