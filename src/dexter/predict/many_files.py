"""Predictions for many files: each process takes its share of them, and a file that is finished is never done again.

An output appears when it is whole, so that after a crash the same command goes on with what is missing, also with
another number of processes. What the outputs were made with is written beside them once, and another model or other
settings are refused: a folder never holds a mixture.
"""

from __future__ import annotations

import glob
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from dexter.errors import DataError, UsageError
from dexter.files import write_json
from dexter.predict.predictor import Predictor
from dexter.predict.streams import FORMS, predict_texts, read_texts, write_lines
from dexter.processes import Launch

_FACTS = "predictions.json"
log = logging.getLogger("dexter")


def is_pattern(name: str) -> bool:
    """Whether a path stands for several files."""
    return glob.has_magic(name) and not Path(name).exists()


def predict_files(
    predictor: Predictor,
    pattern: str,
    folder: Path,
    *,
    k: int | None = None,
    threshold: float | None = None,
    form: str = "jsonl",
    launch: Launch | None = None,
) -> list[Path]:
    """Predict for every file that a pattern such as 'part-*.jsonl' names; returns the outputs this process wrote.

    Args:
        predictor: ranks the labels.
        pattern: the files; `**` goes through folders.
        folder: where outputs go, one per file and of its name; made if needed.
        k: labels per text, as in `Predictor.predict`.
        threshold: only labels that are right with at least this probability.
        form: how predictions are written.
        launch: this process among those that do it together; alone if left out.
    """
    launch = launch or Launch()
    if form not in FORMS:
        raise UsageError(f"--format {form!r}: expected one of {', '.join(FORMS)}")
    outputs = _outputs(pattern, folder, form)
    settings = {
        "model": predictor.fingerprint,
        "head": predictor.head,
        "scoring": predictor.scoring,
        "k": k,
        "threshold": threshold,
        "format": form,
    }
    _claim(folder, settings)
    share = sorted(outputs.items())[launch.rank :: launch.size]
    written = []
    for source, target in share:
        if target.exists():
            log.info("%s is finished already", target)
            continue
        for leftover in folder.glob(f".tmp-*-{glob.escape(target.name)}"):
            leftover.unlink(missing_ok=True)
        write_lines(predict_texts(predictor, read_texts(source), k=k, threshold=threshold, form=form), target)
        log.info("%s -> %s", source, target)
        written.append(target)
    return written


def _outputs(pattern: str, folder: Path, form: str) -> dict[Path, Path]:
    """The output of every input."""
    sources = [Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]
    if not sources:
        raise DataError(f"{pattern}: no file has such a name")
    outputs = {source: folder / f"{_stem(source)}.{'txt' if form == 'text' else form}" for source in sources}
    for source, target in outputs.items():
        if target.resolve() == source.resolve():
            raise UsageError(f"{target} would replace the file it is made from: choose another --output folder")
    if len(set(outputs.values())) < len(outputs):
        first, second = _clash(list(outputs.items()))
        raise UsageError(f"{first} and {second} would have one output: rename one, or predict them into two folders")
    return outputs


def _clash(pairs: Sequence[tuple[Path, Path]]) -> tuple[Path, Path]:
    seen: dict[Path, Path] = {}
    for source, target in sorted(pairs):
        if target in seen:
            return seen[target], source
        seen[target] = source
    raise AssertionError("no two outputs are the same")


def _stem(source: Path) -> str:
    return source.name.removesuffix(".gz").rsplit(".", 1)[0] or source.name


def _claim(folder: Path, facts: Mapping[str, object]) -> None:
    """Write down what the predictions of a folder are made with, or refuse to add others to it."""
    path = folder / _FACTS
    found = [entry for entry in folder.iterdir() if not entry.name.startswith(".tmp-")] if folder.is_dir() else []
    if not found:
        # Several processes may do this at the same moment: they write the same.
        write_json(path, facts)
        return
    if not path.exists():
        raise UsageError(f"{folder} holds other files: choose a new folder for the predictions")
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        known = None
    if known != facts:
        raise UsageError(f"{folder} holds predictions made with {known}, these would be with {facts}: choose another")
