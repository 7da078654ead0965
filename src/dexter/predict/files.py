"""Predictions out: for one text, a stream or many files, in constant memory; order and ids are kept.

With many files each process takes its share, and a finished file is never done again: an output appears when it is
complete, so that after a crash the same command continues with what is missing, also with another number of processes.
The settings are written beside the outputs once, and a folder refuses predictions with other settings.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise, tee
from pathlib import Path
from typing import Any, NamedTuple

from dexter.errors import DataError, UsageError
from dexter.files import atomic_path, write_json
from dexter.model.labels import LabelEntry
from dexter.predict.explain import Explanation
from dexter.predict.filters import LabelFilter
from dexter.predict.predictor import Prediction, Predictor
from dexter.processes import Launch
from dexter.progress import count_lines, track

log = logging.getLogger("dexter")
FORMS = ("text", "jsonl", "tsv", "csv")
_CSV_HEADER = "id,rank,label_id,label_text,score,probability"
_SHOWN_CHARACTERS = 100
"""Characters of a text that are printed above its labels."""
_SETTINGS_FILE = "predictions.json"


class Query(NamedTuple):
    """A text to label, and the id that is written with its predictions."""

    uid: str
    text: str
    has_id: bool = False
    """Whether the input gave the id; otherwise it is the number of a line."""


def form_of(path: Path | None) -> str:
    """Return the form of predictions for the ending of a file's name; text for stdout."""
    ending = "" if path is None else path.suffix.removeprefix(".").lower()
    if ending in ("", "txt"):
        return "text"
    if ending not in FORMS:
        raise UsageError(f"--output {path}: expected an ending of .txt, .jsonl, .tsv or .csv, or a --format")
    return ending


def predict_texts(
    predictor: Predictor,
    queries: Iterable[Query],
    *,
    k: int | None = None,
    threshold: float | None = None,
    form: str = "text",
    explain: bool = False,
    labels: LabelFilter | None = None,
    language: str | None = None,
) -> Iterator[str]:
    """Yield one line (as text: one block of lines) per query, in order; with `explain` also why each label is there.

    `labels` are those that may be returned; all if left out. `language` is as in `Predictor.predict`.
    """
    forms = tuple(name for name in FORMS if not (explain and name in ("tsv", "csv")))
    if form not in forms:
        raise UsageError(f"--format {form!r}{' with --explain' * explain}: expected one of {', '.join(forms)}")
    # The copies advance together but for one block of the predictor's, so little is held between them.
    shown, texts, ids = tee(queries, 3)
    labels = labels or LabelFilter()
    ranked = predictor.predict_stream(
        (query.text for query in texts),
        k,
        threshold=threshold,
        ids=(query.uid if query.has_id else None for query in ids),
        exclude=labels.exclude,
        only=labels.only,
        bands=labels.bands,
        language=language,
    )
    if form == "csv":
        yield _CSV_HEADER
    num_texts = num_empty = 0
    rises = False
    for query, found in zip(shown, ranked, strict=True):
        num_texts += 1
        num_empty += not query.text.strip()
        rises = rises or any((lower.probability or 0) > (label.probability or 0) for label, lower in pairwise(found))
        why = predictor.explain_labels(query.text, [label.id for label in found]) if explain else None
        if found or form != "csv":
            yield _format(form, query, found, why)
    if rises:
        log.info("a lower label may be likelier: probabilities are learned for rare and frequent labels apart")
    if not num_texts:
        log.warning("the input has no texts: nothing is predicted")
    if num_empty:
        log.warning("%d of the texts are empty: their labels say only what is common", num_empty)


def label_lines(labels: Iterable[LabelEntry]) -> Iterator[str]:
    """Yield one line per label: id, number of training queries, text."""
    for label in labels:
        yield f"{_flat(label.id)}\t{label.count}\t{_flat(label.text)}"


def write_lines(lines: Iterable[str], path: Path | None) -> None:
    """Print each line as it comes, or write all to a file that appears only when it is complete."""
    if path is None:
        for line in lines:
            print(line)
        return
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as handle:
        for line in lines:
            handle.write(line + "\n")


def is_pattern(name: str) -> bool:
    """Return whether a path is a pattern of several files."""
    return glob.has_magic(name) and not Path(name).exists()


def predict_files(
    predictor: Predictor,
    pattern: str,
    folder: Path,
    *,
    k: int | None = None,
    threshold: float | None = None,
    form: str = "jsonl",
    labels: LabelFilter | None = None,
    text_column: str | None = None,
    language: str | None = None,
    launch: Launch | None = None,
) -> list[Path]:
    """Predict for every file that a pattern such as 'part-*.jsonl' matches; return the outputs that this process wrote.

    Args:
        predictor: ranks the labels.
        pattern: the files; `**` matches folders of any depth.
        folder: gets one output for each file, of the same name; created if needed.
        k: labels per text, as in `Predictor.predict`.
        threshold: only labels that are right with at least this probability.
        form: how predictions are written.
        labels: those that may be returned; all if left out.
        text_column: for tables, the text column, or several joined by "+"; guessed if left out.
        language: of the labels' texts, as in `Predictor.predict`.
        launch: this process among those that share the files; a single process if left out.
    """
    # Imported here because a text on the command line does not need it, and it takes a while.
    from dexter.predict.text_files import read_texts

    launch = launch or Launch()
    if form not in FORMS:
        raise UsageError(f"--format {form!r}: expected one of {', '.join(FORMS)}")
    outputs = _outputs(pattern, folder, form)
    settings = {
        "model": predictor.fingerprint,
        "ranking": asdict(predictor.choice),
        "k": k,
        "threshold": threshold,
        "format": form,
    }
    if labels is not None and not labels.is_empty:
        # As JSON reads it back: lists, not tuples.
        settings["labels"] = json.loads(json.dumps(asdict(labels)))
    if language is not None:
        settings["language"] = language
    _claim(folder, settings)
    written = []
    for target, source in list(outputs.items())[launch.rank :: launch.size]:
        if target.exists():
            log.info("%s is finished already", target)
            continue
        for leftover in folder.glob(f".tmp-*-{glob.escape(target.name)}"):
            leftover.unlink(missing_ok=True)
        texts = track(read_texts(source, text_column=text_column), what=source.name, total=count_lines(source))
        lines = predict_texts(predictor, texts, k=k, threshold=threshold, form=form, labels=labels, language=language)
        write_lines(lines, target)
        log.info("%s -> %s", source, target)
        written.append(target)
    return written


def _format(form: str, query: Query, labels: list[Prediction], why: list[Explanation] | None) -> str:
    if form == "jsonl":
        entries = [_values(label, rank) for rank, label in enumerate(labels, start=1)]
        if why is not None:
            entries = [entry | {"explanation": one.to_json()} for entry, one in zip(entries, why, strict=True)]
        return json.dumps({"id": query.uid, "labels": entries}, ensure_ascii=False)
    if form == "csv":
        return _csv_rows(query, labels)
    if form == "tsv":
        return "\t".join([_flat(query.uid), *(f"{_flat(label.id)}\t{label.score:.6f}" for label in labels)])
    cut = query.text[: _SHOWN_CHARACTERS + 1]
    shown = cut if len(cut) <= _SHOWN_CHARACTERS else cut[: _SHOWN_CHARACTERS - 1] + "…"
    lines = [_flat(shown)]
    for place, label in enumerate(labels):
        names = dict.fromkeys((_flat(label.id), _flat(label.text)))  # once where id and text are the same
        lines.append(f"  {_numbers(label)}  {'  '.join(names)}")
        lines += [f"{'':11}{_flat(line)}" for line in ([] if why is None else why[place].lines())]
    return "\n".join(lines)


def _values(label: Prediction, rank: int) -> dict[str, Any]:
    values: dict[str, Any] = {"id": label.id, "text": label.text, "score": round(label.score, 6), "rank": rank}
    return values if label.probability is None else values | {"probability": round(label.probability, 4)}


def _csv_rows(query: Query, labels: list[Prediction]) -> str:
    rows = io.StringIO()
    cells = csv.writer(rows, lineterminator="\n")
    for rank, label in enumerate(labels, start=1):
        values = _values(label, rank)
        cells.writerow([query.uid, rank, label.id, label.text, values["score"], values.get("probability", "")])
    return rows.getvalue().removesuffix("\n")


def _numbers(label: Prediction) -> str:
    """Format the score, and the probability where it is known."""
    return f"{label.score:7.4f}" + ("" if label.probability is None else f"  {label.probability:4.0%}")


def _flat(text: str) -> str:
    """Make one line without control characters, which could move a terminal's cursor."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))


def _outputs(pattern: str, folder: Path, form: str) -> dict[Path, Path]:
    """Return the input file of every output path, in the order of the inputs."""
    sources = sorted(Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file())
    if not sources:
        raise DataError(f"{pattern}: no file has such a name")
    outputs: dict[Path, Path] = {}
    for source in sources:
        stem = source.name.removesuffix(".gz").rsplit(".", 1)[0] or source.name
        target = folder / f"{stem}.{'txt' if form == 'text' else form}"
        if target.resolve() == source.resolve():
            raise UsageError(f"{target} would replace the file it is made from: choose another --output folder")
        if target in outputs:
            raise UsageError(
                f"{outputs[target]} and {source} would have one output: rename one, or predict them into two folders"
            )
        outputs[target] = source
    return outputs


def _claim(folder: Path, settings: Mapping[str, object]) -> None:
    """Record the settings of a folder's predictions, or refuse where it holds predictions with others."""
    path = folder / _SETTINGS_FILE
    found = [entry for entry in folder.iterdir() if not entry.name.startswith(".tmp-")] if folder.is_dir() else []
    if not found:
        # Several processes may do this at the same moment: they write the same.
        write_json(path, settings)
        return
    if not path.exists():
        raise UsageError(f"{folder} holds other files: choose a new folder for the predictions")
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        known = None
    if known != settings:
        raise UsageError(
            f"{folder} holds predictions made with {known}, these would be with {settings}: choose another"
        )
