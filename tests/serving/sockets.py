"""Clients that write bytes to a socket, and a `dexter serve` process of its own."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.conftest import eventually

PATIENCE = 60.0
"""Seconds that a loaded machine may take for anything; what hangs takes longer."""
POST = "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def request_bytes(inputs, *, length=None, **fields):
    body = json.dumps({"inputs": inputs, **fields}).encode()
    return f"{POST}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


def connect(port):
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def call(port, path, method="GET", *, scheme="http", **options):
    """Answer of a service on this machine; httpx by itself waits five seconds."""
    return httpx.request(method, f"{scheme}://127.0.0.1:{port}{path}", timeout=PATIENCE, **options)


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


SERVE = """
import json, sys
from pathlib import Path
from dexter.cli.main import common
from dexter.serving.server import serve
from dexter.serving.settings import ServeSettings

common(debug=False, quiet=False, version=False)
serve({"run": Path(sys.argv[1])}, ServeSettings(**{"port": 0, "keep_edits": False, **json.loads(sys.argv[2])}))
"""


def start_process(*arguments, **environment):
    """A `dexter serve` of its own, and the port that it names."""
    return _start("-m", "dexter", "serve", *map(str, arguments), "--port", "0", **environment)


def start_service(run, *, before="", **settings):
    """A process that serves a run with settings that the command line does not have, and its port.

    `before` is code that runs first.
    """
    return _start("-c", before + SERVE, str(run), json.dumps(settings))


def _start(*arguments, **environment):
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    said = process.stderr.readline()
    address = re.search(r"https?://127\.0\.0\.1:(\d+)", said)
    assert address, said + process.stderr.read()
    return process, int(address[1])


def num_open_files(process):
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


def resident_bytes(process):
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        pytest.skip("needs /proc to measure memory")
    return int(status.read_text().split("VmRSS:")[1].split()[0]) * 1_024


def cpu_seconds(process):
    """Processor time of a process so far, of all its threads."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_ready(port, **options):
    def is_ready():
        try:
            return call(port, "/readyz", **options).status_code == 200
        except httpx.TransportError:
            return False

    eventually(is_ready)
