"""Settings: what a public address needs, where keys come from, how runs are named."""

from pathlib import Path

import pytest

from dexter.errors import ResourceError, UsageError
from dexter.serving.server import name_runs
from dexter.serving.settings import ServeSettings, keys_from_environment

KEY = "a-key-of-more-than-sixteen-characters"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.10"])
def test_an_address_of_this_machine_needs_no_key(host):
    assert ServeSettings(host=host).is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", ""])
def test_an_address_of_others_needs_a_key_or_a_word(host):
    with pytest.raises(UsageError, match=r"DEXTER_API_KEY.*--insecure"):
        ServeSettings(host=host)
    assert not ServeSettings(host=host, keys=(KEY,)).is_loopback
    assert ServeSettings(host=host, insecure=True).keys == ()


@pytest.mark.parametrize("wrong", [{"port": -1}, {"port": 65_536}, {"max_inputs": 0}, {"keys": ("short",)}])
def test_settings_that_cannot_be_meant(wrong):
    with pytest.raises(UsageError):
        ServeSettings(**wrong)


def test_keys_come_from_the_environment_or_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n\n second-{KEY} \n")
    assert keys_from_environment({}) == ()
    assert keys_from_environment({"DEXTER_API_KEY": f" {KEY}\n"}) == (KEY,)
    assert keys_from_environment({"DEXTER_API_KEY_FILE": str(file)}) == (KEY, f"second-{KEY}")
    file.write_text("\n")
    for path in (file, tmp_path / "nowhere"):
        with pytest.raises(ResourceError, match="API keys"):
            keys_from_environment({"DEXTER_API_KEY_FILE": str(path)})


def test_runs_are_named_by_their_folder_or_as_told():
    assert name_runs(["runs/a", "b=runs/a", "runs/c/"]) == {
        "a": Path("runs/a"),
        "b": Path("runs/a"),
        "c": Path("runs/c"),
    }
    with pytest.raises(UsageError, match="two runs"):
        name_runs(["runs/a", "other/a"])
