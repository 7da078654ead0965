"""Files that are either whole or absent: atomic writes, and a SHA-256 manifest that is written last.

A file is written under a temporary name beside its target, flushed to the disk and renamed; a folder likewise. Readers
therefore never see half of anything, whatever moment the process dies at.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dexter.errors import ModelError, ResourceError

MANIFEST = "MANIFEST.json"
_TEMPORARY = ".tmp-"


@contextmanager
def atomic_path(target: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `target`; when the block ends well, flush it and rename it onto the target."""
    target = Path(target)
    temporary = target.with_name(f"{_TEMPORARY}{os.getpid()}-{target.name}")
    with _disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _disk_errors(target):
            yield temporary
            flush(temporary)
            os.replace(temporary, target)
            flush(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Give a temporary folder; when the block ends well, seal it with a manifest and rename it onto `target`.

    An existing target is an error unless `replace` is given; it is then moved aside first and deleted last.
    """
    target = Path(target)
    if target.exists() and not replace:
        raise ResourceError(f"{target} exists already: choose another output or remove it first")
    temporary = target.with_name(f"{_TEMPORARY}{os.getpid()}-{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with _disk_errors(target):
            temporary.mkdir(parents=True)
            yield temporary
            write_manifest(temporary)
            if target.exists():
                aside = target.with_name(f"{_TEMPORARY}{os.getpid()}-old-{target.name}")
                os.replace(target, aside)
                os.replace(temporary, target)
                shutil.rmtree(aside, ignore_errors=True)
            else:
                os.replace(temporary, target)
            flush(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file atomically, readable and with stable key order."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file, as hexadecimal text."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """Flush every file below a folder and record its size and SHA-256 in the manifest, which is written last."""
    entries = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST):
        flush(path)
        entries[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    write_json(folder / MANIFEST, {"files": entries})


def verify_manifest(folder: str | Path) -> None:
    """Raise `ModelError` unless every file of the folder's manifest is present and unchanged."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        entries = dict(manifest["files"])
    except FileNotFoundError:
        raise ModelError(f"{folder}: no {MANIFEST}: the folder is incomplete or not one of ours") from None
    except (ValueError, KeyError, TypeError):
        raise ModelError(f"{folder / MANIFEST}: not a readable manifest: restore the folder from a copy") from None
    for name, entry in entries.items():
        path = folder / name
        if not path.is_file():
            raise ModelError(f"{path}: listed in the manifest but missing: restore the folder from a copy")
        if path.stat().st_size != entry.get("bytes") or sha256(path) != entry.get("sha256"):
            raise ModelError(f"{path}: differs from its manifest (torn or altered): restore the folder from a copy")


def remove_leftovers(folder: str | Path) -> None:
    """Delete temporary files and folders that killed writers left behind directly below a folder."""
    for path in Path(folder).glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Ask the operating system to put a file or folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write into one clear line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(target.parent if target.parent.exists() else Path("/")).free
            raise ResourceError(
                f"{target}: the disk is full ({free:,} bytes free): free some space and repeat"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ResourceError(f"{target}: no permission to write here: choose another output folder") from error
        raise
