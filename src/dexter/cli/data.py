"""The verbs of `dexter data`, and how every verb reads a data set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dexter.cli.options import Json, echo_json
from dexter.errors import UsageError

if TYPE_CHECKING:
    from dexter.data import Dataset

data_app = typer.Typer(help="Make, check and convert data sets.", no_args_is_help=True, rich_markup_mode=None)

OnError = Annotated[str, typer.Option("--on-error", help="What to do with bad lines: fail or skip.")]
TextColumn = Annotated[str | None, typer.Option(help="Tables: the text column, or several joined by +.")]
LabelColumn = Annotated[str | None, typer.Option(help="Tables: the column of labels.")]
Separator = Annotated[str | None, typer.Option(help="Tables: what stands between the labels of a cell.")]


@data_app.command("build")
def data_build(
    name: Annotated[str, typer.Argument(help="pydocs (installed Python packages) or debian (the apt index).")],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
) -> None:
    """Make a data set from what is installed on this machine.

    Example: dexter data build pydocs --out data/pydocs
    """
    from dexter.data.formats import save_dataset
    from dexter.data.sources import build

    dataset = build(name)
    save_dataset(dataset, out, replace=force)
    typer.echo(f"{out}: {_size(dataset)}")


@data_app.command("check")
def data_check(
    path: Annotated[str, typer.Argument(help="A data set: folder, file, or the name of a built-in one.")],
    plot: Annotated[Path | None, typer.Option(help="Also write the Zipf plot as a PNG.")] = None,
    on_error: OnError = "fail",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    label_separator: Separator = None,
    as_json: Json = False,
) -> None:
    """Validate and describe: counts, label frequencies, duplicates, leaks, each problem with file and line.

    Example: dexter data check data/pydocs
    """
    from dexter.data.check import check

    dataset = load(path, on_error, text_column, label_column, label_separator)
    report = check(dataset, folder=Path(path) if Path(path).exists() else None)
    if plot is not None:
        from dexter.evaluation.plots import save_zipf_plot

        save_zipf_plot(report.label_counts, plot, title=report.name)
    if as_json:
        echo_json(report.to_json())
    else:
        typer.echo(report.render())


@data_app.command("convert")
def data_convert(
    source: Annotated[Path, typer.Argument(help="The data set to read.")],
    target: Annotated[Path, typer.Argument(help="The folder to make.")],
    to: Annotated[str, typer.Option(help="The format to write; a wrong name lists them.")] = "jsonl",
    on_error: OnError = "fail",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    label_separator: Separator = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
) -> None:
    """Read one format and write another; nothing is half-written.

    Example: dexter data convert articles.csv data/articles --to jsonl
    """
    from dexter.data.formats import save_dataset

    dataset = load(str(source), on_error, text_column, label_column, label_separator)
    save_dataset(dataset, target, format=to, replace=force)
    typer.echo(f"{target}: {_size(dataset)}")


def load(
    path: str,
    on_error: str = "fail",
    text_column: str | None = None,
    label_column: str | None = None,
    label_separator: str | None = None,
) -> Dataset:
    """A data set, from a path or a built-in name, as the options of a verb say."""
    from dexter.data.formats import load_dataset

    policy: Literal["fail", "skip"]
    if on_error == "fail":
        policy = "fail"
    elif on_error == "skip":
        policy = "skip"
    else:
        raise UsageError(f"--on-error {on_error!r}: expected fail or skip")
    return load_dataset(
        path, on_error=policy, text_column=text_column, label_column=label_column, label_separator=label_separator
    )


def _size(dataset: Dataset) -> str:
    splits = ", ".join(f"{len(split):,} {name} queries" for name, split in dataset.splits.items())
    return f"{splits}, {dataset.num_labels:,} labels"
