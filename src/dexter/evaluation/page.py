"""Reports as one HTML page: charts, table, examples and how to read them, in a single file that loads nothing else.

Everything that comes from data (names, texts, labels) is escaped, and the page's policy forbids scripts and requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from dexter.data import Dataset
from dexter.errors import DataError
from dexter.evaluation.plots import COLOURS, chart_groups
from dexter.evaluation.reports import Report
from dexter.evaluation.tables import BAND_TITLES, default_columns, format_percent, notes, table_rows
from dexter.files import write_text
from dexter.metrics import checked_top_ids

_TEXT_LIMIT = 400
"""Characters of a query that an example shows."""

_GLOSSARY = {
    "P@k": "Of the first k labels, the share that is right. It is divided by k even when a query has fewer labels.",
    "PSP@k": "The same with rare labels worth more, relative to the best ranking: how well the tail is found.",
    "nDCG@k": "Right labels near the top are worth more; 100 is the best order possible.",
    "R@k": "Of a query's labels, the share found among the first k.",
    "Bands": "labels by training queries: frequent more than 100, torso 10 to 100, tail 1 to 9, unseen 0.",
}


@dataclass(frozen=True, kw_only=True)
class Example:
    """One query with its predictions, for people to look at."""

    text: str
    """The query."""
    predicted: Sequence[tuple[str, bool]]
    """Predicted labels, best first, each with whether it is relevant."""
    missed: Sequence[str]
    """Relevant labels that were not predicted."""


def collect_examples(
    top_ids: Any, dataset: Dataset, *, split: str = "test", num_examples: int = 8, k: int = 5, seed: int = 0
) -> list[Example]:
    """Draw queries at random (not by how well they went) and show the first k predictions of each."""
    if split not in dataset.splits:
        raise DataError(f"data set {dataset.name!r} has no split {split!r}: it has {', '.join(dataset.splits)}")
    queries = dataset.splits[split]
    ids = checked_top_ids(top_ids, len(queries))[:, :k]
    rows = np.random.default_rng(seed).permutation(len(queries))[:num_examples]
    examples = []
    for row in rows:
        relevant = queries.relevance[row].indices.tolist()
        predicted = [int(label) for label in ids[row] if 0 <= label < dataset.num_labels]
        examples.append(
            Example(
                text=queries.texts[row],
                predicted=[(dataset.label_texts[label], label in relevant) for label in predicted],
                missed=[dataset.label_texts[label] for label in relevant if label not in predicted],
            )
        )
    return examples


def save_page(
    reports: Mapping[str, Report],
    path: str | Path,
    *,
    title: str = "Evaluation",
    subtitle: str = "",
    columns: Sequence[str] | None = None,
    examples: Sequence[Example] = (),
) -> None:
    """Write the page of several systems' reports on the same queries."""
    write_text(path, render_page(reports, title=title, subtitle=subtitle, columns=columns, examples=examples))


def render_page(
    reports: Mapping[str, Report],
    *,
    title: str = "Evaluation",
    subtitle: str = "",
    columns: Sequence[str] | None = None,
    examples: Sequence[Example] = (),
) -> str:
    """The page as HTML text."""
    columns = default_columns(reports) if columns is None else tuple(columns)
    style = resources.files("dexter.evaluation").joinpath("page.css").read_text(encoding="utf-8")
    sections = [
        f"<header><h1>{_escape(title)}</h1>"
        + (f'<p class="soft">{_escape(subtitle)}</p>' if subtitle else "")
        + "</header>",
        _legend(list(reports)),
        _charts(reports),
        f"<h2>In figures</h2>{_table(reports, columns)}",
        "".join(f'<p class="soft small">{_escape(note)}</p>' for note in notes(reports)),
        _examples(examples),
        _definitions("How to read this", _GLOSSARY),
        _definitions("How it was computed", _settings(reports)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{_escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def _legend(names: Sequence[str]) -> str:
    items = (f'<li><i class="{_colour(place)}"></i>{_escape(name)}</li>' for place, name in enumerate(names))
    return f'<ul class="legend">{"".join(items)}</ul>'


def _charts(reports: Mapping[str, Report]) -> str:
    """One card per panel, with a bar per system in each group."""
    names = list(reports)
    cards = []
    for title, groups in chart_groups(reports).items():
        bars = "".join(
            f'<div class="group"><b>{_escape(group)}</b>'
            + "".join(_bar(names[place], value, place) for place, value in enumerate(values))
            + "</div>"
            for group, values in groups.items()
        )
        cards.append(f'<section class="card"><h3>{_escape(title)}</h3>{bars}</section>')
    return f'<div class="panels">{"".join(cards)}</div>'


def _bar(name: str, value: float, place: int) -> str:
    width = min(max(value, 0.0), 100.0) if np.isfinite(value) else 0.0
    return (
        f'<div class="bar" title="{_escape(name)}"><span class="track">'
        f'<span class="fill {_colour(place)}" style="width:{width:.2f}%"></span></span>'
        f"<span>{format_percent(value)}</span></div>"
    )


def _table(reports: Mapping[str, Report], columns: Sequence[str]) -> str:
    """The table of `render_table`, with the intervals below the overall values."""
    head = "".join(f'<th scope="col">{_escape(name)}</th>' for name in ("", "queries", *columns))
    body = []
    for name, band, num_queries, values in table_rows(reports, columns):
        intervals = reports[name].intervals if band is None else {}
        cells = [f"<td>{num_queries:,}</td>"]
        for column, value in zip(columns, values, strict=True):
            interval = intervals.get(column)
            bounds = "" if interval is None else f"<small>{interval.low:.1f}–{interval.high:.1f}</small>"
            cells.append(f"<td>{format_percent(value)}{bounds}</td>")
        row_title = name if band is None else BAND_TITLES[band]
        kind = "system" if band is None else "band"
        body.append(f'<tr class="{kind}"><th scope="row">{_escape(row_title)}</th>{"".join(cells)}</tr>')
    return (
        '<div class="card scroll" tabindex="0" role="region" aria-label="Metrics">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _examples(examples: Sequence[Example]) -> str:
    if not examples:
        return ""
    cards = []
    for example in examples:
        text = example.text if len(example.text) <= _TEXT_LIMIT else example.text[:_TEXT_LIMIT].rstrip() + " …"
        chips = [
            f'<li class="{"hit" if relevant else "other"}">{"✓ " if relevant else ""}{_escape(label)}</li>'
            for label, relevant in example.predicted
        ]
        chips += [f'<li class="missed">missed: {_escape(label)}</li>' for label in example.missed]
        cards.append(
            f'<article class="card example"><p>{_escape(text)}</p><ul class="chips">{"".join(chips)}</ul></article>'
        )
    return f'<h2>Examples, drawn at random</h2><div class="examples">{"".join(cards)}</div>'


def _settings(reports: Mapping[str, Report]) -> dict[str, str]:
    """The settings of the first report in words; reports on one page share them."""
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


def _definitions(title: str, entries: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{_escape(term)}</dt><dd>{_escape(text)}</dd>" for term, text in entries.items())
    return f'<h2>{_escape(title)}</h2><dl class="card">{rows}</dl>'


def _colour(place: int) -> str:
    """The style class of a system's colour."""
    return f"s{place % len(COLOURS)}"


def _escape(text: str) -> str:
    """Text that is safe in an element or a quoted attribute; lone surrogates, which no file can hold, are replaced."""
    return escape(text.encode("utf-8", "replace").decode("utf-8"), quote=True)
