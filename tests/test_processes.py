"""How a process learns of the others."""

from dexter.processes import Launch, read_launch


def test_the_environment_says_how_it_was_launched(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert read_launch() == Launch()
    values = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host"}
    values |= {"MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_RUN_ID": "job"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert read_launch() == Launch(1, 4, 1, 2, 2, "job")
    assert not read_launch().is_first
