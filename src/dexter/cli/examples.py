"""The verbs of `dexter examples`: texts that people have labelled, which vote for their labels without training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from dexter.cli.labels import Run, open_run, user
from dexter.cli.options import AS_GUESSED, Json, ReadOptions, echo_json, reads_data
from dexter.errors import UsageError

log = logging.getLogger("dexter")
examples_app = typer.Typer(
    help="Texts that you have labelled, which vote without training.", no_args_is_help=True, rich_markup_mode=None
)
_SHOWN_CHARACTERS = 80


@examples_app.command("add")
@reads_data
def add(
    run: Run,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Texts with labels, as `train` reads them.")
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="One text, instead of a file.")] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", help="A label of that text, by id or text; repeat for several.")
    ] = None,
    add_labels: Annotated[bool, typer.Option("--add-labels", help="Add labels that the run lacks.")] = False,
    reading: ReadOptions = AS_GUESSED,
    as_json: Json = False,
) -> None:
    """Add texts with their labels. Texts like them get these labels from now on.

    A text that was added before gets the new labels instead. `dexter labels undo` undoes an edit.

    Example: dexter examples add runs/pydocs corrections.jsonl

    Example: dexter examples add runs/pydocs --text "read a zipped table" --label read_csv --add-labels
    """
    if (file is None) == (text is None) or (text is None) != (not label):
        raise UsageError("give a FILE of texts with labels, or --text with its --label")
    if file is None:
        examples = [(text or "", label or [])]
    else:
        data = reading.load(str(file))
        ids, split = data.label_ids, data.train
        rows = (split.relevance[row].indices.tolist() for row in range(len(split)))
        examples = [(text, [ids[place] for place in row]) for text, row in zip(split.texts, rows, strict=True)]
    predictor = open_run(run)
    result = predictor.add_examples(examples, add_labels=add_labels, by=user())
    if as_json:
        echo_json({"version": result.version, "examples": len(predictor.examples)})
    else:
        done = f"{len(examples):,} added; {len(predictor.examples):,} in all, version {result.version}"
        typer.echo(f"{run}: {done}")


@examples_app.command("list")
def list_examples(
    run: Run,
    limit: Annotated[int | None, typer.Option(help="Largest number of examples; all by default.")] = None,
    as_json: Json = False,
) -> None:
    """List the examples, newest first: id, labels, text.

    Example: dexter examples list runs/pydocs --limit 10
    """
    examples = open_run(run).examples[::-1][:limit]
    if as_json:
        echo_json([{"id": each.id, "text": each.text, "labels": each.labels} for each in examples])
        return
    for each in examples:
        shown = " ".join((each.text or "")[: 2 * _SHOWN_CHARACTERS].split())[:_SHOWN_CHARACTERS]
        typer.echo(f"{each.id}  {', '.join(each.labels)}  {shown}")


@examples_app.command("remove")
def remove(
    run: Run,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of the examples to remove.")],
    as_json: Json = False,
) -> None:
    """Remove examples, which do not vote any more.

    Example: dexter examples remove runs/pydocs 0753f29aeb323dfb
    """
    predictor = open_run(run)
    result = predictor.remove_examples(ids, by=user())
    if as_json:
        echo_json({"version": result.version, "examples": len(predictor.examples)})
    else:
        done = f"{len(ids):,} removed; {len(predictor.examples):,} left, version {result.version}"
        typer.echo(f"{run}: {done}")


@examples_app.command("export")
@reads_data
def export(
    run: Run,
    to: Annotated[Path, typer.Option("--to", help="The folder to make; it must not exist.")],
    data: Annotated[
        Path | None, typer.Option("--with", help="A data set whose training texts come first, to train on both.")
    ] = None,
    reading: ReadOptions = AS_GUESSED,
) -> None:
    """Write the examples as a data set to train on.

    Alone, or joined with the training texts of another data set.

    Example: dexter examples export runs/pydocs --to corrected --with data/pydocs
    """
    from dexter.data.formats import save_dataset

    made = open_run(run).example_dataset(None if data is None else reading.load(str(data)))
    save_dataset(made, to)
    typer.echo(f"{to}: {len(made.train):,} training texts, {made.num_labels:,} labels")
