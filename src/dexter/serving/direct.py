"""Predictions answered on the connection itself, past ASGI, whose layers would take longer than a prediction does.

A connection hands over what it recognises as a prediction by its first bytes; the same gate, checks, errors, metrics
and log as those of the application apply. What the gate refuses is left to the application, which says why.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from dexter.errors import DexterError
from dexter.serving.batching import IsDisconnected
from dexter.serving.middleware import Gate, Metrics, add_headers, explain_error, new_request_id
from dexter.serving.problems import Problem, check_json_type, parse_json, refusal
from dexter.serving.protocol import PredictRequest
from dexter.serving.routes import PREDICT_PATH, predict_json
from dexter.serving.runs import ServedRuns

_HEAD = b"HTTP/1.1 200 OK\r\n%scontent-length: %d\r\ncontent-type: application/json\r\nx-request-id: %s\r\n"
_FIXED_HEADERS = b"".join(b"%s: %s\r\n" % each for each in add_headers((), "")[1:]) + b"\r\n"


@dataclass(slots=True, eq=False)
class DirectRequest:
    """A prediction whose head has arrived."""

    content_type: str
    num_bytes: int
    """Length of its body."""
    state: dict[str, Any]
    """Its id and key, as in a scope of ASGI."""
    started: float = field(default_factory=time.perf_counter)
    body: bytes = b""
    """As much of it as has arrived."""


class DirectPredictions:
    """Answers to predictions over the runs of a service."""

    def __init__(self, runs: ServedRuns, gate: Gate, metrics: Metrics) -> None:
        self._runs, self._gate, self._metrics = runs, gate, metrics
        self._traffic = gate.traffic

    def check_source(self, headers: dict[str, str]) -> dict[str, str] | None:
        """Return headers whose host and origin are accepted; None: the application says why not."""
        return headers if self._gate.check_source("POST", headers) is None else None

    def admit(self, headers: dict[str, str], num_bytes: int) -> DirectRequest | None:
        """Let a request in by its checked headers, and count it as under way; None: the application says why not."""
        state: dict[str, Any] = {"request_id": new_request_id(), "key": None}
        if self._gate.is_full(num_bytes) or self._gate.check_key(headers, state) is not None:
            return None
        self._traffic.open += 1
        self._traffic.in_flight += 1
        self._traffic.held_bytes += num_bytes
        return DirectRequest(headers.get("content-type", ""), num_bytes, state)

    def release(self, request: DirectRequest) -> None:
        """Note that a request is answered, or its client gone."""
        self._traffic.open -= 1
        self._traffic.in_flight -= 1
        self._traffic.held_bytes -= request.num_bytes

    async def answer(self, request: DirectRequest, is_disconnected: IsDisconnected, headers: bytes) -> bytes:
        """Return the whole answer to a request, in HTTP/1.1; `headers` are further ones."""
        try:
            check_json_type(request.content_type)
            asked = parse_json(request.body, PredictRequest)
            body = await predict_json(self._runs, asked, is_disconnected=is_disconnected)
        except Exception as error:
            return self.refuse(request, error, headers)
        if (problem := self._gate.check_room(len(body))) is not None:
            return self.refuse(request, problem, headers)
        self._metrics.note("POST", PREDICT_PATH, 200, request.started, len(body), request.state)
        return _HEAD % (headers, len(body), request.state["request_id"].encode()) + _FIXED_HEADERS + body

    def refuse(self, request: DirectRequest, error: Exception | None, headers: bytes = b"") -> bytes:
        """Return the answer to a request that failed; None: its time is up."""
        request_id = request.state["request_id"]
        if error is None:
            error = self._gate.too_slow() if len(request.body) == request.num_bytes else self._gate.incomplete()
        elif isinstance(error, DexterError):
            error = refusal(error, request_id)
        elif not isinstance(error, Problem):
            error = explain_error(error, request_id)
        response = error.response({"state": request.state})
        lines = b"".join(b"%s: %s\r\n" % each for each in add_headers(response.raw_headers, request_id))
        self._metrics.note("POST", PREDICT_PATH, error.status, request.started, len(response.body), request.state)
        status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()
        return status + headers + lines + b"\r\n" + bytes(response.body)
