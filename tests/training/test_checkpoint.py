import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from dexter.errors import ModelError
from dexter.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint


def state(step):
    return Checkpoint(
        step, {"encoder:weight": torch.full((3, 2), float(step)), "random:cpu": torch.get_rng_state()}, {"best": {}}
    )


def test_round_trip_and_the_newest_two_are_kept(tmp_path):
    for step in (5, 10, 100):
        save_checkpoint(tmp_path, state(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000010", "step-000000100"]
    loaded = load_checkpoint(tmp_path)
    assert loaded.step == 100
    assert torch.equal(loaded.tensors["encoder:weight"], torch.full((3, 2), 100.0))
    assert loaded.values == {"best": {}}


def test_nothing_there_is_not_an_error(tmp_path):
    assert load_checkpoint(tmp_path / "missing") is None
    assert load_checkpoint(tmp_path) is None


def damages():
    yield "missing file", lambda folder: (folder / "state.safetensors").unlink()
    yield "missing manifest", lambda folder: (folder / "MANIFEST.json").unlink()
    yield "empty manifest", lambda folder: (folder / "MANIFEST.json").write_text("")
    yield "manifest of another kind", lambda folder: (folder / "MANIFEST.json").write_text("[1]")
    generator = random.Random(0)
    for _ in range(10):
        yield "truncated", lambda folder, share=generator.random(): truncate(folder / "state.safetensors", share)
    for _ in range(20):
        yield "flipped bit", lambda folder, place=generator.random(): flip(folder / "state.safetensors", place)


def truncate(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(("name", "damage"), list(damages()))
def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path, caplog, name, damage):
    save_checkpoint(tmp_path, state(1))
    damage(save_checkpoint(tmp_path, state(2)))
    assert load_checkpoint(tmp_path).step == 1
    assert "damaged" in caplog.text


def test_only_damaged_checkpoints_is_an_error(tmp_path):
    flip(save_checkpoint(tmp_path, state(1)) / "state.safetensors", 0.5)
    with pytest.raises(ModelError, match="start again"):
        load_checkpoint(tmp_path)


def test_a_crash_at_any_write_leaves_the_previous_or_the_new_one(tmp_path, monkeypatch):
    """Fail at the n-th file-system call of a save, for every n until the save succeeds."""
    import os

    for fail_at in range(200):
        folder = tmp_path / str(fail_at)
        save_checkpoint(folder, state(1))
        calls = 0

        def dying(real):
            def call(*arguments, **settings):
                nonlocal calls
                calls += 1
                if calls == fail_at + 1:
                    raise RuntimeError("power cut")
                return real(*arguments, **settings)

            return call

        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "open"):
                patch.setattr(os, name, dying(getattr(os, name)))
            try:
                save_checkpoint(folder, state(2))
                survived = True
            except RuntimeError:
                survived = False
        assert load_checkpoint(folder).step in ((2,) if survived else (1, 2))
        if survived:
            break
    assert survived and fail_at > 5


def test_a_kill_while_an_old_one_is_dropped_leaves_no_part_of_it(tmp_path, monkeypatch):
    def killed(path, **_):
        if (Path(path) / "MANIFEST.json").exists():
            (Path(path) / "MANIFEST.json").unlink()
            raise KeyboardInterrupt

    for step in (1, 2):
        save_checkpoint(tmp_path, state(step))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, state(3))
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-000000002", "step-000000003"]
    assert load_checkpoint(tmp_path).step == 3
    assert len(list(tmp_path.iterdir())) == 2


def test_other_json_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, state(1))
    (path / "state.json").write_text(json.dumps({"no": "step"}))
    with pytest.raises(ModelError):
        load_checkpoint(tmp_path)


@pytest.mark.slow
def test_250_damaged_checkpoints_are_all_noticed(tmp_path):
    """50 truncations and 200 flipped bits of the newest: the one before it is taken, every time."""
    generator = random.Random(4)
    for step in (1, 2):
        save_checkpoint(tmp_path, state(step))
    newest = tmp_path / "step-000000002"
    files = {path: path.read_bytes() for path in newest.iterdir()}
    for trial in range(250):
        path, content = generator.choice(list(files.items()))
        place = generator.randrange(len(content))
        flipped = content[:place] + bytes([content[place] ^ 1 << generator.randrange(8)]) + content[place + 1 :]
        path.write_bytes(content[:place] if trial < 50 else flipped)
        if path.name == "MANIFEST.json" and json_equal(path.read_bytes(), content):
            path.write_bytes(content)
            continue
        assert load_checkpoint(tmp_path).step == 1, f"{path.name}, byte {place}"
        path.write_bytes(content)
    assert load_checkpoint(tmp_path).step == 2


def json_equal(one, other):
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False
