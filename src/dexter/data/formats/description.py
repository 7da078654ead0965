"""`dataset.json`: what the other files of a data set do not say, beside them in a folder of any format.

    {"propensity": [0.6, 2.6], "text_fields": ["title"]}

Both are optional. `propensity` holds the constants (a, b) of its propensity-scored metrics; `text_fields` the fields of
the published records that its texts were made of.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dexter.data.benchmarks import TITLE, TITLE_AND_CONTENT
from dexter.data.dataset import Dataset, check_propensity
from dexter.data.formats.lines import excerpt
from dexter.errors import DataError, UsageError
from dexter.files import write_json

NAME = "dataset.json"
_KEYS = ("propensity", "text_fields")
_MAX_BYTES = 100_000


@dataclass(frozen=True, kw_only=True)
class Description:
    """The content of a `dataset.json`; None for what it does not say."""

    propensity: tuple[float, float] | None = None
    text_fields: tuple[str, ...] | None = None


def read_description(folder: Path) -> Description:
    """Read the description of a folder, empty without one; a malformed one is an error."""
    path = folder / NAME
    if not path.is_file():
        return Description()
    try:
        with open(path, "rb") as handle:
            content = json.loads(handle.read(_MAX_BYTES))
    except (ValueError, RecursionError):
        raise DataError("not valid JSON: correct it or remove it", path=path) from None
    if not isinstance(content, dict) or not set(content) <= set(_KEYS):
        raise DataError(f"expected an object with {' and '.join(_KEYS)}, or one of them", path=path)
    propensity, fields = (content.get(key) for key in _KEYS)
    try:
        return Description(
            propensity=None if propensity is None else check_propensity(propensity),
            text_fields=None if fields is None else check_text_fields(fields),
        )
    except (DataError, UsageError) as error:
        raise DataError(f"{error}: correct it or remove it", path=path) from None


def write_description(folder: Path, dataset: Dataset) -> None:
    """Write the description of a data set."""
    fields = {} if dataset.text_fields is None else {"text_fields": list(dataset.text_fields)}
    write_json(folder / NAME, {"propensity": list(dataset.propensity), **fields})


def check_text_fields(fields: Sequence[str]) -> tuple[str, ...]:
    """Return the fields as one of the two known choices, or raise `UsageError`."""
    for known in (TITLE, TITLE_AND_CONTENT):
        if isinstance(fields, list | tuple) and tuple(fields) == known:
            return known
    raise UsageError(f'text_fields is {excerpt(fields)}: expected ("title",) or ("title", "content")')
