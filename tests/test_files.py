"""Whole or absent: atomic files and folders, whatever fails and whenever; manifests that notice every change."""

import errno
import json
import os
import re
import threading
from pathlib import Path

import pytest

from dexter import files
from dexter.errors import ModelError, ResourceError, UsageError
from dexter.files import (
    MANIFEST,
    atomic_folder,
    atomic_path,
    read_object,
    remove_leftovers,
    verified,
    verify_manifest,
    write_json,
    write_text,
)
from tests.conftest import small_disk


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def make_folder(target, text, *, replace=False):
    with atomic_folder(target, replace=replace) as temporary:
        (temporary / "part").mkdir()
        (temporary / "part" / "a.txt").write_text(text)


def test_a_file_appears_when_it_is_whole(tmp_path):
    target = tmp_path / "deep" / "a.txt"
    with atomic_path(target) as temporary:
        temporary.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert names(target.parent) == ["a.txt"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "a.txt"
    write_text(target, "old")

    def fail():
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_json_refuses_what_json_does_not_have(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert names(tmp_path) == []


def test_a_folder_is_sealed_and_replaced_only_on_request(tmp_path):
    target = tmp_path / "model"
    make_folder(target, "one")
    verify_manifest(target)
    with pytest.raises(UsageError, match="exists already"):
        make_folder(target, "two")
    make_folder(target, "two", replace=True)
    verify_manifest(target)
    assert (target / "part" / "a.txt").read_text() == "two"
    assert names(tmp_path) == ["model"]


def test_replacing_works_where_names_cannot_be_swapped(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    make_folder(tmp_path / "model", "one")
    make_folder(tmp_path / "model", "two", replace=True)
    assert (tmp_path / "model" / "part" / "a.txt").read_text() == "two"
    assert names(tmp_path) == ["model"]


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="swapping two names in one step is Linux's")
def test_a_replaced_folder_is_there_at_every_moment(tmp_path):
    target, done, missing = tmp_path / "model", threading.Event(), []
    make_folder(target, "0")

    def watch():
        while not done.is_set():
            if not (target / MANIFEST).exists():
                missing.append(1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(50):
        make_folder(target, str(number), replace=True)
    done.set()
    watcher.join()
    assert not missing


@pytest.mark.parametrize("swaps", [True, False])
def test_a_power_cut_at_any_call_leaves_a_whole_folder_or_the_way_back(tmp_path, monkeypatch, swaps):
    """Fail at the n-th file-system call of a replacement, for every n until it succeeds."""
    if not swaps:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    for fail_at in range(100):
        target = tmp_path / str(fail_at) / "model"
        make_folder(target, "old")
        calls = 0

        def dying(real):
            def call(*arguments, **settings):
                nonlocal calls
                calls += 1
                if calls > fail_at:
                    raise RuntimeError("power cut")
                return real(*arguments, **settings)

            return call

        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "open", "mkdir"):
                patch.setattr(os, name, dying(getattr(os, name)))
            try:
                make_folder(target, "new", replace=True)
                survived = True
            except RuntimeError:
                survived = False
        whole = [target] if target.exists() else list(target.parent.glob(".tmp-*-old-model"))
        assert not swaps or whole == [target]
        verify_manifest(whole[0])
        assert (whole[0] / "part" / "a.txt").read_text() in (("new",) if survived else ("old", "new"))
        if survived:
            break
    assert survived and fail_at > 5


def damages():
    yield "missing", lambda folder: (folder / "part" / "a.txt").unlink()
    yield "longer", lambda folder: (folder / "part" / "a.txt").write_text("one!")
    yield "changed", lambda folder: (folder / "part" / "a.txt").write_text("onf")
    yield "no manifest", lambda folder: (folder / MANIFEST).unlink()
    for content in (
        "",
        "[]",
        "{}",
        '{"files": 3}',
        '{"files": {"part/a.txt": 1}}',
        "[" * 100_000,
        '{"files": {"a": {}}}',
        '{"files": {}}',
        '{"files": {"../model/part/a.txt": {"bytes": 3, "sha256": "x"}}}',
        '{"files": {"/etc/passwd": {"bytes": 3, "sha256": "x"}}}',
        "[" * 2**24 + "0",
    ):
        yield f"manifest {content[:30]}", lambda folder, content=content: (folder / MANIFEST).write_text(content)


def test_an_altered_file_is_told_rather_than_what_it_breaks(tmp_path):
    make_folder(tmp_path / "model", "one")
    with pytest.raises(KeyError), verified(tmp_path / "model"):
        raise KeyError
    (tmp_path / "model" / "part" / "a.txt").write_text("onf")
    with pytest.raises(ModelError, match="differs from its manifest"), verified(tmp_path / "model"):
        raise KeyError


@pytest.mark.parametrize(("name", "damage"), list(damages()), ids=lambda value: value if isinstance(value, str) else "")
def test_a_manifest_notices(tmp_path, name, damage):
    make_folder(tmp_path / "model", "one")
    damage(tmp_path / "model")
    with pytest.raises(ModelError, match=str(tmp_path / "model")):
        verify_manifest(tmp_path / "model")


def replaced(folder, make):
    """Put something else in the place of a file, with the same content where it has any."""
    path = folder / "part" / "a.txt"
    os.replace(path, folder.parent / "moved")
    make(path, folder.parent / "moved")


def linked(path):
    """Move something elsewhere and put a link to it in its place."""
    os.replace(path, path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: replaced(folder, lambda path, moved: path.symlink_to(moved)),
        lambda folder: replaced(folder, lambda path, moved: os.mkfifo(path)),
        lambda folder: replaced(folder, lambda path, moved: path.mkdir()),
        lambda folder: (
            (folder / "part").rename(folder.parent / "p"),
            (folder / "part").symlink_to(folder.parent / "p"),
        ),
        lambda folder: (folder / "part" / "tokenizer_config.json").write_text("{}"),
        lambda folder: (
            (folder / MANIFEST).rename(folder.parent / "m"),
            (folder / MANIFEST).symlink_to(folder.parent / "m"),
        ),
    ],
    ids=["link", "pipe", "folder", "linked folder", "unlisted", "linked manifest"],
)
def test_only_regular_files_that_are_listed(tmp_path, damage):
    make_folder(tmp_path / "model", "one")
    damage(tmp_path / "model")
    with pytest.raises(ModelError, match=str(tmp_path / "model")):
        verify_manifest(tmp_path / "model")


def test_what_is_written_beside_a_model_needs_no_listing(tmp_path):
    make_folder(tmp_path / "model", "one")
    for name in ("labels.sqlite", "labels.sqlite-journal", "tuned.json", "README.md", ".gitattributes"):
        (tmp_path / "model" / name).write_text("x")
    (tmp_path / "model" / ".tmp-labels-x").mkdir()
    (tmp_path / "model" / ".tmp-labels-x" / "labels.sqlite").write_text("x")
    verify_manifest(tmp_path / "model")


def test_a_planted_link_is_not_written_through(tmp_path):
    """Whoever made the folder may have guessed the temporary names."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "run").mkdir()
    files.temporary_beside(tmp_path / "run" / "a.txt").symlink_to(precious)
    files.temporary_beside(tmp_path / "run" / "model").symlink_to(tmp_path)
    write_text(tmp_path / "run" / "a.txt", "new")
    make_folder(tmp_path / "run" / "model", "one")
    assert precious.read_text() == "precious" and names(tmp_path / "run") == ["a.txt", "model"]


def test_files_of_a_folder_can_be_read_alike(tmp_path):
    """safetensors writes its files for the owner alone."""
    with atomic_folder(tmp_path / "model") as temporary:
        (temporary / "a").write_text("a")
        (temporary / "b").write_text("b")
        (temporary / "b").chmod(0o600)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "model").iterdir()}
    assert len(set(modes.values())) == 1 and "b" in modes


def test_the_names_of_new_folders_are_flushed(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(files, "flush", lambda path: flushed.append(path))
    write_text(tmp_path / "a" / "b" / "c.txt", "x")
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(flushed)


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    (tmp_path / ".tmp-1-a").mkdir()
    (tmp_path / ".tmp-1-a" / "x").write_text("x")
    (tmp_path / ".tmp-2-b").write_text("x")
    (tmp_path / "kept").write_text("x")
    (tmp_path / ".tmp-work").write_text("not ours")
    (tmp_path / ".tmp-3-c").symlink_to(tmp_path / "kept")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".tmp-work", "kept"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_in_one_line(tmp_path, monkeypatch, number):
    def full(descriptor):
        raise OSError(number, os.strerror(number))

    write_text(tmp_path / "a.txt", "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match=r"a.txt: the disk is full \([0-9,]+ bytes free\)"):
        write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_no_permission_is_said_in_one_line(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(ResourceError, match="no permission to write here"):
        make_folder(tmp_path / "model", "one")
    assert names(tmp_path) == []


@pytest.fixture
def tiny_disk(tmp_path):
    with small_disk(tmp_path / "disk", "256k") as disk:
        yield disk


def test_a_disk_that_is_really_full(tiny_disk):
    make_folder(tiny_disk / "model", "old")
    with (
        pytest.raises(ResourceError, match="disk is full"),
        atomic_folder(tiny_disk / "model", replace=True) as temporary,
    ):
        (temporary / "big").write_bytes(bytes(10**6))
    verify_manifest(tiny_disk / "model")
    assert names(tiny_disk) == ["model"]


def test_a_full_disk_told_by_a_library_in_words(tiny_disk):
    """safetensors reports the system's error as text, not as an OSError."""
    import numpy as np
    from safetensors.numpy import save_file

    with pytest.raises(ResourceError, match="disk is full"), atomic_path(tiny_disk / "a.safetensors") as temporary:
        save_file({"a": np.zeros(10**6)}, temporary)
    assert names(tiny_disk) == []


def test_json_is_stable(tmp_path):
    write_json(tmp_path / "a.json", {"b": 1, "a": "é"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": 1, "a": "é"}
    assert "é" in (tmp_path / "a.json").read_text(encoding="utf-8")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs names for open files")
@pytest.mark.parametrize("exchange", ["file", "link", "folder", "deleted"])
def test_what_is_exchanged_while_it_is_read_is_not_read(tmp_path, exchange):
    with atomic_folder(tmp_path / "model") as temporary:
        (temporary / "part").mkdir()
        (temporary / "part" / "tensors").write_text("right")
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "tensors").write_text("wrong")
    target = tmp_path / "model" / "part" / "tensors"
    with verified(tmp_path / "model") as view:
        if exchange == "folder":
            os.replace(target.parent, tmp_path / "aside")
            os.replace(tmp_path / "wrong", target.parent)
        else:
            target.unlink()
            if exchange == "file":
                os.replace(tmp_path / "wrong" / "tensors", target)
            elif exchange == "link":
                target.symlink_to(tmp_path / "wrong" / "tensors")
        assert (view / "part" / "tensors").read_text() == "right"
    assert not view.exists()


def test_errors_name_the_folder_and_not_the_view(tmp_path):
    make_folder(tmp_path / "model", "one")
    with (
        pytest.raises(ModelError, match=re.escape(f"{tmp_path / 'model' / 'absent'}: missing")),
        verified(tmp_path / "model") as view,
    ):
        read_object(view / "absent")
