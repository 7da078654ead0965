"""Where the files of a data set lie: train, test and label files by their usual names, plain or gzip."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dexter.errors import DataError

TRAIN = ("trn", "train")
TEST = ("tst", "test")
LABELS = ("lbl", "labels")


def find_file(folder: Path, stems: Sequence[str], suffixes: Sequence[str]) -> Path | None:
    """The one file in a folder with one of the stems and suffixes, `.gz` or not; two of them are an error."""
    names = [f"{stem}{suffix}{gz}" for stem in stems for suffix in suffixes for gz in ("", ".gz")]
    found = [folder / name for name in names if (folder / name).is_file()]
    if len(found) > 1:
        raise DataError(f"holds both {found[0].name} and {found[1].name}: keep one of them", path=folder)
    return found[0] if found else None


def need_file(folder: Path, stems: Sequence[str], suffixes: Sequence[str]) -> Path:
    """As `find_file`, but a missing file is an error that names what was looked for."""
    path = find_file(folder, stems, suffixes)
    if path is None:
        names = " or ".join(f"{stem}{suffix}[.gz]" for stem in stems for suffix in suffixes)
        raise DataError(f"no {names} in this folder", path=folder)
    return path


def split_files(path: Path, suffixes: Sequence[str]) -> tuple[Path, Path | None]:
    """The training file and, if there is one, the test file; a path to a single file is a training file alone."""
    if path.is_file():
        return path, None
    return need_file(path, TRAIN, suffixes), find_file(path, TEST, suffixes)


def plain_suffix(path: Path) -> str:
    """The suffix of a file name in lower case, without `.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def data_name(path: Path) -> str:
    """A short name for the data set at a path: the folder's name, or the file's without its suffixes."""
    name = path.resolve().name
    return name.removesuffix(".gz").rsplit(".", 1)[0] if path.is_file() else name
