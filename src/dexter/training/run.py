"""The run folder: how it is opened, which data and queries it belongs to, and how its end is recorded.

run/   config.toml      every setting, as resolved
       data.sha256      which training data it belongs to
       metrics.jsonl    one record per logged step, epoch and validation
       checkpoints/     the newest two states; removed when the run has finished, unless they are to be kept
       model/           the best model on validation (see `dexter.model.model`)
       run.json         its best figures, written when the run has finished
       launch           which torchrun started it, if one did: after a restart it is resumed
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, identity, vstack

from dexter.config import MAX_VALIDATION_QUERIES, Config, config_to_toml, load_config
from dexter.data import Dataset, Split
from dexter.errors import ModelError, UsageError
from dexter.files import remove_leftovers, write_json, write_text
from dexter.training.presets import SCALED_SETTINGS, check_device, resolve_presets

_CONFIG, _DATA, _END, _LAUNCH = "config.toml", "data.sha256", "run.json", "launch"


@dataclass(frozen=True)
class Run:
    """A finished run."""

    path: Path
    config: Config
    best: dict[str, float]
    """Validation metrics of the published model; empty without a validation split."""
    step: int
    """The step after which that model was taken."""
    seconds: float
    """Time spent, over all resumes."""


def open_run(
    folder: Path,
    dataset: Dataset,
    recipe: str | Path,
    overrides: Mapping[str, Any],
    *,
    resume: bool,
    launch: str = "",
    num_processes: int = 1,
) -> Config:
    """Make a new run folder, or read the settings of the one to resume.

    `launch` names the launcher that started this process, if there is one (see `was_started_by`). A resumed run keeps
    the batch size and learning rates that were scaled by the number of processes when it started.
    """
    path = folder / _CONFIG
    if resume and path.exists():
        remove_leftovers(folder)
        saved = load_config(path)
        check_data(folder, dataset)
        check_device(saved.train.device)
        changed = {key for key, value in overrides.items() if _setting(saved, key) != value}
        if changed and load_config(recipe, overrides).train.scale_with_processes:
            changed -= set(SCALED_SETTINGS)
        if changed:
            raise UsageError(f"a resumed run keeps its settings; {', '.join(sorted(changed))} differ from {path}")
        return saved
    if folder.exists() and any(folder.iterdir()) and not resume:
        raise UsageError(f"{folder} is not empty: choose another --out, or continue that run with --resume")
    config = resolve_presets(load_config(recipe, overrides), dataset, num_processes=num_processes)
    write_text(folder / _DATA, _identity(dataset) + "\n")
    if launch:
        write_text(folder / _LAUNCH, launch + "\n")
    write_text(path, config_to_toml(config))
    return config


def discard_run(folder: Path) -> None:
    """Remove what `open_run` wrote for a run that took no step, and the folder if nothing else is in it."""
    for name in (_CONFIG, _DATA, _LAUNCH):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def was_started_by(folder: Path, launch: str) -> bool:
    """Whether a run was started by this launcher: a restarted process resumes its own run, never another one."""
    path = folder / _LAUNCH
    return bool(launch) and path.exists() and path.read_text(encoding="utf-8").strip() == launch


def read_config(folder: Path) -> Config:
    """The settings of a run folder."""
    return load_config(folder / _CONFIG)


def check_data(folder: Path, dataset: Dataset) -> None:
    """Raise a UsageError unless the run was started on these training data."""
    if (folder / _DATA).read_text(encoding="utf-8").strip() != _identity(dataset):
        fields = f" read as {','.join(dataset.text_fields)}" if dataset.text_fields else ""
        raise UsageError(f"{folder} was started on other data than {dataset.name}{fields}: give it the same data")


def make_splits(dataset: Dataset, config: Config) -> tuple[Split, Split | None]:
    """The queries to train on and those to validate on; the same ones every time."""
    train, validation = dataset.train, None
    if config.validation.fraction:
        train, validation = dataset.carve_validation(
            config.validation.fraction, seed=config.seed, maximum=MAX_VALIDATION_QUERIES
        )
    return (_with_label_queries(train, dataset) if config.batch.label_queries else train), validation


def _with_label_queries(split: Split, dataset: Dataset) -> Split:
    """The split with one more query per label: its text, relevant to itself."""
    ones = identity(dataset.num_labels, dtype=np.float32, format="csr")
    return Split(
        [*split.texts, *dataset.label_texts],
        [*split.uids, *(f"label:{label_id}" for label_id in dataset.label_ids)],
        vstack([split.relevance, ones]).tocsr(),
        None if split.filtered is None else vstack([split.filtered, csr_matrix(ones.shape)]).tocsr(),
    )


def _setting(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _identity(dataset: Dataset) -> str:
    """A hash of the training texts, labels and pairs."""
    digest = hashlib.sha256()
    for texts in (dataset.label_ids, dataset.label_texts, dataset.train.uids, dataset.train.texts):
        for text in texts:
            digest.update(text.encode("utf-8", "surrogatepass") + b"\x00")
    for array in (dataset.train.relevance.indptr, dataset.train.relevance.indices, dataset.train.relevance.data):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def record_end(folder: Path, *, best: Mapping[str, float], best_step: int, seconds: float, **more: float) -> None:
    """Mark the run as finished."""
    write_json(folder / _END, {"best": dict(best), "best_step": best_step, "seconds": seconds, **more})


def is_finished(folder: Path) -> bool:
    """Whether the run has finished."""
    return (folder / _END).exists()


def describe_missing(folder: Path) -> str:
    """Say why a folder is no finished run, and what to do."""
    if not folder.is_dir():
        return f"{folder}: no such run folder: train one with `dexter train DATA --out {folder}`"
    if (folder / _CONFIG).exists():
        return f"{folder}: the run is not finished: continue it with `dexter train DATA --out {folder} --resume`"
    return f"{folder}: not a run folder: give one that `dexter train DATA --out FOLDER` made"


def read_run(folder: Path) -> Run:
    """Read a finished run."""
    if not is_finished(folder):
        raise ModelError(describe_missing(folder))
    ended = json.loads((folder / _END).read_text(encoding="utf-8"))
    return Run(folder, load_config(folder / _CONFIG), ended["best"], ended["best_step"], ended["seconds"])
