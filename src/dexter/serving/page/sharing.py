"""A question of the page as others can ask it: the JSON of its answer, and the command that gets it."""

from __future__ import annotations

import json
import shlex
from typing import Any

from dexter.serving.protocol import PredictRequest, PredictResponse


def as_curl(base_url: str, request: PredictRequest) -> str:
    """A shell command that asks the same of the service."""
    body = json.dumps(request.model_dump(exclude_defaults=True), ensure_ascii=False)
    address = shlex.quote(base_url.rstrip("/") + "/v1/predict")
    return f"curl -s {address} -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def as_json(response: PredictResponse) -> str:
    """What the service answers, laid out for reading; without reasons, which only the page asked for."""
    reasons = {"results": {"__all__": {"labels": {"__all__": {"why"}}}}}
    values: dict[str, Any] = response.model_dump(exclude_none=True, exclude=reasons)
    return json.dumps(values, ensure_ascii=False, indent=2)
