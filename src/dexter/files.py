"""Files that are complete or absent: atomic writes, and a SHA-256 manifest that is written last.

A file is written under a temporary name beside its target, flushed to the disk and renamed; a folder likewise. Readers
therefore never see a partial file, whenever the process dies. Where the system can swap two names in one step (Linux),
a replaced folder is never absent either.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dexter.errors import ModelError, ResourceError, UsageError

MANIFEST = "MANIFEST.json"
_TEMPORARY = ".tmp-"
_CURRENT_FOLDER, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux's renameat2."""


@contextmanager
def atomic_path(target: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `target`; when the block ends well, flush it and rename it onto the target."""
    target = Path(target)
    temporary = temporary_beside(target)
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with disk_errors(target):
            yield temporary
            flush(temporary)
            os.replace(temporary, target)
            flush(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Give a temporary folder; when the block ends well, seal it with a manifest and rename it onto `target`.

    An existing target is an error unless `replace` is given; the old one is then deleted last.
    """
    target = Path(target)
    if target.exists() and not replace:
        raise UsageError(f"{target} exists already: choose another output, or remove it first")
    temporary = temporary_beside(target)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with disk_errors(target):
            temporary.mkdir(parents=True)
            yield temporary
            write_manifest(temporary)
            if not (target.exists() and _exchange(temporary, target)):
                _move(temporary, target)
            flush(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def temporary_beside(target: Path, *, process: int | None = None) -> Path:
    """Return the temporary name of `target` for a process: this one, or the one on whose behalf others write."""
    return target.with_name(f"{_TEMPORARY}{os.getpid() if process is None else process}-{target.name}")


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file atomically, readable and with stable key order."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """Flush every file below a folder and record its size and SHA-256 in the manifest, which is written last."""
    entries = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST):
        flush(path)
        entries[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    write_json(folder / MANIFEST, {"files": entries})


def read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of every file that a folder's manifest lists, by name."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {str(name): (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        raise ModelError(f"{folder}: no {MANIFEST}: the folder is incomplete or not one of ours") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{folder / MANIFEST}: not a readable manifest: restore the folder from a copy") from None


def verify_manifest(folder: str | Path) -> None:
    """Raise `ModelError` unless every file of the folder's manifest is present and unchanged."""
    folder = Path(folder)
    for name, expected in read_manifest(folder).items():
        path = folder / name
        if not path.is_file():
            raise ModelError(f"{path}: listed in the manifest but missing: restore the folder from a copy")
        if path.stat().st_size != expected[0] or sha256(path) != expected[1]:
            raise ModelError(f"{path}: differs from its manifest (torn or altered): restore the folder from a copy")


def read_sealed(folder: Path, name: str) -> bytes:
    """Read a file that a folder's manifest lists; the bytes returned are the bytes that were checked."""
    entry, path = read_manifest(folder).get(name), folder / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}): restore the folder from a copy") from None
    if entry != (len(content), hashlib.sha256(content).hexdigest()):
        raise ModelError(f"{path}: differs from its manifest (torn or altered): restore the folder from a copy")
    return content


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


def _move(temporary: Path, target: Path) -> None:
    """Rename a folder to the target; an existing target is renamed first, so that for a moment there is none."""
    aside = target.with_name(f"{_TEMPORARY}{os.getpid()}-old-{target.name}")
    if target.exists():
        os.replace(target, aside)
    os.replace(temporary, target)
    shutil.rmtree(aside, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the system or its file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    if rename is None:
        return False
    result = rename(_CURRENT_FOLDER, os.fsencode(first), _CURRENT_FOLDER, os.fsencode(second), _EXCHANGE)
    return bool(result == 0)


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into a `ResourceError` of one line."""
    try:
        yield
    except Exception as error:
        if _is_full(error):
            free = shutil.disk_usage(target.parent if target.parent.exists() else Path("/")).free
            raise ResourceError(
                f"{target}: the disk is full ({free:,} bytes free): free some space and repeat"
            ) from error
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ResourceError(f"{target}: no permission to write here: choose another output folder") from error
        raise


def _is_full(error: Exception) -> bool:
    """Whether the disk was full; libraries written in Rust report the system's error as text only."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"(os error {errno.ENOSPC})" in str(error)
