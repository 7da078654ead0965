"""Checkpoints of a run: published whole or not at all, verified before use, the previous one kept.

    checkpoints/step-000001200/
        state.safetensors                  tensors that are the same on all ranks
        rank-00000-of-00002.safetensors    of each rank: its rows of what has a row per label or text, its random state
        state.json                         everything else
        MANIFEST.json                      written last, by the first rank

Rows carry the ids they belong to, so that any number of ranks can go on from what any other number wrote: each picks
its own. The newest checkpoint is found by its name; one that is torn or altered is passed over for the one before it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.errors import ModelError
from dexter.files import atomic_folder, flush, remove_leftovers, temporary_beside, verify_manifest, write_json
from dexter.training.distributed import ProcessGroup

_PREFIX = "step-"
_KEPT = 2
_SHARED, _VALUES = "state.safetensors", "state.json"
_IDS, _ROWS, _OWN = "ids:", "rows:", "own:"

log = logging.getLogger("dexter")


@dataclass(frozen=True)
class Rows:
    """Tensors that have a row for each label, or each text, of which this rank holds some."""

    ids: NDArray[np.int64]
    """What the rows are of, ascending."""
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after some step."""

    step: int
    tensors: Mapping[str, Tensor]
    """Weights, optimiser state: every array that is the same on all ranks, by dotted name. When loaded, rows too."""
    values: Mapping[str, Any]
    """Counters and settings, as JSON can hold them."""
    rows: Mapping[str, Rows] = field(default_factory=dict)
    """What ranks hold different rows of, by kind of row."""
    own: Mapping[str, Tensor] = field(default_factory=dict)
    """What each rank has of its own, such as a random state; empty when loaded by another number of ranks."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint, processes: ProcessGroup | None = None) -> Path:
    """Publish a checkpoint below `folder`, of which every rank writes its part, and drop all but the newest two."""
    from safetensors.torch import save_file

    processes = processes or ProcessGroup()
    target = folder / f"{_PREFIX}{checkpoint.step:09d}"
    with _shared_folder(target, processes) as temporary:
        own = temporary / _rank_file(processes.rank, processes.size)
        save_file(_rank_tensors(checkpoint), own)
        if processes.is_first:
            save_file(_on_cpu(checkpoint.tensors), temporary / _SHARED)
            write_json(temporary / _VALUES, {"step": checkpoint.step, "ranks": processes.size, **checkpoint.values})
        elif own.exists():
            flush(own)
    if processes.is_first:
        for old in _newest_first(folder)[_KEPT:]:
            shutil.rmtree(old)
    return target


def load_checkpoint(
    folder: Path, *, held: Mapping[str, NDArray[np.int64]] | None = None, processes: ProcessGroup | None = None
) -> Checkpoint | None:
    """The newest checkpoint that is whole; None when there is none at all.

    Args:
        folder: where checkpoints are.
        held: by kind of row, the ids of those that this rank wants; all of them if left out.
        processes: the ranks that load it together; the first verifies it and decides which it is.

    Raises `ModelError` when there are checkpoints and every one is damaged.
    """
    processes = processes or ProcessGroup()
    path = _newest_whole(folder) if processes.is_first else None
    step = int(processes.broadcast(torch.tensor([-1 if path is None else int(path.name.removeprefix(_PREFIX))])))
    return None if step < 0 else _read(folder / f"{_PREFIX}{step:09d}", held or {}, processes)


@contextmanager
def _shared_folder(target: Path, processes: ProcessGroup) -> Iterator[Path]:
    """A folder that every rank writes into, published by the first when all have done so."""
    if not processes.is_first:
        process = int(processes.broadcast(torch.zeros(1, dtype=torch.int64)))
        temporary = temporary_beside(target, process=process)
        temporary.mkdir(parents=True, exist_ok=True)
        yield temporary
        processes.barrier("checkpoint")
    else:
        with atomic_folder(target, replace=True) as temporary:
            processes.broadcast(torch.tensor([os.getpid()]))
            yield temporary
            processes.barrier("checkpoint")
    # Nobody goes on before it is published: the next checkpoint drops older ones.
    processes.barrier("published")


def _newest_whole(folder: Path) -> Path | None:
    if not folder.is_dir():
        return None
    remove_leftovers(folder)
    candidates = _newest_first(folder)
    for path in candidates:
        try:
            verify_manifest(path)
            _read_values(path)
            return path
        except ModelError as error:
            log.warning("passing over a damaged checkpoint: %s", error)
    if candidates:
        raise ModelError(f"{folder}: none of its {len(candidates)} checkpoints is whole: start again without --resume")
    return None


def _read_values(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads((path / _VALUES).read_text(encoding="utf-8"))
        int(values["step"]), int(values["ranks"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: not a checkpoint of this version ({error!r})") from None
    return values


def _read(path: Path, held: Mapping[str, NDArray[np.int64]], processes: ProcessGroup) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    values = _read_values(path)
    step, num_processes = int(values.pop("step")), int(values.pop("ranks"))
    try:
        tensors = load_file(path / _SHARED)
        files = [path / _rank_file(rank, num_processes) for rank in range(num_processes)]
        own = _read_own(files[processes.rank]) if num_processes == processes.size else {}
        return Checkpoint(step, {**tensors, **_read_rows(files, held)}, values, own=own)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"{path}: not a checkpoint of this version ({error})") from None


def _read_own(path: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        return {name.removeprefix(_OWN): opened.get_tensor(name) for name in _names(opened) if name.startswith(_OWN)}


def _read_rows(files: list[Path], held: Mapping[str, NDArray[np.int64]]) -> dict[str, Tensor]:
    """Every tensor that has rows, with the wanted ones of all files; one file's tensor is in memory at a time."""
    from safetensors import safe_open

    wanted, found = dict(held), dict[str, Tensor]()
    filled: dict[str, int] = {}
    for kind, ids in _all_ids(files).items():
        wanted.setdefault(kind, ids)
    for path in files:
        with safe_open(path, framework="pt") as opened:
            for name in _names(opened):
                if not name.startswith(_ROWS):
                    continue
                kind, _, short = name.removeprefix(_ROWS).partition(":")
                ids = opened.get_tensor(_IDS + kind).numpy()
                places, sources = _matching(wanted[kind], ids)
                rows = opened.get_tensor(name)
                target = found.setdefault(short, rows.new_empty(len(wanted[kind]), *rows.shape[1:]))
                target[places] = rows[sources]
                filled[short] = filled.get(short, 0) + len(places)
    for short, tensor in found.items():
        if filled[short] != len(tensor):
            raise ModelError(f"{files[0].parent}: {short} lacks rows: the checkpoint belongs to other data")
    return found


def _names(opened: Any) -> list[str]:
    return list(opened.keys())


def _all_ids(files: list[Path]) -> dict[str, NDArray[np.int64]]:
    from safetensors import safe_open

    parts: dict[str, list[NDArray[np.int64]]] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            for name in _names(opened):
                if name.startswith(_IDS):
                    parts.setdefault(name.removeprefix(_IDS), []).append(opened.get_tensor(name).numpy())
    return {kind: np.sort(np.concatenate(ids)) for kind, ids in parts.items()}


def _matching(wanted: NDArray[np.int64], ids: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Where wanted ids are found among others: their places in either; both ascend."""
    _, places, sources = np.intersect1d(wanted, ids, assume_unique=True, return_indices=True)
    return torch.from_numpy(places), torch.from_numpy(sources)


def _rank_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    tensors = {_OWN + name: value for name, value in checkpoint.own.items()}
    for kind, rows in checkpoint.rows.items():
        if rows.tensors:
            tensors[_IDS + kind] = torch.from_numpy(rows.ids)
            tensors |= {f"{_ROWS}{kind}:{name}": value for name, value in rows.tensors.items()}
    return _on_cpu(tensors)


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def _rank_file(rank: int, size: int) -> str:
    return f"rank-{rank:05d}-of-{size:05d}.safetensors"


def _newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob(f"{_PREFIX}*") if path.is_dir()), reverse=True)
