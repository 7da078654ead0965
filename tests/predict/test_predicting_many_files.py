"""Predictions for many files: shared out, resumed, never mixed."""

import json

import pytest

from dexter.errors import DataError, UsageError
from dexter.predict.files import is_pattern, predict_files
from dexter.predict.predictor import Predictor
from dexter.processes import Launch, read_launch


@pytest.fixture(scope="module")
def predictor(trained):
    return Predictor.load(trained)


@pytest.fixture
def parts(tmp_path):
    for number in range(5):
        lines = [json.dumps({"uid": f"{number}-{line}", "text": "river stone"}) for line in range(number + 1)]
        (tmp_path / f"part-{number}.jsonl").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "part-*.jsonl")


def uids(folder):
    paths = sorted(folder.glob("part-*.jsonl"))
    return [json.loads(line)["uid"] for path in paths for line in path.read_text().splitlines()]


def test_every_file_once_whatever_the_number_of_processes(predictor, parts, tmp_path):
    for size in (1, 2, 7):
        folder = tmp_path / f"out-{size}"
        shares = [predict_files(predictor, parts, folder, k=2, launch=Launch(rank, size)) for rank in range(size)]
        assert len([path for share in shares for path in share]) == 5
        assert uids(folder) == [f"{number}-{line}" for number in range(5) for line in range(number + 1)]


def test_finished_files_are_kept_and_leftovers_replaced(predictor, parts, tmp_path):
    folder = tmp_path / "out"
    predict_files(predictor, parts, folder, k=2)
    (folder / "part-3.jsonl").unlink()
    (folder / ".tmp-1-part-3.jsonl").write_text("half a")
    before = (folder / "part-1.jsonl").stat().st_mtime_ns
    assert predict_files(predictor, parts, folder, k=2, launch=Launch(0, 1)) == [folder / "part-3.jsonl"]
    assert (folder / "part-1.jsonl").stat().st_mtime_ns == before
    assert not list(folder.glob(".tmp-*"))


def test_other_settings_and_other_folders_are_refused(predictor, parts, tmp_path):
    predict_files(predictor, parts, tmp_path / "out", k=2)
    with pytest.raises(UsageError, match="choose another"):
        predict_files(predictor, parts, tmp_path / "out", k=3)
    with pytest.raises(UsageError, match="holds other files"):
        predict_files(predictor, parts, tmp_path, k=2, form="tsv")
    with pytest.raises(UsageError, match="would replace"):
        predict_files(predictor, parts, tmp_path, k=2)
    with pytest.raises(DataError, match="no file"):
        predict_files(predictor, str(tmp_path / "none-*"), tmp_path / "other", k=2)


def test_two_files_of_one_name_are_refused(predictor, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "texts.txt").write_text("river\n")
    with pytest.raises(UsageError, match="one output"):
        predict_files(predictor, str(tmp_path / "*" / "texts.txt"), tmp_path / "out", k=1)


def test_a_file_with_magic_in_its_name_is_a_file(tmp_path):
    (tmp_path / "part[1].jsonl").write_text("")
    assert not is_pattern(str(tmp_path / "part[1].jsonl"))
    assert is_pattern(str(tmp_path / "part[2].jsonl"))


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
