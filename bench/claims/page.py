"""Write docs/claims.md and its plots from the records: no figure of the page is typed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from bench.claims.claim import FEWEST_SEEDS, RULE, WITHOUT_CHANCE, Claim, Results, Row, Study
from bench.claims.intervals import Estimate
from bench.claims.plots import save_plots
from bench.claims.runner import find_missing
from bench.claims.samples import SAMPLES
from bench.claims.trial import RECORDS, read_all

from dexter.files import write_text

DOCS = Path(__file__).parents[2] / "docs"
TITLES = {"pool_labels": "labels in the pool", "positives_per_query": "positives/query", "MB": "peak MB"}
WHOLE = ("CPU s", "MB", "pool_labels", "CPU ms/step", "million parameters", "PFLOP/epoch")
"""Columns that are shown without an interval."""
HEAD = """# The papers' claims, tried

<!-- Written by `python -m bench.claims page` from bench/claims/records: change the claims' modules, not this page. -->

What the papers of DEXML and UniDEC claim, tried on data that can be looked at: small fixed samples, the static encoder
of this project with a short schedule (and MiniLM where a table says so), several seeds. This tells whether a claim
carries over to such data and encoders; it says nothing against the papers' own tables, which were made with DistilBERT,
100 to 150 epochs and GPUs. Repeat a claim with `python -m bench.claims run NUMBER`.
"""


def write_page(claims: Sequence[Claim], *, records: Path = RECORDS, docs: Path = DOCS) -> None:
    """Write the page, and the plots that it shows."""
    results = [Results(claim, records) for claim in claims]
    plots = save_plots(results, docs / "plots")
    parts = [
        HEAD,
        _overview(results),
        _rules(records),
        *(_section(one, plots.get(one.claim.number)) for one in results),
    ]
    write_text(docs / "claims.md", "\n".join(parts))


def _overview(results: Sequence[Results]) -> str:
    lines = ["| | claim | verdict | yes / no / open | trials run |", "|---|---|---|---|---|"]
    for one in results:
        found = [outcome for _, _, outcome, _ in one.outcomes()]
        counts = " / ".join(str(found.count(name)) for name in ("yes", "no", "open"))
        link = f"[{one.claim.title}](#{_anchor(one.claim)})"
        num_run, num_trials = one.progress()
        lines.append(f"| {one.claim.number} | {link} | {one.verdict()} | {counts} | {num_run} of {num_trials} |")
    return "\n".join(lines) + "\n"


def _rules(records: Path) -> str:
    every = read_all(records)
    hours = sum(record.cpu_seconds for record in every) / 3600
    samples = sorted({record.trial.sample for record in every} & SAMPLES.keys())
    drawn = "\n".join(f"- `{name}`: {SAMPLES[name].describe()}." for name in samples)
    return f"""## How to read this
{RULE}

The intervals cover what seeds change (order, draws, dropout), not the choice of the sample and of the test queries.
CPU s is the processor time of training on one thread of a shared machine, peak MB the largest resident size of the
process, libraries and data included. Heads are scored as they were trained, without neighbours and without a choice on
validation.
{len(every):,} trials, {hours:.1f} processor hours.

Samples, drawn once (seed 0), with the labels that their training queries have:
{drawn}
"""


def _section(results: Results, plot: str | None) -> str:
    (num_run, num_trials), claim = results.progress(), results.claim
    so_far = "" if num_run == num_trials else " so far"
    parts = [
        f"## {claim.number}. {claim.title}",
        f"**Claim.** {claim.text}\n",
        f"*Source:* {claim.source}. *Setting:* {claim.setting}\n",
        f"**Verdict{so_far}: {results.verdict()}.** {_explanation(results)}\n" + _missing(results),
        *([f"![{claim.title}](plots/{plot})\n"] if plot else []),
        *(_table(results, study) for study in claim.studies if _has_records(results, study)),
        _comparisons(results),
    ]
    return "\n".join(parts)


def _explanation(results: Results) -> str:
    """Say what we make of a claim, as far as it has been run, and which trials these words are about."""
    (num_run, num_trials), claim = results.progress(), results.claim
    sentences = []
    if not results.outcomes():
        most = max(study.seeds for study in claim.studies)
        one_or_more = "one seed" if most == 1 else f"{most} seeds"
        sentences.append(
            f"A comparison needs {FEWEST_SEEDS} seeds of both its rows, and "
            + (f"these tables have {one_or_more}: " if most < FEWEST_SEEDS else "none has them yet: ")
            + "nothing is judged."
        )
    if claim.why and num_run:
        sentences.append(claim.why)
        if claim.seen != num_run:
            sentences.append(f"(Written when {claim.seen} of now {num_trials} trials had been run.)")
    return " ".join(sentences)


def _missing(results: Results) -> str:
    """Say how many trials have not been run, if any."""
    trials = {trial.identity: trial for trial in results.claim.trials()}.values()
    missing = find_missing(trials, results.folder)
    if not missing:
        return ""
    encoders = ", ".join(sorted({trial.encoder for trial in missing}))
    return (
        f"\nNot run yet: {len(missing)} of {len(trials)} trials ({encoders}); "
        f"`python -m bench.claims run {results.claim.number}` runs them.\n"
    )


def _has_records(results: Results, study: Study) -> bool:
    return any(results.records(study, row) for row in results.claim.rows_of(study))


def _table(results: Results, study: Study) -> str:
    claim = results.claim
    rows = [row for row in claim.rows_of(study) if results.records(study, row)]
    columns = [name for name in claim.columns if any(results.mean(study, row, name) for row in rows)]
    published = claim.published if any(row.published for row in rows) else ""
    titles = ["", *(TITLES.get(name, name) for name in columns), *([f"paper: {published}"] if published else [])]
    lines = [_caption(results, study, rows), "", _line(titles), "|" + "---|" * len(titles)]
    for row in rows:
        cells = [_cell(name, results.mean(study, row, name)) for name in columns]
        lines.append(_line([row.name, *cells, *([row.published] if published else [])]))
    return "\n".join(lines) + "\n"


def _caption(results: Results, study: Study, rows: Sequence[Row]) -> str:
    records = [record for row in rows for record in results.records(study, row).values()]
    counts = sorted({len(results.records(study, row)) for row in rows})
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    facts = records[0].facts
    labels = f", {facts['labels']:,} labels" if "labels" in facts else ""
    if all(row.measure in WITHOUT_CHANCE for row in rows):
        return f"From {study.sample}:"
    unjudged = f" (too few to judge: {FEWEST_SEEDS} are needed)" if study.seeds < FEWEST_SEEDS else ""
    return f"`{study.sample}`{labels}, {study.encoder} encoder, {seeds} seed{'s' if seeds != '1' else ''}{unjudged}:"


def _cell(name: str, estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if name in WHOLE:
        return f"{estimate.mean:,.0f}" if estimate.mean >= 10 else f"{estimate.mean:.2g}"
    return f"{estimate.mean:.2f}" + (f" ± {estimate.half:.2f}" if 0.005 < estimate.half < math.inf else "")


def _comparisons(results: Results) -> str:
    lines = ["| comparison | data | difference | |", "|---|---|---|---|"]
    for comparison, study, outcome, found in results.outcomes():
        assert found is not None
        shape = (
            "{:.2f} [{:.2f}, {:.2f}]"
            if comparison.ratio or comparison.against_nothing
            else "{:+.2f} [{:+.2f}, {:+.2f}]"
        )
        where = study.sample + ("" if study.encoder == "static" else f", {study.encoder}")
        difference = shape.format(found.mean, found.low, found.high)
        lines.append(_line([comparison.text, where, difference + (" times" if comparison.ratio else ""), outcome]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _anchor(claim: Claim) -> str:
    return "-".join("".join(c for c in f"{claim.number} {claim.title}".lower() if c.isalnum() or c == " ").split())
