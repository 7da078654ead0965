"""Settings: what a public address needs, how runs are named."""

from pathlib import Path

import pytest

from dexter.errors import UsageError
from dexter.serving.keys import make_key
from dexter.serving.server import name_runs
from dexter.serving.settings import ServeSettings

KEY = "a-key-of-more-than-sixteen-characters"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.10"])
def test_an_address_of_this_machine_needs_no_key(host):
    assert ServeSettings(host=host).is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_an_address_of_others_needs_a_key_or_a_word(host):
    with pytest.raises(UsageError, match=r"DEXTER_API_KEY.*--insecure"):
        ServeSettings(host=host)
    assert not ServeSettings(host=host, keys=(make_key("one", KEY),)).is_loopback
    with pytest.raises(UsageError, match="--allow-host"):
        ServeSettings(host=host, insecure=True)
    assert ServeSettings(host=host, insecure=True, allowed_hosts=("server",)).keys == ()


@pytest.mark.parametrize("wrong", [{"port": -1}, {"port": 65_536}, {"max_inputs": 0}, {"max_connections": 0}])
def test_settings_that_cannot_be_meant(wrong):
    with pytest.raises(UsageError):
        ServeSettings(**wrong)


def test_runs_are_named_by_their_folder_or_as_told():
    assert name_runs(["runs/a", "b=runs/a", "runs/c/"]) == {
        "a": Path("runs/a"),
        "b": Path("runs/a"),
        "c": Path("runs/c"),
    }
    with pytest.raises(UsageError, match="two runs"):
        name_runs(["runs/a", "other/a"])
