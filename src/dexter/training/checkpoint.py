"""Checkpoints of a run: published whole or not at all, verified before use, the previous one kept.

    checkpoints/step-000001200/   state.safetensors (every tensor), state.json (everything else), MANIFEST.json (last)

The newest checkpoint is found by its name; one that is torn or altered is passed over for the one before it.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dexter.errors import ModelError
from dexter.files import atomic_folder, remove_leftovers, verify_manifest, write_json

_PREFIX = "step-"
_KEPT = 2

log = logging.getLogger("dexter")


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after some step."""

    step: int
    tensors: Mapping[str, Tensor]
    """Weights, optimiser state, random states: everything that is an array, by dotted name."""
    values: Mapping[str, Any]
    """Counters and settings, as JSON can hold them."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Publish a checkpoint below `folder` and drop all but the newest two."""
    from safetensors.torch import save_file

    target = folder / f"{_PREFIX}{checkpoint.step:09d}"
    with atomic_folder(target, replace=True) as temporary:
        tensors = {name: value.detach().cpu().contiguous() for name, value in checkpoint.tensors.items()}
        save_file(tensors, temporary / "state.safetensors")
        write_json(temporary / "state.json", {"step": checkpoint.step, **checkpoint.values})
    for old in _newest_first(folder)[_KEPT:]:
        shutil.rmtree(old)
    return target


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; None when there is none at all.

    Raises `ModelError` when there are checkpoints and every one is damaged.
    """
    if not folder.is_dir():
        return None
    remove_leftovers(folder)
    candidates = _newest_first(folder)
    for path in candidates:
        try:
            return _read(path)
        except ModelError as error:
            log.warning("passing over a damaged checkpoint: %s", error)
    if candidates:
        raise ModelError(f"{folder}: none of its {len(candidates)} checkpoints is whole: start again without --resume")
    return None


def _read(path: Path) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    verify_manifest(path)
    try:
        values = json.loads((path / "state.json").read_text(encoding="utf-8"))
        tensors = load_file(path / "state.safetensors")
        return Checkpoint(int(values.pop("step")), tensors, values)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"{path}: not a checkpoint of this version ({error})") from None


def _newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob(f"{_PREFIX}*") if path.is_dir()), reverse=True)
