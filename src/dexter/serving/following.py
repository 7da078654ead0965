"""Keep up with a run folder: its first model, a model that replaces it, label edits of other processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from dexter.errors import DexterError, ModelError
from dexter.model import fingerprint, model_folder
from dexter.predictor import Predictor
from dexter.serving.runs import Run

log = logging.getLogger("dexter")


def open_folder(folder: Path, load: Callable[[Path], Predictor]) -> Predictor | None:
    """The predictor of a run folder; None where its training has not published a model yet."""
    try:
        model_folder(folder)
    except ModelError:
        if not (folder / "config.toml").exists():
            raise
        log.info("%s: no model yet: waiting for the first", folder)
        return None
    return load(folder)


async def follow(run: Run, folder: Path, load: Callable[[Path], Predictor], *, seconds: float) -> None:
    """Look every few seconds, until cancelled. What cannot be read now is tried again; a complaint is logged once."""
    complaint = ""
    while True:
        await asyncio.sleep(seconds)
        try:
            await run.in_editor(lambda: take_up(run, folder, load))
            complaint = ""
        except DexterError as error:
            if str(error) != complaint:
                log.warning("%s", error)
            complaint = str(error)


def take_up(run: Run, folder: Path, load: Callable[[Path], Predictor]) -> None:
    """Serve what the folder holds now: another model is loaded whole and then swapped in."""
    if run.is_ready and fingerprint(model_folder(folder)) == run.predictor.fingerprint:
        run.predictor.refresh_labels()
    elif run.is_ready or (folder / "model").is_dir():
        run.predictor = load(folder)
        log.info("%s: serving model %s", folder, run.predictor.fingerprint)
