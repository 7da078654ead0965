"""The service over real sockets: clients that disconnect or are slow, ports in use, signals to a process."""

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import httpx
import pytest

from dexter import Predictor
from dexter.cli import main as cli
from dexter.errors import ResourceError
from dexter.serving import logs
from tests.conftest import eventually
from tests.serving.sockets import POST, call, connect, read_all, request_bytes, start_process, start_service, wait_ready


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
    eventually(lambda: not (app.state.traffic.in_flight or next(iter(app.state.runs)).num_queued))


def test_a_request_that_never_ends_is_given_up(listening):
    port, app = listening(timeout_seconds=0.3)
    with connect(port) as dawdler:
        dawdler.sendall(request_bytes("river", length=500))
        answer = read_all(dawdler)
    assert b"408" in answer.split(b"\r\n")[0] and b"problem+json" in answer
    # The answer is on its way before the request is counted as done.
    eventually(lambda: app.state.traffic.in_flight == 0)


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
    assert call(port, "/healthz").status_code == 200


def test_sigterm_finishes_what_is_under_way_and_refuses_what_is_new(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    key = "a-key-of-more-than-sixteen-characters"
    process, port = start_process(tmp_path / "run", "--log-requests", DEXTER_API_KEY=key)
    try:
        wait_ready(port)
        assert call(port, "/v1/predict", "POST", json={"inputs": "a"}).status_code == 401
        sent = request_bytes("river stone").replace(b"Host:", f"X-API-Key: {key}\r\nHost:".encode())
        with connect(port) as under_way:
            under_way.sendall(sent[:-5])
            eventually(lambda: "in_flight 2.0" in call(port, "/metrics", headers={"x-api-key": key}).text)
            process.send_signal(signal.SIGTERM)
            new = call(port, "/info", headers={"x-api-key": key})
            assert new.status_code == 503 and new.json()["code"] == "draining"
            assert call(port, "/readyz").status_code == 503
            assert call(port, "/healthz").status_code == 200
            assert process.poll() is None
            under_way.sendall(sent[-5:])
            assert read_all(under_way).startswith(b"HTTP/1.1 200")
        assert process.wait(60) == 0
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


HANGING = """
import sys, time
from pathlib import Path
from dexter import Predictor
from dexter.cli.main import common
from dexter.serving.server import serve
from dexter.serving.settings import ServeSettings

def hang(*arguments, **options):
    print("hanging", file=sys.stderr, flush=True)
    time.sleep(1_000)

if sys.argv[2] == "thread":
    Predictor.predict = hang
else:
    import dexter.serving.routes
    dexter.serving.routes.cut_texts = hang  # in the event loop
common(debug=False, quiet=False, version=False)
serve({"run": Path(sys.argv[1])}, ServeSettings(port=0, keep_edits=False, drain_seconds=1.0))
"""


@pytest.mark.parametrize("where", ["thread", "loop"])
def test_sigterm_ends_the_process_whatever_hangs(trained, where):
    process = subprocess.Popen([sys.executable, "-c", HANGING, str(trained), where], stderr=subprocess.PIPE, text=True)
    try:
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)", process.stderr.readline())[1])
        assert call(port, "/healthz").status_code == 200
        with connect(port) as asking:
            asking.sendall(request_bytes("river"))
            assert process.stderr.readline() == "hanging\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 5
        assert "something still hangs" in process.stderr.read()
    finally:
        process.kill()


def test_a_log_that_nobody_reads_stops_neither_the_service_nor_its_end(trained):
    process, port = start_service(trained, log_requests=True)
    try:
        wait_ready(port)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for _ in range(1_500):  # more than a pipe holds
                assert client.get("/v1/labels", params={"limit": 1}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_lines_that_were_lost_are_told():
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        handler = logging.StreamHandler(stream)
        handler.addFilter(logs._UnreadFilter(stream))
        for number in range(3_000):
            handler.handle(logging.LogRecord("dexter", logging.INFO, "", 0, "%s", ("line " * 10 + str(number),), None))
        first = os.read(reader, 2**20)
        handler.handle(logging.LogRecord("dexter", logging.INFO, "", 0, "%s", ("after",), None))
        then = os.read(reader, 2**20).decode()
    os.close(reader)
    num_lost = 3_000 - first.count(b"\n")
    assert num_lost > 0 and then == f"[{num_lost:,} lines before this one were not read and are lost] after\n"


def test_head_is_get_without_the_body(listening):
    port, _ = listening()
    for path in ("/healthz", "/info", "/v1/labels", "/labels", "/static/page.css"):
        got, head = (call(port, path, method) for method in ("GET", "HEAD"))
        assert (head.status_code, head.content) == (got.status_code, b"") == (200, b"")
        assert head.headers["content-length"] == got.headers["content-length"]
    assert call(port, "/v1/predict", "HEAD").status_code == 405


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ResourceError("disk"), MemoryError()])
def test_what_the_machine_lacks_is_503_with_a_time_and_logged(client, monkeypatch, caplog, error):
    def fail(self, *arguments, **options):
        raise error

    monkeypatch.setattr(Predictor, "predict", fail)
    monkeypatch.setattr(Predictor, "edit_labels", fail)
    predict = client.post("/v1/predict", json={"inputs": "river"})
    change = client.post("/v1/labels", json={"labels": [{"id": "new", "text": "x"}]})
    for answer, route in ((predict, "/v1/predict"), (change, "/v1/labels")):
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        assert f"{answer.headers['x-request-id']} POST {route} 503" in caplog.text
