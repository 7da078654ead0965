"""`dexter serve`: take the port, load the runs, answer until a signal, finish the requests under way.

With several workers each of their processes does so, on a socket of its own on the same port.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette

from dexter.errors import ResourceError, UsageError
from dexter.serving.app import create_app
from dexter.serving.connections import Connection, Refusals
from dexter.serving.logs import set_log_format
from dexter.serving.middleware import OpenRequests
from dexter.serving.settings import ServeSettings
from dexter.serving.workers import run_workers

log = logging.getLogger("dexter")
_GARBAGE_THRESHOLD = 10_000
"""New objects after which garbage is looked for; almost none of those that a request makes form circles."""
_MIN_DRAIN_SECONDS = 0.5
"""Shortest time between a signal and the end: new requests are told to go elsewhere."""
_SECONDS_TO_END = 3.0
"""Time after the requests under way for threads to end; what hangs longer is left behind."""


def serve(runs: Mapping[str, Path], settings: ServeSettings) -> None:
    """Serve runs by name until SIGTERM or SIGINT; then finish the requests under way and answer new ones with 503.

    SIGHUP reads the file of API keys again.
    """
    set_log_format(settings.log_format)
    with _bind(settings) as listener:
        host, port = listener.getsockname()[:2]
        address = f"{'https' if settings.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
        told = f"serving {', '.join(runs)} on {address} (Ctrl-C stops)"
        if settings.workers == 1:
            server = _load(runs, settings)
            listener.listen(server.config.backlog)  # clients wait from now on, instead of being refused
            log.info("%s", told)
            server.run(sockets=[listener])
            return
    # The port was free: other services are refused it from now on, but for those of this user that share their port.
    with _bind(settings, port=port, shared=True):

        def work(number: int, beat: Callable[[], None]) -> None:
            server = _load(runs, settings, worker=number)
            with _bind(settings, port=port, shared=True) as own:
                server.beat = beat
                server.run(sockets=[own])

        log.info("%s, %d workers", told, settings.workers)
        run_workers(settings.workers, work, end_seconds=settings.drain_seconds + _SECONDS_TO_END + 1.0)


def _load(runs: Mapping[str, Path], settings: ServeSettings, *, worker: int | None = None) -> _DrainingServer:
    app = create_app(runs, settings, worker=worker)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, lambda *_: app.state.keys.reload())
    gc.collect()
    gc.freeze()  # what is there now stays: looking for garbage in it would take a tenth of the time under load
    gc.set_threshold(_GARBAGE_THRESHOLD)
    return make_server(app)


def make_server(app: FastAPI) -> _DrainingServer:
    """Make the server of an application of `create_app`, with the limits of its settings."""
    settings: ServeSettings = app.state.runs.settings
    certificate, private_key = settings.tls or (None, None)
    config = uvicorn.Config(
        partial(Starlette.__call__, app),  # FastAPI's own looks for telemetry in the environment, at each request
        interface="asgi3",
        http=partial(  # type: ignore[arg-type]
            Connection,
            settings=settings,
            traffic=app.state.traffic,
            direct=app.state.direct,
            refusals=Refusals(settings.busy_wait_seconds, app.state.traffic.computed),
        ),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=certificate,
        ssl_keyfile=private_key,
        timeout_graceful_shutdown=1,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ResourceError(
            f"{certificate}, {private_key}: no certificate with its key in PEM format ({error})"
        ) from None
    return _DrainingServer(config, app.state.traffic, settings.drain_seconds)


def name_runs(arguments: Sequence[str]) -> dict[str, Path]:
    """Return run folders by name, from arguments NAME=FOLDER, or FOLDER for a run with the folder's name."""
    named: dict[str, Path] = {}
    for argument in arguments:
        name, separator, folder = argument.partition("=")
        path = Path(folder if separator else argument)
        name = name if separator else path.resolve().name
        if name in named:
            raise UsageError(f"two runs are called {name!r}: write NAME={path} for one of them")
        named[name] = path
    return named


def _bind(settings: ServeSettings, *, port: int | None = None, shared: bool = False) -> socket.socket:
    """Take the port, before the runs are loaded, so that a port in use is reported at once; `shared` by workers."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port if port is None else port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        raise ResourceError(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror}): choose another --host or --port"
        ) from None
    return listener


class _DrainingServer(uvicorn.Server):
    """A server that on a signal refuses new requests, finishes those under way, and ends in any case."""

    def __init__(self, config: uvicorn.Config, traffic: OpenRequests, drain_seconds: float) -> None:
        super().__init__(config)
        self._traffic, self._drain_seconds = traffic, drain_seconds
        self._signalled_at = 0.0
        self.beat: Callable[[], None] = lambda: None
        """Called ten times a second, once connections are accepted."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain at the first signal, stop at once at the second."""
        if self._traffic.draining:
            self.should_exit = self.force_exit = True
            _end_later(_SECONDS_TO_END)
            return
        self._traffic.draining = True
        self._signalled_at = time.monotonic()
        _end_later(self._drain_seconds + _SECONDS_TO_END)

    async def on_tick(self, counter: int) -> bool:
        """Give a sign of life, and decide whether to close, ten times a second."""
        self.beat()
        if self._traffic.draining and not self.should_exit:
            seconds = time.monotonic() - self._signalled_at
            self.should_exit = seconds >= (_MIN_DRAIN_SECONDS if self._traffic.in_flight == 0 else self._drain_seconds)
        return await super().on_tick(counter)


def _end_later(seconds: float) -> None:
    """End the process after a time, from a thread of its own: an event loop or a thread that hangs cannot stop it."""

    def end() -> None:
        message = "something still hangs %g s after the signal: ending without it"
        telling = threading.Thread(target=log.error, args=(message, seconds), daemon=True)
        telling.start()
        telling.join(1.0)  # the log may be what hangs
        os._exit(ResourceError.exit_code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
