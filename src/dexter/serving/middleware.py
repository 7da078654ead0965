"""ASGI middleware, from the outside in: response headers, metrics, unexpected errors, and the gate.

The gate refuses what should not be read at all: unknown hosts, other sites' pages, missing keys, large bodies, requests
beyond the limit; and it ends requests that take too long.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import secrets
import time
import traceback

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dexter.serving.problems import Busy, Problem
from dexter.serving.settings import ServeSettings

log = logging.getLogger("dexter")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    # Not "no-referrer": a form of our own page would then send the origin "null" and be refused.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_OPEN_PATHS = ("/healthz", "/readyz")
"""Answered to everyone at any time: health checks ask here."""
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_CLOSE = {"Connection": "close"}


class HeadersMiddleware:
    """Give each request an id and each response the security headers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request_id = scope.setdefault("state", {})["request_id"] = secrets.token_hex(8)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                headers.setdefault("Cache-Control", "no-store")
                headers.update(_HEADERS)
            await send(message)

        return await self.app(scope, receive, send_with_headers)


class Metrics:
    """Prometheus metrics of a service, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "dexter_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "dexter_request_seconds", "Time to answer.", ["route"], buckets=_SECONDS, registry=registry
        )
        self.in_flight = Gauge("dexter_requests_in_flight", "Requests under way.", registry=registry)
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


class MetricsMiddleware:
    """Count, time and optionally log each request by its route; never by its path, which the client chooses."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, log_requests: bool) -> None:
        self.app, self.metrics, self.log_requests = app, metrics, log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started, status = time.perf_counter(), 500

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        finally:
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.metrics.requests.labels(method, route, status).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            if self.log_requests:
                request_id = scope["state"]["request_id"]
                log.info("%s %s %s %d %.1f ms", request_id, scope["method"], route, status, 1_000 * seconds)


class ErrorMiddleware:
    """Answer an unexpected error with 500, and log where it happened but not what was sent."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        except Exception as error:
            request_id = scope.get("state", {}).get("request_id")
            lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-1:]]
            log.error("%s: %s at %s", request_id, type(error).__name__, lines)
            if started or scope["type"] != "http":
                raise
            problem = Problem(500, "bug", "an error in the service: its log has more under the request id")
            await problem.response(scope)(scope, receive, send)


class OpenRequests:
    """Requests under way, and whether the service is stopping."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.draining = False


class GateMiddleware:
    """Let a request in, or answer it with a problem without reading its body."""

    def __init__(self, app: ASGIApp, *, settings: ServeSettings, traffic: OpenRequests) -> None:
        self.app, self.settings, self.traffic = app, settings, traffic
        self.key_digests = [_digest(key) for key in settings.keys]
        self.hosts = settings.allowed_hosts or (_LOOPBACK_NAMES if settings.is_loopback else ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            return await self.app(scope, receive, send)
        method, headers = scope["method"], Headers(scope=scope)
        problem = self._check(method, headers)
        if problem is None and self._is_full:
            await asyncio.sleep(self.settings.busy_wait_seconds)
            problem = self._check(method, headers)
        if problem is None and self._is_full:
            problem = Busy(f"{self.settings.max_in_flight} requests are under way")
        if problem is not None:
            return await problem.response(scope)(scope, receive, send)
        self.traffic.in_flight += 1
        try:
            await self._answer_in_time(scope, receive, send)
        finally:
            self.traffic.in_flight -= 1

    @property
    def _is_full(self) -> bool:
        return self.traffic.in_flight >= self.settings.max_in_flight

    def _check(self, method: str, headers: Headers) -> Problem | None:
        """Return why a request is refused; None lets it in."""
        if self.traffic.draining:
            return Problem(503, "draining", "the service is stopping", headers={"Retry-After": "5", **_CLOSE})
        # Starlette's TrustedHostMiddleware would answer 400 in plain text, and to health checks too.
        if self.hosts and _host_name(headers.get("host", "")) not in self.hosts:
            return Problem(421, "host", "this service does not answer to this host name: see --allow-host")
        if method not in _SAFE_METHODS and _is_cross_site(headers):
            return Problem(403, "origin", "pages of other sites may not write here")
        if self.key_digests and not self._has_key(headers):
            challenge = {"WWW-Authenticate": 'Basic realm="dexter", charset="UTF-8"'}
            return Problem(401, "key", "an API key is needed: Authorization: Bearer KEY", headers=challenge)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.settings.max_body_bytes:
            detail = f"a request may have {self.settings.max_body_bytes:,} bytes"
            return Problem(413, "too_large", detail, headers=_CLOSE)
        return None

    def _has_key(self, headers: Headers) -> bool:
        given = _digest(_sent_key(headers))
        # All keys are compared, also after a match, so that the time tells nothing.
        return sum(hmac.compare_digest(given, digest) for digest in self.key_digests) > 0

    async def _answer_in_time(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer within the time-out: 408 if the request was incomplete by then, 504 if the answer was."""
        started = complete = False

        async def watched_receive() -> Message:
            nonlocal complete
            message = await receive()
            complete = complete or not message.get("more_body", False)
            return message

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            async with asyncio.timeout(self.settings.timeout_seconds):
                await self.app(scope, watched_receive, watched_send)
        except TimeoutError:
            if started:
                raise
            limit = f"{self.settings.timeout_seconds:g} s"
            problem = Problem(504, "timeout", f"no answer within {limit}: send fewer or shorter texts")
            if not complete:
                problem = Problem(408, "slow_request", f"the request was incomplete after {limit}", headers=_CLOSE)
            await problem.response(scope)(scope, receive, send)


def _host_name(host: str) -> str:
    """Return a Host header without its port."""
    name, separator, port = host.rpartition(":")
    return (name if separator and port.isdecimal() else host).lower()


def _is_cross_site(headers: Headers) -> bool:
    """Return whether a browser says that a page of another site sent the request."""
    if headers.get("sec-fetch-site", "same-origin") in ("cross-site", "same-site"):
        return True
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()


def _sent_key(headers: Headers) -> str:
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


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()
