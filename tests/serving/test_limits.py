"""Requests that are refused before they are read, and errors that repeat nothing of the request."""

import asyncio
import base64
import json
import logging
import threading

import httpx
import pytest

from dexter import Predictor
from dexter.serving.app import create_app
from dexter.serving.keys import make_key
from dexter.serving.settings import ServeSettings

KEY = "a-key-of-more-than-sixteen-characters"
SECRET = "mumblepeg"
JSON = {"content-type": "application/json"}


def problem(answer, status):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    content = answer.json()
    assert content["status"] == status and content["detail"] and content["code"]
    assert content["request_id"] == answer.headers["x-request-id"]
    return content


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("POST", "/v1/predict", {"content": f"{{{SECRET}".encode(), "headers": JSON}, 400),
        ("POST", "/v1/predict", {"content": b"[" * 100_000 + SECRET.encode(), "headers": JSON}, 400),
        ("POST", "/v1/predict", {"content": b'{"inputs":"\xff' + SECRET.encode() + b'"}', "headers": JSON}, 400),
        ("POST", "/v1/predict", {"content": f'{{"inputs":"{SECRET} \\ud800"}}'.encode(), "headers": JSON}, 400),
        ("POST", "/v1/predict", {"json": {"inputs": SECRET, "k": 1, SECRET: 3}}, 422),
        ("POST", "/v1/predict", {"json": {"inputs": [{"id": SECRET, "txt": SECRET}]}}, 422),
        ("POST", "/v1/predict", {"json": {"inputs": SECRET, "k": SECRET}}, 422),
        ("POST", "/v1/predict", {"json": {"inputs": SECRET, "head": SECRET}}, 422),
        ("POST", "/v1/predict", {"json": {"inputs": SECRET, "model": SECRET}}, 404),
        ("POST", "/v1/predict", {"content": f'{{"inputs":"{SECRET}","k":1e400}}'.encode(), "headers": JSON}, 422),
        ("POST", "/v1/predict", {"content": SECRET.encode(), "headers": {"content-type": "text/plain"}}, 415),
        ("POST", "/v1/labels", {"json": {"labels": [{"id": SECRET, "text": SECRET}] * 2}}, 409),
        ("DELETE", f"/v1/labels?id={SECRET}", {}, 404),
        ("GET", f"/v1/labels?limit={SECRET}", {}, 422),
        ("GET", f"/v1/labels?cursor={'9' * 5_000}", {}, 422),
        ("GET", f"/{SECRET}", {}, 404),
        ("GET", f"/static/{SECRET}", {}, 404),
        ("GET", f"/v1/projects/{SECRET}", {}, 404),
        ("PUT", "/v1/predict", {}, 405),
    ],
)
def test_an_error_is_a_problem_and_says_nothing_of_the_input(client, method, path, options, status):
    answer = client.request(method, path, **options)
    problem(answer, status)
    assert SECRET not in answer.text and len(answer.text) < 3_000


def test_a_bug_is_a_problem_too_and_the_log_has_no_text(client, monkeypatch, caplog):
    def fail(self, texts, *arguments, **options):
        raise RuntimeError(texts[0])

    monkeypatch.setattr(Predictor, "predict", fail)
    with caplog.at_level(logging.INFO):
        answer = client.post("/v1/predict", json={"inputs": SECRET})
    problem(answer, 500)
    assert SECRET not in answer.text and SECRET not in caplog.text
    assert answer.headers["x-request-id"] in caplog.text and "RuntimeError" in caplog.text


def test_the_body_is_bounded_whether_or_not_its_length_is_told(connect):
    client = connect(max_body_bytes=1_000)
    small = json.dumps({"inputs": "river"}).encode()
    for size, status in ((1_000, 200), (1_001, 413)):
        body = small + b" " * (size - len(small))
        assert client.post("/v1/predict", content=body, headers=JSON).status_code == status
        assert client.post("/v1/predict", content=iter([body[:500], body[500:]]), headers=JSON).status_code == status
    problem(client.post("/v1/predict", content=b" " * 2_000, headers=JSON), 413)
    problem(client.post("/v1/predict", content=iter([b" " * 2_000]), headers=JSON), 413)
    problem(client.post("/nowhere", content=b" " * 2_000, headers=JSON), 413)
    problem(client.post("/v1/predict", content=small, headers={**JSON, "content-length": "-5"}), 413)


def ask_many(app, count, **options):
    """Many requests at the same moment."""

    async def main():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as client:
            asked = (client.post("/v1/predict", json={"inputs": "river stone"}, **options) for _ in range(count))
            return await asyncio.gather(*asked)

    return asyncio.run(main())


@pytest.mark.parametrize("limits", [{"max_in_flight": 3}, {"max_queued_texts": 2, "batch_texts": 1}])
def test_too_many_at_a_time_are_told_to_come_back(trained, limits):
    app = create_app(Predictor.load(trained), ServeSettings(busy_wait_seconds=0.05, **limits))
    answers = ask_many(app, 40)
    refused = [answer for answer in answers if answer.status_code == 429]
    assert 0 < len(refused) < 40
    assert {answer.status_code for answer in answers} == {200, 429}
    for answer in refused:
        problem(answer, 429)
        assert answer.headers["retry-after"] == "1"
    assert app.state.traffic.in_flight == 0
    assert [answer.status_code for answer in ask_many(app, 2)] == [200, 200]


def test_one_too_many_waits_for_a_place(trained):
    app = create_app(Predictor.load(trained), ServeSettings(max_in_flight=1, busy_wait_seconds=2.0))
    ask_many(app, 1)  # the first one takes longest
    assert sorted(answer.status_code for answer in ask_many(app, 2)) == [200, 200]


def test_an_answer_that_takes_too_long_is_given_up(trained, monkeypatch):
    given_up = threading.Event()
    monkeypatch.setattr(Predictor, "predict", lambda *_, **__: given_up.wait(60))
    app = create_app(Predictor.load(trained), ServeSettings(timeout_seconds=0.1))
    [answer] = ask_many(app, 1)
    given_up.set()
    problem(answer, 504)
    assert app.state.traffic.in_flight == 0


def test_a_service_that_stops_lets_nobody_in(client):
    client.app.state.traffic.draining = True
    answer = client.post("/v1/predict", json={"inputs": "river"})
    problem(answer, 503)
    assert answer.headers["retry-after"] and answer.headers["connection"] == "close"


def basic(user, password):
    return {"authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, False),
        ({"authorization": f"Bearer {KEY}"}, True),
        ({"authorization": f"bearer {KEY}"}, True),
        ({"authorization": f"Bearer {KEY}x"}, False),
        ({"authorization": f"Bearer {KEY[:-1]}"}, False),
        ({"authorization": "Bearer "}, False),
        ({"authorization": KEY}, False),
        ({"x-api-key": KEY}, True),
        ({"x-api-key": "other-" + KEY}, True),
        ({"x-api-key": "wrong"}, False),
        (basic("anyone", KEY), True),
        (basic(KEY, ""), False),
        ({"authorization": "Basic %%%"}, False),
        ({"authorization": "Basic " + base64.b64encode(b"\xff\xfe").decode()}, False),
    ],
)
def test_keys(connect, headers, allowed):
    client = connect(keys=(make_key("one", KEY), make_key("other", "other-" + KEY)))
    for method, path in (("POST", "/v1/predict"), ("GET", "/v1/labels"), ("GET", "/"), ("GET", "/metrics")):
        options = {"json": {"inputs": "river"}} if method == "POST" else {}
        answer = client.request(method, path, headers=headers, **options)
        if allowed:
            assert answer.status_code == 200
        else:
            problem(answer, 401)
            assert answer.headers["www-authenticate"].startswith("Basic")
    assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200


def test_the_key_is_told_to_nobody(connect, caplog):
    client = connect(keys=(make_key("one", KEY),), log_requests=True)
    with caplog.at_level(logging.DEBUG):
        answers = [client.get(path, headers={"x-api-key": KEY}) for path in ("/info", "/metrics", "/openapi.json", "/")]
        answers.append(client.get("/info", headers={"x-api-key": KEY + "x"}))
    assert "GET /info 200" in caplog.text
    assert KEY not in caplog.text
    assert not [answer for answer in answers if KEY in answer.text]
    assert KEY not in repr(client.app.state.runs.settings)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://localhost"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin", "origin": "http://localhost"}, 200),
        ({"host": "evil.example"}, 421),
        ({"host": "localhost:8000"}, 200),
        ({"host": "127.0.0.1:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
    ],
)
def test_other_sites_cannot_use_the_browser_of_somebody_here(client, headers, status):
    assert client.post("/v1/predict", json={"inputs": "river"}, headers=headers).status_code == status


def test_other_names_can_be_allowed(connect):
    client = connect(allowed_hosts=("dexter.example",))
    assert client.get("/info", headers={"host": "dexter.example"}).status_code == 200
    assert client.get("/info").status_code == 421
