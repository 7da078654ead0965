"""What a claim is: rows to run, studies to run them in, comparisons that decide, and the rule of the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.claims.intervals import Estimate, estimate_difference, estimate_mean
from bench.claims.trial import RECORDS, Record, Trial, read_record

Outcome = Literal["yes", "no", "open", "not run"]
Verdict = Literal["holds", "holds in part", "does not hold here", "cannot be told"]
RULE = """Each comparison of a claim is made in each of its tables: the difference of two rows, paired by seed, with its
95% interval (Student's t over three seeds or more). It is a *yes* if the whole interval is on the side that the claim
says, a *no* if it is on the other side, and *open* otherwise; where a row has fewer seeds it is left out. A claim
**cannot be told** if more than half of its comparisons are open, **holds** if none is a no, **does not hold here** if
none is a yes, and **holds in part** otherwise. A verdict is *so far* while trials are missing."""


FEWEST_SEEDS = 3
"""Seeds that a comparison needs."""
WITHOUT_CHANCE = ("neighbours", "one-vs-all", "plan", "untrained")
"""Measures that draw no random numbers and read no settings of a study: they are run once."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a claim's tables."""

    name: str
    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    measure: str = "recipe"
    head: str = "encoder"
    """Which head's figures are shown."""
    published: str = ""
    """The paper's figures, as text."""
    only: Sequence[str] = ()
    """The samples it is run on; all of the claim's if empty."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One table: a sample, an encoder, and the settings and seeds that all rows share."""

    sample: str
    encoder: str = "static"
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 5
    rows: Sequence[str] = ()
    """Rows that are run here; all if empty."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One row against another: yes if `better - worse` (or their ratio) is above a limit."""

    text: str
    better: str
    worse: str
    metric: str
    at_least: float = 0.0
    ratio: bool = False
    against_nothing: bool = False
    """Compare the row itself with the limit, not a difference of two rows."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of a paper and how it is tried."""

    number: int
    title: str
    text: str
    """The claim in our words."""
    source: str
    setting: str
    columns: Sequence[str]
    published: str = ""
    """What the column of published figures holds."""
    rows: Sequence[Row]
    studies: Sequence[Study]
    comparisons: Sequence[Comparison]
    why: str = ""
    """What we make of the outcome, written by hand after looking at the tables."""
    seen: int = 0
    """Trials of this claim that had been run when `why` was written."""
    plot: Any = None

    def row(self, study: Study, name: str) -> Row:
        """Return a row of a study by its name."""
        return next(row for row in self.rows_of(study) if row.name == name)

    def rows_of(self, study: Study) -> list[Row]:
        """Return the rows of a study's table."""
        named = [row for row in self.rows if not study.rows or row.name in study.rows]
        return [row for row in named if not row.only or study.sample in row.only]

    def trials(self, studies: slice = slice(None), seeds: range = range(99)) -> Iterator[Trial]:
        """Yield the trials of some studies and seeds (all if left out), seed by seed."""
        for seed in seeds[: max(study.seeds for study in self.studies)]:
            for study in self.studies[studies]:
                if seed < study.seeds:
                    yield from (make_trial(row, study, seed) for row in self.rows_of(study))


def make_trial(row: Row, study: Study, seed: int) -> Trial:
    """Return the trial of a row in a study."""
    if row.measure in WITHOUT_CHANCE:
        return Trial(sample=study.sample, recipe=row.recipe, measure=row.measure, settings=row.settings)
    settings = {**study.settings, **row.settings}
    return Trial(
        sample=study.sample,
        recipe=row.recipe,
        measure=row.measure,
        encoder=study.encoder,
        settings=settings,
        seed=seed,
    )


@dataclass(frozen=True)
class Results:
    """The records of a claim."""

    claim: Claim
    folder: Path = RECORDS

    def records(self, study: Study, row: Row) -> dict[int, Record]:
        """Return the records of a row by seed."""
        found = {seed: read_record(make_trial(row, study, seed), self.folder) for seed in range(study.seeds)}
        return {seed: record for seed, record in found.items() if record is not None}

    def values(self, study: Study, row: Row, metric: str) -> dict[int, float]:
        """Return a figure of a row by seed."""
        found = {seed: read_figure(record, row.head, metric) for seed, record in self.records(study, row).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, study: Study, row: Row, metric: str) -> Estimate | None:
        """Return the mean of a figure with its interval."""
        values = self.values(study, row, metric)
        return estimate_mean(list(values.values())) if values else None

    def outcome(self, comparison: Comparison, study: Study) -> tuple[Outcome, Estimate | None]:
        """Decide a comparison in a study."""
        names = {row.name for row in self.claim.rows_of(study)}
        if not {comparison.better, comparison.worse} <= names:
            return "not run", None
        better, worse = (
            self.values(study, self.claim.row(study, name), comparison.metric)
            for name in (comparison.better, comparison.worse)
        )
        seeds = sorted(better.keys() & worse.keys())
        if len(seeds) < FEWEST_SEEDS:
            return "not run", None
        pairs = [(better[seed], 0.0 if comparison.against_nothing else worse[seed]) for seed in seeds]
        found = estimate_difference(pairs, ratio=comparison.ratio)
        if found.low > comparison.at_least:
            return "yes", found
        return ("no" if found.high < comparison.at_least else "open"), found

    def outcomes(self) -> list[tuple[Comparison, Study, Outcome, Estimate | None]]:
        """Decide every comparison in every study that has both rows."""
        found = [
            (comparison, study, *self.outcome(comparison, study))
            for comparison in self.claim.comparisons
            for study in self.claim.studies
        ]
        return [entry for entry in found if entry[2] != "not run"]

    def progress(self) -> tuple[int, int]:
        """Return how many trials have a record, and how many there are."""
        trials = {trial.identity: trial for trial in self.claim.trials()}.values()
        return sum(trial.path(self.folder).exists() for trial in trials), len(trials)

    def verdict(self) -> Verdict:
        """Return the verdict by `RULE`."""
        return judge([outcome for _, _, outcome, _ in self.outcomes()])


def read_figure(record: Record, head: str, metric: str) -> float | None:
    """Return a metric of a head, or the cost or a size of a record by its name; None where there is none."""
    if record.trial.measure == "plan":
        return record.metrics["all"].get(metric)
    if metric == "CPU s":
        return record.cpu_seconds
    if metric == "MB":
        return record.peak_megabytes
    if metric == "CPU ms/step":
        return 1e3 * record.cpu_seconds / record.facts["steps"] if "steps" in record.facts else None
    if metric in record.facts:
        return float(record.facts[metric])
    return record.metrics.get(head, record.metrics.get("all", {})).get(metric)


def judge(outcomes: Sequence[Outcome]) -> Verdict:
    """Apply `RULE` to the outcomes of a claim's comparisons."""
    yes, no, is_open = (outcomes.count(name) for name in ("yes", "no", "open"))
    if 2 * is_open > yes + no + is_open or not outcomes:
        return "cannot be told"
    if not no:
        return "holds"
    return "holds in part" if yes else "does not hold here"
