"""Prometheus: what the service counts, in a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Requests by route and status, their time, sizes of batches, and what stands in each run."""

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
        self.queued = Gauge("dexter_queued_texts", "Texts that wait.", ["run"], registry=registry)
        self.labels = Gauge("dexter_labels", "Labels that can be predicted.", ["run"], registry=registry)
        self.version = Gauge("dexter_labels_version", "Version of the labels.", ["run"], registry=registry)

    def batch_observer(self, run: str) -> Callable[[int], None]:
        """What a run's queue tells about its batches."""
        return self.batches.labels(run).observe

    def render(self) -> bytes:
        """Everything in Prometheus' text form."""
        return generate_latest(self.registry)


class MetricsMiddleware:
    """Counts and times each request by its route, never by its path: a path is the sender's own word."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, log: Callable[[Scope, str, int, float], None] | None) -> None:
        self.app, self.metrics, self.log = app, metrics, log

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
            if self.log is not None:
                self.log(scope, route, status, seconds)


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
