"""Label changes on disk: a kill at any moment, a second writer, a disk that fails, every altered byte."""

import errno
import os
import random
import signal
import sqlite3
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

from dexter import Predictor
from dexter.errors import ModelError, ResourceError, UsageError
from dexter.model import label_file, label_writer
from dexter.model.edits import LabelChange
from dexter.model.label_file import ChangedLabel
from dexter.model.published import fingerprint
from dexter.model.store import LabelStore

DIMENSION = 32

WRITER = """
import sys
import numpy as np
from pathlib import Path
from dexter.model.label_file import ChangedLabel
from dexter.model.published import fingerprint
from dexter.model.store import LabelStore

folder = Path(sys.argv[1])
store = LabelStore(folder, fingerprint=fingerprint(folder), dimension=32, num_priors=1)
version = store.version()
print("ready", flush=True)
while True:
    version += 1
    vector = np.full(32, version, dtype=np.float32)
    names = [f"{version}-{number}" for number in range(1 + version % 50)]
    changed = [ChangedLabel(name, "text " * 20, vector, (0.5,), version) for name in names]
    if version > 1:
        changed.append(ChangedLabel(f"{version - 1}-0", None))
    with store.writing() as writer:
        writer.write(version, changed)
    print(version, flush=True)
    if version % 7 == 0:
        store.compact()
"""


def store_of(run):
    return LabelStore(run / "model", fingerprint=fingerprint(run / "model"), dimension=DIMENSION, num_priors=1)


def add(stored, version, count=2, size=1):
    """Add some labels with texts of a size; the text says which version they are of."""
    vector = np.full(DIMENSION, version, dtype=np.float32)
    with stored.writing() as writer:
        names = [f"{version}-{number}" for number in range(count)]
        writer.write(version, [ChangedLabel(name, f"{version} " * size, vector, (0.25,), version) for name in names])


def start(code, *arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_state(run):
    """Six writers killed at random moments: what was said to be committed is there, and all of it is whole."""
    generator = random.Random(5)
    for _ in range(6):
        process = start(WRITER, run / "model")
        assert process.stdout.readline() == "ready\n"
        time.sleep(generator.uniform(0, 0.3))
        os.kill(process.pid, signal.SIGKILL)
        said = process.stdout.read().split()
        process.wait()
        version, _, changed, *_ = store_of(run).read()
        committed = int(said[-1]) if said else 0
        assert committed <= version
        assert version <= max(committed, 1) + 1 or not said, "at most one commit was not announced"
        expected = [(f"{v}-{number}", v) for v in range(1, version + 1) for number in range(1 + v % 50)]
        assert [label.id for label in changed] == [label_id for label_id, _ in expected], "every label once, in order"
        for label, (_, v) in zip(changed, expected, strict=True):
            removed = label.id.endswith("-0") and v < version
            assert removed == (label.text is None) and (removed or (label.representation_D == v).all())
    assert version > 6


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kilobytes", [1, 4, 9, 16, 30, 60, 100])
def test_a_disk_that_fails_at_any_size_leaves_the_old_state(run, first, kilobytes):
    """No file may grow beyond some size: the write is refused in one line, and the next one succeeds."""
    if not first:
        add(store_of(run), 1)
    before = store_of(run).version()
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom tests.model.test_store import add, store_of\n"
        "from dexter.errors import ResourceError\nlimit = int(sys.argv[2]) * 1024\n"
        "store = store_of(Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
        "try:\n    add(store, int(sys.argv[3]), count=40, size=1000)\n"
        "except ResourceError as error:\n    print('refused', error, flush=True)\n"
    )
    process = start(code, run, kilobytes, before + 1)
    assert process.stdout.read().startswith(f"refused {run / 'model' / 'labels.sqlite'}: ")
    assert process.wait() == 0
    version, _, changed, *_ = store_of(run).read()
    assert (version, len(changed)) == (before, 2 * before)
    add(store_of(run), before + 1)
    assert store_of(run).version() == before + 1
    assert [path.name for path in (run / "model").glob("*labels*")] == ["labels.sqlite"]


def test_a_second_writer_is_refused(run):
    first, second = Predictor.load(run, persistent=True), Predictor.load(run, persistent=True)
    first.add_labels([("w", "river")])
    refused = pytest.raises(ResourceError, match="another process is changing the labels: wait")
    with store_of(run).writing(), refused:
        second.add_labels([("x", "river")])
    assert second.version == 0
    first.add_labels([("x", "river")])
    second.add_labels([("y", "stone")])
    assert second.version == 3 and list(second.labels.ids)[-2:] == ["x", "y"], "it took up what the first wrote"
    assert list(Predictor.load(run).labels.ids)[-2:] == ["x", "y"]


def test_of_two_first_writers_one_is_refused(run):
    late = ChangedLabel("late", "text", np.zeros(DIMENSION, np.float32), (0.0,), 1)

    def write_slowly():
        with store_of(run).writing() as writer:
            add(store_of(run), 1)
            writer.write(1, [late])

    with pytest.raises(ResourceError, match="another process is changing"):
        write_slowly()
    assert [label.id for label in store_of(run).read().changed] == ["1-0", "1-1"]


def test_readers_go_on_while_somebody_writes(run):
    stored = store_of(run)
    add(stored, 1)
    with stored.writing() as writer:
        writer.write(2, [ChangedLabel("1-0", None)])
        version, _, changed, *_ = store_of(run).read()  # one that waited for the writer would fail in the end
        assert (version, len(changed)) == (1, 2)
    assert stored.version() == 2


@pytest.mark.parametrize("is_first", [True, False])
def test_a_killed_writer_holds_no_lock_and_leaves_nothing(run, is_first):
    if not is_first:
        add(store_of(run), 1)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom dexter.model.label_file import ChangedLabel\n"
        "from tests.model.test_store import store_of\nwith store_of(Path(sys.argv[1])).writing() as writer:\n"
        "    writer.write(2, [ChangedLabel('1-0', None)])\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    process = start(code, run)
    assert process.stdout.readline() == "held\n"
    if not is_first:
        with pytest.raises(ResourceError, match="another process is changing the labels"):
            add(store_of(run), 2)
    process.kill()
    process.wait()
    for version in (1, 2) if is_first else (2,):
        add(store_of(run), version)
    assert len(store_of(run).read().changed) == 4
    assert [path.name for path in (run / "model").rglob("*labels.sqlite*")] == ["labels.sqlite"]


def test_every_altered_byte_is_noticed_or_changes_nothing(run):
    predictor = Predictor.load(run, persistent=True)
    predictor.add_labels([("x", "river 🙂"), ("y", "stone")])
    predictor.rename_labels([("L1", "kettle")])
    predictor.remove_labels(["L2"])
    stored, path, generator = store_of(run), run / "model" / "labels.sqlite", random.Random(1)
    content, expected = path.read_bytes(), plain(stored.read())
    used = [place for place, byte in enumerate(content) if byte]
    noticed = 0
    for place in generator.sample(used, 300) + generator.sample(range(len(content)), 100):
        altered = bytearray(content)
        altered[place] ^= 1 << generator.randrange(8)
        path.write_bytes(altered)
        try:
            assert plain(stored.read()) == expected, f"byte {place} was altered"
        except ModelError:
            noticed += 1
        except ResourceError:
            assert place in (18, 19), "the header says that there is a write-ahead log, which is not there"
    assert noticed > 150
    for damaged in (b"", content[:-4096], content[: len(content) // 2], b"not a database" * 1000):
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"restore it from a copy .*, or remove it"):
            stored.read()
    path.write_bytes(content)
    assert plain(stored.read()) == expected


def test_rows_that_vanished_or_were_swapped_are_noticed(run):
    for statement in (
        "DELETE FROM labels WHERE id = '1-1'",
        "UPDATE labels SET text = 'other' WHERE id = '1-0'",
        "UPDATE labels SET position = position + 7",
        "UPDATE state SET version = 2",
        "DELETE FROM state",
        "DROP TABLE labels",
    ):
        (run / "model" / "labels.sqlite").unlink(missing_ok=True)
        add(store_of(run), 1)
        connection = sqlite3.connect(run / "model" / "labels.sqlite")
        connection.execute(statement)
        connection.commit()
        connection.close()
        with pytest.raises(ModelError, match="damaged"):
            store_of(run).read()


def plain(found):
    version, _, changed, *_ = found
    return version, [
        (
            *label[:2],
            label.priors,
            label.added_in,
            None if label.representation_D is None else label.representation_D.tolist(),
        )
        for label in changed
    ]


def test_changes_of_another_model_are_refused(run):
    add(LabelStore(run / "model", fingerprint=fingerprint(run / "model"), dimension=DIMENSION, num_priors=1), 1)
    with pytest.raises(ModelError, match="a vector of 32 elements, expected 16"):
        LabelStore(run / "model", fingerprint=fingerprint(run / "model"), dimension=16, num_priors=1).read()
    manifest = run / "model" / "MANIFEST.json"
    manifest.write_text(manifest.read_text() + " ")
    with pytest.raises(ModelError, match=r"labels in format 3 of model '\w+', expected 3 of"):
        store_of(run).read()


def test_a_write_does_not_touch_the_published_model(run):
    def state():
        files = [path for path in (run / "model").rglob("*") if path.is_file() and path.name != "labels.sqlite"]
        return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in files}

    before = state()
    predictor = Predictor.load(run, persistent=True)
    predictor.add_labels([("x", "river")])
    predictor.remove_labels(["L3"])
    predictor.compact_labels()
    assert state() == before


def test_labels_that_came_and_went_leave_only_their_ids(run):
    predictor = Predictor.load(run, persistent=True)
    for number in range(50):
        predictor.add_labels([(f"x{number}", f"secret {number} " * 100)])
    predictor.remove_labels([f"x{number}" for number in range(50)])
    before = (run / "model" / "labels.sqlite").stat().st_size
    predictor.compact_labels()
    content = (run / "model" / "labels.sqlite").read_bytes()
    assert len(content) < before / 3 and b"secret" not in content
    assert predictor.version == Predictor.load(run).version == 51
    with pytest.raises(ValueError, match="was removed"):
        Predictor.load(run).add_labels([("x3", "river")])


def test_a_read_only_folder_is_read_and_not_written(run):
    add(store_of(run), 1)
    if os.getuid() == 0:
        pytest.skip("root may write everywhere")
    folder = run / "model"
    folder.chmod(0o555)
    (folder / "labels.sqlite").chmod(0o444)
    assert store_of(run).read()[0] == 1
    with pytest.raises(ResourceError, match="check permissions"):
        add(store_of(run), 2)


def seal(run, *statements):
    """Run SQL on the file of label changes and give every row its right checksum, as an attacker would."""
    connection = sqlite3.connect(run / "model" / "labels.sqlite")
    for statement in statements:
        connection.execute(statement)
    rows = connection.execute(f"{label_file.LABELS}").fetchall()
    for *values, _ in rows:
        connection.execute("UPDATE labels SET sha256 = ? WHERE position = ?", [label_file.checksum(*values), values[0]])
    for *values, _ in connection.execute(label_file._STATE).fetchall() if "VIEW state" not in statements[-1] else []:
        connection.execute("UPDATE state SET sha256 = ?", [label_file.checksum(*values)])
    connection.commit()
    connection.close()


HOSTILE = [
    "UPDATE labels SET id = NULL",
    "UPDATE labels SET id = ''",
    "UPDATE labels SET id = X'00ff'",
    "UPDATE labels SET text = X'ff'",
    "UPDATE labels SET text = '  '",
    "UPDATE labels SET added_in = 'x'",
    "UPDATE labels SET added_in = -1",
    "UPDATE labels SET added_in = NULL",
    "UPDATE labels SET changed_in = 'x'",
    "UPDATE labels SET changed_in = -1",
    "UPDATE labels SET priors = NULL",
    "UPDATE labels SET priors = 'text'",
    "UPDATE labels SET priors = X'000000'",
    "UPDATE labels SET priors = X''",
    "UPDATE labels SET priors = X'0000c07f'",
    "UPDATE labels SET representation = NULL",
    "UPDATE labels SET representation = 5",
    "UPDATE labels SET representation = X'00'",
    "UPDATE labels SET representation = zeroblob(70000000)",
    "UPDATE labels SET representation = CAST(replace(hex(zeroblob(32)), '00', X'0000c07f') AS BLOB)",
    "UPDATE labels SET representation = CAST(replace(hex(zeroblob(32)), '00', X'ffff7f7f') AS BLOB)",
    "UPDATE state SET version = 'x'",
    "UPDATE state SET version = -3",
    "UPDATE state SET num_rows = NULL",
    "UPDATE state SET num_rows = 9",
    "UPDATE state SET format_version = 'x'",
    "UPDATE state SET format_version = 99",
    "UPDATE state SET model = X'00'",
    "INSERT INTO state SELECT * FROM state",
    "CREATE TRIGGER t AFTER INSERT ON labels BEGIN DELETE FROM labels; END",
    "CREATE VIEW v AS SELECT * FROM labels",
    "CREATE INDEX i ON labels (abs(position))",
    "CREATE TABLE sqlite (a)",
    "ALTER TABLE labels ADD COLUMN more AS (length(text))",
    "DROP TABLE edits",
]


def test_hostile_changes_with_right_checksums_are_refused(run):
    add(store_of(run), 1, count=1)
    path = run / "model" / "labels.sqlite"
    content = path.read_bytes()
    for statement in HOSTILE:
        path.write_bytes(content)
        seal(run, statement)
        for attempt in (store_of(run).read, store_of(run).verify):
            with pytest.raises(ModelError, match=r"labels\.sqlite: .*(damaged|expected)"):
                print(statement, attempt())
    seal(run, "ALTER TABLE state RENAME TO old", "CREATE VIEW state AS SELECT * FROM old")
    with pytest.raises(ModelError, match="other tables than expected"):
        Predictor.load(run)


def test_edits_write_through_no_link(run, tmp_path):
    """The file and those beside it may not be links: a change would be written to what they lead to."""
    precious = tmp_path / "precious"
    for name in ("labels.sqlite", "labels.sqlite-journal", "labels.sqlite-wal", "labels.sqlite-shm"):
        (run / "model" / "labels.sqlite").unlink(missing_ok=True)
        if name == "labels.sqlite":
            add(store_of(run), 1)
            os.replace(run / "model" / name, precious)
        else:
            add(store_of(run), 1)
            precious.write_bytes(b"precious")
        before = precious.read_bytes()
        (run / "model" / name).symlink_to(precious)
        for attempt in (store_of(run).read, lambda: add(store_of(run), 2)):
            with pytest.raises(ModelError, match=f"{name}: not a file that dexter writes"):
                attempt()
        assert precious.read_bytes() == before
        (run / "model" / name).unlink()


def test_a_linked_model_folder_is_refused(run, tmp_path):
    os.replace(run / "model", tmp_path / "elsewhere")
    (run / "model").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="model: a link: give the folder"):
        Predictor.load(run, persistent=True)
    Predictor.load(tmp_path / "elsewhere")


def test_a_journal_cannot_name_a_file_to_delete(run, tmp_path):
    """SQLite deletes the second journal that a left journal names, after rolling it back: any file, as it turns out."""
    add(store_of(run), 1)
    path, victim = run / "model" / "labels.sqlite", tmp_path / "precious"
    victim.write_text("precious")
    magic, name = bytes.fromhex("d9d505f920a163d7"), os.fsencode(victim)
    header = magic + struct.pack(">iiiii", 0, 1, path.stat().st_size // 4096, 512, 4096)
    total = sum(byte - 256 * (byte > 127) for byte in name) % 2**32
    named = struct.pack(">I", 2**30 // 4096 + 1) + name + struct.pack(">II", len(name), total) + magic
    journal = path.with_name("labels.sqlite-journal")
    journal.write_bytes(header.ljust(512, b"\0") + named)
    with pytest.raises(ModelError, match="journal: not a file that dexter writes"):
        Predictor.load(run)
    assert victim.read_text() == "precious"
    connection = sqlite3.connect(path)
    connection.execute("SELECT * FROM labels").fetchall()
    connection.close()
    assert not victim.exists(), "this is what SQLite itself does"


def test_the_first_change_where_there_are_no_hard_links(run, monkeypatch):
    def refused(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr("dexter.files._rename", lambda *_: False)
    test_of_two_first_writers_one_is_refused(run)
    (run / "model" / "labels.sqlite").unlink()
    add(store_of(run), 1)
    assert store_of(run).version() == 1
    assert [path.name for path in (run / "model").rglob("*labels.sqlite*")] == ["labels.sqlite"]


def test_a_backup_is_restored_over_later_edits_and_over_damage(run, tmp_path):
    predictor, copy, path = (
        Predictor.load(run, persistent=True),
        tmp_path / "copy.sqlite",
        run / "model" / "labels.sqlite",
    )
    with pytest.raises(UsageError, match="nothing to back up"):
        store_of(run).backup(copy)
    predictor.add_labels([("a", "river"), ("b", "stone")], by="anna")
    predictor.remove_labels(["L2"])
    assert store_of(run).backup(copy) == 2
    with pytest.raises(UsageError, match="exists already"):
        store_of(run).backup(copy)
    kept = list(predictor.labels.ids)
    predictor.edit_labels(LabelChange(remove=["a"], rename=[("L3", "brook")], add=[("c", "kettle")]))
    changed = list(predictor.labels.ids)

    assert store_of(run).restore(copy, by="ben") == 4
    assert predictor.refresh_labels() and list(predictor.labels.ids) == kept == list(Predictor.load(run).labels.ids)
    assert store_of(run).history()[0].describe() == "1 added, 1 renamed, 1 removed (backup restored)"
    predictor.undo_labels(4)
    assert set(Predictor.load(run).labels.ids) == set(changed)

    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ModelError, match="damaged"):
        store_of(run).verify()
    assert store_of(run).restore(copy) == 3
    assert predictor.refresh_labels() and list(predictor.labels.ids) == kept
    assert store_of(run).verify() == 3 and path.with_name("labels.sqlite.damaged").stat().st_size == 5000
    path.unlink()
    assert store_of(run).restore(copy) == 3 and list(Predictor.load(run).labels.ids) == kept
    copy.write_bytes(b"damaged" * 1000)
    with pytest.raises(ModelError, match=r"copy\.sqlite: damaged"):
        store_of(run).restore(copy)
    assert list(Predictor.load(run).labels.ids) == kept


def test_verify_notices_an_altered_history(run):
    for statement in (
        "UPDATE edits SET author = 'somebody else'",
        "UPDATE before SET text = 'other' WHERE text IS NOT NULL",
        "UPDATE before SET id = 'other'",
    ):
        (run / "model" / "labels.sqlite").unlink(missing_ok=True)
        add(store_of(run), 1, count=1)
        with store_of(run).writing() as writer:
            writer.write(2, [ChangedLabel("1-0", "renamed")])
        assert store_of(run).verify() == 1
        connection = sqlite3.connect(run / "model" / "labels.sqlite")
        assert connection.execute(statement).rowcount
        connection.commit()
        connection.close()
        with pytest.raises(ModelError, match="its history differs"):
            store_of(run).verify()


def test_unused_space_is_given_back_after_an_edit(run):
    add(store_of(run), 1, count=200, size=5_000)
    path = run / "model" / "labels.sqlite"
    with store_of(run).writing() as writer:
        writer.write(2, [ChangedLabel(f"1-{number}", None) for number in range(200)])
    large = path.stat().st_size
    for version in range(3, 3 + label_writer.UNDOABLE_EDITS):
        add(store_of(run), version, count=1)
    assert large > 2_000_000 > 500_000 > path.stat().st_size
    assert len(store_of(run).history()) == 2 + label_writer.UNDOABLE_EDITS
