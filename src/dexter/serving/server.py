"""`dexter serve`: load runs, take the port, answer until told to stop, finish what is under way."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import uvicorn

from dexter.errors import ResourceError, UsageError
from dexter.serving.app import create_app
from dexter.serving.limits import Traffic
from dexter.serving.settings import ServeSettings

log = logging.getLogger("dexter")
_LEAST_DRAIN_SECONDS = 0.5
"""For so long at least new requests hear that the service stops, before the port is closed."""


def serve(runs: Mapping[str, Path], settings: ServeSettings) -> None:
    """Serve runs by name until SIGTERM or SIGINT: requests under way finish, new ones get 503."""
    with _listen(settings) as listener:
        app = create_app(runs, settings)
        config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, lifespan="on")
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        listener.listen(config.backlog)  # from now on a client waits; it is not refused
        log.info("serving %s on %s (Ctrl-C stops)", ", ".join(runs), address)
        _DrainingServer(config, app.state.service.traffic, settings.drain_seconds).run(sockets=[listener])


def name_runs(arguments: Sequence[str]) -> dict[str, Path]:
    """Runs by name, from NAME=FOLDER or FOLDER, whose own name is taken."""
    named: dict[str, Path] = {}
    for argument in arguments:
        name, separator, folder = argument.partition("=")
        path = Path(folder if separator else argument)
        name = name if separator else path.resolve().name
        if name in named:
            raise UsageError(f"two runs are called {name!r}: write NAME={path} for one of them")
        named[name] = path
    return named


def _listen(settings: ServeSettings) -> socket.socket:
    """Take the port before the runs are loaded: a port in use is told at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ResourceError(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror}): choose another --host or --port"
        ) from None
    return listener


class _DrainingServer(uvicorn.Server):
    """On a signal it first refuses new requests, and closes when those under way are answered."""

    def __init__(self, config: uvicorn.Config, traffic: Traffic, drain_seconds: float) -> None:
        super().__init__(config)
        self._traffic, self._drain_seconds = traffic, drain_seconds
        self._asked_to_stop = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts to drain, a second one stops at once."""
        if self._traffic.draining:
            self.should_exit = self.force_exit = True
        self._traffic.draining = True
        self._asked_to_stop = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to close."""
        if self._traffic.draining and not self.should_exit:
            seconds = time.monotonic() - self._asked_to_stop
            finished = self._traffic.in_flight == 0 and seconds >= _LEAST_DRAIN_SECONDS
            self.should_exit = finished or seconds >= self._drain_seconds
        return await super().on_tick(counter)
