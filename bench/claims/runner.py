"""Run trials that have no record yet, each in a process of its own; stopped at any time, it goes on where it was."""

from __future__ import annotations

import logging
import multiprocessing
import resource
import time
from collections.abc import Iterable
from pathlib import Path

from bench.claims.measures import MEASURES
from bench.claims.samples import load_sample
from bench.claims.trial import RECORDS, Record, Trial, read_record, write_record


def find_missing(trials: Iterable[Trial], folder: Path = RECORDS) -> list[Trial]:
    """Return the trials without a record, in order, each once."""
    by_identity = {trial.identity: trial for trial in trials}
    return [trial for trial in by_identity.values() if read_record(trial, folder) is None]


def run_missing(trials: Iterable[Trial], folder: Path = RECORDS) -> int:
    """Run every trial without a record; return how many failed.

    A trial that fails is reported, leaves no record, and is tried again by the next call. The data are loaded here, so
    that the forked processes share them.
    """
    missing, num_failed = find_missing(trials, folder), 0
    _import_once()
    for number, trial in enumerate(missing, start=1):
        if trial.path(folder).exists():  # Another runner was faster.
            continue
        load_sample(trial.sample)
        started = time.monotonic()
        process = multiprocessing.get_context("fork").Process(target=run_trial, args=(trial, folder))
        process.start()
        process.join()
        num_failed += process.exitcode != 0
        outcome = f"failed ({process.exitcode})" if process.exitcode else f"{time.monotonic() - started:.0f} s"
        where = f"{trial.sample}, {trial.encoder}, seed {trial.seed}"
        print(f"{number}/{len(missing)} {trial.recipe}, {where} {dict(trial.settings)}: {outcome}", flush=True)
    return num_failed


def run_trial(trial: Trial, folder: Path = RECORDS) -> None:
    """Run one trial in this process and write its record."""
    logging.disable(logging.INFO)

    measured = MEASURES[trial.measure](load_sample(trial.sample), trial)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record = Record(
        trial=trial,
        metrics=measured.metrics,
        cpu_seconds=round(measured.cpu_seconds, 2),
        peak_megabytes=round(peak),
        facts=measured.facts,
    )
    write_record(record, folder)


def _import_once() -> None:
    """Import what trials need before forking: torch's compiler alone takes seconds, and its optimisers import it."""
    import dexter.training.trainer  # noqa: F401
