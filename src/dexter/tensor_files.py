"""Arrays in safetensors files, read as views of the mapped file, so that only what is used is loaded.

NumPy has no bfloat16: such an array is handled as the uint16 of its bits, and `widened` returns its values.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError

_TYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "U16": np.uint16, "I8": np.int8, "U8": np.uint8, "U64": np.uint64, "BOOL": np.bool_,
}  # fmt: skip
_NAMES = {kind: name for name, kind in _TYPES.items() if name != "BF16"}
_MAX_HEADER = 100_000_000
_BLOCK = 2**17
"""Numbers that are checked at a time: few enough to stay in a cache."""
_REMEDY = "restore the folder from a copy"


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file by name: read-only, and read from the disk where and when they are used.

    Raises `ModelError` for a file that is missing or damaged, or that holds numbers that are not finite.
    """
    try:
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if length > _MAX_HEADER:
                raise ValueError(f"a header of {length:,} bytes")
            header = json.loads(handle.read(length))
            content = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        header.pop("__metadata__", None)
        arrays = {str(name): _view(content, 8 + length, entry) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: missing or damaged ({error}): {_REMEDY}") from None
    for name, array in arrays.items():
        if not is_finite(array):
            raise ModelError(f"{path}: {name} holds values that are not finite: {_REMEDY}")
    release(*arrays.values())  # the check has read everything
    return arrays


def release(*arrays: NDArray[Any]) -> None:
    """Give the memory of mapped files back until their arrays are used again; other arrays stay as they are."""
    for content in {id(content): content for content in map(_mapped, arrays) if content is not None}.values():
        if hasattr(mmap, "MADV_DONTNEED"):
            content.madvise(mmap.MADV_DONTNEED)


def write_tensors(path: Path, arrays: Mapping[str, NDArray[Any]], *, bfloat16: Collection[str] = ()) -> None:
    """Write arrays to a file; those named in `bfloat16` are the bits of such numbers."""
    # Wide types first, so that every array begins at a multiple of its item size.
    ordered = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        begin, end = end, end + arrays[name].nbytes
        kind = "BF16" if name in bfloat16 else _NAMES[arrays[name].dtype.type]
        header[name] = {"dtype": kind, "shape": arrays[name].shape, "data_offsets": [begin, end]}
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    with path.open("wb") as handle:
        handle.write(len(described).to_bytes(8, "little") + described)
        for name in ordered:
            handle.write(np.ascontiguousarray(arrays[name]).data)


def widened(array: NDArray[Any]) -> NDArray[np.float32]:
    """Return the float32 values of an array, which is that itself, of another type, or the bits of bfloat16."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def narrowed(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 numbers, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def is_finite(array: NDArray[Any]) -> bool:
    """Return whether no number of an array is infinite or not a number; bits of bfloat16 are taken for integers."""
    if array.dtype == np.float16:  # whose arithmetic is slow: an exponent of ones marks both
        bits = array.reshape(-1).view(np.uint16)
        parts = (bits[start : start + _BLOCK] for start in range(0, len(bits), _BLOCK))
        return not any((part & 0x7FFF).max() >= 0x7C00 for part in parts)
    # A sum is finite only if all values are, or else may have overflowed: the quick test comes first.
    with np.errstate(over="ignore", invalid="ignore"):
        return array.dtype.kind != "f" or bool(np.isfinite(array.sum()) or np.isfinite(array).all())


def row_starts(ends: NDArray[Any], columns: NDArray[Any], num_columns: int) -> NDArray[np.int64]:
    """Return where each row of a stored sparse matrix begins, and the end of the last one.

    `ends` says where rows end among the columns of all entries; raises ValueError where these do not fit together.
    """
    starts = np.concatenate([[0], ends])
    if (
        starts.dtype.kind != "i"
        or columns.dtype.kind != "i"
        or starts[-1] != len(columns)
        or (np.diff(starts) < 0).any()
    ):
        raise ValueError("rows that end before they begin or beyond the entries")
    if len(columns) and not 0 <= columns.min() <= columns.max() < num_columns:
        raise ValueError("an entry beyond the last column")
    return starts.astype(np.int64, copy=False)


def _mapped(array: NDArray[Any]) -> mmap.mmap | None:
    """Return the mapped file that an array is a view of, if it is one."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    content = base.obj if isinstance(base, memoryview) else base
    return content if isinstance(content, mmap.mmap) else None


def _view(content: mmap.mmap, start: int, entry: Mapping[str, Any]) -> NDArray[Any]:
    kind, shape = np.dtype(_TYPES[entry["dtype"]]), tuple(map(int, entry["shape"]))
    begin, end = map(int, entry["data_offsets"])
    size = math.prod(shape)
    if min((*shape, begin), default=0) < 0 or end - begin != size * kind.itemsize or start + end > len(content):
        raise ValueError("an array is not where it should be")
    return np.frombuffer(content, dtype=kind, count=size, offset=start + begin).reshape(shape)
