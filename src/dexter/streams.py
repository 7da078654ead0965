"""Texts in, predictions out, one at a time: files, stdin and stdout in constant memory, order and ids kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import tee
from pathlib import Path

from dexter.errors import DataError, UsageError
from dexter.files import atomic_path
from dexter.predictor import Prediction, Predictor

Query = tuple[str | None, str]
"""An id, where there is one, and a text."""
_MAX_LINE = 16 * 2**20


def read_texts(path: Path | None) -> Iterator[Query]:
    """Queries from a file or stdin: one text per line, or JSON objects with `text` and `uid` (or `id`)."""
    name = "stdin" if path is None else str(path)
    try:
        handle = sys.stdin.buffer if path is None else path.open("rb")
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror}): give a file of texts", path=name) from None
    with handle:
        for number, raw in enumerate(iter(lambda: handle.readline(_MAX_LINE + 1), b""), start=1):
            if len(raw) > _MAX_LINE:
                raise DataError(f"a line of more than {_MAX_LINE:,} bytes: split the text", path=name, line=number)
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise DataError("not valid UTF-8: convert the file first", path=name, line=number) from None
            if line.strip():
                yield _parse(line, name, number)


def predict_texts(run: Path, queries: Iterable[Query], *, k: int, form: str) -> Iterator[str]:
    """One line (or, as text, one block of lines) per query, in order."""
    if form not in ("text", "jsonl", "tsv"):
        raise UsageError(f"--format {form!r}: expected text, jsonl or tsv")
    predictor = Predictor.load(run)
    first, second = tee(queries)
    ranked = predictor.predict_stream((text for _, text in second), k)
    for number, ((uid, text), labels) in enumerate(zip(first, ranked, strict=True), start=1):
        yield _format(form, uid or str(number), text, labels)


def write_lines(lines: Iterable[str], path: Path | None) -> None:
    """Write to stdout as lines come, or to a file that appears only when it is whole."""
    if path is None:
        for line in lines:
            print(line)
        return
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as handle:
        for line in lines:
            handle.write(line + "\n")


def _parse(line: str, name: str, number: int) -> Query:
    if not line.startswith("{"):
        return None, line
    try:
        record = json.loads(line)
    except ValueError:
        return None, line
    if not isinstance(record.get("text"), str):
        raise DataError('a JSON object without a "text": expected {"uid": ..., "text": ...}', path=name, line=number)
    uid = record.get("uid", record.get("id"))
    return None if uid is None else str(uid), record["text"]


def _format(form: str, uid: str, text: str, labels: list[Prediction]) -> str:
    if form == "jsonl":
        entries = [{"id": label.id, "text": label.text, "score": round(label.score, 6)} for label in labels]
        return json.dumps({"uid": uid, "labels": entries}, ensure_ascii=False)
    if form == "tsv":
        return "\t".join([_flat(uid), *(f"{_flat(label.id)}\t{label.score:.6f}" for label in labels)])
    shown = text if len(text) <= 100 else text[:99] + "…"
    return "\n".join(
        [_flat(shown), *(f"  {label.score:7.4f}  {_flat(label.id)}  {_flat(label.text)}" for label in labels)]
    )


def _flat(text: str) -> str:
    return " ".join(text.split())
