"""The demo on a small made-up data set: everything a newcomer is promised is printed and left behind."""

import re
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from dexter.cli import demo
from tests.conftest import SMALL, make_world

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
LABELS = 120
"""The demo's table has R@100."""


@pytest.fixture
def small(monkeypatch):
    built = []

    def build(name):
        built.append(name)
        return replace(make_world(num_train=300, num_test=30, num_labels=LABELS), propensity=(0.6, 2.6))

    monkeypatch.setattr(demo, "build", build)
    return built


def test_the_demo_prints_a_table_and_writes_a_plot_and_a_page(small, tmp_path, capsys):
    demo.run_demo(tmp_path, overrides={**SMALL, "train.epochs": 1})
    shown = capsys.readouterr().out
    assert "training queries per label" in shown
    for name in (
        "popularity",
        "TF-IDF neighbours",
        "unidec, classifier",
        "unidec, unified",
        "dexter",
        "tail (1-9)",
        "PSP@5",
        "R@100",
    ):
        assert name in shown
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert "TF-IDF neighbours" in page and "a = 0.6, b = 2.6" in page
    assert str(tmp_path / "report.html") in shown and str(tmp_path / "comparison.png") in shown
    before, after = shown.split("The same after adding the label")
    assert "my.spd_solve" not in before
    assert re.search(r"^ *\d+\. +-?\d\.\d+  new  my\.spd_solve: ", after, re.MULTILINE)
    assert f"dexter predict {tmp_path / 'runs' / 'dexter-1'}" in after


def test_a_second_demo_keeps_the_first_and_its_data(small, tmp_path, capsys):
    for _ in range(2):
        demo.run_demo(tmp_path, overrides={**SMALL, "train.epochs": 1})
    assert small == ["pydocs"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "dexter-1",
        "dexter-2",
        "unidec-1",
        "unidec-2",
    ]


def test_baselines_have_places_to_spare_for_filter_pairs(small):
    from dataclasses import replace

    from scipy.sparse import csr_matrix

    world = make_world(num_train=100, num_test=5, num_labels=LABELS)
    filtered = csr_matrix(np.tile(np.arange(LABELS) < 3, (5, 1)).astype(np.float32))
    rankings = demo._baselines(replace(world, test=replace(world.test, filtered=filtered)))
    installed = ["omikuji"] if find_spec("omikuji") else []
    assert list(rankings) == ["popularity", "TF-IDF neighbours", *installed]
    assert {ids.shape for ids in rankings.values()} == {(5, 103)}


@pytest.mark.timeout(900)  # a minute and a half where nothing else runs
@pytest.mark.slow(minutes=3)
def test_the_new_label_is_in_the_list_of_the_real_demo(tmp_path, capsys):
    demo.run_demo(tmp_path)
    shown = capsys.readouterr().out
    places = re.findall(r"^ *(\d+)\. .* new  my\.spd_solve", shown, re.MULTILINE)
    assert [int(place) <= 5 for place in places] == [True]
