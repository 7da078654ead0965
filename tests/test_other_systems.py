"""Train, predict and edit labels without what only Linux has, or only Linux and macOS."""

import os
import subprocess
import sys

import pytest

from dexter import files

PREAMBLE = """
import os, signal, sys
for name in ("sched_getaffinity", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"):
    delattr(os, name)
del signal.SIGHUP
sys.modules["resource"] = sys.modules["fcntl"] = None
import dexter.files
dexter.files._OPEN_FILES = dexter.files.Path("/nowhere")
dexter.files._rename = lambda *_: False
"""
SCRIPT = (
    PREAMBLE
    + """
import dexter
from tests.conftest import SMALL, make_world
world, out = make_world(), sys.argv[1]
dexter.train(world, recipe="dexter", out=out, overrides={key: SMALL[key] for key in SMALL if key != "train.threads"})
model = dexter.Predictor.load(out)
model.add_labels([("new", "something entirely new")])
assert model.predict(["something entirely new"], k=1)[0][0].id == "new"
assert dexter.evaluate(out, world).metrics["P@1"] > 0
"""
)


def test_a_run_without_what_linux_alone_has(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_link_is_refused_where_the_system_cannot_refuse_it(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_NOFOLLOW")
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert files.read_regular(tmp_path / "file", limit=10) == b"content"
    with pytest.raises(OSError, match="a link"):
        files.read_regular(tmp_path / "link", limit=10)


def test_folders_are_not_flushed_on_windows(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_ino))
    file = tmp_path / "file"
    file.write_text("content")
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "name", "nt")
        for path in (tmp_path, file):
            files.flush(path)
    assert flushed == [file.stat().st_ino]
