"""`/v1/examples`: added, listed, downloaded, removed, refused; and taken up by another worker of the same run."""

import json
import shutil

import pytest

from dexter.serving.keys import make_key
from tests.conftest import eventually

TEXT = "the old ferry timetable of the harbor office"


def first(client, text=TEXT):
    return client.post("/v1/predict", json={"inputs": text, "k": 1}).json()["results"][0]["labels"][0]["id"]


def add(client, *examples, **more):
    listed = [{"text": text, "labels": labels} for text, labels in examples]
    return client.post("/v1/examples", json={"examples": listed, **more})


def test_an_example_changes_the_next_prediction_and_goes_again(client):
    assert first(client) != "L9"
    assert add(client, (TEXT, ["L9"])).json() == {"model": "default", "version": 1, "total": 1}
    assert first(client) == "L9"
    [listed] = client.get("/v1/examples").json()["examples"]
    assert (listed["text"], listed["labels"]) == (TEXT, ["L9"])
    assert client.delete("/v1/examples", params={"id": listed["id"]}).json()["total"] == 0
    assert first(client) != "L9"
    assert client.delete("/v1/examples", params={"id": listed["id"]}).status_code == 404


def test_unknown_labels_are_refused_without_quoting_them_or_added(client):
    refused = add(client, (TEXT, ["L1"]), (TEXT, ["secret"]))
    assert refused.status_code == 422 and "secret" not in refused.text and "add_labels" in refused.json()["detail"]
    assert client.get("/v1/examples").json()["total"] == 0
    assert add(client, (TEXT, ["ferries"]), add_labels=True).status_code == 200
    assert first(client) == "ferries"


def test_pages_and_the_download_hold_every_example(client):
    add(client, *((f"text number {number}", ["L1"]) for number in range(7)))
    page = client.get("/v1/examples", params={"limit": 5}).json()
    rest = client.get("/v1/examples", params={"limit": 5, "cursor": page["next"]}).json()
    assert rest["next"] is None and len(page["examples"] + rest["examples"]) == page["total"] == 7
    download = client.get("/v1/examples.jsonl")
    assert "attachment" in download.headers["content-disposition"]
    lines = [json.loads(line) for line in download.text.splitlines()]
    assert [line["text"] for line in lines] == [f"text number {number}" for number in range(7)]
    assert lines[0]["labels"] == ["L1"]


def test_keys_that_may_read_cannot_add(connect):
    keys = (make_key("reader", "r" * 20, "read"), make_key("editor", "e" * 20, "edit"))
    client = connect(keys=keys)
    body = {"examples": [{"text": TEXT, "labels": ["L9"]}]}
    refused = client.post("/v1/examples", json=body, headers={"X-API-Key": "r" * 20})
    assert refused.status_code == 403
    assert client.post("/v1/examples", json=body, headers={"X-API-Key": "e" * 20}).status_code == 200
    history = client.get("/v1/labels/history", headers={"X-API-Key": "r" * 20})
    assert history.status_code == 200


def test_texts_are_not_shown_where_training_texts_are_not(connect):
    client = connect(training_texts=False)
    assert add(client, (TEXT, ["L9"])).status_code == 200 and first(client) == "L9"
    assert client.get("/v1/examples").status_code == client.get("/v1/examples.jsonl").status_code == 403


def test_another_worker_takes_examples_up(connect, trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    one, other = (connect({"run": run}, keep_edits=True, follow_seconds=0.05) for _ in range(2))
    assert add(one, (TEXT, ["L9"])).status_code == 200
    eventually(lambda: first(other) == "L9")
    history = other.get("/v1/labels/history").json()["edits"]
    assert history[0]["examples_added"] == 1
    assert other.post("/v1/labels/undo", json={}).status_code == 200 and first(other) != "L9"


@pytest.mark.parametrize("example", [{"text": " ", "labels": ["L1"]}, {"text": "x", "labels": []}, {"text": "x"}])
def test_what_is_no_example_is_refused(client, example):
    assert client.post("/v1/examples", json={"examples": [example]}).status_code == 422
