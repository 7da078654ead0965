"""The edits on disk: a kill at any moment, a second writer, every damaged byte."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dexter import Predictor
from dexter.errors import ModelError, ResourceError
from dexter.model.journal import LabelJournal
from dexter.model.lock import locked
from dexter.model.model import fingerprint
from dexter.model.replay import Added, Entry

DIMENSION = 32

WRITER = """
import sys
import numpy as np
from pathlib import Path
from dexter.model.journal import LabelJournal
from dexter.model.replay import Added, Entry
from dexter.model.model import fingerprint

folder = Path(sys.argv[1])
journal = LabelJournal(folder, fingerprint=fingerprint(folder), dimension=32)
with journal.writing():
    version = journal.head().version
    print("ready", flush=True)
    while True:
        version += 1
        count = 1 + version % 50
        labels = [Added(f"{version}-{number}", "text " * 20, (0.5,)) for number in range(count)]
        entry = Entry(version=version, add=labels, vectors_ND=np.full((count, 32), version, dtype=np.float32))
        journal.append(entry)
        print(version, flush=True)
        if version % 7 == 0:
            entries = journal.read()[1]
            merged = Entry(
                version=version,
                add=[label for entry in entries for label in entry.add],
                vectors_ND=np.concatenate([entry.vectors_ND for entry in entries]),
            )
            journal.compact(merged)
"""


def journal_of(run):
    return LabelJournal(run / "model", fingerprint=fingerprint(run / "model"), dimension=DIMENSION)


def entry(version, count=2):
    labels = [Added(f"{version}-{number}", "text", (0.25,)) for number in range(count)]
    return Entry(version=version, add=labels, vectors_ND=np.full((count, DIMENSION), version, dtype=np.float32))


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_state(run):
    """Six writers killed at random moments: what was said to be committed is there, and all of it is whole."""
    generator, environment = random.Random(5), os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(run / "model")], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout.readline() == "ready\n"
        time.sleep(generator.uniform(0, 0.3))
        os.kill(process.pid, signal.SIGKILL)
        said = process.stdout.read().split()
        process.wait()
        head, entries = journal_of(run).read()
        committed = int(said[-1]) if said else 0
        assert committed <= head.version
        assert head.version <= max(committed, 1) + 1 or not said, "at most one commit was not announced"
        versions = [version for entry in entries for version in np.unique(entry.vectors_ND[:, 0])]
        assert versions == list(range(1, head.version + 1)), "every edit is there once, with its vectors"
        assert sum(len(entry.add) for entry in entries) == sum(1 + v % 50 for v in range(1, head.version + 1))
    assert head.version > 6


@pytest.mark.parametrize("step", range(8))
def test_a_crash_between_any_two_steps_of_a_write(run, monkeypatch, step):
    """The disk fails at the n-th flush or rename: the old state stays, and the next write succeeds."""
    journal, calls = journal_of(run), iter(range(100))
    with journal.writing():
        journal.append(entry(1))
    real_fsync, real_replace = os.fsync, os.replace

    def failing(real):
        def call(*arguments, **options):
            if next(calls) == step:
                raise KeyboardInterrupt
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patched, journal.writing():
        patched.setattr(os, "fsync", failing(real_fsync))
        patched.setattr(os, "replace", failing(real_replace))
        with contextlib.suppress(KeyboardInterrupt):
            journal.append(entry(2, count=5))
    head, entries = journal_of(run).read()
    assert len(entries) == head.version in (1, 2)
    with journal.writing():
        journal.append(entry(head.version + 1, count=3))
    expected = [2, 3] if head.version == 1 else [2, 5, 3]
    assert [len(one.add) for one in journal.read()[1]] == expected


def test_a_second_writer_is_refused_and_the_first_is_named(run):
    first, second = Predictor.load(run, persistent=True), Predictor.load(run, persistent=True)
    refused = pytest.raises(ResourceError, match=f"process {os.getpid()} is changing the labels: wait")
    with locked(run / "model.lock", purpose="testing"), refused:
        second.add_labels([("x", "river")])
    assert second.version == 0
    first.add_labels([("x", "river")])
    second.add_labels([("y", "stone")])
    assert second.version == 2 and list(second.labels.ids)[-2:] == ["x", "y"], "it took up what the first wrote"
    assert list(Predictor.load(run).labels.ids)[-2:] == ["x", "y"]


def test_a_killed_writer_holds_no_lock(run):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom dexter.model.lock import locked\n"
        "with locked(Path(sys.argv[1]), purpose='x'):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run / "model.lock")], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ResourceError, match=f"process {process.pid} is"), locked(run / "model.lock", purpose="x"):
        pass
    process.kill()
    process.wait()
    with locked(run / "model.lock", purpose="x"):
        pass


def test_every_altered_byte_is_noticed(run):
    predictor = Predictor.load(run, persistent=True)
    predictor.add_labels([("x", "river 🙂"), ("y", "stone")])
    predictor.rename_labels([("L1", "kettle")])
    predictor.remove_labels(["L2"])
    journal, generator = journal_of(run), random.Random(1)
    for path in sorted((run / "model" / "edits").iterdir()):
        content = path.read_bytes()
        for place in generator.sample(range(len(content)), 40):
            altered = bytearray(content)
            altered[place] ^= 1 << generator.randrange(8)
            path.write_bytes(altered)
            if path.name == "HEAD.json" and is_same(altered, content):
                continue
            with pytest.raises(ModelError, match="edits"):
                journal.read()
        for damaged in (b"", content[:-1], content[: len(content) // 2]):
            path.write_bytes(damaged)
            if not is_same(damaged, content):
                with pytest.raises(ModelError, match="restore the folder from a copy, or remove"):
                    journal.read()
        path.unlink()
        with pytest.raises(ModelError, match="missing"):
            journal.read()
        path.write_bytes(content)
    assert journal.read()[0].version == 3


def is_same(altered, content):
    """Whether a damaged HEAD.json says the same: spaces between values may differ."""
    try:
        return json.loads(altered) == json.loads(content)
    except ValueError:
        return False


def test_what_was_never_committed_is_ignored_and_cut_off(run):
    journal = journal_of(run)
    with journal.writing():
        journal.append(entry(1))
    files = [path for path in (run / "model" / "edits").iterdir() if path.name != "HEAD.json"]
    sizes = [path.stat().st_size for path in files]
    for path in files:
        with path.open("ab") as handle:
            handle.write(b"half a line" * 1000)
    assert journal.read()[0].version == 1
    with journal.writing():
        journal.append(entry(2))
    assert [path.stat().st_size for path in files] == [2 * size for size in sizes]


def test_a_write_does_not_touch_the_published_model(run):
    def state():
        files = [path for path in (run / "model").rglob("*") if path.is_file() and "edits" not in path.parts]
        return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in files}

    before = state()
    predictor = Predictor.load(run, persistent=True)
    predictor.add_labels([("x", "river")])
    predictor.remove_labels(["L3"])
    predictor.compact_labels()
    assert state() == before


def test_labels_that_came_and_went_are_gone_from_a_compacted_journal(run):
    predictor = Predictor.load(run, persistent=True)
    for number in range(5):
        predictor.add_labels([(f"x{number}", "river")])
        predictor.remove_labels([f"x{number}"])
    before = sum(path.stat().st_size for path in (run / "model" / "edits").glob("vectors-*"))
    predictor.compact_labels()
    assert (before, sum(path.stat().st_size for path in (run / "model" / "edits").glob("vectors-*"))) == (5 * 128, 0)
    assert predictor.version == Predictor.load(run).version == 10
    with pytest.raises(ValueError, match="was removed"):
        Predictor.load(run).add_labels([("x3", "river")])


def test_a_folder_that_cannot_be_written(run, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    predictor = Predictor.load(run, persistent=True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ResourceError, match="the disk is full"):
            predictor.add_labels([("x", "river")])
    assert predictor.version == Predictor.load(run).version == 0


def test_the_lock_needs_a_folder(tmp_path):
    with (
        pytest.raises(ResourceError, match="cannot be opened for"),
        locked(Path(tmp_path / "missing" / "x.lock"), purpose="x"),
    ):
        pass
