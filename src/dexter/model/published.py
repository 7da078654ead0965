"""A published model's folder: where it is, and which model it holds."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from dexter.errors import ModelError
from dexter.files import MANIFEST, read_manifest

_OWN_FOLDER = "dexter"


def model_folder(run: str | Path) -> Path:
    """Return the folder of the published model, given it or its run folder."""
    folder = Path(run)
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such run folder: train one with `dexter train DATA --out {folder}`")
    published = folder / "model"
    if not published.is_dir() and (folder / "config.toml").exists():
        raise ModelError(
            f"{folder}: the run has no model yet: let it finish, or continue it with `dexter train --resume`"
        )
    if not any((folder / name).exists() for name in ("model", "dexter")):
        raise ModelError(f"{folder}: not a run folder: give one that `dexter train DATA --out FOLDER` made")
    if published.is_symlink():  # Whoever made the run folder would choose what is changed.
        raise ModelError(f"{published}: a link: give the folder that it leads to instead")
    return published if published.is_dir() else folder


def is_in_training(folder: Path) -> bool:
    """Return whether a published model belongs to a run that may still replace it."""
    run = folder.resolve().parent
    return (run / "config.toml").exists() and not (run / "run.json").exists()


def fingerprint(folder: Path) -> str:
    """Return a short hash that changes with any file of a published model; label changes do not alter it."""
    try:
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise ModelError(f"{folder / MANIFEST}: cannot be read ({error.strerror}): is the folder complete?") from None


def encoder_fingerprint(folder: Path) -> str:
    """Return a short hash of what turns a text into a vector: the files of the encoder and the heads."""
    files = read_manifest(folder)
    heads = f"{_OWN_FOLDER}/heads.safetensors"
    kept = {
        name: digest for name, (_, digest) in files.items() if name == heads or not name.startswith(f"{_OWN_FOLDER}/")
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]
