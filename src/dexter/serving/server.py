"""`dexter serve`: take the port, load the runs, answer until a signal, finish the requests under way."""

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
from dexter.serving.middleware import OpenRequests
from dexter.serving.settings import ServeSettings

log = logging.getLogger("dexter")
_DRAIN_SECONDS = 0.5, 30.0
"""Shortest and longest time between a signal and the end: new requests are told to go elsewhere, others finish."""


def serve(runs: Mapping[str, Path], settings: ServeSettings) -> None:
    """Serve runs by name until SIGTERM or SIGINT; then finish the requests under way and answer new ones with 503."""
    with _listen(settings) as listener:
        app = create_app(runs, settings)
        config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, lifespan="on")
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        listener.listen(config.backlog)  # clients wait from now on, instead of being refused
        log.info("serving %s on %s (Ctrl-C stops)", ", ".join(runs), address)
        _DrainingServer(config, app.state.traffic).run(sockets=[listener])


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


def _listen(settings: ServeSettings) -> socket.socket:
    """Take the port, before the runs are loaded, so that a port in use is reported at once."""
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
    """A server that on a signal refuses new requests, and closes when those under way are answered."""

    def __init__(self, config: uvicorn.Config, traffic: OpenRequests) -> None:
        super().__init__(config)
        self._traffic = traffic
        self._signalled_at = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain at the first signal, stop at once at the second."""
        if self._traffic.draining:
            self.should_exit = self.force_exit = True
        self._traffic.draining = True
        self._signalled_at = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        """Decide ten times a second whether to close."""
        if self._traffic.draining and not self.should_exit:
            seconds = time.monotonic() - self._signalled_at
            shortest, longest = _DRAIN_SECONDS
            self.should_exit = seconds >= (shortest if self._traffic.in_flight == 0 else longest)
        return await super().on_tick(counter)
