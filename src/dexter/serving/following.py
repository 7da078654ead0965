"""Keep up with a run folder: its first model, another model or index in its place, label edits of other processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dexter.errors import DexterError, ModelError
from dexter.model.store import fingerprint, model_folder
from dexter.predict.indexing import index_folder
from dexter.predict.predictor import Predictor
from dexter.serving.runs import Run

log = logging.getLogger("dexter")


class _Published(NamedTuple):
    """What a run folder holds: another one of either needs another predictor."""

    model_hash: str
    index_hash: str | None


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


class Follower:
    """Serves what a run folder holds now: another model or index is loaded whole and then swapped in."""

    def __init__(self, run: Run, folder: Path, load: Callable[[Path], Predictor]) -> None:
        self._run, self._folder, self._load = run, folder, load
        self._served = _published(folder) if run.is_ready else None

    async def follow(self, *, seconds: float) -> None:
        """Look every few seconds, until cancelled. What cannot be read is tried again; a complaint is logged once."""
        complaint = ""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self._run.in_editor(self.look)
                complaint = ""
            except DexterError as error:
                if str(error) != complaint:
                    log.warning("%s", error)
                complaint = str(error)

    def look(self) -> None:
        """Take up what has changed."""
        if not self._run.is_ready and not (self._folder / "model").is_dir():
            return
        published = _published(self._folder)
        if published == self._served:
            self._run.predictor.refresh_labels()
            return
        self._run.predictor = self._load(self._folder)
        self._served = published
        log.info("%s: serving model %s", self._folder, published.model_hash)


def _published(folder: Path) -> _Published:
    model = model_folder(folder)
    index = index_folder(model)
    return _Published(fingerprint(model), fingerprint(index) if index.is_dir() else None)
