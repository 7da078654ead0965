"""Options that several verbs share: their types, how their values are parsed, and how results are printed as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dexter.errors import UsageError
from dexter.types import PROPENSITY, HeadName

if TYPE_CHECKING:
    from dexter.data import Dataset

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
OnError = Annotated[Literal["fail", "skip"], typer.Option("--on-error", help="What to do with bad lines.")]
TextColumn = Annotated[str | None, typer.Option(help="Tables: the text column, or several joined by +.")]
LabelColumn = Annotated[str | None, typer.Option(help="Tables: the column of labels.")]
Separator = Annotated[str | None, typer.Option(help="Tables: what stands between the labels of a cell.")]
TextFields = Annotated[
    str | None,
    typer.Option(help="xmc-json: title or title,content; by the folder's name if left out (Titles: title)."),
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="Override a setting: --set train.epochs=5.")]
Propensity = Annotated[
    str | None, typer.Option(help="Propensity constants: default, amazon or wikipedia; the data set's own if left out.")
]
Deciles = Annotated[bool, typer.Option("--deciles", help="Also a table by decile of label frequency.")]
Head = Annotated[
    HeadName | None,
    typer.Option(help="What ranks the labels: encoder, and with a classifier also classifier or unified."),
]
UseIndex = Annotated[
    Literal["exact"] | None,
    typer.Option("--index", help="exact: look at every label; the run's own (see dexter index --help) if left out."),
]
NeighboursOption = Annotated[
    bool | None,
    typer.Option("--neighbours/--no-neighbours", help="Let the nearest training queries vote; else as tuned."),
]
Dial = Annotated[
    float | None, typer.Option(help="Weight of label frequency, from 0 (rare labels up) to 1; as tuned if left out.")
]
RuntimeOption = Annotated[
    Literal["torch", "onnx"],
    typer.Option("--runtime", help="What encodes queries: torch, or onnx after `dexter export`."),
]


def echo_json(value: Any) -> None:
    """Print plain values as JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def load(
    path: str,
    on_error: Literal["fail", "skip"] = "fail",
    text_column: str | None = None,
    label_column: str | None = None,
    label_separator: str | None = None,
    text_fields: str | None = None,
) -> Dataset:
    """Read a data set from a path or a built-in name, with the options of a verb."""
    from dexter.data import load_dataset

    return load_dataset(
        path,
        on_error=on_error,
        text_column=text_column,
        label_column=label_column,
        label_separator=label_separator,
        text_fields=text_fields,
    )


def parse_propensity(name: str | None) -> tuple[float, float] | None:
    """The constants (a, b) of a name of --propensity, or None for those of the data set."""
    if name is None:
        return None
    if name not in PROPENSITY:
        raise UsageError(f"--propensity {name!r}: expected one of {', '.join(PROPENSITY)}")
    return PROPENSITY[name]
