"""Bad records: gathered by kind while a file is read, then raised as one error or counted as skipped.

A `BadRecord` is one line that cannot be used. Damage to a whole file (a truncated gz, a missing column) is not one:
readers raise `DataError` for it at once, whatever the policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dexter.errors import DataError

OnError = Literal["fail", "skip"]

MAX_PROBLEMS = 1000
"""With the policy "fail", reading stops after this many bad records: the first of each kind is what helps."""
_MAX_GROUPS_SHOWN = 10
_EXCERPT_CHARACTERS = 40


class BadRecord(Exception):
    """One record that cannot be used: a kind, by which repeats are grouped, and a message about this one."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        self.message = message
        super().__init__(message)


@dataclass
class _Group:
    path: Path
    line: int
    message: str
    count: int = 1

    def __str__(self) -> str:
        return self.message + (f" (and {self.count - 1:,} more like it)" if self.count > 1 else "")


class Problems:
    """The bad records of one load, grouped by file and kind."""

    def __init__(self, on_error: OnError = "fail") -> None:
        self.on_error = on_error
        self._groups: dict[tuple[Path, str], _Group] = {}
        self._must_fail = False

    @property
    def count(self) -> int:
        """Number of bad records so far."""
        return sum(group.count for group in self._groups.values())

    def add(self, path: Path, line: int, bad: BadRecord, *, skippable: bool = True) -> None:
        """Note one bad record; one that is not skippable makes `check` raise under either policy."""
        group = self._groups.get((path, bad.kind))
        if group is None:
            self._groups[path, bad.kind] = _Group(path, line, bad.message)
        else:
            group.count += 1
        self._must_fail |= not skippable or self.on_error == "fail"
        if self._must_fail and self.count >= MAX_PROBLEMS:
            self.check()

    def check(self) -> None:
        """Raise one `DataError` with a line per kind of problem, unless there are none or they may be skipped."""
        if not self._must_fail:
            return
        first, *rest = self._groups.values()
        lines = [str(first)]
        lines += [f"{group.path}:{group.line}: {group}" for group in rest[: _MAX_GROUPS_SHOWN - 1]]
        if len(rest) >= _MAX_GROUPS_SHOWN:
            lines.append(f"... and {len(rest) - _MAX_GROUPS_SHOWN + 1} more kinds of problem")
        raise DataError("\n".join(lines), path=first.path, line=first.line)

    def summary(self) -> list[str]:
        """What was skipped, as lines to announce; empty when nothing was."""
        if not self._groups:
            return []
        total = f"skipped {self.count:,} line{'s' if self.count != 1 else ''}"
        return [total] + [f"  {group.path}:{group.line}: {group}" for group in self._groups.values()]


def excerpt(value: object) -> str:
    """A short, printable form of a user's value for an error message."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= _EXCERPT_CHARACTERS else text[: _EXCERPT_CHARACTERS - 3] + "..."
