"""Who may ask: API keys, compared in constant time and kept as hashes only."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers


class Keys:
    """The keys that open the service; none means that it is open."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def allow(self, headers: Headers) -> bool:
        """Whether the request carries a key: as bearer token, `X-API-Key`, or the password of basic authentication.

        The last is what a browser asks its user for; the user name does not matter.
        """
        if not self._digests:
            return True
        given = _digest(_presented(headers))
        # Every key is compared, whether or not an earlier one fits: the time says nothing.
        return sum(hmac.compare_digest(given, digest) for digest in self._digests) > 0


def _presented(headers: Headers) -> str:
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
