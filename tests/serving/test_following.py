"""A run folder that changes while it is served: a first model, a new model, labels changed by other processes."""

import shutil
import threading
from contextlib import suppress

import pytest

import dexter
from dexter import Predictor
from dexter.errors import ModelError
from dexter.serving.app import create_app
from tests.conftest import SMALL, eventually, small_disk


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def total(client):
    return client.get("/v1/labels").json()["total"]


def test_edits_are_kept_and_edits_of_others_are_taken_up(connect, run, world):
    client = connect({"run": run}, follow_seconds=0.05)
    assert client.post("/v1/labels", json={"labels": [{"id": "ours", "text": "zither"}]}).json()["version"] == 1
    assert "ours" in Predictor.load(run).labels.ids
    Predictor.load(run, persistent=True).add_labels([("theirs", "zebra")])
    eventually(lambda: total(client) == world.num_labels + 2)
    assert client.get("/v1/labels").json()["version"] == 2
    assert client.delete("/v1/labels", params={"id": "theirs"}).json()["version"] == 3
    assert "theirs" not in Predictor.load(run).labels.ids


def test_edits_can_be_forgotten(connect, run, world):
    client = connect({"run": run}, keep_edits=False)
    assert client.post("/v1/labels", json={"labels": [{"id": "ours", "text": "zither"}]}).status_code == 200
    assert total(client) == world.num_labels + 1
    assert "ours" not in Predictor.load(run).labels.ids


def test_a_run_in_training_is_waited_for_and_its_next_model_is_swapped_in(connect, run, world, tmp_path):
    (run / "model").rename(tmp_path / "model")
    client = connect({"run": run}, follow_seconds=0.05)
    for answer in (
        client.get("/readyz"),
        client.get("/v1/labels"),
        client.post("/v1/predict", json={"inputs": "river"}),
        client.post("/v1/labels", json={"labels": [{"id": "a", "text": "b"}]}),
    ):
        assert answer.status_code == 503 and answer.json()["code"] == "no_model"
    assert client.get("/info").json()["runs"] == [{"name": "run", "ready": False}]
    assert client.get("/metrics").status_code == client.get("/v1/projects").status_code == 200

    (tmp_path / "model").rename(run / "model")
    eventually(lambda: client.get("/readyz").status_code == 200)
    first = client.get("/info").json()["runs"][0]["fingerprint"]
    shutil.rmtree(run)
    dexter.train(world, recipe="dexter", out=run, overrides={**SMALL, "train.epochs": 1})
    eventually(lambda: client.get("/info").json()["runs"][0]["fingerprint"] != first)
    expected = [label.score for label in Predictor.load(run).predict(["river stone"])[0]]

    def scores():
        found = client.post("/v1/predict", json={"inputs": "river stone"}).json()["results"][0]["labels"]
        return [label["score"] for label in found]

    # Training publishes its best model first and tunes it then: the tuned one is another model.
    eventually(lambda: scores() == pytest.approx(expected))


def test_a_new_index_is_swapped_in(connect, run):
    from dexter.predict.run_index import build_run_index

    client = connect({"run": run}, follow_seconds=0.05)
    before = client.post("/v1/predict", json={"inputs": "river stone"}).json()
    served = client.app.state.runs.default
    assert type(served.predictor.index).__name__ == "ExactIndex"
    model = Predictor.load(run).model
    build_run_index(model, run / "model", head=model.default_head, backend="pq")
    eventually(lambda: type(served.predictor.index).__name__ != "ExactIndex")
    after = client.post("/v1/predict", json={"inputs": "river stone"}).json()
    assert [label["id"] for label in after["results"][0]["labels"]] == [
        label["id"] for label in before["results"][0]["labels"]
    ]


def test_a_run_in_training_keeps_its_labels(connect, run):
    (run / "run.json").unlink()
    client = connect({"run": run})
    answer = client.post("/v1/labels", json={"labels": [{"id": "a", "text": "b"}]})
    assert answer.status_code == 409 and "in training" in answer.json()["detail"]


def test_what_is_no_run_is_refused_at_the_start(tmp_path):
    with pytest.raises(ModelError, match="no such run folder"):
        create_app({"run": tmp_path / "nowhere"})


def test_a_damaged_label_file_is_told_and_followed_again_when_repaired(connect, run, world, caplog):
    client = connect({"run": run}, follow_seconds=0.05)
    writer, path = Predictor.load(run, persistent=True), run / "model" / "labels.sqlite"
    writer.add_labels([("a", "river")])
    eventually(lambda: total(client) == world.num_labels + 1)
    assert client.get("/readyz").json() == {"status": "ready", "problems": []}
    whole = path.read_bytes()
    for damaged in (b"not a database" * 1_000, whole[:5_000], b""):
        path.write_bytes(damaged)
        eventually(lambda: client.get("/readyz").json()["status"] == "degraded")
        assert "cannot be taken up" in client.get("/readyz").json()["problems"][0]
        assert client.post("/v1/predict", json={"inputs": "river"}).status_code == 200
    assert "labels.sqlite: damaged" in caplog.text
    path.write_bytes(whole)
    eventually(lambda: client.get("/readyz").json()["status"] == "ready")
    writer.add_labels([("b", "stone")])
    eventually(lambda: total(client) == world.num_labels + 2)


def test_no_error_ends_the_follower(connect, run, world, monkeypatch):
    client = connect({"run": run}, follow_seconds=0.05)
    with monkeypatch.context() as patch:
        patch.setattr(Predictor, "refresh_labels", lambda self: 1 / 0)
        eventually(lambda: client.get("/readyz").json()["status"] == "degraded")
    Predictor.load(run, persistent=True).add_labels([("a", "river")])
    eventually(lambda: total(client) == world.num_labels + 1)


def test_a_service_whose_searches_fail_or_hang_is_not_ready(connect, run, monkeypatch):
    client = connect({"run": run})
    served = client.app.state.runs.default
    assert client.get("/readyz").status_code == 200
    released = threading.Event()
    for broken in (lambda *_, **__: 1 / 0, lambda *_, **__: released.wait(60)):
        served._answered_at = float("-inf")
        with monkeypatch.context() as patch:
            patch.setattr("dexter.serving.runs._SEARCH_SECONDS", 0.2)
            patch.setattr(Predictor, "predict", broken)
            answer = client.get("/readyz")
        assert answer.status_code == 503 and answer.json()["code"] == "search" and answer.headers["Retry-After"]
    released.set()
    served._answered_at = float("-inf")
    assert client.get("/readyz").status_code == 200


def test_a_full_disk_is_no_bug_and_shows_in_readiness(connect, run, monkeypatch):
    import errno
    import tempfile

    client = connect({"run": run})
    label = {"labels": [{"id": "a", "text": "river"}]}

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", full)
        answer = client.post("/v1/labels", json=label)
    assert answer.status_code == 503 and answer.headers["Retry-After"]
    assert "could not be written" in client.get("/readyz").json()["problems"][0]
    assert client.post("/v1/labels", json=label).status_code == 200
    assert client.get("/readyz").json()["status"] == "ready"


def test_a_disk_that_is_really_full_keeps_the_labels_and_answers_go_on(connect, run, tmp_path):
    with small_disk(tmp_path / "disk", "8m") as disk:
        shutil.copytree(run, disk / "run")
        client = connect({"run": disk / "run"})
        assert client.post("/v1/labels", json={"labels": [{"id": "a", "text": "river"}]}).status_code == 200
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4_096))
        many = {"labels": [{"id": f"b{number}", "text": "stone " * 100} for number in range(50)]}
        answer = client.post("/v1/labels", json=many)
        assert answer.status_code == 503 and answer.headers["Retry-After"]
        assert "could not be written" in client.get("/readyz").json()["problems"][0]
        assert client.post("/v1/predict", json={"inputs": "river"}).status_code == 200
        assert client.get("/v1/labels").json()["version"] == 1
        (disk / "filler").unlink()
        assert client.post("/v1/labels", json=many).json()["version"] == 2
        assert client.get("/readyz").json()["status"] == "ready"
        assert {"a", "b49"} <= set(Predictor.load(disk / "run").labels.ids)


def test_a_pipe_among_the_results_blocks_nothing(connect, run):
    import os

    (run / "results").mkdir(exist_ok=True)
    for name in ("x.json", "x.misses.jsonl"):
        os.mkfifo(run / "results" / name)
    (run / "results" / "y.json").symlink_to("nowhere")
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    client = connect({"run": run})
    for page in ("/labels", "/labels?label=L1", "/training"):
        assert client.get(page).status_code == 200


def test_a_model_published_while_the_old_one_is_loaded(connect, run, world, tmp_path, monkeypatch):
    """The new one is served, and its labels are never put on the old one."""
    from dexter.predict import predictor as module

    other = tmp_path / "other"
    dexter.train(world, recipe="dexter", out=other, overrides={**SMALL, "train.epochs": 1})
    load, loads = module._load_model, []

    def load_slowly(*arguments, **settings):
        model = load(*arguments, **settings)
        loads.append(1)
        if len(loads) == 1:
            (run / "model").rename(tmp_path / "old")
            shutil.copytree(other / "model", run / "model")
        return model

    monkeypatch.setattr(module, "_load_model", load_slowly)
    predictor = Predictor.load(run)
    expected = Predictor.load(other)
    assert predictor.fingerprint == expected.fingerprint
    assert predictor.predict(["river stone"]) == expected.predict(["river stone"])
