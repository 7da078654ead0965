"""Run the slow tests too, as many as fit into some minutes: `pytest -p tests.budget --minutes 35`.

The fast tests come first, then the slow ones, the shortest first. A slow test says how many minutes it takes on two
cores, `@pytest.mark.slow(minutes=3)`, or takes less than half a minute; one for which too little time is left is
skipped. The last line tells how many tests passed, and what was skipped and why.
"""

import time
from collections import defaultdict

import pytest

TOO_LATE = "no time left"


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, required=False, default=35.0, help="Time for all tests together.")


def pytest_configure(config):
    config.stash[STARTED] = time.monotonic()


def pytest_collection_modifyitems(items):
    items.sort(key=minutes_of)


def pytest_runtest_setup(item):
    elapsed = (time.monotonic() - item.config.stash[STARTED]) / 60
    if minutes_of(item) and elapsed + minutes_of(item) > item.config.getoption("--minutes"):
        pytest.skip(TOO_LATE)


def pytest_unconfigure(config):
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and STARTED in config.stash:
        minutes = (time.monotonic() - config.stash[STARTED]) / 60
        print(f"\n{summary(reporter.stats)} ({minutes:.0f} min)")


STARTED = pytest.StashKey[float]()


def minutes_of(item):
    """How long a test takes; 0 for a fast one."""
    marker = item.get_closest_marker("slow")
    return 0.0 if marker is None else marker.kwargs.get("minutes", 0.5)


def summary(stats):
    """One line: counts, and the skipped tests by reason; those without time by name."""
    counts = [f"{len(stats[kind])} {kind}" for kind in ("failed", "error", "passed", "skipped") if stats.get(kind)]
    reasons = defaultdict(list)
    for report in stats.get("skipped", []):
        reasons[str(report.longrepr[2]).removeprefix("Skipped: ")].append(report.nodeid.rpartition("::")[2])
    told = [
        f"{reason} ({len(names)}{': ' + ', '.join(names) if reason == TOO_LATE else ''})"
        for reason, names in sorted(reasons.items())
    ]
    return ", ".join(counts) + (f"; skipped: {'; '.join(told)}" if told else "")
