"""The service over real sockets: clients that disconnect or are slow, ports in use, signals to a process."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import httpx
import pytest
import uvicorn

from dexter import Predictor
from dexter.cli import main as cli
from dexter.serving.app import create_app
from dexter.serving.settings import ServeSettings


@pytest.fixture
def listening(trained):
    """Start a service with these settings in a thread of this process: its port and its application."""
    started = []

    def start(**settings):
        app = create_app(Predictor.load(trained), ServeSettings(**settings))
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        started.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return listener.getsockname()[1], app

    yield start
    for server, thread in started:
        server.should_exit = server.force_exit = True
        thread.join(20)


POST = "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def request_bytes(inputs, *, length=None, **fields):
    body = json.dumps({"inputs": inputs, **fields}).encode()
    return f"{POST}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


def connect(port):
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_all(connection):
    """Everything until the other side closes or a whole answer is there."""
    received = b""
    while True:
        part = connection.recv(65_536)
        received += part
        head, separator, body = received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        if not part or (separator and length and len(body) >= int(length[1])):
            return received


def test_half_of_the_clients_leave_and_the_others_are_answered(listening, trained):
    port, app = listening()
    expected = Predictor.load(trained).predict(["river stone"])[0]
    right = []

    def stay(number):
        for _ in range(10):
            with connect(port) as connection:
                connection.sendall(request_bytes("river stone"))
                body = json.loads(read_all(connection).partition(b"\r\n\r\n")[2])
            right.append([label["id"] for label in body["results"][0]["labels"]] == [label.id for label in expected])

    def leave(number):
        for _ in range(10):
            with connect(port) as connection:
                connection.sendall(request_bytes(["amber cloud " * 100] * 20))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8) for work in (stay, leave)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 80
    deadline = time.monotonic() + 20
    while app.state.traffic.in_flight or next(iter(app.state.runs)).num_queued:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_request_that_never_ends_is_given_up(listening):
    port, app = listening(timeout_seconds=0.3)
    with connect(port) as dawdler:
        dawdler.sendall(request_bytes("river", length=500))
        answer = read_all(dawdler)
    assert b"408" in answer.split(b"\r\n")[0] and b"problem+json" in answer
    for _ in range(100):  # the answer is on its way before the request is counted as done
        if app.state.traffic.in_flight == 0:
            break
        time.sleep(0.05)
    assert app.state.traffic.in_flight == 0


def test_a_body_that_is_too_large_is_not_waited_for(listening):
    port, _ = listening(max_body_bytes=1_000)
    with connect(port) as sender:
        sender.sendall(request_bytes("river", length=10**12))
        answer = read_all(sender)
    assert b"413" in answer.split(b"\r\n")[0]
    with connect(port) as sender:
        sender.sendall(f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode() + b"7d0\r\n" + b" " * 2_000 + b"\r\n")
        answer = read_all(sender)
    assert b"413" in answer.split(b"\r\n")[0]


@pytest.mark.parametrize(
    "sent", [b"\x00\xff" * 100, b"GET / HTTP/9.9\r\n\r\n", b"GET /" + b"a" * 100_000, b"\r\n" * 50]
)
def test_what_is_no_request_disturbs_nobody(listening, sent):
    port, _ = listening()
    with connect(port) as sender:
        sender.sendall(sent)
        sender.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            assert not re.match(rb"HTTP/1.1 [25]", sender.recv(65_536))
    assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200


def start_process(*arguments, **environment):
    """A `dexter serve` of its own, and the address that it names."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dexter", "serve", *map(str, arguments), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    said = process.stderr.readline()
    address = re.search(r"http://127\.0\.0\.1:(\d+)", said)
    assert address, said + process.stderr.read()
    return process, int(address[1])


def wait_ready(port):
    for _ in range(600):
        try:
            if httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("never ready")


def test_sigterm_finishes_what_is_under_way_and_refuses_what_is_new(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    key = "a-key-of-more-than-sixteen-characters"
    process, port = start_process(tmp_path / "run", "--log-requests", DEXTER_API_KEY=key)
    try:
        wait_ready(port)
        assert httpx.post(f"http://127.0.0.1:{port}/v1/predict", json={"inputs": "a"}).status_code == 401
        sent = request_bytes("river stone").replace(b"Host:", f"X-API-Key: {key}\r\nHost:".encode())
        with connect(port) as under_way:
            under_way.sendall(sent[:-5])
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            new = httpx.get(f"http://127.0.0.1:{port}/info", headers={"x-api-key": key})
            assert new.status_code == 503 and new.json()["code"] == "draining"
            assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 503
            assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
            assert process.poll() is None
            under_way.sendall(sent[-5:])
            assert read_all(under_way).startswith(b"HTTP/1.1 200")
        assert process.wait(20) == 0
        said = process.stderr.read()
        assert "POST /v1/predict 200" in said and key not in said and "river" not in said
    finally:
        process.kill()


def run_cli(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["dexter", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code, capsys.readouterr().err


def test_what_cannot_be_served_is_told_in_one_line(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("DEXTER_API_KEY", raising=False)
    code, said = run_cli(monkeypatch, capsys, "serve", trained, "--host", "0.0.0.0")
    assert code == 2 and "DEXTER_API_KEY" in said and said.count("\n") == 1
    code, said = run_cli(monkeypatch, capsys, "serve", tmp_path / "nowhere", "--port", "0")
    assert code == 4 and "no such run folder" in said
    code, said = run_cli(monkeypatch, capsys, "serve", trained, f"world={trained}", "--port", "0")
    assert code == 2 and "two runs" in said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, said = run_cli(monkeypatch, capsys, "serve", trained, "--port", taken.getsockname()[1])
    assert code == 5 and "choose another" in said
