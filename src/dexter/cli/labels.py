"""The verbs of `dexter labels`: change, list and search the labels of a run. Each is a method of `Predictor`."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dexter.cli.options import Json, echo_json
from dexter.errors import UsageError

if TYPE_CHECKING:
    from dexter.model.edits import ChangeResult
    from dexter.model.labels import LabelPage
    from dexter.predict.predictor import Predictor

log = logging.getLogger("dexter")
labels_app = typer.Typer(
    help="Add, remove, rename, list and search the labels of a run, without training.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Run = Annotated[Path, typer.Argument(help="The run folder, or the model folder in it.")]
Offset = Annotated[int, typer.Option(help="Number of labels to skip.")]


@labels_app.command("add")
def add(
    run: Run,
    label_id: Annotated[str | None, typer.Argument(metavar="ID", help="The new label's id.")] = None,
    text: Annotated[str | None, typer.Argument(help="The new label's text.")] = None,
    input_path: Annotated[
        Path | None, typer.Option("--input", help="A file of labels: JSONL or a table with id and text; .gz too.")
    ] = None,
    reuse_ids: Annotated[bool, typer.Option("--reuse-ids", help="Allow ids of labels that were removed.")] = False,
    as_json: Json = False,
) -> None:
    """Add one label, or those of a file, without training. A warning names similar labels.

    Example: dexter labels add runs/pydocs my.inv "my.inv: invert a matrix, quickly"

    Example: dexter labels add runs/pydocs --input new.jsonl
    """
    if (input_path is None) == (label_id is None) or (label_id is None) != (text is None):
        raise UsageError("give ID and TEXT of one label, or --input with a file of labels")
    from dexter.data.formats import read_label_file

    labels = read_label_file(input_path) if input_path is not None else [(label_id or "", text or "")]
    predictor = _open(run)
    _report(run, predictor, predictor.add_labels(labels, reuse_ids=reuse_ids), f"{len(labels):,} added", as_json)


@labels_app.command("remove")
def remove(
    run: Run,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of the labels to remove.")],
    as_json: Json = False,
) -> None:
    """Remove labels. Their ids are not used again, except by `add --reuse-ids`.

    Example: dexter labels remove runs/pydocs my.inv
    """
    predictor = _open(run)
    _report(run, predictor, predictor.remove_labels(ids), f"{len(ids):,} removed", as_json)


@labels_app.command("rename")
def rename(
    run: Run,
    label_id: Annotated[str, typer.Argument(metavar="ID", help="The label's id, which stays.")],
    text: Annotated[str, typer.Argument(help="Its new text.")],
    keep_vector: Annotated[
        bool, typer.Option("--keep-vector", help="Change the displayed text only; keep the vector.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Give a label a new text, which is encoded in place of the old one.

    Example: dexter labels rename runs/pydocs my.inv "my.inv: invert a regular matrix"
    """
    predictor = _open(run)
    result = predictor.rename_labels([(label_id, text)], keep_vectors=keep_vector)
    _report(run, predictor, result, "1 renamed", as_json)


@labels_app.command("list")
def list_labels(
    run: Run,
    limit: Annotated[int | None, typer.Option(help="Largest number of labels; all by default.")] = None,
    offset: Offset = 0,
    as_json: Json = False,
) -> None:
    """List the labels: id, number of training queries, text.

    Example: dexter labels list runs/pydocs --limit 10
    """
    _show(_open(run).search_labels("", limit=limit, offset=offset), as_json)


@labels_app.command("search")
def search(
    run: Run,
    query: Annotated[str, typer.Argument(help="A part of an id or text.")],
    limit: Annotated[int, typer.Option(help="Largest number of labels.")] = 20,
    offset: Offset = 0,
    as_json: Json = False,
) -> None:
    """Find labels by a part of their id or text, those that begin with it first.

    Example: dexter labels search runs/pydocs "linear algebra"
    """
    _show(_open(run).search_labels(query, limit=limit, offset=offset), as_json)


@labels_app.command("compact")
def compact(run: Run) -> None:
    """Give unused space of the file of label changes back; the labels and their version stay.

    Example: dexter labels compact runs/pydocs
    """
    predictor = _open(run)
    predictor.compact_labels()
    typer.echo(f"{run}: version {predictor.version}, compacted")


def _open(run: Path) -> Predictor:
    from dexter.predict.predictor import Predictor

    return Predictor.load(run, persistent=True)


def _report(run: Path, predictor: Predictor, result: ChangeResult, done: str, as_json: bool) -> None:
    for duplicate in result.duplicates:
        log.warning("warning: %s", duplicate)
    if as_json:
        duplicates = [asdict(duplicate) for duplicate in result.duplicates]
        shown = {"version": result.version, "labels": len(predictor.labels.ids), "duplicates": duplicates}
        echo_json(shown)
    else:
        typer.echo(f"{run}: {done}; now {len(predictor.labels.ids):,} labels, version {result.version}")


def _show(page: LabelPage, as_json: bool) -> None:
    from dexter.predict.files import label_lines

    if as_json:
        echo_json(asdict(page))
        return
    for line in label_lines(page.labels):
        typer.echo(line)
    log.info("%s of %s labels", f"{len(page.labels):,}", f"{page.total:,}")
