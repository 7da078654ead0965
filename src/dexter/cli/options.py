"""Options that several verbs share: their types, how their values are parsed, and how results are printed as JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from dexter.data.label_names import DEFAULT_PARTS

if TYPE_CHECKING:
    from dexter.data import Dataset
    from dexter.predict.filters import LabelFilter

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
TextColumn = Annotated[str | None, typer.Option(help="Tables: the text column, or several joined by +.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="Override a setting: --set train.epochs=5.")]
Propensity = Annotated[
    Literal["default", "amazon", "wikipedia"] | None,
    typer.Option(help="Propensity constants of a family of data sets; the data set's own if left out."),
]
Deciles = Annotated[bool, typer.Option("--deciles", help="Also a table by decile of label frequency.")]
Head = Annotated[
    Literal["encoder", "classifier", "unified"] | None,
    typer.Option(help="What ranks the labels; classifier and unified need a run with a classifier."),
]
UseIndex = Annotated[
    Literal["exact"] | None,
    typer.Option("--index", help="exact: score every label; the run's own index (dexter index) if left out."),
]
NeighboursOption = Annotated[
    bool | None,
    typer.Option("--neighbours/--no-neighbours", help="Let the nearest training queries vote; else as tuned."),
]
Dial = Annotated[
    float | None, typer.Option(help="Weight of label frequency, from 0 (rare labels up) to 1; as tuned if left out.")
]
Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", help="Id of a label to leave out; repeat, or @FILE of ids.")
]
Only = Annotated[list[str] | None, typer.Option("--only", help="Id of a label that may be returned; repeat, or @FILE.")]
Band = Annotated[
    list[str] | None,
    typer.Option("--band", help="Only labels of this frequency: frequent, torso, tail or unseen; repeat for several."),
]
RuntimeOption = Annotated[
    Literal["torch", "onnx"], typer.Option("--runtime", help="What encodes queries; onnx needs `dexter export` first.")
]


def parse_filter(exclude: list[str] | None, only: list[str] | None, bands: list[str] | None) -> LabelFilter:
    """Return the labels that may be returned; a value @FILE stands for the ids in a file."""
    from dexter.predict.filters import LabelFilter

    return LabelFilter.of(_read_ids(exclude), None if not only else _read_ids(only), bands)


def _read_ids(values: list[str] | None) -> list[str]:
    """Return the ids; one that begins with @ is a file of ids, one per line, where there is such a file."""
    ids: list[str] = []
    for value in values or []:
        path = Path(value[1:])
        if value.startswith("@") and path.is_file():
            ids += [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        else:
            ids.append(value)
    return ids


def echo_json(value: Any) -> None:
    """Print plain values as JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How a verb reads its data set. `reads_data` makes an option of the command line of each field."""

    on_error: Annotated[Literal["fail", "skip"], typer.Option("--on-error", help="What to do with bad lines.")] = "fail"
    text_column: TextColumn = None
    label_column: Annotated[str | None, typer.Option(help="Tables: the column of labels.")] = None
    label_separator: Annotated[str | None, typer.Option(help="Tables: what stands between the labels of a cell.")] = (
        None
    )
    text_fields: Annotated[
        str | None,
        typer.Option(help="xmc-json: title or title,content; by the folder's name if left out (Titles: title)."),
    ] = None

    vocabulary: Annotated[
        Path | None,
        typer.Option(help="A file whose concepts are the labels: SKOS (.ttl, .rdf, .nt), or a table of Annif."),
    ] = None
    language: Annotated[str | None, typer.Option(help="The language of the vocabulary's labels, such as en.")] = None
    label_text: Annotated[
        str,
        typer.Option(help="What its labels' texts are made of: label,alternatives,broader,definition or some of them."),
    ] = ",".join(DEFAULT_PARTS)

    def load(self, path: str) -> Dataset:
        """Read a data set from a path or a built-in name."""
        from dexter.data.formats import load_dataset

        return load_dataset(
            path,
            on_error=self.on_error,
            text_column=self.text_column,
            label_column=self.label_column,
            label_separator=self.label_separator,
            text_fields=None if self.text_fields is None else self.text_fields.split(","),
            vocabulary=self.vocabulary,
            language=self.language,
            label_text=self.label_text.split(","),
        )


AS_GUESSED = ReadOptions()
"""The options where none is given."""


def reads_data(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options of `ReadOptions` in place of its parameter `reading`."""
    hints = get_type_hints(ReadOptions, include_extras=True)
    options = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
        for one in fields(ReadOptions)
    ]
    signature = inspect.signature(verb, eval_str=True)
    parameters: list[inspect.Parameter] = []
    for one in signature.parameters.values():
        parameters += options if one.name == "reading" else [one.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

    @wraps(verb)
    def with_options(**values: Any) -> None:
        reading = ReadOptions(**{one.name: values.pop(one.name) for one in options})
        verb(**values, reading=reading)

    del with_options.__wrapped__  # Typer would read the signature of the verb itself.
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {one.name: one.annotation for one in parameters}
    return with_options


def constants_of(propensity: str | None) -> tuple[float, float] | None:
    """Return the constants (a, b) of a value of --propensity; None stands for those of the data set."""
    from dexter.types import PROPENSITY

    return None if propensity is None else PROPENSITY[propensity]
