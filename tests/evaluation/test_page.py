"""The plot and the page: written, self-contained, escaped."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

import numpy as np
import pytest

from dexter.errors import DataError, UsageError
from dexter.evaluation.baselines import popularity
from dexter.evaluation.page import ExampleQuery, collect_examples, render_page, save_page
from dexter.evaluation.plots import chart_groups, save_comparison_plot
from dexter.evaluation.report import score_report

HOSTILE = '<script>alert("x")</script>" onload=\'y\' $a_b$ \udcff'


@pytest.fixture(scope="module")
def reports(tiny_dataset):
    ids = popularity(tiny_dataset, 5).ids
    make = lambda top: score_report(top, tiny_dataset.test, tiny_dataset.train.relevance, num_resamples=20)  # noqa: E731
    return {HOSTILE: make(ids), "_second": make(ids[:, ::-1])}


class Checker(HTMLParser):
    """Collects tags and attributes, and whether elements are closed in the order they were opened."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.open, self.balanced = set(), [], [], True

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        self.balanced &= bool(self.open) and self.open.pop() == tag


def test_the_page_is_whole_self_contained_and_escaped(reports, tiny_dataset, tmp_path):
    examples = [ExampleQuery(text=HOSTILE + "long " * 200, predicted=[(HOSTILE, True), ("b", False)], missed=[HOSTILE])]
    examples += collect_examples(popularity(tiny_dataset, 5).ids, tiny_dataset, num_examples=3)
    save_page(reports, tmp_path / "page.html", title=HOSTILE, subtitle=HOSTILE, examples=examples)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.balanced
    assert not checker.open
    assert not checker.tags & {"script", "link", "img", "iframe", "b>"}
    assert not any(name.startswith("on") or name in {"src", "href"} for name, _ in checker.attributes)
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text
    assert text.count('<article class="card example">') == 4
    assert "label 0 &lt;b&gt;&amp;amp;" in text


def test_the_page_shows_every_figure_of_the_table(reports):
    text = render_page(reports)
    for report in reports.values():
        assert f"<td>{report.metrics['PSP@5']:.2f}<small>" in text
    assert "Examples" not in text


def test_examples_are_drawn_by_seed_and_mark_hits(tiny_dataset):
    ids = np.tile(np.array([0, 19, -1]), (40, 1))
    examples = collect_examples(ids, tiny_dataset, num_examples=40, k=3)
    assert len(examples) == 40
    assert examples == collect_examples(ids, tiny_dataset, num_examples=40, k=3)
    for example in examples:
        row = tiny_dataset.test.texts.index(example.text)
        relevant = [tiny_dataset.label_texts[label] for label in tiny_dataset.test.relevance[row].indices]
        assert [label for label, _ in example.predicted] == [tiny_dataset.label_texts[0], tiny_dataset.label_texts[19]]
        assert all(hit == (label in relevant) for label, hit in example.predicted)
        assert sorted(example.missed + [label for label, hit in example.predicted if hit]) == sorted(relevant)
    with pytest.raises(DataError, match="no test split"):
        collect_examples(ids, dataclasses.replace(tiny_dataset, test=None))


def test_the_plot_is_a_png(reports, tmp_path):
    pytest.importorskip("matplotlib")
    save_comparison_plot(reports, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]


def test_charts_leave_out_what_has_no_value(reports):
    panels = chart_groups(reports)
    assert list(panels["Precision"]) == ["P@1", "P@3", "P@5"]
    assert "unseen" not in panels["Recall by label frequency, R@5"]
    with pytest.raises(UsageError, match="no report"):
        chart_groups({})
