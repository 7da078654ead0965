"""Annif's REST API, as its `http` backend and its clients use it."""

from itertools import pairwise

import pytest

from dexter.predict.predictor import Prediction
from dexter.serving.annif import _suggestions

FORM = {"content-type": "application/x-www-form-urlencoded"}


def suggest(client, **fields):
    return client.post("/v1/projects/default/suggest", data=fields)


def test_projects(client):
    [project] = client.get("/v1/projects").json()["projects"]
    assert project == client.get("/v1/projects/default").json()
    assert project["project_id"] == "default" and project["is_trained"] is True
    assert set(project) >= {"name", "language", "backend", "modification_time"}
    assert client.get("/v1/projects/nobody").status_code == 404
    assert client.get("/v1/").json()["title"] == "Annif REST API"


def test_suggestions_are_the_predictions_with_scores_annif_can_use(client, world):
    text = world.test.texts[3]
    labels = client.post("/v1/predict", json={"inputs": text, "k": 37}).json()["results"][0]["labels"]
    found = suggest(client, text=text, limit=37, project="ignored", metadata_title="ignored").json()["results"]
    assert [each["uri"] for each in found] == [label["id"] for label in labels]
    assert [each["label"] for each in found] == [label["text"] for label in labels]
    scores = [each["score"] for each in found]
    assert all(0.0 < score <= 1.0 for score in scores)
    assert all(first > second for first, second in pairwise(scores))


def test_limit_and_threshold(client, world):
    text = world.test.texts[3]
    assert len(suggest(client, text=text).json()["results"]) == 10
    assert suggest(client, text=text, limit=0).json()["results"] == []
    every = suggest(client, text=text, limit=37).json()["results"]
    middle = every[4]["score"]
    assert suggest(client, text=text, limit=37, threshold=middle).json()["results"] == every[:5]
    assert suggest(client, text=" ").json()["results"] == []


@pytest.mark.parametrize("fields", [{}, {"text": "a", "limit": "-1"}, {"text": "a", "threshold": "2"}, {"limit": "1"}])
def test_a_form_that_cannot_be_meant(client, fields):
    assert suggest(client, **fields).status_code in (400, 415)
    assert client.post("/v1/projects/default/suggest", json={"text": "a"}).status_code == 415
    assert client.post("/v1/projects/default/suggest", content=b"text=\xff", headers=FORM).status_code == 400
    assert client.post("/v1/projects/default/suggest", content=b"a&" * 5_000, headers=FORM).status_code == 400


def test_batches(connect, world):
    client = connect(max_inputs=3)
    texts = [*world.test.texts[:5], ""]
    documents = [{"text": text, "document_id": f"d{place}", "metadata": {}} for place, text in enumerate(texts)]
    path = "/v1/projects/default/suggest-batch"
    found = client.post(path, params={"limit": 2}, json={"documents": documents}).json()
    assert [each["document_id"] for each in found] == [f"d{place}" for place in range(6)]
    for text, each in zip(texts[:5], found, strict=False):
        expected = [hit["uri"] for hit in suggest(client, text=text, limit=2).json()["results"]]
        assert [hit["uri"] for hit in each["results"]] == expected
    assert found[5]["results"] == []
    assert client.post(path, json={"documents": documents * 6}).status_code == 422


def test_scores_are_probabilities_where_there_are_any():
    labels = [Prediction(str(place), "", 1.0, chance) for place, chance in enumerate([0.5, 0.7, 0.5, 0.0, 0.0])]
    scores = [each.score for each in _suggestions(labels)]
    assert scores == pytest.approx([0.5, 0.5, 0.5, 0.0, 0.0], abs=1e-5)
    assert min(scores) > 0 and scores == sorted(scores, reverse=True)
    assert [round(each.score, 3) for each in _suggestions([Prediction("a", "", -3.0)])] == [0.047]
