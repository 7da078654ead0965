"""A fault at each single `write` of every kind of save: a short write, a full disk, a disk that fails.

A library loaded before C's own (tests/write_faults.c) strikes below Python, so that what safetensors (Rust) and SQLite
write is struck too. Not what goes through C's streams, as faiss could; dexter writes no file that way.
"""

import ctypes
import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dexter import Predictor
from dexter.data.formats import load_dataset, save_dataset
from dexter.errors import ResourceError
from dexter.files import verify_manifest, write_text
from dexter.predict.files import write_lines
from dexter.predict.run_index import build_run_index
from dexter.training.checkpoint import load_checkpoint, save_checkpoint
from tests.conftest import make_world
from tests.model.test_store import add, store_of
from tests.training.test_checkpoint import state

PROGRAM = """
import sys
from tests.test_write_faults import strike_each_write
strike_each_write(*sys.argv[1:])
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    target = tmp_path_factory.mktemp("library") / "write_faults.so"
    source = Path(__file__).with_name("write_faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", target, source, "-ldl"], check=True)
    return target


def strike_each_write(library, name, trained, tmp_path):
    """Save once for each write and each fault, look at what is there, and save again."""
    shim, num_writes, num_refused = ctypes.CDLL(library), 0, 0
    before, folder = Path(tmp_path) / "before", Path(tmp_path) / "struck"
    before.mkdir()
    save, look = SAVES[name]
    save(before, "old", trained)
    for fault in (0, errno.ENOSPC, errno.EIO):
        for at in itertools.count(1):
            shutil.copytree(before, folder)
            assert look(folder) == "old"
            shim.set_fault(os.fsencode(folder), at, fault)
            try:
                save(folder, "new", trained)
                is_refused = False
            except ResourceError:
                is_refused = True
            has_struck = shim.has_struck()
            shim.set_fault(b"", 0, 0)
            assert look(folder) == ("old" if is_refused else "new"), (fault, at)
            assert not list(folder.rglob(".tmp-*")), (fault, at)
            if is_refused:
                save(folder, "new", trained)
                assert look(folder) == "new"
            shutil.rmtree(folder)
            num_writes, num_refused = num_writes + has_struck, num_refused + is_refused
            if not has_struck:
                break
    print(json.dumps({"writes": num_writes, "refused": num_refused}))


def save_text(folder, which, trained):
    write_text(folder / "a.txt", which * 10_000)


def look_at_text(folder):
    text = (folder / "a.txt").read_text()
    assert text == text[:3] * 10_000
    return text[:3]


def save_predictions(folder, which, trained):
    write_lines((f"{which} {number}" for number in range(5_000)), folder / "a.jsonl")


def look_at_predictions(folder):
    lines = (folder / "a.jsonl").read_text().splitlines()
    assert [line[4:] for line in lines] == list(map(str, range(5_000)))
    return lines[0][:3]


def save_data(folder, which, trained):
    world = make_world(num_train=60, num_test=20, num_labels=30 if which == "old" else 31)
    save_dataset(world, folder / "data", replace=True)


def look_at_data(folder):
    return "new" if load_dataset(folder / "data").num_labels % 2 else "old"


def save_state(folder, which, trained):
    save_checkpoint(folder / "checkpoints", state(1 if which == "old" else 2))


def look_at_state(folder):
    return {1: "old", 2: "new"}[load_checkpoint(folder / "checkpoints").step]


def save_model(folder, which, trained):
    Predictor.load(trained).model.save(folder / "model", records={"which.json": which})


def look_at_model(folder):
    verify_manifest(folder / "model")
    [found] = (folder / "model").rglob("which.json")
    return json.loads(found.read_text())


def save_index(folder, which, trained):
    if which == "old":
        shutil.copytree(trained, folder / "run")
    model = Predictor.load(folder / "run", index="exact").model
    backend = "pq" if which == "old" else "hnsw"
    build_run_index(model, folder / "run" / "model", head=model.default_head, backend=backend)


def look_at_index(folder):
    return {"pq": "old", "hnsw": "new"}[Predictor.load(folder / "run").index.backend]


def save_labels(folder, which, trained):
    if which == "old":
        shutil.copytree(trained, folder / "run")
    add(store_of(folder / "run"), 1 if which == "old" else 2, count=40, size=100)


def look_at_labels(folder):
    stored = store_of(folder / "run")
    assert len(stored.read().changed) == stored.verify() == 40 * stored.version()
    return {1: "old", 2: "new"}[stored.version()]


def save_backup(folder, which, trained):
    if which == "old":
        save_labels(folder, "old", trained)
    else:
        store_of(folder / "run").backup(folder / "backup.sqlite")


def look_at_backup(folder):
    assert look_at_labels(folder) == "old"
    if not (folder / "backup.sqlite").exists():
        return "old"
    assert store_of(folder / "run").restore(folder / "backup.sqlite") == 2
    return "new"


SAVES = {
    "text": (save_text, look_at_text),
    "predictions": (save_predictions, look_at_predictions),
    "data": (save_data, look_at_data),
    "checkpoint": (save_state, look_at_state),
    "model": (save_model, look_at_model),
    "index": (save_index, look_at_index),
    "labels": (save_labels, look_at_labels),
    "backup": (save_backup, look_at_backup),
}
"""By name: save the old or the new one in a folder, and tell which is there, whole."""


@pytest.mark.slow
@pytest.mark.parametrize("save", SAVES)
def test_a_fault_at_any_write_leaves_the_old_or_the_new_one(library, trained, tmp_path, save, record_property):
    environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, library, save, trained, tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["writes"] >= 3 and found["refused"] >= found["writes"] * 2 // 3
    record_property("writes, refused", [found["writes"], found["refused"]])
