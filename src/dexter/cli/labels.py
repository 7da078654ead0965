"""The verbs of `dexter labels`: change, list and search the labels of a run. Each is a method of `Predictor`."""

from __future__ import annotations

import getpass
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dexter.cli.options import Json, echo_json
from dexter.errors import UsageError

if TYPE_CHECKING:
    from dexter.model.edits import ChangeResult, LabelChange
    from dexter.model.labels import LabelPage
    from dexter.model.store import LabelStore
    from dexter.predict.predictor import Predictor

log = logging.getLogger("dexter")
labels_app = typer.Typer(
    help="Change, list and search the labels of a run, without training.", no_args_is_help=True, rich_markup_mode=None
)

_SHOWN_LABELS = 5
"""Of those that would be added."""
_SHOWN_DUPLICATES = 20
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
    example: Annotated[
        list[str] | None, typer.Option("--example", help="A text that has the new label; repeat for several.")
    ] = None,
    reuse_ids: Annotated[bool, typer.Option("--reuse-ids", help="Allow ids of labels that were removed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be added, and add nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Add one label, or those of a file, without training. A warning names similar labels.

    Example: dexter labels add runs/pydocs my.inv "my.inv: invert a matrix, quickly"

    Example: dexter labels add runs/pydocs my.inverse "my.inverse: invert a matrix" --example "the inverse of a matrix"

    Example: dexter labels add runs/pydocs --input new.jsonl
    """
    if (input_path is None) == (label_id is None) or (label_id is None) != (text is None):
        raise UsageError("give ID and TEXT of one label, or --input with a file of labels")
    if example and label_id is None:
        raise UsageError("--example belongs to one label: give its ID and TEXT instead of --input")
    from dexter.data.formats import read_label_file

    labels = read_label_file(input_path) if input_path is not None else [(label_id or "", text or "")]
    predictor = open_run(run, persistent=not dry_run)
    examples = {label_id: example} if label_id is not None and example else {}
    result = predictor.add_labels(labels, examples=examples, reuse_ids=reuse_ids, by=user())
    if not dry_run:
        _report(run, predictor, result, f"{len(labels):,} added", as_json)
        return
    for known_id, known_text in labels[:_SHOWN_LABELS]:
        log.info("  %s  %s", known_id, known_text)
    if len(labels) > _SHOWN_LABELS:
        log.info("  ... and %s more", f"{len(labels) - _SHOWN_LABELS:,}")
    _report(run, predictor, result, f"dry run, nothing is written: {len(labels):,} added", as_json)


@labels_app.command("remove")
def remove(
    run: Run,
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of the labels to remove.")],
    as_json: Json = False,
) -> None:
    """Remove labels. Their ids are not used again, except by `add --reuse-ids`.

    Example: dexter labels remove runs/pydocs my.inverse
    """
    predictor = open_run(run)
    _report(run, predictor, predictor.remove_labels(ids, by=user()), f"{len(ids):,} removed", as_json)


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
    """Give a label a new text, which is encoded.

    Example: dexter labels rename runs/pydocs my.inv "my.inv: invert a regular matrix"
    """
    predictor = open_run(run)
    result = predictor.rename_labels([(label_id, text)], keep_vectors=keep_vector, by=user())
    _report(run, predictor, result, "1 renamed", as_json)


@labels_app.command("sync")
def sync(
    run: Run,
    vocabulary: Annotated[Path, typer.Argument(help="The new release: SKOS (.ttl, .rdf, .nt), or a table of Annif.")],
    language: Annotated[
        str | None, typer.Option(help="The language of the label texts; that of training if left out.")
    ] = None,
    keep_missing: Annotated[
        bool, typer.Option("--keep-missing", help="Keep labels that the vocabulary does not have.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Make the labels those of a vocabulary.

    What a new release added, renamed and removed becomes one edit.

    Example: dexter labels sync runs/library yso-2026.ttl --dry-run
    """
    from dexter.data.formats.vocabulary import read_vocabulary
    from dexter.data.label_names import NAMES_FILE
    from dexter.model.edits import plan_sync
    from dexter.model.published import model_folder

    predictor = open_run(run, persistent=not dry_run)
    names = predictor.model.names
    found = read_vocabulary(vocabulary, language=language or (None if names is None else names.language))
    plan = plan_sync(predictor.labels, found, names=names, language=language, keep_missing=keep_missing)
    _preview(plan.change, dict(zip(predictor.labels.ids, predictor.labels.texts, strict=True)))
    result = predictor.edit_labels(plan.change, by=user())
    if not dry_run:
        plan.names.save(model_folder(run) / NAMES_FILE)
    _report(run, predictor, result, f"{'dry run, nothing is written: ' * dry_run}{plan.describe()}", as_json)


def _preview(change: LabelChange, texts: Mapping[str, str]) -> None:
    """Log the first labels that a change adds, renames and removes."""
    lines = {
        "add": [f"{label_id}  {text}" for label_id, text in change.add],
        "rename": [f"{label_id}  {texts[label_id]} -> {text}" for label_id, text in change.rename],
        "remove": [f"{label_id}  {texts[label_id]}" for label_id in change.remove],
    }
    for name, entries in lines.items():
        for entry in entries[:_SHOWN_LABELS]:
            log.info("  %s  %s", name, entry)
        if len(entries) > _SHOWN_LABELS:
            log.info("  %s  ... and %s more", name, f"{len(entries) - _SHOWN_LABELS:,}")


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
    _show(open_run(run).search_labels("", limit=limit, offset=offset), as_json)


@labels_app.command("search")
def search(
    run: Run,
    query: Annotated[str, typer.Argument(help="A part of an id or text.")],
    limit: Annotated[int, typer.Option(help="Largest number of labels.")] = 20,
    offset: Offset = 0,
    as_json: Json = False,
) -> None:
    """Find labels by a part of their id or text.

    Those that begin with it come first.

    Example: dexter labels search runs/pydocs "linear algebra"
    """
    _show(open_run(run).search_labels(query, limit=limit, offset=offset), as_json)


@labels_app.command("history")
def history(
    run: Run,
    label_id: Annotated[str | None, typer.Option("--label", help="Only edits of the label with this id.")] = None,
    limit: Annotated[int, typer.Option(help="Largest number of edits.")] = 20,
    as_json: Json = False,
) -> None:
    """List the edits of the labels, newest first.

    Number, time (UTC), who, and what was done.

    Example: dexter labels history runs/pydocs
    """
    edits = open_run(run).label_history(label_id)
    if as_json:
        echo_json([edit._asdict() for edit in edits[:limit]])
        return
    for edit in edits[:limit]:
        typer.echo(f"{edit.version:>5}  {edit.time[:19]}  {edit.author or '-':<12}  {edit.describe()}")
    log.info("%s of %s edits", f"{len(edits[:limit]):,}", f"{len(edits):,}")


@labels_app.command("undo")
def undo(
    run: Run,
    edit: Annotated[
        int | None, typer.Argument(metavar="[EDIT]", help="Its number in `history`; the last one if left out.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Undo an edit of labels or examples.

    Added labels are removed, removed ones return, renamed ones get their old texts. It is an edit itself, and can be
    undone by its number. Again without a number, the edit before is undone.

    Example: dexter labels undo runs/pydocs
    """
    predictor = open_run(run)
    result = predictor.undo_labels(edit, by=user())
    _report(run, predictor, result, predictor.label_history()[0].describe(), as_json)


@labels_app.command("verify")
def verify(run: Run) -> None:
    """Check every byte of a model and its label changes.

    Example: dexter labels verify runs/pydocs
    """
    num_changed, predictor = _store(run).verify(), open_run(run)
    typer.echo(f"{run}: whole; {len(predictor.labels.ids):,} labels, {num_changed:,} changed since training")


@labels_app.command("backup")
def backup(run: Run, to: Annotated[Path, typer.Argument(metavar="FILE", help="The copy; it must not exist.")]) -> None:
    """Copy the label changes with their history.

    Labels may be changed meanwhile.

    Example: dexter labels backup runs/pydocs labels-monday.sqlite
    """
    typer.echo(f"{to}: the labels of {run}, version {_store(run).backup(to)}")


@labels_app.command("restore")
def restore(
    run: Run, source: Annotated[Path, typer.Argument(metavar="FILE", help="What `dexter labels backup` wrote.")]
) -> None:
    """Return to the labels of a backup.

    It is one more edit, which can be undone. A damaged file is replaced.

    Example: dexter labels restore runs/pydocs labels-monday.sqlite
    """
    version = _store(run).restore(source, by=user())
    typer.echo(f"{run}: restored from {source}; now {len(open_run(run).labels.ids):,} labels, version {version}")


@labels_app.command("compact")
def compact(run: Run) -> None:
    """Forget what undo needs, and free the space.

    Labels, versions and history stay. Afterwards no text of a removed label is left. After an edit, much unused space
    is given back without this.

    Example: dexter labels compact runs/pydocs
    """
    predictor = open_run(run)
    predictor.compact_labels()
    typer.echo(f"{run}: version {predictor.version}, compacted")


def open_run(run: Path, *, persistent: bool = True) -> Predictor:
    """Open a run; with `persistent` its changes are written to it."""
    from dexter.predict.predictor import Predictor

    return Predictor.load(run, persistent=persistent)


def _store(run: Path) -> LabelStore:
    """Return the label changes of a run, which may be damaged."""
    from dexter.model.model import Model
    from dexter.model.published import fingerprint, model_folder
    from dexter.model.store import LabelStore

    folder = model_folder(run)
    return LabelStore.for_model(folder, Model.load(folder), fingerprint=fingerprint(folder))


def user() -> str | None:
    """Return the name of the user at this computer; None where it has none."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None


def _report(run: Path, predictor: Predictor, result: ChangeResult, done: str, as_json: bool) -> None:
    for duplicate in result.duplicates[:_SHOWN_DUPLICATES]:
        log.warning("warning: %s", duplicate)
    if len(result.duplicates) > _SHOWN_DUPLICATES:
        log.warning("warning: %s more resemble others", f"{len(result.duplicates) - _SHOWN_DUPLICATES:,}")
    if as_json:
        duplicates = [asdict(duplicate) for duplicate in result.duplicates]
        shown = {
            "run": str(run),
            "version": result.version,
            "num_labels": len(predictor.labels.ids),
            "duplicates": duplicates,
        }
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
