"""One vocabulary: what docs/json.md says of a word holds in the output of every verb and in every answer over HTTP."""

# ruff: noqa: F811 - fixtures of another file
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.test_main import SETTINGS, data, run  # noqa: F401 - fixtures

FORBIDDEN = {"uid", "why", "best", "wall_seconds", "folder_path"}
"""Words that were used for the same things before."""
COUNTS = ("counts", "sizes", "bands")
"""Objects whose every value is a count."""


def keys(value, inside=""):
    """Every (key, value) below a value, but those of objects of counts."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield key, below
            if not any(word in key for word in COUNTS):
                yield from keys(below, key)
    elif isinstance(value, list):
        for below in value:
            yield from keys(below)


def check_words(value):
    for key, below in keys(value):
        assert key not in FORBIDDEN, key
        if key == "labels":
            assert isinstance(below, list | tuple), "a plural is a list"
        if key.startswith("num_") or key == "rank":
            assert isinstance(below, int), key
        if key in ("id", "text") and below is not None:
            assert isinstance(below, str), key
        if key == "backend" or (key == "index" and isinstance(below, str)):
            assert below in ("exact", "pq", "hnsw", "pgvector", "qdrant")
        if key == "metrics" and isinstance(below, dict):
            assert all(isinstance(one, float | int | dict | type(None)) for one in below.values())


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copy")


def test_the_verbs_speak_it(run, data, copy, tmp_path):
    out = tmp_path / "run"
    verbs = [
        ["train", data, "--out", out, *SETTINGS],
        ["evaluate", out, data],
        ["compare", out, copy, "--data", data],
        ["tune", out, data],
        ["plan", data],
        ["data", "check", data],
        ["index", copy, "--backend", "exact"],
        ["labels", "add", copy, "fresh", "fresh water"],
        ["labels", "list", copy],
        ["labels", "search", copy, "fresh"],
        ["labels", "undo", copy],
    ]
    answers = {}
    for verb in verbs:
        code, shown, said = run(*verb, "--json")
        assert code == 0, said
        answers[" ".join(map(str, verb[:2]))] = json.loads(shown)
        check_words(json.loads(shown))
    assert set(answers[f"train {data}"]) == {"run", "metrics", "step", "seconds"}
    assert set(answers["labels add"]) == {"run", "version", "num_labels", "duplicates"}
    code, shown, _ = run("predict", out, "river", "--format", "jsonl", "--explain", "-k", 2)
    found = json.loads(shown)
    check_words(found)
    assert set(found) >= {"id", "labels"}
    assert set(found["labels"][0]) >= {"id", "text", "score", "rank", "explanation"}
    assert [label["rank"] for label in found["labels"]] == [1, 2]


def test_http_speaks_it(trained):
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from dexter import Predictor
    from dexter.serving.app import create_app

    with TestClient(create_app({"world": Predictor.load(trained)}), base_url="http://127.0.0.1") as client:
        answer = client.post("/v1/predict", json={"inputs": ["river"], "k": 2, "explain": True}).json()
        assert set(answer["results"][0]["labels"][0]) >= {"id", "text", "score", "rank", "explanation"}
        for body in (answer, client.get("/v1/labels").json(), client.get("/info").json()["runs"]):
            check_words({"of": body} if isinstance(body, list) else body)
        for wrong in (
            {"inputs": 7},
            {"inputs": ["a"], "k": "many"},
            {"inputs": [3]},
            {"inpust": "a"},
            {"inputs": "a", "bands": "x"},
        ):
            detail = client.post("/v1/predict", json=wrong).json()["detail"]
            assert not re.search(r"dictionary|function-|\[|Input should|pydantic|union", detail.replace("[...]", "")), (
                detail
            )
            assert "expected" in detail or "missing" in detail, detail


def test_the_page_names_every_word():
    text = Path(__file__).parents[1].joinpath("docs", "json.md").read_text(encoding="utf-8")
    for word in (
        "id",
        "text",
        "labels",
        "score",
        "rank",
        "probability",
        "explanation",
        "metrics",
        "run",
        "version",
        "seconds",
    ):
        assert re.search(rf"^\| .*`{word}`", text, re.MULTILINE), word
