"""The plugin that runs slow tests while there is time."""

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.slow(minutes=20)
def test_long(): pass

@pytest.mark.slow(minutes=3)
def test_medium(): raise AssertionError

@pytest.mark.slow
def test_short(): pass

def test_fast(): pass

def test_elsewhere(): pytest.skip("needs a moon")
"""


def run(pytester, minutes):
    pytester.makeini("[pytest]\nmarkers = slow: takes long")
    pytester.makepyfile(TESTS)
    return pytester.runpytest("-q", "-p", "tests.budget", "--minutes", str(minutes)).outlines[-1]


def test_slow_tests_run_while_there_is_time_and_the_last_line_says_which_did_not(pytester):
    told = "1 failed, 2 passed, 2 skipped; skipped: needs a moon (1); no time left (1: test_long) (0 min)"
    assert run(pytester, minutes=10) == told
    assert "no time left (3: test_short, test_medium, test_long)" in run(pytester, minutes=0)
    assert "no time left" not in run(pytester, minutes=60)
