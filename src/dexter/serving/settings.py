"""Settings of the service: address, keys and limits, checked once."""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dexter.errors import UsageError
from dexter.serving.keys import ApiKey
from dexter.serving.logs import LogFormat

MAX_K = 1_000
"""Most labels that a request may ask for per text."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Address, keys and limits of a service."""

    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines can reach needs a key, or `insecure`."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    workers: int = 1
    """Processes that answer on the port; each has the limits below for itself."""
    tls: tuple[Path, Path] | None = None
    """Files of the certificate and its private key, to answer over HTTPS."""
    keys: tuple[ApiKey, ...] = ()
    """API keys. Without any, everyone who can reach the address may predict and change labels."""
    keys_file: Path | None = None
    """Where SIGHUP makes the service read its keys again."""
    insecure: bool = False
    """Allow an address that other machines can reach without a key; needs `allowed_hosts`."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted names in the Host header. Empty: the loopback names on a loopback address, otherwise any name."""
    log_requests: bool = False
    """Log method, route, status, milliseconds, bytes and the key's name of each request, never texts and keys.

    Answers of 500 and above are always logged."""
    log_format: LogFormat = "text"
    """Lines of text, or of JSON."""
    explanations: bool = True
    """Whether requests may ask why a text has its labels."""
    training_texts: bool = True
    """Whether training and test texts are shown: as neighbours in explanations, as examples and as misses."""

    keep_edits: bool = True
    """Write changes of labels to the run folder; otherwise they are lost when the service ends."""
    runtime: Literal["torch", "onnx"] = "torch"
    """What encodes queries; "onnx" needs an exported run."""
    follow_seconds: float = 2.0
    """Seconds between two looks at a run folder for a new model, a new index or labels changed by other processes."""

    max_body_bytes: int = 2 * 2**20
    """Largest body of a request; a larger one is refused before it is read."""
    max_inputs: int = 32
    """Most texts of a request; further ones are left out, and the answer says how many."""
    max_characters: int = 20_000
    """Most characters of a text; the rest is cut off, and the answer says so."""
    max_in_flight: int = 512
    """Most requests at a time; one more waits `busy_wait_seconds` and is then refused with 429."""
    busy_wait_seconds: float = 0.02
    """Seconds before a request is refused with 429, so that clients that retry at once do not add to the load.

    Where hundreds are refused at a time, three times as long."""
    timeout_seconds: float = 30.0
    """Seconds after which an unanswered request is given up."""
    drain_seconds: float = 25.0
    """Seconds that requests under way have after SIGTERM; the process ends soon after, whatever hangs."""

    max_connections: int = 1_000
    """Most connections; one more is refused with 503."""
    head_seconds: float = 10.0
    """Seconds that a connection has to send the request line and the headers of its next request."""
    answer_seconds: float = 60.0
    """Seconds in which a client has to read an answer."""
    max_answer_bytes: int = 16 * 2**20
    """Largest answer; a request for a larger one is refused."""
    max_held_bytes: int = 256 * 2**20
    """Most bytes of request bodies and of answers that are not read yet, over all connections; then 429."""

    batch_texts: int = 64
    """Most texts that are predicted together."""
    max_queued_texts: int = 1_024
    """Most texts that wait for a batch; requests beyond are refused with 429."""
    max_variants: int = 4
    """Predictors kept per run for requests that choose another head, dial or neighbours than the run's own."""

    def __post_init__(self) -> None:
        for name, least in _MINIMUMS.items():
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be {least} or more, got {getattr(self, name)}")
        if self.workers > 1 and not (hasattr(os, "fork") and hasattr(socket, "SO_REUSEPORT")):
            raise UsageError("several workers need a system that can fork and share a port, such as Linux: use one")
        if self.workers > 1 and not self.keep_edits:
            raise UsageError("several workers share label edits through the run folder: drop --no-keep-edits")
        if not 0 <= self.port < 2**16:
            raise UsageError(f"port must be between 0 and 65535, got {self.port}")
        if not (self.is_loopback or self.keys or self.insecure):
            raise UsageError(
                f"{self.host} can be reached from other machines and no API key is set: set DEXTER_API_KEY or "
                "--keys FILE, or pass --insecure to let everyone there predict and change labels"
            )
        if not (self.is_loopback or self.keys or self.allowed_hosts):
            raise UsageError(
                "--insecure needs --allow-host NAME, the name or address by which clients reach the service: without "
                "it any web page that somebody there opens could use the service under a name of its own"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


_MINIMUMS: dict[str, float] = {
    "workers": 1,
    "follow_seconds": 0.01,
    "max_body_bytes": 1,
    "max_inputs": 1,
    "max_characters": 1,
    "max_in_flight": 1,
    "busy_wait_seconds": 0,
    "timeout_seconds": 0.001,
    "drain_seconds": 0.1,
    "max_connections": 1,
    "head_seconds": 0.01,
    "answer_seconds": 0.01,
    "max_answer_bytes": 1_000,
    "max_held_bytes": 1,
    "batch_texts": 1,
    "max_queued_texts": 1,
    "max_variants": 1,
}
