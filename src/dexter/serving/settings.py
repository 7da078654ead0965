"""What can be set about the service. Checked once, then immutable."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dexter.errors import ResourceError, UsageError

_SHORTEST_KEY = 16


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Address, keys and limits."""

    host: str = "127.0.0.1"
    """The address to listen on; one that others can reach needs a key, or `insecure`."""
    port: int = 8000
    """0 takes a free one."""
    keys: tuple[str, ...] = field(default=(), repr=False)
    """Any of these opens the service; without keys everyone who reaches the address may ask and edit."""
    insecure: bool = False
    """Listen on a public address without a key all the same."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may address; left empty: the loopback names on a loopback address, else any."""
    log_requests: bool = False
    """One line per request: method, route, status, milliseconds. Never a text or a key."""

    keep_edits: bool = True
    """Whether edits of labels are written to the run folders, or forgotten when the service ends."""
    runtime: Literal["torch", "onnx"] = "torch"
    """What encodes queries of run folders; onnx needs their exports."""
    follow_seconds: float = 2.0
    """How often run folders are looked at for another model and for edits of other processes."""

    max_body_bytes: int = 2 * 2**20
    """A larger request is refused before it is read."""
    max_inputs: int = 32
    """Texts per request; the rest is left out, and the answer says how many."""
    max_characters: int = 20_000
    """Characters per text; the rest is cut, and the answer says so."""
    max_k: int = 1_000
    """Labels per text."""
    max_in_flight: int = 512
    """Requests at a time; one more waits a little for a place, and is told to come back."""
    busy_wait_seconds: float = 1.0
    """How long it waits. Clients that ask again at once could otherwise keep the service busy with refusals."""
    timeout_seconds: float = 30.0
    """A request that is not answered by then is given up."""
    drain_seconds: float = 30.0
    """On SIGTERM requests under way have so long to finish."""

    batch_texts: int = 64
    """Texts that are predicted together."""
    batch_characters: int = 2**18
    """Fewer where they are long."""
    batch_wait_seconds: float = 0.004
    """How long a batch waits to be as large as the last one. What arrives while a batch is computed forms the next."""
    max_queued_texts: int = 1_024
    """Texts that wait for a batch; requests beyond are told to come back."""
    max_variants: int = 4
    """Heads and other choices that requests ask for whose predictors are held, besides the default."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be {least} or more, got {getattr(self, name)}")
        if not 0 <= self.port < 2**16:
            raise UsageError(f"port must be between 0 and 65535, got {self.port}")
        if any(len(key) < _SHORTEST_KEY for key in self.keys):
            raise UsageError(
                f"an API key needs {_SHORTEST_KEY} characters or more: "
                "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one"
            )
        if not (self.is_loopback or self.keys or self.insecure):
            raise UsageError(
                f"{self.host} can be reached from other machines and no API key is set: set DEXTER_API_KEY or "
                "DEXTER_API_KEY_FILE, or say --insecure if everyone there may ask and edit"
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


_LEAST: dict[str, float] = {
    "follow_seconds": 0.01,
    "max_body_bytes": 1,
    "max_inputs": 1,
    "max_characters": 1,
    "max_k": 1,
    "max_in_flight": 1,
    "busy_wait_seconds": 0,
    "timeout_seconds": 0.001,
    "drain_seconds": 0,
    "batch_texts": 1,
    "batch_characters": 1,
    "batch_wait_seconds": 0,
    "max_queued_texts": 1,
    "max_variants": 1,
}


def keys_from_environment(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys of DEXTER_API_KEY, or of the file that DEXTER_API_KEY_FILE names, one per line."""
    if key := environment.get("DEXTER_API_KEY", "").strip():
        return (key,)
    if not (name := environment.get("DEXTER_API_KEY_FILE")):
        return ()
    try:
        keys = tuple(line.strip() for line in Path(name).read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ResourceError(f"{name}: the file of API keys cannot be read ({type(error).__name__})") from None
    if not keys:
        raise ResourceError(f"{name}: the file of API keys is empty: write one key per line")
    return keys
