"""Progress: a bar on a terminal, a line now and then elsewhere, nothing with --quiet; items pass unchanged."""

import io
import logging

import pytest

from dexter import progress
from dexter.progress import count_lines, track


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves by 20 seconds at each look."""
    now = iter(range(0, 10**6, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(now)))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_line_every_half_minute_says_how_long_it_takes(clock, caplog):
    caplog.set_level(logging.INFO, logger="dexter")
    assert list(track("abcdef", what="rank", total=6)) == list("abcdef")
    assert caplog.messages[0] == "rank: 2 of 6 texts, 0.1 texts/s, 80 s left"
    assert len(caplog.messages) == 3
    caplog.clear()
    assert list(track(iter("abcd"), what="rank", unit="block")) == list("abcd")
    assert caplog.messages[0] == "rank: 2 blocks, 0.1 blocks/s"


def test_quiet_is_quiet(clock, caplog):
    caplog.set_level(logging.WARNING, logger="dexter")
    assert list(track("abcdef", what="rank", total=6)) == list("abcdef")
    assert not caplog.messages


def test_a_terminal_has_a_bar_with_the_time_left(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="dexter")
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setattr(progress, "DELAY_SECONDS", 0)
    assert list(track("abc", what="rank", total=3)) == list("abc")
    assert "rank:" in shown.getvalue() and "/3 [" in shown.getvalue() and "<" in shown.getvalue()
    assert not caplog.messages


def test_lines_of_plain_files_are_counted(tmp_path):
    (tmp_path / "x.txt").write_text("a\nb\nc\n")
    assert count_lines(tmp_path / "x.txt") == 3
    assert count_lines(tmp_path / "x.csv.gz") is None and count_lines(None) is None
