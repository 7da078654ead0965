"""ASGI middleware: `WatchMiddleware` around everything, and the gate inside it.

The gate refuses what should not be read at all: unknown hosts, other sites' pages, missing keys, large bodies, requests
beyond a limit; and it ends requests that take too long.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import collections
import functools
import logging
import random
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dexter.serving.keys import KeyRing
from dexter.serving.logs import log_request
from dexter.serving.problems import AnswerTooLarge, Busy, Problem, Unavailable
from dexter.serving.settings import ServeSettings

log = logging.getLogger("dexter")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    # Not "no-referrer": a form of our own page would then send the origin "null" and be refused.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
]
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_OPEN_PATHS = ("/healthz", "/readyz")
"""Answered to everyone at any time: health checks ask here."""
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_CLOSE = {"Connection": "close"}


class Metrics:
    """Prometheus metrics of a service, in a registry of its own; those of one of several workers say which."""

    def __init__(self, worker: int | None = None, *, log_requests: bool = False) -> None:
        self._log_requests = log_requests
        self.registry = registry = CollectorRegistry() if worker is None else _WorkerRegistry(worker)
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "dexter_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "dexter_request_seconds", "Time to answer.", ["route"], buckets=_SECONDS, registry=registry
        )
        self.count_for, self.seconds_for = functools.cache(self.requests.labels), functools.cache(self.seconds.labels)
        """By values of the labels, which are few."""
        self.in_flight = Gauge("dexter_requests_in_flight", "Requests under way.", registry=registry)
        self.held_bytes = Gauge(
            "dexter_held_bytes", "Bytes of request bodies and of answers not read yet.", registry=registry
        )
        self.refused = Gauge(
            "dexter_connections_refused",
            "Connections and requests refused unread.",
            ["reason"],
            registry=registry,
        )
        self.batches = Histogram(
            "dexter_batch_texts",
            "Texts predicted together.",
            ["run"],
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=registry,
        )
        self.queued = Gauge("dexter_queued_texts", "Texts waiting for a batch.", ["run"], registry=registry)
        self.labels = Gauge("dexter_labels", "Labels that can be predicted.", ["run"], registry=registry)
        self.version = Gauge("dexter_labels_version", "Version of the labels.", ["run"], registry=registry)

    def note(
        self, method: str, route: str, status: int, started: float, num_bytes: int, state: Mapping[str, Any]
    ) -> None:
        """Count, time and, if wanted, log an answer; `state` has the id of its request and the key."""
        seconds = time.perf_counter() - started
        self.count_for(method, route, status).inc()
        self.seconds_for(route).observe(seconds)
        if self._log_requests or status >= 500:
            key = state["key"].name if state["key"] else None
            log_request(state["request_id"], method, route, status, 1_000 * seconds, num_bytes, key)


class _WorkerRegistry(CollectorRegistry):
    """Gives all metrics the label `worker`: a request for them reaches one worker, and not always the same."""

    def __init__(self, worker: int) -> None:
        super().__init__()
        self._worker = {"worker": str(worker)}

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [sample._replace(labels={**sample.labels, **self._worker}) for sample in metric.samples]
            yield metric


class WatchMiddleware:
    """Give each request an id and its response the security headers; count, time and log it; answer unexpected errors.

    Requests are counted by their route, never by their path, which the client chooses. HEAD is answered as GET, without
    the body.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started, status, num_bytes = time.perf_counter(), 0, 0
        state: dict[str, Any] = scope.setdefault("state", {})
        request_id = state["request_id"] = new_request_id()
        state["key"] = None
        state.setdefault("is_disconnected", None)  # only our own server knows
        is_head = scope["method"] == "HEAD"
        inner = {**scope, "method": "GET"} if is_head else scope

        async def watched_send(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = add_headers(message.get("headers", ()), request_id)
            else:
                num_bytes += len(message.get("body", b""))
                message = {**message, "body": b""} if is_head else message
            await send(message)

        try:
            await self.app(inner, receive, watched_send)
        except Exception as error:
            problem = explain_error(error, request_id)
            if not status:  # otherwise the answer is half sent, and the server closes the connection
                await problem.response(scope)(scope, receive, watched_send)
        finally:
            route = getattr(inner.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.metrics.note(method, route, status or 500, started, num_bytes, state)


def new_request_id() -> str:
    """Return an id for a request; it names it and protects nothing."""
    return f"{random.getrandbits(64):016x}"


def add_headers(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> list[tuple[bytes, bytes]]:
    """Return the headers of a response with those that every response has."""
    completed = [*headers, (b"x-request-id", request_id.encode()), *_HEADERS]
    if all(name != b"cache-control" for name, _ in headers):
        completed.append((b"cache-control", b"no-store"))
    return completed


def explain_error(error: Exception, request_id: str) -> Problem:
    """Return the problem of an unexpected error, and log where it happened but not what was sent."""
    lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-1:]]
    log.error("%s: %s at %s", request_id, type(error).__name__, lines)
    if isinstance(error, OSError | MemoryError):
        return Unavailable("a file, a connection or memory that the service needs is not to be had")
    return Problem(500, "bug", "an error in the service: its log has more under the request id")


class OpenRequests:
    """Requests under way, what they hold in memory, and whether the service is stopping."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.open = 0
        """Requests that connections have handed on and not answered: those under way, and those about to be."""
        self.held_bytes = 0
        """Bytes of the bodies of requests under way, and of answers that clients have not read."""
        self.refused: collections.Counter[str] = collections.Counter()
        """Connections and requests that were refused before the application saw them, by code of the problem."""
        self.draining = False
        self.computed = threading.Event()
        """Set while no thread computes a batch."""
        self.computed.set()


class Gate:
    """Says why a request is refused: by its headers, by what is under way, by the size of its answer."""

    def __init__(self, settings: ServeSettings, traffic: OpenRequests, keys: KeyRing) -> None:
        self.settings, self.traffic, self.keys = settings, traffic, keys
        self.hosts = settings.allowed_hosts or (_LOOPBACK_NAMES if settings.is_loopback else ())

    def is_full(self, num_bytes: int) -> bool:
        """Return whether there is no room for one more request with so many bytes."""
        too_many = self.traffic.in_flight >= self.settings.max_in_flight
        return too_many or self.traffic.held_bytes + num_bytes > self.settings.max_held_bytes

    def check(self, method: str, headers: Mapping[str, str], state: dict[str, Any]) -> Problem | None:
        """Return why a request is refused; None lets it in. `state` gets its key."""
        problem = self.check_source(method, headers) or self.check_key(headers, state)
        if problem is None and not 0 <= _body_length(headers) <= self.settings.max_body_bytes:
            return self.too_large()
        return problem

    def check_source(self, method: str, headers: Mapping[str, str]) -> Problem | None:
        """Return why a request with this host and origin is refused."""
        # Starlette's TrustedHostMiddleware would answer 400 in plain text, and to health checks too.
        if self.hosts and _host_name(headers.get("host", "")) not in self.hosts:
            return Problem(421, "host", "this service does not answer to this host name: see --allow-host")
        if method not in _SAFE_METHODS and _is_cross_site(headers):
            return Problem(403, "origin", "pages of other sites may not write here")
        return None

    def check_key(self, headers: Mapping[str, str], state: dict[str, Any]) -> Problem | None:
        """Return why a request with this key is refused now."""
        if self.traffic.draining:
            return _draining()
        if self.keys:
            key = state["key"] = self.keys.find(_sent_key(headers))
            if key is None:
                challenge = {"WWW-Authenticate": 'Basic realm="dexter", charset="UTF-8"'}
                return Problem(401, "key", "an API key is needed: Authorization: Bearer KEY", headers=challenge)
            if seconds := self.keys.charge(key):
                detail = f"this key may send {key.per_minute} requests in a minute: try again in {seconds} s"
                return Problem(429, "rate", detail, headers={"Retry-After": str(seconds)})
        return None

    def too_large(self) -> Problem:
        """Return the problem of a body that is too large."""
        detail = f"a request may have {self.settings.max_body_bytes:,} bytes"
        return Problem(413, "too_large", detail, headers=_CLOSE)

    def check_room(self, num_bytes: int) -> Problem | None:
        """Return why an answer is not sent: it is too large, or there is no room until others have read theirs."""
        if num_bytes > self.settings.max_answer_bytes:
            return AnswerTooLarge(self.settings.max_answer_bytes)
        if self.traffic.held_bytes + num_bytes > self.settings.max_held_bytes:
            return Busy("too many answers are waiting to be read")
        return None

    def too_slow(self) -> Problem:
        """Return the problem of an answer that is not there in time."""
        return Problem(504, "timeout", f"no answer within {self._limit}: send fewer or shorter texts")

    def incomplete(self) -> Problem:
        """Return the problem of a request whose body is not there in time."""
        return Problem(408, "slow_request", f"the request was incomplete after {self._limit}", headers=_CLOSE)

    @property
    def _limit(self) -> str:
        return f"{self.settings.timeout_seconds:g} s"


class GateMiddleware:
    """Let a request in, or answer it with a problem without reading its body."""

    def __init__(self, app: ASGIApp, *, gate: Gate) -> None:
        self.app, self.gate = app, gate
        self.settings, self.traffic = gate.settings, gate.traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            return await self.app(scope, receive, send)
        # Of a header that is sent twice, the first counts.
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        problem = self.gate.check(scope["method"], headers, scope["state"])
        # A body of unknown length counts as the largest.
        num_bytes = self.settings.max_body_bytes if "transfer-encoding" in headers else _body_length(headers)
        if problem is None and self.gate.is_full(num_bytes):
            await asyncio.sleep(self.settings.busy_wait_seconds)
            if self.gate.is_full(num_bytes):
                problem = Busy("the service has as many requests, or as much of them in memory, as it takes")
            elif self.traffic.draining:
                problem = _draining()
        if problem is not None:
            return await problem.response(scope)(scope, receive, send)
        self.traffic.in_flight += 1
        self.traffic.held_bytes += num_bytes
        try:
            await self._answer_in_time(scope, receive, send)
        finally:
            self.traffic.in_flight -= 1
            self.traffic.held_bytes -= num_bytes

    async def _answer_in_time(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer within the time-out: 408 if the request was incomplete by then, 504 if the answer was."""
        started = complete = False
        num_received = 0
        start: Message | None = None
        refusal: Problem | None = None

        async def watched_receive() -> Message:
            nonlocal complete, num_received
            message = await receive()
            complete = complete or not message.get("more_body", False)
            num_received += len(message.get("body", b""))
            if num_received > self.settings.max_body_bytes:  # its length was not announced
                raise self.gate.too_large()
            return message

        async def watched_send(message: Message) -> None:
            nonlocal started, start, refusal
            if message["type"] == "http.response.start":
                start = message
                return
            if start is not None:
                refusal = self.gate.check_room(len(message.get("body", b"")))
            if refusal is not None:
                return
            if start is not None:
                started = True
                await send(start)
                start = None
            await send(message)

        try:
            async with asyncio.timeout(self.settings.timeout_seconds):
                await self.app(scope, watched_receive, watched_send)
        except TimeoutError:
            if started:
                raise
            refusal = self.gate.too_slow() if complete else self.gate.incomplete()
        if refusal is not None:
            await refusal.response(scope)(scope, receive, send)


def _draining() -> Problem:
    return Problem(503, "draining", "the service is stopping", headers={"Retry-After": "5", **_CLOSE})


def _body_length(headers: Mapping[str, str]) -> int:
    """Return the length of the body that is announced; -1 if that is not a number."""
    length = headers.get("content-length", "0")
    return int(length) if length.isascii() and length.isdecimal() and len(length) < 20 else -1


def _host_name(host: str) -> str:
    """Return a Host header without its port."""
    name, separator, port = host.rpartition(":")
    return (name if separator and port.isdecimal() else host).lower()


def _is_cross_site(headers: Mapping[str, str]) -> bool:
    """Return whether a browser says that a page of another site sent the request."""
    if headers.get("sec-fetch-site", "same-origin") in ("cross-site", "same-site"):
        return True
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()


def _sent_key(headers: Mapping[str, str]) -> str:
    """Return the API key of a request: a bearer token, `X-API-Key`, or the password of basic authentication.

    A browser asks its user for the last; the user name does not matter.
    """
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            decoded = base64.b64decode(value, validate=True).decode("utf-8", errors="replace")
        except binascii.Error:
            return ""
        return decoded.partition(":")[2]
    return headers.get("x-api-key", "")
