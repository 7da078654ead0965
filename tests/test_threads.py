"""The command line asks OpenMP to wait without spinning, before torch reads that wish."""

import os
import sys

import pytest

from dexter.cli import main as cli


def test_threads_wait_without_spinning(monkeypatch, capsys):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(sys, "argv", ["dexter", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_the_users_own_choice_wins(monkeypatch, capsys):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setattr(sys, "argv", ["dexter", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
