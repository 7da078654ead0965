"""The formats by name, and finding out which one a path holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from dexter.data.formats.annif import ANNIF
from dexter.data.formats.dexml import DEXML
from dexter.data.formats.fasttext import FASTTEXT
from dexter.data.formats.format import Format
from dexter.data.formats.jsonl import JSONL
from dexter.data.formats.svmlight import SVMLIGHT
from dexter.data.formats.table import CSV, PARQUET, TSV
from dexter.data.formats.xmc_json import XMC_JSON
from dexter.errors import DataError, UsageError

FORMATS: Mapping[str, Format] = MappingProxyType(
    {one.name: one for one in (JSONL, CSV, TSV, PARQUET, XMC_JSON, DEXML, SVMLIGHT, FASTTEXT, ANNIF)}
)


def detect(path: str | Path) -> str:
    """The name of the format that a file or folder is in; none or several is an error that says what was looked for."""
    path = Path(path)
    if not path.exists():
        raise DataError("no such file or folder", path=path)
    found = [one.name for one in FORMATS.values() if one.detect(path)]
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(f"looks like {' and like '.join(found)}: say which with the format option", path=path)
    looked_for = "".join(f"\n  {one.name}: {one.description}" for one in FORMATS.values())
    raise DataError(f"no known format (each file may also be .gz). Looked for:{looked_for}", path=path)


def format_named(name: str) -> Format:
    """The format of a name, or a `UsageError` that lists the names."""
    if name not in FORMATS:
        raise UsageError(f"no format {name!r}: choose one of {', '.join(FORMATS)}")
    return FORMATS[name]
