# ruff: noqa: F811 - fixtures of another file
"""What the plots of an evaluation show: a line per band, a point per bin, an interval per metric and run."""

from dataclasses import replace

import numpy as np
import pytest
from tests.cli.test_main import data, run  # noqa: F401 - fixtures

from dexter.evaluation import plots
from dexter.evaluation.report import compare, score_report
from dexter.predict.calibration import calibration_error, reliability

figure = pytest.importorskip("matplotlib.figure")


def ranking(world, seed):
    rng = np.random.default_rng(seed)
    return np.array([rng.permutation(world.num_labels)[:20] for _ in range(len(world.test))])


def test_bins_of_reliability_make_the_calibration_error():
    rng = np.random.default_rng(0)
    chances = rng.random(5000)
    hits = rng.random(5000) < chances**2
    bins = reliability(chances, hits)
    assert sum(one["count"] for one in bins) == 5000 and len(bins) == 15
    error = sum(one["count"] * abs(one["claimed"] - one["right"]) for one in bins) / 50
    assert calibration_error(chances, hits) == pytest.approx(error) and error > 10
    assert all(one["right"] < one["claimed"] for one in bins[4:12]), "claimed too much, as made"


def test_values_of_the_dial_at_the_same_point_share_a_caption():
    axes = figure.Figure().subplots()
    same, other = {"P@1": 50.0, "PSP@1": 40.0}, {"P@1": 51.0, "PSP@1": 39.0}
    plots._draw_dial(axes, {0.0: same, 0.2: same, 0.4: same, 1.0: other})
    assert [text.get_text() for text in axes.texts] == ["0 to 0.4", "1"]


def test_an_evaluation_has_a_line_per_band_and_a_point_per_bin(world, tmp_path):
    report = score_report(ranking(world, 0), world.test, world.train.relevance, num_resamples=0)
    report = replace(
        report, reliability=[{"claimed": 0.2, "right": 0.3, "count": 4}, {"claimed": 0.8, "right": 0.7, "count": 9}]
    )
    left, middle = figure.Figure().subplots(1, 2)
    plots._draw_bands(left, report)
    names = [text.get_text() for text in left.get_legend().get_texts()]
    assert names[0] == "all labels" and set(names[1:]) <= {"frequent", "torso", "tail", "unseen"} and len(names) > 1
    assert left.lines[0].get_xdata().tolist() == [report.metrics[f"R@{k}"] for k in (1, 3, 5)]
    plots._draw_reliability(middle, report)
    assert middle.collections[0].get_offsets().tolist() == [[0.2, 0.3], [0.8, 0.7]]
    points = {0.0: report.metrics, 1.0: report.metrics}
    plots.save_evaluation_plot(report, points, tmp_path / "all.png")
    plots.save_evaluation_plot(replace(report, reliability=[]), points, tmp_path / "none.png")
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "none.png").exists()


def test_a_comparison_has_an_interval_per_metric_and_run(world, tmp_path):
    first, *others = (ranking(world, seed) for seed in range(3))
    differences = {
        f"$run_{number}": compare(first, other, world.test, world.train.relevance, num_resamples=50)
        for number, other in enumerate(others)
    }
    plots.save_intervals_plot(differences, tmp_path / "x.png", against="first")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_verbs_draw(run, data, trained, tmp_path):
    import shutil

    other = shutil.copytree(trained, tmp_path / "other")
    assert run("evaluate", trained, data, "--record", tmp_path / "r.json", "--plot", tmp_path / "e.png")[0] == 0
    assert run("compare", trained, other, "--data", data, "--plot", tmp_path / "c.png")[0] == 0
    assert (tmp_path / "e.png").exists() and (tmp_path / "c.png").exists()
