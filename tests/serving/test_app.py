"""The service as a whole: health, description, headers, embeddings, the page."""

import base64

import numpy as np
import pytest
from starlette.testclient import TestClient

from dexter import Predictor
from dexter.errors import UsageError
from dexter.serving.app import create_app
from dexter.serving.settings import ServeSettings


def test_health_and_readiness(client):
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready", "problems": []}
    client.app.state.traffic.draining = True
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").status_code == 503


def test_info_says_what_is_served(client, world):
    info = client.get("/info").json()
    [run] = info["runs"]
    assert info["default"] == run["name"] == "default"
    assert (run["num_labels"], run["version"], run["head"]) == (world.num_labels, 0, "encoder")
    assert info["limits"]["max_inputs"] == 32


def test_metrics_count_by_route_and_not_by_path(client):
    client.post("/v1/predict", json={"inputs": "river"})
    client.get("/a-secret-path")
    text = client.get("/metrics").text
    assert 'dexter_requests_total{method="POST",route="/v1/predict",status="200"} 1.0' in text
    assert 'dexter_batch_texts_count{run="default"} 1.0' in text
    assert 'dexter_labels{run="default"} 37.0' in text
    assert "secret" not in text


@pytest.mark.parametrize("path", ["/", "/v1/labels", "/nowhere", "/static/page.css"])
def test_every_answer_carries_the_policy(client, path):
    headers = client.get(path).headers
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert len(headers["x-request-id"]) == 16
    assert "access-control-allow-origin" not in headers


def test_embeddings_are_the_vectors_that_are_scored(client, trained, world):
    model = Predictor.load(trained).model
    asked = {"input": [world.test.texts[0], "river"]}
    found = client.post("/v1/embeddings", json=asked).json()
    assert found["object"] == "list" and found["model"] == "default"
    assert [each["index"] for each in found["data"]] == [0, 1]
    expected = model.query_vectors(asked["input"], head="encoder")
    vectors = np.array([each["embedding"] for each in found["data"]])
    np.testing.assert_allclose(vectors, expected[:, : vectors.shape[1]], rtol=1e-5, atol=1e-6)
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] > 2
    packed = client.post("/v1/embeddings", json={**asked, "encoding_format": "base64"}).json()
    first = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_allclose(first, vectors[0], rtol=1e-6)


def test_texts_embedded_as_labels_are_the_labels(client, trained, world):
    model = Predictor.load(trained).model
    asked = {"input": list(world.label_texts[:3]), "side": "label"}
    found = client.post("/v1/embeddings", json=asked).json()
    vectors = np.array([each["embedding"] for each in found["data"]])
    expected = model.label_vectors(head="encoder")[:3, : vectors.shape[1]]
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-6)


def test_the_page_shows_labels_as_text(connect, trained):
    predictor = Predictor.load(trained)
    predictor.add_labels([("evil", "river stone <script>alert(1)</script>")])
    page = connect(predictor).get("/", params={"text": "river stone"})
    assert page.status_code == 200 and "evil" in page.text
    assert "<script>alert" not in page.text and "&lt;script&gt;" in page.text


@pytest.mark.parametrize("names", [[], ["a/b"], ["../up"], [""], ["-x"], ["a" * 65]])
def test_names_of_runs_are_plain(trained, names):
    predictor = Predictor.load(trained)
    with pytest.raises(UsageError, match="run"):
        create_app(dict.fromkeys(names, predictor))


def test_a_service_can_be_started_again_in_its_process(trained):
    app = create_app(Predictor.load(trained), ServeSettings(allowed_hosts=("testserver",)))
    for _ in range(2):
        with TestClient(app) as client:
            assert client.post("/v1/predict", json={"inputs": "river", "explain": True}).status_code == 200
