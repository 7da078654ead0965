"""The verbs of `dexter data`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dexter.cli.options import AS_GUESSED, Json, ReadOptions, echo_json, reads_data
from dexter.errors import UsageError

if TYPE_CHECKING:
    from dexter.data import Dataset

data_app = typer.Typer(help="Make, check, convert and split data sets.", no_args_is_help=True, rich_markup_mode=None)


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
@reads_data
def data_check(
    path: Annotated[str, typer.Argument(help="A data set: folder, file, or the name of a built-in one.")],
    plot: Annotated[Path | None, typer.Option(help="Also write the Zipf plot as a PNG.")] = None,
    reading: ReadOptions = AS_GUESSED,
    as_json: Json = False,
) -> None:
    """Validate and describe a data set.

    Counts, label frequencies, duplicates, leaks, each problem with file and line.

    Example: dexter data check data/pydocs
    """
    from dexter.data.check import check

    dataset = reading.load(path)
    report = check(dataset, folder=Path(path) if Path(path).exists() else None)
    if plot is not None:
        from dexter.evaluation.plots import save_zipf_plot

        save_zipf_plot(report.label_counts, plot, title=report.name)
    echo_json(report.to_json()) if as_json else typer.echo(report.render())


@data_app.command("convert")
@reads_data
def data_convert(
    source: Annotated[Path, typer.Argument(help="The data set to read.")],
    target: Annotated[Path, typer.Argument(help="The folder to make.")],
    to: Annotated[str, typer.Option(help="The format to write; a wrong name lists them.")] = "jsonl",
    reading: ReadOptions = AS_GUESSED,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
) -> None:
    """Read one format and write another.

    Example: dexter data convert articles.csv data/articles --to jsonl
    """
    from dexter.data.formats import save_dataset

    dataset = reading.load(str(source))
    save_dataset(dataset, target, format=to, replace=force)
    typer.echo(f"{target}: {_size(dataset)}")


@data_app.command("split")
@reads_data
def data_split(
    source: Annotated[Path, typer.Argument(help="A data set without a test split.")],
    target: Annotated[Path, typer.Argument(help="The folder to make, with a training and a test split.")],
    fraction: Annotated[float, typer.Option(help="The share of the queries to test on.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Another seed holds out other queries.")] = 0,
    by: Annotated[
        str | None, typer.Option(help="A column whose values say train or test, or whose equal values stay together.")
    ] = None,
    reading: ReadOptions = AS_GUESSED,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder.")] = False,
) -> None:
    """Hold out test queries, at random or by a column.

    `dexter evaluate` scores on them.

    Example: dexter data split articles.csv data/articles --fraction 0.1
    """
    from dexter.data.dataset import hold_out_test
    from dexter.data.formats import read_column, save_dataset

    if by is not None and reading.on_error == "skip":
        raise UsageError("--by needs every row: leave out --on-error skip, or correct the bad lines")
    groups = None if by is None else read_column(source, by)
    dataset = hold_out_test(reading.load(str(source)), fraction=fraction, seed=seed, groups=groups)
    save_dataset(dataset, target, replace=force)
    typer.echo(f"{target}: {_size(dataset)}")


def _size(dataset: Dataset) -> str:
    splits = ", ".join(f"{len(split):,} {name} queries" for name, split in dataset.splits.items())
    return f"{splits}, {dataset.num_labels:,} labels"
