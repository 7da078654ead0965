"""Settings of the service: address, keys and limits, checked once."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dexter.errors import ResourceError, UsageError

MAX_K = 1_000
"""Most labels that a request may ask for per text."""
_MIN_KEY_LENGTH = 16


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Address, keys and limits of a service."""

    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines can reach needs a key, or `insecure`."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    keys: tuple[str, ...] = field(default=(), repr=False)
    """API keys. Without any, everyone who can reach the address may predict and change labels."""
    insecure: bool = False
    """Allow an address that other machines can reach without a key."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted names in the Host header. Empty: the loopback names on a loopback address, otherwise any name."""
    log_requests: bool = False
    """Log method, route, status and milliseconds of each request. Texts and keys are never logged."""

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
    busy_wait_seconds: float = 1.0
    """Seconds before a request is refused with 429, so that clients that retry at once do not add to the load."""
    timeout_seconds: float = 30.0
    """Seconds after which an unanswered request is given up."""

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
        if not 0 <= self.port < 2**16:
            raise UsageError(f"port must be between 0 and 65535, got {self.port}")
        if any(len(key) < _MIN_KEY_LENGTH for key in self.keys):
            raise UsageError(
                f"an API key needs {_MIN_KEY_LENGTH} characters or more: "
                "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one"
            )
        if not (self.is_loopback or self.keys or self.insecure):
            raise UsageError(
                f"{self.host} can be reached from other machines and no API key is set: set DEXTER_API_KEY or "
                "DEXTER_API_KEY_FILE, or pass --insecure to let everyone there predict and change labels"
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
    "follow_seconds": 0.01,
    "max_body_bytes": 1,
    "max_inputs": 1,
    "max_characters": 1,
    "max_in_flight": 1,
    "busy_wait_seconds": 0,
    "timeout_seconds": 0.001,
    "batch_texts": 1,
    "max_queued_texts": 1,
    "max_variants": 1,
}


def keys_from_environment(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the key in DEXTER_API_KEY, or the keys in the file named by DEXTER_API_KEY_FILE, one per line."""
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
