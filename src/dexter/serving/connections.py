"""Connections with limits, which uvicorn leaves open: what is sent before a request is complete, and unread answers.

A connection has `head_seconds` to send the head of a request (its request line and headers), of `MAX_HEAD_BYTES` at
most. An answer that the client does not read ends the connection after `answer_seconds`; until then its bytes count as
held, see `Gate`. After an answer to a request whose body was not read, such as 413, the rest of the body is
read and discarded for a while: a connection closed at once would be reset, and the client would never see the answer.

Predictions are recognised by their first bytes and answered past the parser and the application, see `direct`. Where as
many requests are under way as may be, further ones are answered here, with 429: in the application each would take many
times as long, and a flood would leave little time for predictions.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dexter.serving.direct import DirectPredictions, DirectRequest
from dexter.serving.middleware import OpenRequests
from dexter.serving.problems import Busy, Problem
from dexter.serving.settings import ServeSettings

MAX_HEAD_BYTES = 64 * 2**10
"""Largest head of a request, and most bytes between two pieces of its body (chunk extensions, trailers)."""
_MAX_HEADERS = 100
_MAX_PIPELINED = 100
"""Most requests that a client may send on one connection ahead of the answers."""
_DISCARD_BYTES, _DISCARD_SECONDS = 64 * 2**20, 10.0
"""How much of an unwanted body is discarded, and for how long."""
_OPEN_PATHS = (b"/healthz", b"/readyz")
_PLAIN_HEADER = (
    rb"(?:(?!content-length|transfer-encoding|connection(?!: ?keep-alive\r)|expect|upgrade)[\w-]+:[^\r\n\0]*+\r\n)"
)
_PREDICTION = re.compile(
    rb"POST /v1/predict HTTP/1\.1\r\n"
    rb"(%s*+)content-length: ?(\d{1,7})\r\n(%s*+)\r\n" % (_PLAIN_HEADER, _PLAIN_HEADER),
    re.IGNORECASE,
)
"""The head of a prediction of which a parser would say no more than the length of its body."""
_MAX_PREDICTION_HEAD = 2**12
"""Larger heads are left to the parser, which counts their headers."""
_MAX_PATIENCE, _MANY_REFUSALS = 3, 256
"""How many times as long requests wait for their 429 where this many wait."""
_REST_SECONDS = 0.01
_WRITE_BUFFER = 4 * 2**10
"""Bytes of an answer that may wait in this process before the client counts as slow."""


class Refusals:
    """Requests that wait for their 429; one timer serves all of them.

    The more of them wait, the longer each does, up to `_MAX_PATIENCE` times the usual wait: clients that ask again as
    soon as they are refused could otherwise take all of the processor's time. Where the event loop runs late, they wait
    less by that. After requests were refused, the event loop rests while a batch is computed, `_REST_SECONDS` at most:
    to look at each request as it comes would cost more than to refuse it, and disturb the thread that computes.

    Args:
        wait_seconds: the usual wait.
        computed: set while no batch is computed.
    """

    def __init__(self, wait_seconds: float, computed: threading.Event) -> None:
        self._wait_seconds, self._computed = wait_seconds, computed
        self._arrived: list[Connection] = []
        """Those that were refused since the event loop last rested."""
        self._waiting: deque[tuple[float, list[Connection]]] = deque()
        """When they are answered, and which."""
        self._num_waiting = 0
        self._late_seconds = 0.0
        """The most of late: a mean would let one in a hundred wait for too long."""
        self.is_accepting = False
        """Whether a connection was made of late; the event loop accepts one each time it looks, and does not rest."""

    def add(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        """Answer a request of a connection after the wait, in the order in which requests were added."""
        self._arrived.append(connection)
        if len(self._arrived) == 1:
            loop.call_soon(self._rest, loop)

    def _rest(self, loop: asyncio.AbstractEventLoop) -> None:
        arrived, self._arrived = self._arrived, []
        patience = 1 + (_MAX_PATIENCE - 1) * min(1.0, self._num_waiting / _MANY_REFUSALS)
        # The request was read as late as it will be answered.
        wait = max(self._wait_seconds / 2, patience * self._wait_seconds - 2 * self._late_seconds)
        if not self._waiting:
            loop.call_later(wait, self._answer, loop)
        self._waiting.append((loop.time() + wait, arrived))
        self._num_waiting += len(arrived)
        if not self.is_accepting:
            self._computed.wait(min(_REST_SECONDS, self._wait_seconds))
        self.is_accepting = False

    def _answer(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        self._late_seconds = max(now - self._waiting[0][0], 0.9 * self._late_seconds)
        while self._waiting and self._waiting[0][0] <= now + _REST_SECONDS / 2:
            connections = self._waiting.popleft()[1]
            self._num_waiting -= len(connections)
            for connection in connections:
                connection.shed(now)
        if self._waiting:
            loop.call_at(self._waiting[0][0], self._answer, loop)


class Connection(HttpToolsProtocol):
    """One connection of a client.

    Args:
        settings: with the limits.
        traffic: where held bytes and refused connections are counted.
        direct: answers predictions.
        refusals: those of all connections.
        arguments: those of uvicorn's protocol.
    """

    # Attributes are found faster in slots than among the many of uvicorn's protocol.
    __slots__ = (
        "_answer_timer",
        "_closing_last",
        "_direct",
        "_early",
        "_head",
        "_head_fields",
        "_held_bytes",
        "_in_body",
        "_is_discarding",
        "_is_last",
        "_is_shed",
        "_max_in_flight",
        "_num_bytes",
        "_num_discarded",
        "_num_open",
        "_num_shed",
        "_prediction",
        "_refusal",
        "_refusals",
        "_settings",
        "_task",
        "_timer",
        "_traffic",
        "_waits_since",
    )

    def __init__(
        self,
        *,
        settings: ServeSettings,
        traffic: OpenRequests,
        direct: DirectPredictions,
        refusals: Refusals,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._settings, self._traffic, self._direct, self._refusals = settings, traffic, direct, refusals
        self._max_in_flight = settings.max_in_flight
        self._timer: asyncio.TimerHandle | None = None
        """Ends the time for the head of a request, or for the rest of an unwanted body."""
        self._answer_timer: asyncio.TimerHandle | None = None
        self._in_body = False
        self._is_discarding = False
        """Whether everything that still arrives is unwanted: the connection closes next."""
        self._num_bytes = 0
        """Bytes received since the last piece of a body, or since the last request."""
        self._num_discarded = 0
        self._held_bytes = 0
        self._num_open = 0
        """Requests of this connection that are not answered."""
        self._refusal: Problem | None = None
        self._is_shed = False
        """Whether the request that is arriving is answered with 429."""
        self._num_shed = 0
        """Requests that wait for their 429."""
        self._is_last = False
        """Whether the connection closes after them, or after the prediction under way."""
        self._head: tuple[bytes, bytes] = (b"", b"")
        """Headers of the last prediction before and after the length of its body; a client repeats them."""
        self._head_fields: dict[str, str] | None = None
        """The same by name; None: the application says why they are refused."""
        self._prediction: DirectRequest | None = None
        """The prediction that arrives or is computed; the parser does not see it."""
        self._task: asyncio.Task[None] | None = None
        self._early = b""
        """What arrived before the prediction was answered."""
        self._waits_since = 0.0
        """When the connection was made, a head began, or a prediction came or was answered: times count from then."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse a connection too many; give others a time for their first request."""
        super().connection_made(transport)
        self._refusals.is_accepting = True
        self._closing_last = _ClosingLast(self)
        transport.set_write_buffer_limits(high=_WRITE_BUFFER, low=0)
        if len(self.connections) > self._settings.max_connections:
            self._refuse(Problem(503, "connections", "too many connections", headers={"Retry-After": "1"}))
        else:
            self._watch_wait(self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._traffic.open -= self._num_open
        self._num_open = 0
        if self._prediction is not None and self._task is None:
            self._direct.release(self._prediction)  # its body will not arrive
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, unless it is unwanted or too much."""
        if self._prediction is not None:
            return self._receive_rest(self._prediction, data)
        if self._is_discarding:
            return self._count_discarded(len(data))
        # No part of a request came before, and no answer to one is due or unread.
        is_between = not (self._in_body or self._num_bytes or self._num_shed or self._held_bytes)
        is_between = is_between and (self.cycle is None or self.cycle.response_complete)
        if (
            is_between
            and (head := _PREDICTION.match(data, 0, _MAX_PREDICTION_HEAD))
            and head[0].count(b"\n") <= _MAX_HEADERS
        ):
            num_missing = head.end() + int(head[2]) - len(data)
            if self._is_full():
                if num_missing == 0:
                    self._num_shed = 1
                    return self._refusals.add(self.loop, self)
            elif num_missing >= 0 and (prediction := self._admit(head)) is not None:
                return self._receive_rest(prediction, data[head.end() :])
        if not (self._in_body or self._num_bytes):
            self._waits_since = self.loop.time()
        while data:
            # The parser keeps an unfinished header in memory: it gets no more than the limit.
            room = MAX_HEAD_BYTES - self._num_bytes
            piece, data = data[:room], data[room:]
            self._num_bytes += len(piece)
            super().data_received(piece)
            if self._is_discarding or self.transport.is_closing():
                return None
            if self._num_bytes >= MAX_HEAD_BYTES:
                return self._refuse(_head_too_large())
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            if self._in_body:
                self._start_timer(_DISCARD_SECONDS, self.transport.abort)
            else:
                self._start_timer(self._settings.head_seconds, self._end_slow_head)
        return None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; those after the body (trailers) are ignored, since the request is under way by then."""
        if self._in_body:
            return
        super().on_header(name, value)
        if len(self.headers) > _MAX_HEADERS:
            self._refusal = _head_too_large()
            raise ValueError("too many headers")

    def on_headers_complete(self) -> None:
        """Start the request."""
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("too many requests ahead of their answers")
        self._stop_timer()
        self._in_body, self._num_bytes, self._num_discarded = True, 0, 0
        self._is_shed = self._should_shed()
        if self._is_shed:
            self._num_shed += 1
            return
        self._num_open += 1
        self._traffic.open += 1
        super().on_headers_complete()
        self.cycle.transport = self._closing_last  # type: ignore[assignment]
        self.scope["state"]["is_disconnected"] = self.transport.is_closing

    def on_body(self, body: bytes) -> None:
        """Hand a piece of the body on; discard it if the request is answered."""
        self._num_bytes = 0
        if self._is_shed or self.cycle.response_complete:
            self._count_discarded(len(body))
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request; from now on the head of the next one may arrive."""
        self._stop_timer()
        self._in_body, self._num_bytes = False, 0
        if self._is_shed:
            self._is_last = not self.parser.should_keep_alive()
            self._refusals.add(self.loop, self)
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the end of what is discarded."""
        self._num_open -= 1
        self._traffic.open -= 1
        if self._is_discarding:
            self.flow.resume_reading()
        else:
            super().on_response_complete()

    def close(self) -> None:
        """Close when the answer is sent, and a body that is still arriving is discarded."""
        self._watch_answer()
        if self._in_body:
            self._discard()
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Close when what is under way is answered."""
        if self._prediction is not None or self._num_shed:
            self._is_last = True
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        """Start the time in which the client has to read its answer."""
        super().pause_writing()
        self._held_bytes = self.transport.get_write_buffer_size()
        self._traffic.held_bytes += self._held_bytes
        self._watch_answer()

    def resume_writing(self) -> None:
        """Note that the client has read its answer, or is gone."""
        super().resume_writing()
        self._traffic.held_bytes -= self._held_bytes
        self._held_bytes = 0
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """End a connection on which no request follows; `close` would wait for a client that does not read."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, or has too many headers."""
        self._refuse(self._refusal or Problem(400, "not_http", "this is not a request in HTTP/1.1"))

    def _should_shed(self) -> bool:
        """Return whether a request is too many; answers keep the order of the requests of a connection."""
        if self._num_shed:
            return True
        is_next = self.cycle is None or self.cycle.response_complete
        return self._is_full() and is_next and not self.expect_100_continue and self.url not in _OPEN_PATHS

    def _is_full(self) -> bool:
        """Return whether as many requests are under way as may be, those of clients that have left included."""
        return self._traffic.open >= self._max_in_flight or self._traffic.in_flight >= self._max_in_flight

    def _watch_wait(self, now: float) -> None:
        """Count the time for the next head, or for an answer, from now on."""
        self._waits_since = now
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        if self._timer is None:
            self._start_timer(min(self._settings.head_seconds, self._settings.timeout_seconds), self._end_slow_head)

    def _admit(self, head: re.Match[bytes]) -> DirectRequest | None:
        """Start a prediction that the parser does not see; None: the application answers it."""
        if self._head != (around := (head[1], head[3])):
            self._head = around
            lines = b"".join(self._head).decode("latin-1").split("\r\n")[-2::-1]  # of two equal ones the first counts
            pairs = (line.partition(":") for line in lines)
            self._head_fields = self._direct.check_source(
                {name.lower(): value.strip(" \t") for name, _, value in pairs}
            )
        length = int(head[2])
        if self._head_fields is not None and length <= self._settings.max_body_bytes:
            self._prediction = self._direct.admit(self._head_fields, length)
        if self._prediction is not None:
            self._watch_wait(self.loop.time())
        return self._prediction

    def _receive_rest(self, prediction: DirectRequest, data: bytes) -> None:
        """Take the rest of the body of a prediction, and answer it; keep what arrives after it until then."""
        num_missing = prediction.num_bytes - len(prediction.body)
        if len(data) > num_missing:
            self._early += data[num_missing:]
            self.flow.pause_reading()
        prediction.body += data[:num_missing]
        if self._task is None and len(prediction.body) == prediction.num_bytes:
            self._task = self.loop.create_task(self._answer(prediction))

    async def _answer(self, prediction: DirectRequest) -> None:
        headers = b"".join([b"%s: %s\r\n" % each for each in self.server_state.default_headers])
        try:
            answer = await self._direct.answer(prediction, self.transport.is_closing, headers)
        except asyncio.CancelledError:
            answer = self._direct.refuse(prediction, None, headers)
        finally:
            self._direct.release(prediction)
        self._prediction = self._task = None
        self._waits_since = self.loop.time()
        if self.transport.is_closing():
            return
        self.transport.write(answer)
        if self._is_last:
            self.close()
        elif self._early:
            early, self._early = self._early, b""
            self.flow.resume_reading()
            self.data_received(early)

    def shed(self, now: float) -> None:
        """Answer a request that is too many."""
        self._num_shed -= 1
        self._traffic.refused["busy"] += 1
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self._watch_wait(now)
            self.transport.write(_BUSY)
            if self._is_last and not self._num_shed:
                self.transport.close()

    def _refuse(self, problem: Problem) -> None:
        """Answer a connection that has sent no complete request, and close it."""
        self._traffic.refused[problem.code] += 1
        if self.cycle is not None and not self.cycle.response_complete:
            return self.transport.abort()  # an answer to an earlier request may be half sent
        problem.headers["connection"] = "close"
        self.transport.write(_as_bytes(problem))
        self._watch_answer()
        return self._discard()

    def _discard(self) -> None:
        """Read and discard what still arrives, within limits; then close."""
        self._is_discarding = True
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._stop_timer()
        self._start_timer(_DISCARD_SECONDS, self.transport.abort)

    def _count_discarded(self, num_bytes: int) -> None:
        self._num_discarded += num_bytes
        if self._num_discarded > _DISCARD_BYTES:
            self.transport.abort()

    def _end_slow_head(self) -> None:
        """Close a connection on which nothing was sent in time; answer one whose request is late or incomplete."""
        self._timer = None
        seconds = self._settings.head_seconds if self._prediction is None else self._settings.timeout_seconds
        left = self._waits_since + seconds - self.loop.time()
        if left > 0 or self._num_shed:
            self._start_timer(min(max(left, 1.0), self._settings.head_seconds), self._end_slow_head)
        elif self._task is not None:
            self._task.cancel()
        elif self._prediction is not None:
            prediction, self._prediction = self._prediction, None
            self._direct.release(prediction)
            self.transport.write(self._direct.refuse(prediction, None))
            self._watch_answer()
            self._discard()
        elif self._num_bytes:
            self._refuse(Problem(408, "slow_request", f"no request within {self._settings.head_seconds:g} s"))
        else:
            self.transport.close()

    def _watch_answer(self) -> None:
        if self._answer_timer is None:
            self._answer_timer = self.loop.call_later(self._settings.answer_seconds, self.transport.abort)

    def _start_timer(self, seconds: float, end: Callable[[], None]) -> None:
        self._timer = self.loop.call_later(seconds, end)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _ClosingLast:
    """The transport as a request sees it: closing leaves time for the client to read the answer."""

    def __init__(self, connection: Connection) -> None:
        self.write, self.is_closing = connection.transport.write, connection.transport.is_closing
        self.close = connection.close


def _as_bytes(problem: Problem) -> bytes:
    """Return an answer in HTTP/1.1."""
    response = problem.response({})
    lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}", "cache-control: no-store"]
    lines += [f"{name.decode()}: {value.decode()}" for name, value in response.raw_headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + bytes(response.body)


_BUSY = _as_bytes(Busy("the service has as many requests as it takes"))


def _head_too_large() -> Problem:
    detail = f"the request line and headers may have {MAX_HEAD_BYTES // 2**10} KiB and {_MAX_HEADERS} lines"
    return Problem(431, "head_too_large", detail)
