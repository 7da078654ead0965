"""Predictions that the connection answers itself, beside the application's answers to the same requests."""

import json
import time

import httpx
import pytest

from dexter import Predictor
from dexter.serving.direct import DirectPredictions
from dexter.serving.keys import make_key
from tests.conftest import eventually
from tests.serving.sockets import POST, connect, read_all, request_bytes

KEY = "a-key-of-more-than-sixteen-characters"
BODIES = [
    {"inputs": "river stone"},
    {"inputs": ["river", {"id": 'näme "1"', "text": "cloud\nstone"}], "k": 3},
    {"inputs": "river", "id": "a", "exclude": [], "bands": ["tail"]},
    {"inputs": "river " * 5_000, "k": 2},
    {"inputs": ["river"] * 40, "k": 1},
    {"inputs": "river", "explain": True, "k": 1},
    {"inputs": "  "},
    {"inputs": "river", "k": 0},
    {"inputs": "river", "only": ["no such label"]},
    {"inputs": "river", "model": "other"},
    {"inputs": "river", "unknown": 1},
    [],
]


@pytest.fixture
def direct_answers(monkeypatch):
    """Ids of the requests that connections have answered themselves."""
    answered, answer = [], DirectPredictions.answer

    def counted(self, request, *arguments):
        answered.append(request.state["request_id"])
        return answer(self, request, *arguments)

    monkeypatch.setattr(DirectPredictions, "answer", counted)
    return answered


def exchange(port, sent):
    with connect(port) as sender:
        sender.sendall(sent)
        return read_all(sender)


def parse(answer):
    """Status, headers but for those that differ each time, and body of an answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert len(headers.pop("x-request-id")) == 16 and headers.pop("date")
    body = json.loads(body)
    body.pop("request_id", None)
    return status, headers, body


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_answers_are_those_of_the_application(listening, direct_answers, body):
    port, _ = listening()
    content = json.dumps(body, ensure_ascii=False).encode()
    request = f"{POST}Content-Length: {len(content)}\r\n\r\n".encode() + content
    direct = parse(exchange(port, request))
    assert len(direct_answers) == 1
    elsewhere = parse(exchange(port, request.replace(b"/v1/predict", b"/v1/predict?")))
    assert len(direct_answers) == 1, "a path with a query is the application's"
    for (*_, found), name in ((direct, "direct"), (elsewhere, "application")):
        for result in found.get("results", ()):
            for label in result["labels"]:
                label["score"] = round(label["score"], 5)
                label.pop("explanation")
        assert found, name
    direct[1].pop("content-length"), elsewhere[1].pop("content-length")
    assert direct == elsewhere


def test_scores_and_texts_are_sent_whole(listening, trained, direct_answers):
    predictor = Predictor.load(trained)
    predictor.add_labels([("quoted", 'river "stone" \\ \x07 ünder 🙂')])
    port, _ = listening(predictor)
    [expected] = predictor.predict(["river stone"], 5)
    [found] = json.loads(exchange(port, request_bytes("river stone")).partition(b"\r\n\r\n")[2])["results"]
    assert len(direct_answers) == 1
    assert [(label["id"], label["text"]) for label in found["labels"]] == [(label.id, label.text) for label in expected]
    assert [label["score"] for label in found["labels"]] == pytest.approx([label.score for label in expected], rel=1e-5)


@pytest.mark.parametrize("cut", [-1, -5, -20])
def test_a_body_may_come_in_pieces(listening, direct_answers, cut):
    port, app = listening()
    request = request_bytes("river stone cloud")
    with connect(port) as sender:
        sender.sendall(request[:cut])
        eventually(lambda: app.state.traffic.in_flight == 1 and app.state.traffic.held_bytes > 0)
        sender.sendall(request[cut:] + request)  # and the next request early
        received = b""
        while received.count(b'"inputs_left_out"') < 2:
            received += sender.recv(65_536)
        assert received.count(b"HTTP/1.1 200 OK") == 2 and len(direct_answers) == 2
    eventually(lambda: app.state.traffic.in_flight == app.state.traffic.open == app.state.traffic.held_bytes == 0)


def test_a_client_that_leaves_before_its_body_is_forgotten(listening):
    port, app = listening()
    with connect(port) as sender:
        sender.sendall(request_bytes("river")[:-1])
        eventually(lambda: app.state.traffic.in_flight == 1)
    eventually(lambda: app.state.traffic.in_flight == app.state.traffic.open == app.state.traffic.held_bytes == 0)


def test_times_are_those_of_the_application(listening, trained, monkeypatch):
    predict = Predictor.predict
    monkeypatch.setattr(Predictor, "predict", lambda *args, **kwargs: (time.sleep(1.5), predict(*args, **kwargs))[1])
    port, app = listening(timeout_seconds=0.5)
    assert exchange(port, request_bytes("river")).startswith(b"HTTP/1.1 504 ")
    answer = exchange(port, request_bytes("river")[:-1])
    assert answer.startswith(b"HTTP/1.1 408 ") and b"connection: close" in answer.lower()
    eventually(lambda: app.state.traffic.in_flight == app.state.traffic.open == app.state.traffic.held_bytes == 0)


def test_keys_and_hosts_are_checked_each_time(listening, direct_answers):
    port, _ = listening(keys=(make_key("one", KEY, "read", 2),))
    good = request_bytes("river").replace(b"Host", f"X-API-Key: {KEY}\r\nHost".encode())
    with connect(port) as sender:
        for request, status in ((good.replace(b"-key-", b"-kay-"), 401), (good, 200), (good, 200), (good, 429)):
            sender.sendall(request)
            assert read_all(sender).startswith(b"HTTP/1.1 %d " % status)
    assert len(direct_answers) == 2
    port, _ = listening()
    assert exchange(port, request_bytes("river").replace(b"localhost", b"elsewhere")).startswith(b"HTTP/1.1 421 ")
    metrics = httpx.get(f"http://localhost:{port}/metrics").text
    assert 'dexter_requests_total{method="POST",route="other",status="421"} 1.0' in metrics
