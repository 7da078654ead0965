"""What comes before the gate and after it: heads, connections, unread answers, unwanted bodies."""

import http.client
import json
import select
import socket
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress

import httpx
import pytest

from dexter import Predictor
from dexter.serving.connections import Connection
from dexter.serving.keys import make_key
from tests.conftest import eventually
from tests.serving.sockets import (
    PATIENCE,
    POST,
    call,
    connect,
    cpu_seconds,
    read_all,
    request_bytes,
    resident_bytes,
    start_process,
    wait_ready,
)

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
KEY = "a-key-of-more-than-sixteen-characters"


@pytest.fixture(scope="module")
def process(trained):
    """A service in a process of its own, whose memory can be measured; it wants a key."""
    service, port = start_process(trained, "--no-keep-edits", DEXTER_API_KEY=KEY)
    wait_ready(port)
    yield service, port
    service.kill()
    service.wait()


def problem_of(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head and b"connection: close" in head.lower()
    return json.loads(body)


def send_endlessly(connection, piece, num_bytes):
    """Send until everything is sent or the other side has had enough."""
    with suppress(ConnectionError):
        for _ in range(num_bytes // len(piece)):
            connection.sendall(piece)


@pytest.mark.parametrize("piece", [b"a" * 65_536, b"a:\r\n" * 16_384], ids=["one header", "many headers"])
def test_endless_headers_take_no_memory(process, piece):
    service, port = process
    before = resident_bytes(service)
    with connect(port) as sender:
        sender.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
        send_endlessly(sender, piece, 48 * 2**20)
        found = problem_of(read_all(sender))
    assert found["status"] == 431 and found["code"] == "head_too_large"
    assert resident_bytes(service) - before < 8 * 2**20


def test_a_head_of_usual_size_is_read_however_it_is_cut(listening):
    port, _ = listening()
    head = GET + b"".join(b"X-Header-%d: %s\r\n" % (number, b"v" * 500) for number in range(90)) + b"\r\n"
    assert len(head) > 40_000
    for size in (7_001, len(head)):
        with connect(port) as sender:
            for start in range(0, len(head), size):
                sender.sendall(head[start : start + size])
            assert read_all(sender).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("header", [b"X: %s\r\n" % (b"v" * 70_000), b"X: v\r\n" * 101], ids=["long", "many"])
def test_a_prediction_whose_head_arrives_at_once_has_the_same_limits(listening, header):
    port, _ = listening()
    whole = request_bytes("river")
    with connect(port) as sender:
        sender.sendall(whole)
        assert read_all(sender).startswith(b"HTTP/1.1 200")
        sender.sendall(whole.replace(b"\r\n", b"\r\n" + header, 1))
        assert problem_of(read_all(sender))["status"] == 431


@pytest.mark.parametrize("tail", [b"0\r\nX: ", b"1;x="], ids=["trailer", "chunk extension"])
def test_what_follows_the_body_is_bounded_too(listening, tail):
    port, _ = listening()
    with connect(port) as sender:
        sender.sendall(f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode() + tail)
        send_endlessly(sender, b"a" * 65_536, 16 * 2**20)
        with suppress(ConnectionError):
            assert not read_all(sender).startswith(b"HTTP/1.1 2")
    assert call(port, "/healthz").status_code == 200


def test_trailers_are_no_headers(listening):
    port, _ = listening(keys=(make_key("one", KEY),))
    body = json.dumps({"inputs": "river"}).encode()
    with connect(port) as sender:
        sender.sendall(f"{POST}X-API-Key: {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        sender.sendall(b"%x\r\n%s\r\n0\r\nX-Late: 1\r\n\r\n" % (len(body), body))
        assert read_all(sender).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET / HTTP/1.1\r\nHost: local"])
def test_slow_heads_are_given_up(listening, sent):
    port, _ = listening(head_seconds=0.5)
    with connect(port) as sender:
        sender.sendall(sent)
        answer = read_all(sender)
    assert (problem_of(answer)["status"] == 408) if sent else answer == b""


def test_a_head_that_arrives_byte_by_byte_is_given_up_in_the_same_time(listening):
    port, _ = listening(head_seconds=0.5)
    with connect(port) as sender, suppress(ConnectionError):
        for byte in GET * 100:
            sender.sendall(bytes([byte]))
            time.sleep(0.1)
            if select.select([sender], [], [], 0)[0]:
                break
        assert b" 408 " in read_all(sender).split(b"\r\n")[0]


def test_slow_heads_on_a_connection_that_was_used_before(listening):
    port, _ = listening(head_seconds=0.5)
    with connect(port) as sender:
        sender.sendall(GET + b"\r\n")
        assert read_all(sender).startswith(b"HTTP/1.1 200")
        sender.sendall(b"\r\nGET /")
        assert b" 408 " in read_all(sender).split(b"\r\n")[0]


def test_a_connection_too_many_is_refused(listening):
    port, app = listening(max_connections=5)
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(connect(port)).sendall(GET)  # accepted in this order
        with connect(port) as one_more:
            found = read_all(one_more)
        assert problem_of(found)["status"] == 503 and b"retry-after: 1" in found
        assert app.state.traffic.refused["connections"] == 1
    wait_ready(port)  # when the five are gone; until then it is refused, too
    metrics = call(port, "/metrics").text
    assert f'dexter_connections_refused{{reason="connections"}} {app.state.traffic.refused["connections"]}' in metrics


def test_requests_far_ahead_of_their_answers_are_refused(listening):
    port, _ = listening()
    with connect(port) as sender:
        send_endlessly(sender, (GET + b"\r\n") * 5_000, 1_000_000)
        with suppress(ConnectionError):
            while sender.recv(65_536):
                pass
    with connect(port) as sender:
        sender.sendall((GET + b"\r\n") * 20)
        received = b""
        while received.count(b"HTTP/1.1 200") < 20:
            received += sender.recv(65_536)


@pytest.fixture
def long_labels(trained):
    """A predictor whose labels make large answers."""
    predictor = Predictor.load(trained)
    predictor.add_labels([(f"long-{number}", f"{number} " + "river " * 3_300) for number in range(100)])
    return predictor


@pytest.mark.parametrize("head", [POST, POST.replace("Host", "Connection: close\r\nHost")], ids=["keep", "close"])
def test_answers_that_are_never_read_are_let_go(listening, long_labels, head, monkeypatch):
    port, app = listening(long_labels, answer_seconds=1.0)
    pause, held = Connection.pause_writing, []
    monkeypatch.setattr(
        Connection, "pause_writing", lambda self: (pause(self), held.append(app.state.traffic.held_bytes))
    )
    body = json.dumps({"inputs": ["river", "stone", "cloud"], "k": 137}).encode()
    with connect(port) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sender.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        eventually(lambda: held)
        assert held[0] > 10**6
        eventually(lambda: app.state.traffic.held_bytes == 0)


def test_answers_that_wait_are_bounded_together(listening, long_labels):
    port, app = listening(long_labels, max_held_bytes=9 * 2**20, busy_wait_seconds=0)
    request = request_bytes(["river", "stone", "cloud"], k=137)
    with ExitStack() as stack:
        senders = []
        for _ in range(8):
            senders.append(stack.enter_context(connect(port)))
            senders[-1].sendall(request)
            assert select.select([senders[-1]], [], [], PATIENCE)[0], "an answer, or its beginning"
        assert app.state.traffic.held_bytes <= 9 * 2**20
        assert b" 429 " in read_all(senders[-1]).split(b"\r\n")[0]
        assert read_all(senders[0]).startswith(b"HTTP/1.1 200")
    eventually(lambda: app.state.traffic.held_bytes == 0)


def test_a_large_answer_is_read_slowly_and_whole(listening, long_labels):
    port, _ = listening(long_labels)
    with connect(port) as sender:
        sender.sendall(request_bytes(["river", "stone"], k=137))
        time.sleep(0.5)
        body = read_all(sender).partition(b"\r\n\r\n")[2]
    assert len(json.loads(body)["results"][1]["labels"]) == 137 and len(body) > 3_000_000


def test_an_answer_too_large_is_not_made(listening, long_labels):
    port, _ = listening(long_labels)
    address = f"http://127.0.0.1:{port}"
    answer = httpx.post(f"{address}/v1/predict", json={"inputs": ["river"] * 32, "k": 137}, timeout=60)
    assert answer.status_code == 422 and answer.json()["code"] == "answer_too_large"
    documents = {"documents": [{"text": "river"}] * 32}
    answer = httpx.post(f"{address}/v1/projects/default/suggest-batch?limit=137", json=documents, timeout=60)
    assert answer.status_code == 422 and answer.json()["code"] == "answer_too_large"


@pytest.mark.parametrize("key", [KEY, "wrong-but-long-enough"])
def test_an_ordinary_client_with_a_large_body_reads_why_it_is_refused(process, key):
    _, port = process
    headers = {"Content-Type": "application/json", "X-API-Key": key}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/predict", b" " * 30_000_000, headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code == (413 if key == KEY else 401)
    assert json.loads(refused.value.read())["status"] == refused.value.code


def test_an_unwanted_body_without_end_is_not_read_for_ever(process):
    service, port = process
    before, sent = resident_bytes(service), 0
    with connect(port) as sender, suppress(ConnectionError):
        sender.sendall(f"{POST}Content-Length: {10**12}\r\n\r\n".encode())
        while sent < 2**30:
            sender.sendall(b" " * 65_536)
            sent += 65_536
    assert 2**20 < sent < 300 * 2**20
    assert resident_bytes(service) - before < 16 * 2**20


def test_a_refused_request_keeps_its_connection_if_its_body_arrives(listening):
    port, _ = listening(keys=(make_key("one", KEY),))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    for _ in range(3):
        connection.request("POST", "/v1/predict", b" " * 200_000, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 401
        answer.read()
        socket_used = connection.sock
    assert connection.sock is socket_used is not None
    connection.close()


@pytest.mark.parametrize(
    "body",
    [
        '{"inputs":[' + ",".join(["1"] * 500_000) + "]}",
        '{"inputs":[' + ",".join(["{}"] * 500_000) + "]}",
        '{"inputs":"a",' + ",".join(f'"{n:x}":1' for n in range(150_000)) + "}",
        '{"inputs":[{"id":"a",' + ",".join(f'"{n:x}":1' for n in range(150_000)) + "}]}",
        '{"inputs":"a","exclude":[' + ",".join(["1"] * 500_000) + "]}",
    ],
    ids=["numbers", "objects", "fields", "fields of a text", "excluded"],
)
def test_a_body_of_errors_costs_little(process, body):
    service, port = process
    before, cpu = resident_bytes(service), cpu_seconds(service)
    headers = {"content-type": "application/json", "x-api-key": KEY}
    for _ in range(3):
        answer = call(port, "/v1/predict", "POST", content=body, headers=headers)
        assert answer.status_code == 422 and len(answer.content) < 5_000
    cpu = cpu_seconds(service) - cpu
    started = time.process_time()
    for _ in range(3):
        json.loads(body)
    # The event loop reads bodies, so that what one costs is what others wait.
    assert cpu < 20 * (time.process_time() - started)
    assert resident_bytes(service) - before < 250 * 2**20


def test_requests_too_many_are_refused_soon_in_order_and_keep_their_connection(listening):
    port, app = listening(max_in_flight=1, timeout_seconds=600.0)
    with connect(port) as first, connect(port) as second:
        first.sendall(request_bytes("river", length=500)[:-1])  # stays under way: its body is incomplete
        eventually(lambda: app.state.traffic.in_flight == 1)
        for num_requests in (1, 3):
            received = b""
            second.sendall(request_bytes("stone") * num_requests)
            while received.count(b'"code": "busy"') < num_requests:
                received += second.recv(65_536)
            assert app.state.traffic.in_flight == 1, "the first was not waited for"
            assert received.count(b"HTTP/1.1 429 ") == num_requests
            assert received.lower().count(b"retry-after: 1") == num_requests
        assert call(port, "/healthz").status_code == 200
        assert app.state.traffic.refused["busy"] == 4
        first.close()
        eventually(lambda: app.state.traffic.in_flight == 0)
        second.sendall(request_bytes("stone"))
        assert read_all(second).startswith(b"HTTP/1.1 200")
