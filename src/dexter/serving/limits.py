"""What is refused before it is read, in this order: strangers, bodies too large, requests too many; and time-outs."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dexter.serving.keys import Keys
from dexter.serving.problems import Problem, busy
from dexter.serving.settings import ServeSettings

OPEN_PATHS = ("/healthz", "/readyz")
"""Answered to everyone at any time: what watches a service asks here."""
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class Traffic:
    """What is under way, and whether anything new is let in."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.draining = False


class GateMiddleware:
    """Lets a request in, or answers it with a problem without reading its body."""

    def __init__(self, app: ASGIApp, *, settings: ServeSettings, traffic: Traffic) -> None:
        self.app, self.settings, self.traffic = app, settings, traffic
        self.keys = Keys(settings.keys)
        self.hosts = settings.allowed_hosts or (_LOOPBACK_NAMES if settings.is_loopback else ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self.app(scope, receive, send)
        method, headers = scope["method"], Headers(scope=scope)
        problem = self._refusal(method, headers)
        if problem is None and self._is_full:
            await asyncio.sleep(self.settings.busy_wait_seconds)
            problem = self._refusal(method, headers)
        if problem is None and self._is_full:
            problem = busy(f"{self.settings.max_in_flight} requests are under way")
        if problem is not None:
            return await problem.response(scope)(scope, receive, send)
        self.traffic.in_flight += 1
        try:
            await self._timed(scope, receive, send)
        finally:
            self.traffic.in_flight -= 1

    def _refusal(self, method: str, headers: Headers) -> Problem | None:
        if self.traffic.draining:
            return Problem(503, "draining", "the service is stopping", headers={"Retry-After": "5", **_CLOSE})
        if self.hosts and _host_name(headers.get("host", "")) not in self.hosts:
            return Problem(421, "host", "this service does not answer to this host name: see --allow-host")
        if method not in _SAFE_METHODS and _is_foreign(headers):
            return Problem(403, "origin", "pages of other sites may not write here")
        if not self.keys.allow(headers):
            challenge = {"WWW-Authenticate": 'Basic realm="dexter", charset="UTF-8"'}
            return Problem(401, "key", "an API key is needed: Authorization: Bearer KEY", headers=challenge)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.settings.max_body_bytes:
            detail = f"a request may have {self.settings.max_body_bytes:,} bytes"
            return Problem(413, "too_large", detail, headers=_CLOSE)
        return None

    @property
    def _is_full(self) -> bool:
        return self.traffic.in_flight >= self.settings.max_in_flight

    async def _timed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer within the time-out; 408 where the request itself was not all there, 504 where we were slow."""
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
            await self._late(complete).response(scope)(scope, receive, send)

    def _late(self, complete: bool) -> Problem:
        limit = f"{self.settings.timeout_seconds:g} s"
        if not complete:
            return Problem(408, "slow_request", f"the request was not all there after {limit}", headers=_CLOSE)
        return Problem(504, "timeout", f"no answer within {limit}: send fewer or shorter texts")


_CLOSE = {"Connection": "close"}


def _host_name(host: str) -> str:
    """A Host header without its port."""
    name, separator, port = host.rpartition(":")
    return (name if separator and port.isdecimal() else host).lower()


def _is_foreign(headers: Headers) -> bool:
    """Whether a browser says that another site's page sent this."""
    if headers.get("sec-fetch-site", "same-origin") in ("cross-site", "same-site"):
        return True
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower()
