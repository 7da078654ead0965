"""Sparse matrices from `.npz` files that nobody vouches for: sizes are checked before anything is allocated.

`scipy.sparse.load_npz` believes what the file declares: two megabytes can ask for two gigabytes, and column indices out
of range load silently. Here the zip directory and each array's header are read first, and no pickle is ever opened.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np
from scipy.sparse import csr_matrix

from dexter.data.formats.limits import decompressed_limit, limit_advice
from dexter.errors import DataError

_MEMBERS = ("format.npy", "shape.npy", "data.npy", "indices.npy", "indptr.npy")
_OPTIONAL_MEMBERS = ("_is_array.npy",)
_READ_ERRORS = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, TypeError, KeyError,
    NotImplementedError, RuntimeError, SyntaxError, OverflowError, MemoryError, RecursionError,
)  # fmt: skip


def read_csr(path: Path) -> csr_matrix:
    """A CSR matrix as `scipy.sparse.save_npz` writes it, fully checked."""
    try:
        return _checked_csr(path)
    except DataError:
        raise
    except _READ_ERRORS as error:
        raise DataError(
            f"not a usable CSR matrix ({type(error).__name__}: {str(error)[:120]}): "
            "write it with scipy.sparse.save_npz(path, matrix.tocsr())",
            path=path,
        ) from None


def _checked_csr(path: Path) -> csr_matrix:
    with zipfile.ZipFile(path) as archive:
        members = _checked_members(path, archive)
        arrays = {name: _read_array(archive, members[name]) for name in _MEMBERS}
    kind = str(arrays["format.npy"].astype("U8"))
    if kind != "csr":
        raise DataError(f"holds a {kind[:8]!r} matrix, expected 'csr': save matrix.tocsr() instead", path=path)
    num_rows, num_columns = (int(size) for size in arrays["shape.npy"])
    triple = (arrays["data.npy"], arrays["indices.npy"], arrays["indptr.npy"])
    matrix = csr_matrix(triple, shape=(num_rows, num_columns))
    matrix.check_format(full_check=True)
    return matrix


def _checked_members(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The arrays of the archive by name, after checking that they are the expected ones and not too large."""
    members = {info.filename: info for info in archive.infolist()}
    unknown = sorted(set(members) - set(_MEMBERS) - set(_OPTIONAL_MEMBERS))
    missing = sorted(set(_MEMBERS) - set(members))
    if unknown or missing:
        wrong = f"lacks {missing[0]}" if missing else f"holds {unknown[0][:40]!r}"
        raise DataError(f"not a CSR matrix of scipy.sparse.save_npz: it {wrong}", path=path)
    declared, limit = sum(info.file_size for info in members.values()), decompressed_limit(path)
    if declared > limit:
        raise DataError(f"declares {declared:,} bytes, more than the limit of {limit:,}: {limit_advice()}", path=path)
    return members


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """One `.npy` member, read only if its header declares exactly the bytes that the archive holds."""
    with archive.open(info) as member:
        shape, fortran_order, dtype = _read_header(member)
        count = 1
        for size in shape:
            count *= size
        if dtype.hasobject or dtype.kind not in "biufSU":
            raise ValueError(f"{info.filename} has element type {dtype}, expected numbers")
        body = member.read(info.file_size)
        if count < 0 or len(body) != count * dtype.itemsize:
            raise ValueError(f"{info.filename} declares {count:,} elements, but holds {len(body):,} bytes")
        if fortran_order and len(shape) > 1:
            raise ValueError(f"{info.filename} is not a flat array")
        return np.frombuffer(body, dtype=dtype, count=count).reshape(shape)


def _read_header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(member)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(member)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(member)
    raise ValueError(f"npy version {version} is not supported")
