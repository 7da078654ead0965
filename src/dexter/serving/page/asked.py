"""What a person asked: the fields of the form on the first page, from its address or from its body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

from fastapi import Request

from dexter.serving.problems import Problem

_MAX_FIELDS = 32
_TUNED = ("head", "dial", "neighbours")
"""What "reset" leaves to the run."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The fields; what is left out is empty."""

    text: str = ""
    model: str | None = None
    """The run."""
    head: str | None = None
    """The head that ranks; the run's own choice if left out."""
    dial: float | None = None
    """The weight of label frequency; as tuned if left out."""
    neighbours: bool | None = None
    """Whether training texts vote; as tuned if left out."""
    why: str | None = None
    """The id of the label to explain."""
    compare: bool = False
    """Whether all heads are shown."""
    label: str = ""
    """The text of a label that may be added."""
    add: bool = False
    """Whether it is."""

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Asked:
        """Read the fields; others are passed over."""
        if fields.get("reset"):
            fields = {name: value for name, value in fields.items() if name not in _TUNED}
        return cls(
            text=fields.get("text", ""),
            model=fields.get("model") or None,
            head=fields.get("head") or None,
            dial=_share(fields.get("dial", "")),
            neighbours={"on": True, "off": False}.get(fields.get("neighbours", "")),
            why=fields.get("why") or None,
            compare=fields.get("compare", "") != "",
            label=fields.get("label", "").strip(),
            add=fields.get("action", "") == "add",
        )


def _share(value: str) -> float | None:
    """A number from 0 to 1; None for anything else."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0.0 <= number <= 1.0 else None


async def read_asked(request: Request) -> Asked:
    """The fields of a request; only a form that is sent in its body can change anything."""
    if request.method != "POST":
        return Asked.of({**request.query_params, "action": ""})
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise Problem(415, "form", "expected a form: application/x-www-form-urlencoded")
    try:
        body = (await request.body()).decode()
        return Asked.of(dict(parse_qsl(body, keep_blank_values=True, max_num_fields=_MAX_FIELDS)))
    except ValueError:
        raise Problem(400, "form", "the body is not a form in UTF-8") from None
