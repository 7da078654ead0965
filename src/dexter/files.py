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
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

from dexter.errors import ModelError, ResourceError, UsageError

MANIFEST = "MANIFEST.json"
_TEMPORARY = ".tmp-"
_MAX_JSON_BYTES = 10_000_000
_CURRENT_FOLDER, _NO_REPLACE, _EXCHANGE = -100, 1, 2
"""AT_FDCWD, RENAME_NOREPLACE and RENAME_EXCHANGE of Linux's renameat2."""
_MAX_MANIFEST_BYTES = 2**24
_HASHING_THREADS = 2
"""Threads that compare files with a manifest."""
_OPEN_FILES = Path("/proc/self/fd")
"""Where Linux has names for the files that a process has open."""
_FLAGS = ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")
"""How a file is opened that may be a link or a pipe, as far as the system has it: Windows knows the last one only."""
_UNLISTED_NAMES = ("labels.sqlite", "tuned.json", "label_names.json")
"""Begin the names of files that are written beside a model after its manifest."""


@contextmanager
def atomic_path(target: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `target`; when the block ends well, flush it and rename it onto the target."""
    target = Path(target)
    temporary = temporary_beside(target)
    with disk_errors(target):
        make_folder(target.parent)
        _remove(temporary)
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
    try:
        with disk_errors(target):
            _remove(temporary)
            make_folder(temporary)
            yield temporary
            write_manifest(temporary)
            if not (target.exists() and _exchange(temporary, target)):
                _move(temporary, target)
            flush(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents where they are missing, and flush the names of the new ones."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        flush(folder.parent)


def rename_new(source: Path, target: Path) -> None:
    """Rename a file; raise `FileExistsError` if the target exists, also if another process makes it at this moment.

    Where neither the system nor its file system (FAT, some network ones) can do that in one step, it is done in two.
    """
    if _rename(source, target, _NO_REPLACE):
        return
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(target):
            raise FileExistsError(target) from None
        os.replace(source, target)


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


def read_json(path: Path) -> Any:
    """Read a small JSON file of a model; raise `ModelError` if it is missing, huge or malformed."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"{path}: {path.stat().st_size:,} bytes: expected a model setting of at most 10 MB")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ModelError(f"{path}: missing or unreadable: the model folder is incomplete") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path}: not valid JSON: restore the model folder from its source") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a small JSON file that must contain one object; raise `ModelError` otherwise."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """Flush every file below a folder and record its size and SHA-256 in the manifest, which is written last.

    All files get the permissions that the process gives to new ones; some libraries write theirs for the owner alone.
    """
    entries = {}
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST):
        path.chmod(mode)
        flush(path)
        entries[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    write_json(folder / MANIFEST, {"files": entries})


def read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of every file that a folder's manifest lists, by name."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(read_regular(path, limit=_MAX_MANIFEST_BYTES))
        entries = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        raise ModelError(f"{folder}: no {MANIFEST}: the folder is incomplete or not one of ours") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(f"{path}: not a readable manifest: restore the folder from a copy") from None
    if not entries or not all(map(_is_inside, entries)):
        raise ModelError(f"{path}: lists no files, or files elsewhere: restore the folder from a copy")
    return entries


def verify_manifest(folder: str | Path) -> None:
    """Raise `ModelError` unless the folder has the files of its manifest, unchanged and no links, and no others.

    Other files that are hidden, or end in .md, are not looked at.
    """
    with verified(folder):
        pass


@contextmanager
def verified(folder: str | Path) -> Iterator[Path]:
    """Give a view of a folder while its files are compared with the manifest; an altered one precedes other errors.

    The bytes that the block reads are those that are compared, whatever is put in their place meanwhile: each file is
    opened once, and the view is a folder of our own with links to what is open. Where the system has no names for open
    files the view is the folder itself. The files are hashed in threads, which need no lock of the interpreter.
    """
    folder = Path(folder)
    entries = read_manifest(folder)
    _check_names(folder, entries)
    with ExitStack() as stack:
        files = {name: stack.enter_context(_open_sealed(folder, name, entries)) for name in entries}
        view = stack.enter_context(_view(folder, files))
        threads = stack.enter_context(ThreadPoolExecutor(_HASHING_THREADS))
        largest_first = sorted(entries, key=lambda name: -entries[name][0])
        checks = {name: threads.submit(_has_digest, files[name], entries[name][1]) for name in largest_first}
        try:
            yield view
        except ModelError as error:
            raise ModelError(str(error).replace(str(view), str(folder))) from error.__cause__
        finally:
            for name, check in checks.items():
                if not check.result():
                    raise _altered(folder / name)


@contextmanager
def _view(folder: Path, files: Mapping[str, BufferedReader]) -> Iterator[Path]:
    """Give a temporary folder that shows open files under their names."""
    if not _OPEN_FILES.is_dir():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="dexter-") as temporary:
        for name, handle in files.items():
            link = Path(temporary, name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(_OPEN_FILES / str(handle.fileno()))
        yield Path(temporary)


def _has_digest(file: BufferedReader, expected: str) -> bool:
    try:
        # As one block: the interpreter's lock, which reading takes for each, is held by those that use the file.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return hashlib.sha256(content).hexdigest() == expected
    except (ValueError, OSError):  # empty, or not to be mapped
        return hashlib.file_digest(file, "sha256").hexdigest() == expected


def _check_names(folder: Path, entries: Mapping[str, tuple[int, str]]) -> None:
    for name in entries:
        _check_no_links(folder, name)
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        is_beside = name in (MANIFEST, *entries) or name.startswith(_UNLISTED_NAMES) or name.endswith(".md")
        if not (is_beside or path.is_dir() or any(part.startswith(".") for part in Path(name).parts)):
            raise ModelError(f"{path}: not listed in the manifest: move it elsewhere")


def read_sealed(folder: Path, name: str) -> bytes:
    """Read a file that a folder's manifest lists; the bytes returned are the bytes that were checked."""
    entries = read_manifest(folder)
    with _open_sealed(folder, name, entries) as handle:
        content = handle.read()
    if hashlib.sha256(content).hexdigest() != entries[name][1]:
        raise _altered(folder / name)
    return content


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read it, unless it is a link, a pipe or a device: those could lead elsewhere, or never end."""
    if not hasattr(os, "O_NOFOLLOW") and path.is_symlink():
        raise OSError(errno.ELOOP, "a link", str(path))
    descriptor = os.open(path, os.O_RDONLY | sum(getattr(os, flag, 0) for flag in _FLAGS))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def read_regular(path: Path, *, limit: int) -> bytes:
    """Read a file of at most `limit` bytes that is no link, pipe or device."""
    with open_regular(path) as handle:
        content = handle.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"more than {limit:,} bytes", str(path))
    return content


def _open_sealed(folder: Path, name: str, entries: Mapping[str, tuple[int, str]]) -> BufferedReader:
    """Open a file of a manifest, if it has the size that is listed."""
    path = folder / name
    if name not in entries:
        raise ModelError(f"{path}: not listed in the manifest: restore the folder from a copy")
    try:
        handle = open_regular(path)
    except FileNotFoundError:
        raise ModelError(f"{path}: listed in the manifest but missing: restore the folder from a copy") from None
    except OSError as error:
        reason = "a link" if error.errno == errno.ELOOP else error.strerror
        raise ModelError(f"{path}: cannot be read ({reason}): restore the folder from a copy") from None
    if os.fstat(handle.fileno()).st_size != entries[name][0]:
        handle.close()
        raise _altered(path)
    return handle


def _check_no_links(folder: Path, name: str) -> None:
    for parent in list(Path(name).parents)[:-1]:
        if (folder / parent).is_symlink():
            raise ModelError(f"{folder / parent}: a link: restore the folder from a copy")


def _altered(path: Path) -> ModelError:
    return ModelError(f"{path}: differs from its manifest (torn or altered): restore the folder from a copy")


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def remove_folder(folder: Path) -> None:
    """Delete a folder under a temporary name, so that no process ever sees a part of it."""
    aside = temporary_beside(folder)
    _remove(aside)
    os.replace(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def remove_leftovers(folder: str | Path) -> None:
    """Delete temporary files and folders that killed writers left behind directly below a folder."""
    for path in Path(folder).glob(f"{_TEMPORARY}[0-9]*-*"):
        _remove(path)


def _remove(path: Path) -> None:
    """Delete a file, a folder with what is in it, or a link but not what it leads to; nothing may be there too."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Ask the operating system to put a file or folder on the disk; Windows does so for writable files only."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
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
    return _rename(first, second, _EXCHANGE)


def _rename(first: Path, second: Path, flags: int) -> bool:
    """Call Linux's renameat2; False where the system or its file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if rename is None:
        return False
    result = rename(_CURRENT_FOLDER, os.fsencode(first), _CURRENT_FOLDER, os.fsencode(second), flags)
    if result != 0 and ctypes.get_errno() == errno.EEXIST:
        raise FileExistsError(second)
    return bool(result == 0)


@contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn a full or failing disk or a missing permission into a `ResourceError` of one line."""
    try:
        yield
    except Exception as error:
        if _is_caused_by(error, errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(target.parent if target.parent.exists() else Path("/")).free
            raise ResourceError(
                f"{target}: the disk is full ({free:,} bytes free): free some space and repeat"
            ) from error
        if _is_caused_by(error, errno.EIO):
            raise ResourceError(f"{target}: the disk reports an error: choose another disk and repeat") from error
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ResourceError(f"{target}: no permission to write here: choose another output folder") from error
        raise


def _is_caused_by(error: Exception, *numbers: int) -> bool:
    """Whether one of the system's errors was the cause; libraries written in Rust report it as text only."""
    if isinstance(error, OSError):
        return error.errno in numbers
    return any(f"(os error {number})" in str(error) for number in numbers)
