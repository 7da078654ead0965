"""Reports as one HTML page: charts, table, examples and definitions, in a single file that loads nothing else.

The page is a Jinja template (`page.html`) with the style sheet (`page.css`) inside. Everything that comes from data
(names, texts, labels) is escaped, and the page's policy forbids scripts and requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from dexter.data import Dataset
from dexter.errors import require
from dexter.evaluation.plots import COLOURS, chart_groups
from dexter.evaluation.report import Report, test_split
from dexter.evaluation.tables import DECILES_NOTE, default_columns, format_percent, notes, table_rows
from dexter.files import write_text
from dexter.metrics import checked_top_ids

_TEXT_LIMIT = 400
"""Characters of a query that an example shows."""

_GLOSSARY = {
    "P@k": "Of the first k labels, the share that is right. It is divided by k even when a query has fewer labels.",
    "PSP@k": "Precision in which rare labels count more, relative to the best ranking: how well the tail is found.",
    "nDCG@k": "Right labels near the top count more; 100 is the best order possible.",
    "R@k": "Of a query's labels, the share found among the first k.",
    "Bands": "Labels by training queries: frequent more than 100, torso 10 to 100, tail 1 to 9, unseen 0.",
}


@dataclass(frozen=True, kw_only=True)
class ExampleQuery:
    """A query with its predictions, for people to look at."""

    text: str
    predicted: Sequence[tuple[str, bool]]
    """Texts of the predicted labels, best first, each with whether it is relevant."""
    missed: Sequence[str]
    """Texts of the relevant labels that were not predicted."""


def collect_examples(top_ids: Any, dataset: Dataset, *, num_examples: int = 8, k: int = 5) -> list[ExampleQuery]:
    """Draw test queries at random, not by how well they went, with the first k predictions of each."""
    queries = test_split(dataset)
    ids = checked_top_ids(top_ids, len(queries))[:, :k]
    rows = np.random.default_rng(0).permutation(len(queries))[:num_examples]
    examples = []
    for row in rows:
        relevant = queries.relevance[row].indices.tolist()
        predicted = [int(label) for label in ids[row] if 0 <= label < dataset.num_labels]
        examples.append(
            ExampleQuery(
                text=queries.texts[row],
                predicted=[(dataset.label_texts[label], label in relevant) for label in predicted],
                missed=[dataset.label_texts[label] for label in relevant if label not in predicted],
            )
        )
    return examples


def save_page(reports: Mapping[str, Report], path: str | Path, **settings: Any) -> None:
    """Write the page of several systems' reports on the same queries; `settings` are those of `render_page`."""
    write_text(path, render_page(reports, **settings))


def render_page(
    reports: Mapping[str, Report],
    *,
    title: str = "Evaluation",
    subtitle: str = "",
    columns: Sequence[str] | None = None,
    examples: Sequence[ExampleQuery] = (),
) -> str:
    """Return the page as HTML text.

    Args:
        reports: one report per system, all on the same queries.
        title: heading of the page.
        subtitle: a line below the heading.
        columns: metrics of the table; P, PSP, nDCG and R if left out.
        examples: queries to show below the table.
    """
    columns = default_columns(reports) if columns is None else tuple(columns)
    jinja2 = require("jinja2", extra="data", purpose="the page of a report")
    files = resources.files("dexter.evaluation")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(percent=format_percent, excerpt=_excerpt, bar_width=_bar_width)
    template = environment.from_string(files.joinpath("page.html").read_text(encoding="utf-8"))
    page: str = template.render(
        title=title,
        subtitle=subtitle,
        style=files.joinpath("page.css").read_text(encoding="utf-8"),
        names=list(reports),
        num_colours=len(COLOURS),
        panels=chart_groups(reports, deciles=True),
        columns=columns,
        tables={"In figures": table_rows(reports, columns), "By decile": table_rows(reports, columns, deciles=True)},
        intervals={name: report.intervals for name, report in reports.items()},
        notes=[*notes(reports), DECILES_NOTE],
        examples=examples,
        definitions={"How to read this": _GLOSSARY, "How it was computed": _describe_settings(reports)},
    )
    # Lone surrogates, which no file can hold, are replaced.
    return page.encode("utf-8", "replace").decode("utf-8")


def _describe_settings(reports: Mapping[str, Report]) -> dict[str, str]:
    """Return the settings of the first report in words; reports on one page share them."""
    report = next(iter(reports.values()))
    propensity, resampling = report.settings["propensity"], report.settings["intervals"]
    settings = {
        "Labels": f"{report.settings['num_labels']:,}",
        "Propensity": f"a = {propensity['a']}, b = {propensity['b']}, {propensity['num_train']:,} training queries",
    }
    if report.settings["num_filter_pairs"]:
        settings["Filter pairs"] = f"{report.settings['num_filter_pairs']:,}, removed from rankings before scoring"
    if report.intervals:
        settings["Intervals"] = (
            f"{resampling['confidence']:.0%}, from {resampling['num_resamples']:,} resamples of the queries, "
            f"seed {resampling['seed']}"
        )
    return settings


def _excerpt(text: str) -> str:
    return text if len(text) <= _TEXT_LIMIT else text[:_TEXT_LIMIT].rstrip() + " …"


def _bar_width(value: float) -> str:
    """Return the width of a bar as a CSS percentage, 0 where the value is not defined."""
    return f"{min(max(value, 0.0), 100.0) if np.isfinite(value) else 0.0:.2f}%"
