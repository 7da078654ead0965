"""Checkpoints of a run: published whole or not at all, verified before use, the previous one kept.

    checkpoints/step-000001200/
        state.safetensors                  tensors that are the same on all ranks
        rank-00000-of-00002.safetensors    of each rank: its rows of what has a row per label, its random state
        state.json                         everything else
        MANIFEST.json                      written last, by the first rank

Rows are stored with their label ids, so that any number of ranks can resume from what any other number wrote: each
reads its own. The newest checkpoint is found by its name; a damaged one is passed over for the one before it.
`take_state` and `restore_state` say what the rest of a run depends on.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.errors import ModelError
from dexter.files import (
    atomic_folder,
    flush,
    remove_folder,
    remove_leftovers,
    temporary_beside,
    verify_manifest,
    write_json,
)
from dexter.training.distributed import ProcessGroup
from dexter.training.objective import is_by_label

if TYPE_CHECKING:
    from dexter.training.trainer import Trainer

_PREFIX = "step-"
_KEPT = 2
_SHARED, _VALUES = "state.safetensors", "state.json"
_IDS, _ROWS, _OWN = "ids", "rows:", "own:"
_COUNTERS = ("best", "best_step", "num_worse", "seconds", "epoch_sums")

log = logging.getLogger("dexter")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after some step."""

    step: int
    tensors: Mapping[str, Tensor]
    """Weights, optimiser state: what is the same on all ranks, by dotted name. When loaded, the label rows too."""
    values: Mapping[str, Any]
    """Counters and settings, as JSON can hold them."""
    label_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The labels that this rank holds, ascending."""
    label_rows: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors with one row for each of these labels."""
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
            remove_folder(old)
    return target


def load_checkpoint(
    folder: Path, *, label_ids: NDArray[np.int64] | None = None, processes: ProcessGroup | None = None
) -> Checkpoint | None:
    """The newest checkpoint that is whole; None when there is none at all.

    Args:
        folder: where checkpoints are.
        label_ids: the labels, ascending, whose rows are wanted; all of them if left out.
        processes: the ranks that load it together; the first verifies it and chooses which one.

    Raises `ModelError` when there are checkpoints and every one is damaged.
    """
    processes = processes or ProcessGroup()
    path = _newest_whole(folder) if processes.is_first else None
    step = int(processes.broadcast(torch.tensor([-1 if path is None else int(path.name.removeprefix(_PREFIX))])))
    return None if step < 0 else _read(folder / f"{_PREFIX}{step:09d}", label_ids, processes)


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
    # No rank continues before it is published: the next checkpoint drops older ones.
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


def _read(path: Path, label_ids: NDArray[np.int64] | None, processes: ProcessGroup) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    values = _read_values(path)
    step, num_ranks = int(values.pop("step")), int(values.pop("ranks"))
    try:
        tensors = load_file(path / _SHARED)
        files = [path / _rank_file(rank, num_ranks) for rank in range(num_ranks)]
        own = _read_own(files[processes.rank]) if num_ranks == processes.size else {}
        return Checkpoint(step, {**tensors, **_read_rows(files, label_ids)}, values, own=own)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"{path}: not a checkpoint of this version ({error})") from None


def _read_own(path: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        return {name.removeprefix(_OWN): opened.get_tensor(name) for name in _names(opened) if name.startswith(_OWN)}


def _read_rows(files: list[Path], label_ids: NDArray[np.int64] | None) -> dict[str, Tensor]:
    """Every tensor that has a row per label, with the wanted rows of all files; one file's tensor is read at a time."""
    from safetensors import safe_open

    wanted = _all_label_ids(files) if label_ids is None else label_ids
    found: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    for path in files:
        with safe_open(path, framework="pt") as opened:
            for name in _names(opened):
                if not name.startswith(_ROWS):
                    continue
                targets, sources = _matching(wanted, opened.get_tensor(_IDS).numpy())
                rows, short = opened.get_tensor(name), name.removeprefix(_ROWS)
                target = found.setdefault(short, rows.new_empty(len(wanted), *rows.shape[1:]))
                target[targets] = rows[sources]
                filled[short] = filled.get(short, 0) + len(targets)
    for short, tensor in found.items():
        if filled[short] != len(tensor):
            raise ModelError(f"{files[0].parent}: {short} lacks rows: the checkpoint belongs to other data")
    return found


def _names(opened: Any) -> list[str]:
    return list(opened.keys())


def _all_label_ids(files: list[Path]) -> NDArray[np.int64]:
    from safetensors import safe_open

    parts: list[NDArray[np.int64]] = []
    for path in files:
        with safe_open(path, framework="pt") as opened:
            parts += [opened.get_tensor(name).numpy() for name in _names(opened) if name == _IDS]
    return np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)


def _matching(wanted: NDArray[np.int64], ids: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Positions, in either array, of the ids that both contain; both ascend."""
    _, targets, sources = np.intersect1d(wanted, ids, assume_unique=True, return_indices=True)
    return torch.from_numpy(targets), torch.from_numpy(sources)


def _rank_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    tensors = {_OWN + name: value for name, value in checkpoint.own.items()}
    if checkpoint.label_rows:
        tensors[_IDS] = torch.from_numpy(checkpoint.label_ids)
        tensors |= {_ROWS + name: value for name, value in checkpoint.label_rows.items()}
    return _on_cpu(tensors)


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}


def _rank_file(rank: int, size: int) -> str:
    return f"rank-{rank:05d}-of-{size:05d}.safetensors"


def _newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob(f"{_PREFIX}*") if path.is_dir()), reverse=True)


def take_state(trainer: Trainer) -> Checkpoint:
    """The state of a run after its last step."""
    objective = {f"objective:{name}": value for name, value in trainer.objective.state_dict().items()}
    tensors = {f"encoder:{name}": value for name, value in trainer.encoder.state_dict().items()}
    tensors |= {name: value for name, value in objective.items() if not is_by_label(name)}
    tensors |= {f"optimizer:{name}": value for name, value in trainer.optimizers.state(by_label=False).items()}
    tensors |= {f"sampler:{name}": value for name, value in trainer.sampler.state().items()}
    label_rows = {name: value for name, value in objective.items() if is_by_label(name)}
    label_rows |= {f"optimizer:{name}": value for name, value in trainer.optimizers.state(by_label=True).items()}
    counters = {name: getattr(trainer, name) for name in _COUNTERS}
    if trainer.scaler is not None:
        counters["scaler"] = trainer.scaler.state()
    own = random_state() | ({} if trainer.label_cache is None else trainer.label_cache.state())
    return Checkpoint(trainer.step, tensors, counters, trainer.shard.labels, label_rows, own=own)


def restore_state(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Continue from a checkpoint as if the run had never stopped."""
    sections: dict[str, dict[str, Tensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        section, _, rest = name.partition(":")
        sections.setdefault(section, {})[rest] = tensor
    try:
        trainer.encoder.load_state_dict(sections["encoder"])
        trainer.objective.load_state_dict(sections.get("objective", {}))
    except (KeyError, RuntimeError) as error:
        raise ModelError(f"{trainer.folder}: its checkpoint does not fit the data and settings ({error})") from None
    trainer.optimizers.load_state(sections.get("optimizer", {}))
    trainer.sampler.load_state(sections["sampler"])
    trainer.step = checkpoint.step
    for name in _COUNTERS:
        setattr(trainer, name, checkpoint.values[name])
    if trainer.label_cache is not None:
        trainer.label_cache.load_state(checkpoint.own, trainer.device)
    if trainer.scaler is not None:
        trainer.scaler.load_state(checkpoint.values["scaler"])
    if checkpoint.own:
        restore_random_state(checkpoint.own)
    else:
        # Written by another number of ranks: their random states do not fit ours.
        seed_rank(trainer.config.seed, trainer.processes.rank, step=trainer.step)


def random_state() -> dict[str, Tensor]:
    """The states of the generators that dropout draws from."""
    states = {"random:cpu": torch.get_rng_state()}
    return states | ({"random:cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Restore what `random_state` returned."""
    torch.set_rng_state(states["random:cpu"])
    if "random:cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["random:cuda"])


def seed_rank(seed: int, rank: int, *, step: int = 0) -> None:
    """Seed a rank with a number of its own: equal dropout on all ranks would drop the same features of all queries."""
    torch.manual_seed(int(np.random.SeedSequence((seed, rank, step)).generate_state(1, np.uint64)[0] >> np.uint64(1)))
