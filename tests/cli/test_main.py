"""The command line: results on stdout, one line per problem on stderr, and an exit code for every kind of end."""

import gzip
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

import dexter
from dexter.cli import main as cli
from dexter.data.formats import save_dataset
from dexter.errors import DataError
from dexter.training import trainer
from dexter.training.run import read_run
from tests.conftest import SMALL, all_verbs, make_world

VERBS = list(all_verbs())
SETTINGS = [part for key, value in SMALL.items() for part in ("--set", f"{key}={value}")]


@pytest.fixture
def run(monkeypatch, capsys):
    """Call the command line in this process: exit code, stdout, stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["dexter", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def data(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "world"
    save_dataset(world, folder, gzip=False)
    return folder


def error_line(result, code):
    """The one line of an error; nothing on stdout, no traceback."""
    assert result[0] == code, result
    assert result[1] == ""
    lines = [
        line
        for line in result[2].splitlines()
        if not line.startswith(("read as", "recipe ", "needs about", "about ", "epoch "))
    ]
    assert len(lines) == 1, lines
    assert lines[0].startswith("dexter: error: ")
    return lines[0]


def test_control_characters_are_escaped(run, tmp_path):
    named = tmp_path / "data\x1b[2Jred"
    line = error_line(run("train", named, "--out", tmp_path / "out"), 3)
    assert "\x1b" not in line and "data\\x1b[2Jred" in line


# 0: ok


def test_version_and_help(run):
    assert run("--version") == (0, f"dexter {dexter.__version__}\n", "")
    code, out, _ = run("--help")
    assert code == 0
    assert [verb for verb in VERBS if f"\n  {verb.split()[0]} " not in out] == []
    assert "Exit codes" in out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(run, verb):
    code, out, _ = run(*verb.split(), "--help")
    assert code == 0
    assert f"Example: dexter {verb} " in " ".join(out.split())


def test_the_whole_flow(run, data, tmp_path):
    out = tmp_path / "run"
    code, shown, said = run("train", data, "--out", out, *SETTINGS)
    assert code == 0
    assert shown.startswith(f"{out}: trained in ") and "validation P@1" in shown and shown.count("\n") == 1
    assert "read as jsonl" in said and "recipe dexter" in said
    assert "\r" not in said, "a progress bar is for terminals only"
    code, shown, _ = run("evaluate", out, data)
    assert code == 0 and "P@1" in shown and "PSP@5" in shown and "Percent." in shown
    assert (out / "results" / "world-test-unified.json").exists()
    code, shown, said = run("--quiet", "predict", out, "river stone", "-k", 3)
    assert (code, said) == (0, "")
    assert shown.splitlines()[0] == "river stone" and len(shown.splitlines()) == 4


def test_json_where_there_is_a_result(run, data, trained, tmp_path):
    def parsed(*arguments):
        code, out, _ = run(*arguments, "--json")
        assert code == 0
        return json.loads(out)

    assert parsed("data", "check", data)["counts"]["labels"] == 37
    result = parsed("train", data, "--out", tmp_path / "run", *SETTINGS)
    assert result["run"] == str(tmp_path / "run") and result["metrics"] == read_run(tmp_path / "run").best
    assert result["metrics"]["P@1"] > 100 * 2 / 37, "better than chance"
    record = parsed("evaluate", tmp_path / "run", data, "--record", tmp_path / "record.json")
    assert record == json.loads((tmp_path / "record.json").read_text())
    assert set(parsed("compare", trained, tmp_path / "run", "--data", data)["runs"]) == {
        str(trained),
        str(tmp_path / "run"),
    }


def test_predictions_of_a_file_keep_ids_and_order(run, trained, tmp_path):
    texts, out = tmp_path / "q.jsonl", tmp_path / "p.jsonl"
    texts.write_text('{"uid": "b", "text": "river"}\n{"uid": "a", "text": "stone"}\n')
    assert run("predict", trained, "--input", texts, "--output", out, "--format", "jsonl", "-k", 2)[:2] == (0, "")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["id"], len(line["labels"])) for line in lines] == [("b", 2), ("a", 2)]


def test_filters_of_predictions(run, trained, tmp_path):
    def found(*options):
        code, shown, said = run("--quiet", "predict", trained, "river stone", "-k", 37, "--format", "jsonl", *options)
        assert (code, said) == (0, "")
        return [label["id"] for label in json.loads(shown)["labels"]]

    assert sorted(found("--only", "L1", "--only", "L2")) == ["L1", "L2"]
    (tmp_path / "ids.txt").write_text("L3\nL4\n", encoding="utf-8")
    assert {"L1", "L3", "L4"}.isdisjoint(found("--exclude", "L1", "--exclude", f"@{tmp_path / 'ids.txt'}"))
    assert sorted(found("--band", "torso") + found("--band", "frequent") + found("--band", "tail")) == sorted(found())
    assert "no label has the id 'nobody'" in error_line(run("predict", trained, "river", "--only", "nobody"), 2)
    assert "expected frequent" in error_line(run("predict", trained, "river", "--band", "head"), 2)


def test_thresholds_dial_and_neighbours_of_predictions(run, trained):
    sure = run("predict", trained, "river stone", "--threshold", 0.01, "--format", "jsonl")
    labels = json.loads(sure[1])["labels"]
    assert sure[0] == 0
    assert labels
    assert all(label["probability"] >= 0.01 for label in labels)
    for option in (("--precision", 0.3), ("--best-f1",), ("--dial", 0), ("--neighbours",), ("--no-neighbours",)):
        assert run("predict", trained, "river stone", *option)[0] == 0
    twice = run("predict", trained, "river", "--threshold", 0.5, "--best-f1")
    assert "give one of" in error_line(twice, 2)
    assert "from 0" in error_line(run("predict", trained, "river", "--dial", 3), 2)
    assert "the highest is" in error_line(run("predict", trained, "river", "--precision", 1.1), 2)


def test_a_run_is_tuned_and_its_dial_drawn(run, trained, data, tmp_path):
    pytest.importorskip("matplotlib")
    copy = shutil.copytree(trained, tmp_path / "run")
    code, out, _ = run("tune", copy, data, "--for", "PSP@3")
    assert code == 0
    assert "validation PSP@3" in out
    code, out, _ = run("evaluate", copy, data, "--dial-curve", "--plot", tmp_path / "dial.png")
    assert code == 0
    assert len(out.splitlines()) == 7
    assert (tmp_path / "dial.png").exists()
    assert "such as P@1" in error_line(run("tune", copy, data, "--for", "best"), 2)
    assert "between 0 and 1" in error_line(run("evaluate", copy, data, "--unseen", 2), 2)


def test_cut_offs_and_propensity_constants(run, trained, data, tmp_path):
    arguments = ("evaluate", trained, data, "-k", 2, "-k", 7, "--propensity", "amazon", "--record", tmp_path / "r.json")
    code, out, _ = run(*arguments)
    assert code == 0 and "PSP@7" in out and "decile 1 " not in out
    settings = json.loads((tmp_path / "r.json").read_text())["settings"]
    assert settings["ks"] == [2, 7] and settings["propensity"]["a"] == 0.6


def test_a_table_of_deciles(run, trained, data, tmp_path):
    code, out, _ = run("evaluate", trained, data, "--deciles", "--record", tmp_path / "r.json")
    rows = [line.split() for line in out.splitlines() if line.startswith("  decile")]
    assert code == 0 and [row[1] for row in rows] == [str(number) for number in range(1, 11)]
    by_decile = json.loads((tmp_path / "r.json").read_text())["by_decile"]
    assert [row[4] for row in rows] == [f"{by_decile[row[1]]['P@1']:.2f}" for row in rows]


def test_the_data_set_has_its_own_propensity_constants(run, trained, data, tmp_path):
    copy = shutil.copytree(data, tmp_path / "copy")
    (copy / "dataset.json").write_text('{"propensity": [0.5, 0.4]}')
    code, out, _ = run("evaluate", trained, copy, "--json", "--record", tmp_path / "r.json")
    assert code == 0 and json.loads(out)["settings"]["propensity"]["a"] == 0.5
    (copy / "dataset.json").write_text('{"propensity": 3}')
    assert "dataset.json: propensity is 3: expected two numbers" in error_line(run("data", "check", copy), 3)


@pytest.mark.parametrize("verb", ["train", "evaluate", "tune", "plan", "data check", "data convert", "compare"])
def test_every_verb_that_reads_data_takes_text_fields(run, trained, data, tmp_path, verb):
    """The files are not those of records with fields, so that each verb must refuse the choice."""
    arguments = {
        "train": [data, "--out", tmp_path / "run"],
        "evaluate": [trained, data],
        "tune": [trained, data],
        "data convert": [data, tmp_path / "out"],
        "compare": [trained, trained, "--data", data],
    }.get(verb, [data])
    said = error_line(run(*verb.split(), *arguments, "--text-fields", "title"), 2)
    assert "text_fields applies to xmc-json, not to jsonl" in said


def test_a_published_encoder_is_imported_and_evaluated(run, data, world, tmp_path):
    from dexter.encoders.transformer import TransformerEncoder

    TransformerEncoder.random(world.label_texts, hidden_size=16).save(tmp_path / "encoder")
    code, out, said = run("import", tmp_path / "encoder", data, "--out", tmp_path / "run", "--pooling", "cls")
    assert (code, out) == (0, f"{tmp_path / 'run'}: 37 labels encoded, nothing trained\n")
    assert "cls pooling, vectors of length 1, at most 128 tokens" in said
    assert run("evaluate", tmp_path / "run", data)[0] == 0
    assert run("predict", tmp_path / "run", "river stone")[0] == 0
    assert "'--pooling': 'max' is not one of" in error_line(
        run("import", tmp_path, data, "--out", tmp_path / "x", "--pooling", "max"), 2
    )
    assert "config.json" in error_line(run("import", tmp_path, data, "--out", tmp_path / "x", "--pooling", "cls"), 4)


def test_convert_and_check(run, data, tmp_path):
    code, out, _ = run("data", "convert", data, tmp_path / "csv", "--to", "csv")
    assert (code, out) == (0, f"{tmp_path / 'csv'}: 400 train queries, 80 test queries, 37 labels\n")
    code, out, said = run("data", "check", tmp_path / "csv", "--plot", tmp_path / "zipf.png")
    assert code == 0 and "training queries per label" in out and "read as csv" in said
    assert (tmp_path / "zipf.png").exists()


def test_bad_lines_may_be_skipped(run, bad_folder):
    folder = bad_folder('{"uid": "x", "text": 3, "labels": []}')
    code, out, said = run("data", "check", folder, "--on-error", "skip")
    assert code == 0 and out and "skipped 1 line" in said


# 2: usage


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "DATA", "--out", "NEW", "--recipe", "dexm"], "did you mean 'dexml'"),
        (["train", "DATA", "--out", "NEW", "--recipe", "missing.toml"], "cannot be read"),
        (["train", "DATA", "--out", "NEW", "--set", "train.epoch=3"], "did you mean 'train.epochs'"),
        (["train", "DATA", "--out", "NEW", "--set", "train.epochs"], "expected KEY=VALUE"),
        (["train", "DATA", "--out", "NEW", "--set", "train.epochs=many"], "expected int, got 'many'"),
        (["train", "DATA", "--out", "DATA"], "is not empty: choose another --out"),
        (["train", "DATA"], "Missing option '--out'"),
        (["train"], "see dexter train --help"),
        (["nonsense"], "No such command 'nonsense'"),
        (["predict", "RUN", "text", "--nonsense"], "No such option"),
        (["predict", "RUN", "text", "-k", "many"], "'--k'"),
        (["predict", "RUN", "text", "-k", "0"], "k must be 1 or more"),
        (["predict", "RUN", "text", "--format", "xml"], "is not one of 'text', 'jsonl', 'tsv'"),
        (["predict", "RUN", "text", "--head", "tail"], "is not one of 'encoder'"),
        (["predict", "RUN", "text", "--input", "q.txt"], "not both"),
        (["evaluate", "RUN", "DATA", "--propensity", "mine"], "is not one of"),
        (["evaluate", "RUN", "DATA", "-k", "0"], "0"),
        (["compare", "RUN", "--data", "DATA"], "two different runs"),
        (["data", "check", "DATA", "--on-error", "cry"], "is not one of"),
        (["data", "check", "DATA", "--text-column", "body"], "not to jsonl"),
        (["data", "convert", "DATA", "NEW", "--to", "xml"], "xml"),
        (["data", "convert", "DATA", "DATA"], "exists already"),
        (["data", "build", "wikipedia", "--out", "NEW"], "choose one of pydocs, debian"),
    ],
)
def test_usage_errors(run, data, trained, tmp_path, arguments, says):
    places = {"DATA": data, "RUN": trained, "NEW": tmp_path / "new"}
    assert says in error_line(run(*(places.get(argument, argument) for argument in arguments)), 2)
    assert not (tmp_path / "new").exists(), "nothing is half-made"


@pytest.mark.parametrize("group", [[], ["data"], ["labels"], ["examples"], ["recipes"]])
def test_every_summary_of_help_is_shown_whole(run, group):
    shown = run(*group, "--help")[1]
    assert "Commands:" in shown and "..." not in shown.partition("Commands:")[2]


def test_a_wrong_setting_is_refused_before_the_data_are_read(run, tmp_path):
    said = run("train", tmp_path / "missing", "--out", tmp_path / "new", "--set", "train.epoch=3")
    assert "did you mean 'train.epochs'" in error_line(said, 2)


def test_nothing_asked_for_shows_help(run):
    code, out, said = run()
    assert code == 2 and "Commands:" in out + said


# 3: data

LABELS = '{"uid": "a", "text": "A"}\n{"uid": "b", "text": "B"}\n'
GOOD = '{"uid": "1", "text": "fine", "labels": ["a"]}'


@pytest.fixture
def bad_folder(tmp_path):
    def make(*rows, labels=LABELS):
        (tmp_path / "bad").mkdir(exist_ok=True)
        (tmp_path / "bad" / "lbl.jsonl").write_text(labels)
        lines = [row if isinstance(row, bytes) else row.encode() for row in (GOOD, *rows)]
        (tmp_path / "bad" / "trn.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        return tmp_path / "bad"

    return make


BAD_ROWS = {
    "malformed JSON": ('{"uid": ', "not a JSON object"),
    "not an object": ("[1, 2]", "expected a JSON object"),
    "no text": ('{"uid": "2", "labels": []}', '"text" is missing'),
    "no labels": ('{"uid": "2", "text": "x"}', '"labels" is missing'),
    "text of wrong type": ('{"text": 3, "labels": []}', '"text" must be a string'),
    "unknown label": ('{"text": "x", "labels": ["zz"]}', "label id 'zz' is not in lbl.jsonl"),
    "index out of range": ('{"text": "x", "labels": [2]}', "out of range"),
    "NaN weight": ('{"text": "x", "labels": [0], "weights": [NaN]}', "weight nan must be finite"),
    "invalid UTF-8": (b'{"text": "caf\xe9", "labels": []}', "is not UTF-8"),
    "NUL": (b'{"text": "a\x00b", "labels": []}', "NUL byte"),
    "lone surrogate": ('{"text": "\\ud800", "labels": []}', "surrogate"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("verb", ["check", "convert", "train"])
def test_bad_input_has_file_line_and_remedy(run, bad_folder, tmp_path, kind, verb):
    row, says = BAD_ROWS[kind]
    folder, out = bad_folder(row), tmp_path / "out"
    arguments = {
        "check": ("data", "check", folder),
        "convert": ("data", "convert", folder, out),
        "train": ("train", folder, "--out", out),
    }
    line = error_line(run(*arguments[verb]), 3)
    assert f"{folder / 'trn.jsonl'}:2: " in line
    assert says in line
    assert not out.exists(), "nothing is half-written"


def test_each_kind_of_problem_has_a_line_of_its_own(run, bad_folder):
    folder = bad_folder("[1]", '{"text": 3, "labels": []}', "[2]")
    code, out, said = run("data", "check", folder)
    lines = said.splitlines()[1:]
    assert (code, out, len(lines)) == (3, "", 2)
    assert lines[0].startswith(f"dexter: error: {folder / 'trn.jsonl'}:2: ") and "1 more like it" in lines[0]
    assert lines[1].startswith(f"{folder / 'trn.jsonl'}:3: ")


def test_other_bad_data(run, trained, tmp_path, bad_folder):
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(GOOD.encode() * 9999)[:-30])
    assert "gz" in error_line(run("data", "check", tmp_path / "cut.jsonl.gz"), 3)
    assert "no such file" in error_line(run("data", "check", tmp_path / "missing"), 3)
    assert "no test split" in error_line(run("evaluate", trained, bad_folder()), 3)
    assert "cannot be read" in error_line(run("predict", trained, "--input", tmp_path / "missing.txt"), 3)
    (tmp_path / "q.txt").write_bytes(b"fine\n\xff\n")
    assert f"{tmp_path / 'q.txt'}:2: " in error_line(run("predict", trained, "--input", tmp_path / "q.txt"), 3)


def test_a_failed_prediction_leaves_no_output(run, trained, tmp_path):
    (tmp_path / "q.txt").write_bytes(b"fine\n" * 2000 + b"\xff\n")
    error_line(run("predict", trained, "--input", tmp_path / "q.txt", "--output", tmp_path / "out.txt"), 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q.txt"]


# 4: model


@pytest.mark.parametrize("verb", ["predict", "evaluate", "compare"])
@pytest.mark.parametrize("damage", ["missing", "unfinished", "corrupt", "other version"])
def test_model_errors(run, trained, data, tmp_path, verb, damage):
    import shutil

    from dexter.files import write_manifest

    broken = tmp_path / "run"
    if damage == "unfinished":
        broken.mkdir()
        shutil.copy(trained / "config.toml", broken)
    elif damage != "missing":
        shutil.copytree(trained, broken)
        name = "model.json" if damage == "other version" else "labels.safetensors"
        path = broken / "model" / "dexter" / name
        content = path.read_bytes()
        if damage == "corrupt":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        else:
            path.write_bytes(content.replace(b'"format_version": 1', b'"format_version": 99'))
            write_manifest(broken / "model")
    says = {
        "missing": "no such run folder",
        "unfinished": "has no model yet",
        "corrupt": "differs from its manifest",
        "other version": "format version 99, this program reads 1",
    }
    arguments = {
        "predict": ("predict", broken, "text"),
        "evaluate": ("evaluate", broken, data),
        "compare": ("compare", broken, trained, "--data", data),
    }
    assert says[damage] in error_line(run(*arguments[verb]), 4)


# 5: resources


def test_a_full_disk(run, data, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "the disk is full" in error_line(run("data", "convert", data, tmp_path / "out"), 5)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_in_training(run, data, tmp_path):
    """A real small file system: the run stops with 5, and goes on when there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        assert "the disk is full" in error_line(run("train", data, "--out", disk / "run", *SETTINGS), 5)
        subprocess.run(["mount", "-o", "remount,size=32m", disk], check=True)
        assert run("train", data, "--out", disk / "run", "--resume")[0] == 0
        assert run("predict", disk / "run", "river")[0] == 0
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("place", ["/proc/nowhere/out", "file/out"])
def test_an_output_that_cannot_be_written(run, data, trained, tmp_path, place):
    (tmp_path / "file").write_text("x")
    out = tmp_path / place
    error_line(run("data", "convert", data, out), 5)
    error_line(run("predict", trained, "text", "--output", out), 5)
    error_line(run("train", data, "--out", out), 5)


def test_a_missing_package_names_its_install_line(run, data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = error_line(run("data", "check", data, "--plot", tmp_path / "zipf.png"), 5)
    assert "pip install 'dexter-xmc[data]'" in line


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 bytes")])
def test_out_of_memory(run, data, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("dexter.data.formats.load_dataset", fail)
    assert "out of memory" in error_line(run("data", "check", data), 5)


# 6: diverged


def test_a_run_that_diverges(run, data, tmp_path):
    arguments = [*SETTINGS, "--set", "encoder.normalize=false", "--set", "train.learning_rate=1e30"]
    line = error_line(run("train", data, "--out", tmp_path / "run", *arguments), 6)
    assert "not finite in step" in line and "lower train.learning_rate" in line
    assert (tmp_path / "run" / "diverged.json").exists()


# 130, 143: interrupted


def test_a_keyboard_interrupt_outside_training(run, data, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("dexter.data.formats.load_dataset", interrupt)
    assert error_line(run("data", "check", data), 130) == "dexter: error: interrupted"


def test_termination_outside_training_leaves_nothing_behind(run, data, tmp_path, monkeypatch):
    def terminated(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(os, "fsync", terminated)
    before = signal.getsignal(signal.SIGTERM)
    assert "terminated" in error_line(run("data", "convert", data, tmp_path / "out"), 143)
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_training_saves_and_says_how_to_go_on(run, data, tmp_path, monkeypatch, number, code):
    take_step = trainer.Trainer.take_step

    def interrupting(self):
        result = take_step(self)
        if self.step == 3:
            os.kill(os.getpid(), number)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "take_step", interrupting)
        line = error_line(run("train", data, "--out", tmp_path / "run", *SETTINGS), code)
    assert "stopped by a signal after step 3" in line and "--resume" in line
    assert run("train", data, "--out", tmp_path / "run", "--resume")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_a_real_process(tmp_path, number, code):
    save_dataset(make_world(num_train=2000), tmp_path / "data")
    command = [sys.executable, "-m", "dexter", "train", tmp_path / "data", "--out", tmp_path / "run"]
    process = subprocess.Popen(
        [*command, *SETTINGS, "--set", "train.epochs=200"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    out, said = process.communicate(timeout=240)
    assert (process.returncode, out) == (code, "")
    assert "Traceback" not in said and "\r" not in said
    assert said.splitlines()[-1].startswith("dexter: error: stopped by a signal after step ")
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    process = subprocess.Popen([*command, "--resume"], stderr=subprocess.PIPE, text=True)
    while "resumed after step" not in (line := process.stderr.readline()):
        assert line
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_termination_is_not_caught_as_a_failure(run, data, monkeypatch):
    """Logging swallows exceptions of its handlers; a signal may arrive just there."""

    def terminated(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(logging.StreamHandler, "flush", terminated)
    assert "terminated" in error_line(run("data", "check", data), 143)


@pytest.mark.slow
def test_a_closed_pipe_ends_it_quietly(trained, tmp_path):
    (tmp_path / "q.txt").write_text("river stone\n" * 20_000)
    predict = [sys.executable, "-m", "dexter", "predict", trained, "--input", tmp_path / "q.txt"]
    process = subprocess.Popen(predict, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.wait(timeout=60)


# errors in general


def test_debug_shows_the_traceback_before_and_after_the_verb(run, tmp_path):
    for arguments in (("--debug", "data", "check", tmp_path / "no"), ("data", "check", tmp_path / "no", "--debug")):
        code, out, said = run(*arguments)
        assert (code, out) == (3, "")
        assert "Traceback (most recent call last)" in said and "DataError" in said
        assert said.splitlines()[-1].startswith("dexter: error: ")


def test_a_bug_is_one_line_too(run, data, monkeypatch):
    def bug(*_, **__):
        raise KeyError("surprise")

    monkeypatch.setattr("dexter.data.formats.load_dataset", bug)
    assert "a bug in dexter: --debug shows where" in error_line(run("data", "check", data), 1)


def test_quiet_says_only_warnings_and_errors(run, data):
    assert run("data", "check", data, "--quiet")[2] == ""


def test_a_text_may_look_like_an_option(run, trained):
    code, out, _ = run("predict", trained, "-k", 1, "--", "--debug")
    assert code == 0 and out.startswith("--debug\n")


def test_exit_codes_are_those_of_the_errors():
    from dexter import errors

    kinds = [errors.UsageError, errors.DataError, errors.ModelError, errors.ResourceError, errors.DivergedError]
    assert [kind.exit_code for kind in kinds] == [2, 3, 4, 5, 6]
    for code in (0, 1, 2, 3, 4, 5, 6, 130, 143):
        assert f"{code} " in cli.EXIT_CODES
    assert issubclass(DataError, ValueError)


def test_an_index_is_made_used_and_refused_when_damaged(run, trained, data, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    code, out, err = run("index", folder)
    assert code == 0, err
    assert "exact over 37 labels (by their number), recall@100 1.0000" in out
    assert "index exact: the default for 37 labels" in err
    code, out, _ = run("predict", folder, "violin copper", "-k", "1")
    assert code == 0
    assert run("predict", folder, "violin copper", "-k", "1", "--index", "exact")[1] == out
    (folder / "index" / "index.json").write_text("{}")
    line = error_line(run("predict", folder, "violin copper"), 4)
    assert "index.json: differs from its manifest" in line
    assert run("predict", folder, "violin copper", "-k", "1", "--index", "exact")[1] == out


def test_wrong_index_options_are_refused(run, trained, tmp_path):
    assert "expected one of exact, pq" in error_line(run("index", trained, "--backend", "annoy"), 2)
    assert "needs the address of a server" in error_line(run("index", trained, "--backend", "qdrant"), 2)
    assert "'--index': 'pq' is not one of 'exact'" in error_line(run("predict", trained, "x", "--index", "pq"), 2)
    assert not (trained / "index").exists()


def test_plan_says_what_training_needs(run, data):
    code, out, _ = run("plan", data, *SETTINGS)
    assert code == 0
    assert out.startswith("recipe dexter: ")
    assert all(word in out for word in ("memory ", "disk ", "time ", "to shrink the largest"))
    code, out, _ = run("plan", data, "--recipe", "unidec", *SETTINGS, "--world-size", 2, "--json")
    assert code == 0
    assert json.loads(out)["world_size"] == 2


def test_training_logs_what_it_needs(run, data, tmp_path):
    code, _, said = run("train", data, "--out", tmp_path / "run", *SETTINGS)
    assert code == 0
    assert any(
        line.startswith("needs about ") and " of memory (largest: " in line and line.endswith(" of disk")
        for line in said.splitlines()
    )


def test_plan_without_data(run):
    counts = ("--queries", 50_000_000, "--labels", 450_000_000, "--tokens-per-text", 8)
    device = ("--world-size", 2, "--gpu-memory", 80)
    code, out, _ = run("plan", *counts, *device, "--recipe", "unidec", "--set", "head.projection=64")
    assert code == 0
    assert "DOES NOT FIT in 85.9 GB" in out
    assert "sent by each process in a step" in out


@pytest.mark.parametrize(
    "arguments", [(), ("--queries", 10), ("somewhere", "--queries", 10, "--labels", 10), ("--labels", 10)]
)
def test_plan_wants_data_or_counts(run, arguments):
    assert "--queries and --labels" in error_line(run("plan", *arguments), 2)


def test_the_help_of_a_verb_is_that_of_the_whole_command_line(run):
    for words in (["predict"], ["labels", "add"], ["import"]):
        _, shown, _ = run(*words, "--help")
        assert shown.split() == CliRunner().invoke(cli.app, [*words, "--help"], prog_name="dexter").output.split()
