"""Clients that write bytes to a socket, and a `dexter serve` process of its own."""

import json
import os
import re
import socket
import subprocess
import sys
import time

import httpx

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


def start_process(*arguments, **environment):
    """A `dexter serve` of its own, and the address that it names."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dexter", "serve", *map(str, arguments), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    said = process.stderr.readline()
    address = re.search(r"https?://127\.0\.0\.1:(\d+)", said)
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
