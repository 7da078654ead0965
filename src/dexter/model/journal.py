"""The edits of a published model's labels on disk, beside its files and outside its manifest.

model/edits/
  HEAD.json                 what counts: version, sizes, checksums, the model's fingerprint
  journal-<number>.jsonl    one accepted edit per line, each with a checksum over itself and all lines before it
  vectors-<number>.f32      what the encoder made of the new texts, rows of little-endian float32

A write appends to the two files, flushes them, and then replaces HEAD.json by one rename: that is the commit. What lies
beyond the sizes that HEAD.json names was never committed; readers do not look at it and the next writer cuts it off.
Compaction writes the two files anew under the next number. The model's own files never change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from dexter.errors import ModelError
from dexter.files import disk_errors, flush, remove_leftovers, write_json
from dexter.model.lock import locked
from dexter.model.model import fingerprint, is_in_training
from dexter.model.replay import Added, Entry, Renamed

FORMAT_VERSION = 1
_FOLDER, _HEAD = "edits", "HEAD.json"


@dataclass(frozen=True, kw_only=True)
class Head:
    """What of the files counts."""

    format_version: int = FORMAT_VERSION
    model: str
    """Fingerprint of the model whose labels are edited."""
    version: int = 0
    number: int = 0
    """Which pair of files; each compaction makes a new one."""
    journal_bytes: int = 0
    vectors_bytes: int = 0
    checksum: str = ""
    """That of the last line."""


class LabelJournal:
    """Reads and appends the edits of one published model. Many may read; `writing` makes sure that one writes."""

    def __init__(self, model_folder: Path, *, fingerprint: str, dimension: int) -> None:
        self.folder = model_folder / _FOLDER
        self._model_folder = model_folder
        self._lock = model_folder.resolve().with_name(model_folder.resolve().name + ".lock")
        self._model = fingerprint
        self._dimension = dimension

    def head(self) -> Head:
        """Where the labels stand; cheap."""
        if fingerprint(self._model_folder) != self._model:
            raise ModelError(f"{self._model_folder}: the model was replaced since it was loaded: load it again")
        path = self.folder / _HEAD
        try:
            head = Head(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            if self.folder.is_dir() and any(self.folder.glob("journal-*")):
                raise ModelError(f"{path}: missing beside a journal: {self._remedy}") from None
            return Head(model=self._model)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise ModelError(f"{path}: not readable ({error}): {self._remedy}") from None
        if (head.format_version, head.model) != (FORMAT_VERSION, self._model):
            raise ModelError(
                f"{path}: edits in format {head.format_version!r} for model {head.model!r}, expected "
                f"{FORMAT_VERSION} and {self._model!r}: {self._remedy}"
            )
        return head

    def read(self) -> tuple[Head, list[Entry]]:
        """Every entry, oldest first, after checking every byte that counts."""
        while True:
            head = self.head()
            try:
                return head, self._entries(head)
            except FileNotFoundError as error:
                # A compaction may have replaced the files since; only if nothing moved, they are really missing.
                if self.head().number == head.number:
                    raise ModelError(f"{error.filename}: missing: {self._remedy}") from None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the one writer, or `ResourceError`."""
        if is_in_training(self._model_folder):
            raise ModelError(
                f"{self._model_folder}: its run has not ended, and its next model would replace the labels: finish it "
                "with `dexter train --resume`, or change a copy of the model folder"
            )
        with locked(self._lock, purpose="changing the labels"):
            remove_leftovers(self.folder)
            yield

    def append(self, entry: Entry) -> None:
        """Commit one more entry; only while `writing`."""
        head = self.head()
        if not (self.folder / _HEAD).exists():
            # So that a journal without a HEAD.json always means a lost file.
            write_json(self.folder / _HEAD, asdict(head))
        self._commit(entry, head)

    def compact(self, entry: Entry) -> None:
        """Replace all entries by one that has the same effect; only while `writing`."""
        head = self.head()
        self._commit(entry, replace(head, number=head.number + 1, journal_bytes=0, vectors_bytes=0, checksum=""))
        for path in self._files(head):
            path.unlink(missing_ok=True)

    def _commit(self, entry: Entry, head: Head) -> None:
        vectors = np.ascontiguousarray(entry.vectors_ND, dtype="<f4").tobytes()
        body = json.dumps(_to_json(entry, vectors), ensure_ascii=False).encode()
        checksum = _checksum(head.checksum, body)
        line = body + b"\t" + checksum.encode() + b"\n"
        journal_path, vectors_path = self._files(head)
        with disk_errors(self.folder):
            _append(vectors_path, vectors, at=head.vectors_bytes)
            _append(journal_path, line, at=head.journal_bytes)
            flush(self.folder)
        committed = replace(
            head,
            version=entry.version,
            journal_bytes=head.journal_bytes + len(line),
            vectors_bytes=head.vectors_bytes + len(vectors),
            checksum=checksum,
        )
        write_json(self.folder / _HEAD, asdict(committed))

    def _entries(self, head: Head) -> list[Entry]:
        if head.journal_bytes == 0:
            return []
        journal_path, vectors_path = self._files(head)
        lines = _read(journal_path, head.journal_bytes).split(b"\n")
        vectors = memoryview(_read(vectors_path, head.vectors_bytes))
        checksum, entries, start = "", [], 0
        try:
            for line in lines[:-1]:
                body, _, given = line.rpartition(b"\t")
                checksum = _checksum(checksum, body)
                if given != checksum.encode():
                    raise ValueError("a line differs from its checksum")
                record = json.loads(body)
                end = start + record["num_vectors"] * self._dimension * 4
                entries.append(_from_json(record, vectors[start:end], self._dimension))
                start = end
            if (checksum, entries[-1].version, start, lines[-1]) != (head.checksum, head.version, len(vectors), b""):
                raise ValueError("it does not end as HEAD.json says")
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise ModelError(f"{journal_path}: damaged ({error}): {self._remedy}") from None
        return entries

    def _files(self, head: Head) -> tuple[Path, Path]:
        return self.folder / f"journal-{head.number:06d}.jsonl", self.folder / f"vectors-{head.number:06d}.f32"

    @property
    def _remedy(self) -> str:
        return f"restore the folder from a copy, or remove {self.folder} to return to the labels as published"


def _append(path: Path, content: bytes, *, at: int) -> None:
    """Write at a place, cut off what an earlier writer left behind it, and put it on the disk."""
    with path.open("r+b" if path.exists() else "wb") as handle:
        handle.truncate(at)
        handle.seek(at)
        handle.write(content)
    flush(path)


def _read(path: Path, size: int) -> bytes:
    with path.open("rb") as handle:
        return handle.read(size)


def _checksum(previous: str, body: bytes) -> str:
    return hashlib.sha256(previous.encode() + body).hexdigest()


def _to_json(entry: Entry, vectors: bytes) -> dict[str, Any]:
    return {
        "version": entry.version,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "remove": list(entry.remove),
        "rename": [label._asdict() for label in entry.rename],
        "add": [label._asdict() for label in entry.add],
        "retired": list(entry.retired),
        "num_vectors": len(entry.vectors_ND),
        "vectors_sha256": hashlib.sha256(vectors).hexdigest(),
    }


def _from_json(record: dict[str, Any], vectors: memoryview, dimension: int) -> Entry:
    if hashlib.sha256(vectors).hexdigest() != record["vectors_sha256"]:
        raise ValueError(f"the vectors of version {record['version']} differ from their checksum")
    return Entry(
        version=record["version"],
        remove=record["remove"],
        rename=[Renamed(**label) for label in record["rename"]],
        add=[Added(label["id"], label["text"], tuple(label["priors"])) for label in record["add"]],
        retired=record["retired"],
        vectors_ND=np.frombuffer(vectors, dtype="<f4").astype(np.float32, copy=True).reshape(-1, dimension),
    )
