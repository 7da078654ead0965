"""Labels, map, training and batch as the server renders them, and the parts that they are made of."""

import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter import Predictor
from dexter.evaluation.records import Miss, find_misses, read_misses, write_misses
from dexter.evaluation.runs import evaluate_run
from dexter.serving.page.label_map import map_labels, principal_axes
from dexter.serving.page.labels import read_missed_texts, read_tables
from dexter.serving.page.training import TrainingProgress, make_charts, read_records, thin
from dexter.serving.page.view import HERE, duration
from dexter.types import BANDS


@pytest.fixture(scope="module")
def evaluated(trained, world, tmp_path_factory):
    """A run folder with a result record."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    shutil.copytree(trained, folder)
    evaluate_run(folder, world)
    return folder


@pytest.fixture
def site(connect, evaluated):
    return connect({"world": evaluated}, keep_edits=False)


def test_every_page_is_there_and_has_no_inline_code(site):
    for path in ("/", "/labels", "/map", "/training", "/batch"):
        page = site.get(path).text
        assert page.count('aria-current="page"') == 1 and "<main" in page and 'lang="en"' in page
        assert not re.search(r"<script(?![^>]* src=)|<style| style=| on\w+=", page)
        for address in re.findall(r'(?:src|href)="(static/[^"]+)"', page):
            assert site.get(f"/{address}").status_code == 200


def test_every_band_has_its_colour(site):
    style = site.get("/static/page.css").text
    assert all(f".{band} {{ color: var(--{band}); }}" in style and f"--{band}: #" in style for band in BANDS)


def test_labels_are_found_by_text_and_band(site, world):
    page = site.get("/labels", params={"q": "river"}).text
    expected = [text for text in world.label_texts if "river" in text]
    found = re.findall(r'<a class="name"[^>]* data-key="label [^>]*>(.*?)</a>', page)
    assert sorted(found) == sorted(expected)
    assert "0 labels" in site.get("/labels", params={"band": "frequent"}).text
    assert site.get("/labels", params={"band": "<b>"}).status_code == 422


def test_a_problem_of_a_page_is_a_page(site):
    for path in ("/labels?label=<b>nobody</b>", "/labels?start=-1", "/map?model=nobody", "/labels?band=<i>"):
        answer = site.get(path)
        assert answer.status_code in (404, 422) and answer.headers["content-type"].startswith("text/html")
        assert 'role="alert"' in answer.text and "nobody" not in answer.text and "<i>" not in answer.text


def test_bands_have_their_figures(site, evaluated):
    [table] = read_tables(evaluated)
    assert table.rows[0][0] == "all" and table.metrics
    page = site.get("/labels").text
    assert f"<td>{table.rows[0][1]['P@1']:.1f}</td>" in page


def test_a_label_shows_what_missed_it(connect, evaluated, world):
    text = '<img src=x onerror="alert(1)">'
    write_misses(evaluated / "results" / "other.misses.jsonl", [Miss("L0", text, ["L1", "gone"])])
    page = connect({"world": evaluated}, keep_edits=False).get("/labels", params={"label": "L0"}).text
    assert "&lt;img" in page and "<img" not in page and world.label_texts[1] in page
    assert [miss.text for miss in read_missed_texts(evaluated, "L0")][-1] == text


def test_misses_are_labels_beyond_the_first_places(tmp_path):
    relevance = csr_matrix(np.array([[1, 1, 0], [0, 0, 1], [1, 0, 0]]))
    found = list(find_misses(np.array([[0, 2], [1, -1], [0, 1]]), ["a", "b", "c"], relevance, ["x", "y", "z"]))
    assert found == [Miss("y", "a", ["x", "z"]), Miss("z", "b", ["y"])]
    path = tmp_path / "misses.jsonl"
    write_misses(path, found)
    path.write_text(path.read_text() + "{\n[]\n")
    assert list(read_misses(path)) == found


def test_the_map_lies_along_the_largest_variance():
    vectors = np.random.default_rng(0).normal(size=(500, 5)) * np.array([0.1, 5.0, 0.1, 2.0, 0.1])
    _, axes, explained = principal_axes(vectors)
    assert axes[1, 0] > 0.99 and abs(axes[3, 1]) > 0.99 and explained > 0.98


def test_a_map_is_bounded_and_repeats(trained):
    predictor = Predictor.load(trained)
    sampled = map_labels(predictor, max_points=10)
    assert len(sampled.points()) == 10 and len(sampled.labels.ids) == 37
    assert sampled.points() == map_labels(predictor, max_points=10).points()
    assert all(0 <= place <= 1 for point in sampled.points() for place in (point.x, point.y))
    left_out = next(row for row in range(37) if row not in sampled.drawn)
    found = sampled.points([left_out, sampled.drawn[0]])
    assert len(found) == 11 and [point.id for point in found if point.found] == [point.id for point in found[-2:]]


def test_the_map_shows_every_label(site, world):
    page = site.get("/map").text
    assert page.count("<circle") == world.num_labels and f"<title>{world.label_texts[0]}</title>" in page
    expected = sum("river" in text for text in world.label_texts)
    assert site.get("/map", params={"q": "river"}).text.count(" hit") == expected > 0


def test_curves_of_a_run_that_is_going_and_of_one_that_ended(connect, trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    client = connect({"world": folder}, keep_edits=False)
    page = client.get("/training").text
    assert "Positives in the pool per query" in page and "Labels in the pool" in page and "epoch mean" in page
    assert page.count("<polyline") >= 7 and "Finished after" in page and "data-live-run" not in page
    (folder / "run.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 98_765, "kind": "train", "epoch": 9.0, "loss": 0.5}) + '\n{"step": 98')
    page = client.get("/training").text
    assert "step 98,765" in page and "data-live-run" in page and "of 5" in page


def test_time_left_follows_from_the_share_that_is_done():
    assert TrainingProgress(epoch=1.0, epochs=4.0, seconds=60.0).seconds_left == pytest.approx(180.0)
    assert TrainingProgress(epoch=0.0, epochs=4.0, seconds=1.0).seconds_left is None and TrainingProgress().share == 0.0
    assert [duration(seconds) for seconds in (5.4, 61.0, 7_260.0)] == ["5 s", "1 min 1 s", "2 h 1 min"]


def test_curves_skip_what_is_not_a_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [{"kind": "train", "step": step, "loss": loss} for step, loss in enumerate([3.0, None, "x", 1.0], 1)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + "[1]\nnot json\n")
    [chart] = make_charts(read_records(path))
    [curve] = chart.curves
    assert curve.points == [(1, 3.0), (4, 1.0)] and chart.svg_points(curve) == "25.00,0.00 100.00,40.00"
    assert read_records(tmp_path / "nothing") == [] and make_charts([]) == []


def test_long_curves_are_thinned_and_keep_their_end():
    points = [(float(step), 0.0) for step in range(10_001)]
    assert len(thin(points, 300)) <= 300 and thin(points, 300)[-1] == points[-1] and thin(points[:3]) == points[:3]


def test_a_run_without_a_model_shows_its_curves(connect, trained, tmp_path):
    for name in ("config.toml", "metrics.jsonl"):
        shutil.copy(trained / name, tmp_path / name)
    client = connect({"young": tmp_path})
    for path in ("/", "/labels", "/map"):
        answer = client.get(path)
        assert answer.status_code == 503 and "no model yet" in answer.text
    assert "data-live-run" in client.get("/training").text


def test_batch_states_its_limits(site):
    page = site.get("/batch").text
    assert 'data-max-inputs="32"' in page and "20,000 characters" in page


NUMBERS = ["text", None, [], {}, "NaN", float("nan"), float("inf"), -1e400, 10**400, True, -1, 0, 1e308]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_hostile_metrics_and_results_are_left_out_of_the_page(connect, trained, tmp_path, value):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    kinds = [{"kind": kind, "step": value, "epoch": value, "seconds": value} for kind in ("train", "validation")]
    values = {"loss": value, "P@1": value, "best": True}
    lines = [json.dumps({**kind, **values}) for kind in kinds] + [json.dumps({"kind": "train", "step": 3, "loss": 1})]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, *reversed(lines), "{", "[]", "7"]))
    results = folder / "results"
    results.mkdir(exist_ok=True)
    figures = {"P@1": value, "P@5": 12.34}
    data = {"name": value, "split": value}
    record = {"metrics": figures, "by_frequency": {"tail": figures}, "data": data, "model": {"head": value}}
    (results / "a.json").write_text(json.dumps(record))
    (results / "b.json").write_text(json.dumps({**record, "metrics": value, "model": value}))
    (results / "c.json").symlink_to(tmp_path / "nowhere")
    (results / "a.misses.jsonl").write_text(json.dumps({"label": "L0", "text": value, "got": [value]}) + "\n{\n")
    os.mkfifo(results / "d.json")
    os.mkfifo(results / "d.misses.jsonl")
    client = connect({"run": folder}, keep_edits=False)
    for path in ("/training", "/labels", "/labels?label=L0"):
        page = client.get(path)
        assert page.status_code == 200, path
    assert "12.3" in page.text


def test_pipes_in_place_of_the_files_of_a_training_do_not_hang_the_page(connect, trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    client = connect({"run": folder}, keep_edits=False)
    for name in ("metrics.jsonl", "config.toml"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    assert client.get("/training").status_code == 200


def test_a_label_is_no_formula_in_the_file_that_is_downloaded(tmp_path):
    if shutil.which("node") is None:
        pytest.skip("needs node to run the script of the page")
    shutil.copy(HERE / "static" / "csv.js", tmp_path / "csv.mjs")
    cells = ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1)", "\t=1", "river", "-0.25", "+3", "1e-7", "a=b"]
    script = (
        "import {harmless} from './csv.mjs'; console.log(JSON.stringify(JSON.parse(process.argv[1]).map(harmless)))"
    )
    command = ["node", "--input-type=module", "-e", script, json.dumps(cells)]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(made.stdout) == [f"'{cell}" for cell in cells[:5]] + cells[5:]
