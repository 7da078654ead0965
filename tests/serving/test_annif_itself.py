"""Annif itself, from the package index in an environment of its own, using a run through its `http` backend."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dexter import Predictor
from tests.serving.test_server import start_process, wait_ready

pytestmark = [pytest.mark.slow(minutes=10), pytest.mark.timeout(1_800)]
CONSTRAINTS = Path(__file__).parents[2] / "constraints" / "cpu.txt"
PROJECT = """[dexter]
name=dexter over HTTP
language=en
backend=http
endpoint=http://127.0.0.1:{port}/v1/projects/run/suggest
vocab=world
limit=5
"""


@pytest.fixture(scope="module")
def annif(tmp_path_factory):
    """The command: that of $DEXTER_ANNIF, or of a new environment."""
    if command := os.environ.get("DEXTER_ANNIF"):
        return Path(command)
    folder = tmp_path_factory.mktemp("annif")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [folder / "bin" / "pip", "install", "--quiet", "-c", CONSTRAINTS, "annif"]
    result = subprocess.run(install, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"annif cannot be installed here: {result.stderr.strip().splitlines()[-1]}")
    return folder / "bin" / "annif"


@pytest.fixture
def served(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    process, port = start_process(tmp_path / "run")
    wait_ready(port)
    yield port
    process.terminate()
    assert process.wait(20) == 0


def test_annif_suggests_and_evaluates_with_a_run(annif, served, trained, world, tmp_path):
    (tmp_path / "projects.cfg").write_text(PROJECT.format(port=served))
    labels = zip(world.label_ids, world.label_texts, strict=True)
    (tmp_path / "vocabulary.tsv").write_text("".join(f"<{label_id}>\t{text}\n" for label_id, text in labels))

    def call(*arguments, text=None):
        command = [annif, *map(str, arguments)]
        result = subprocess.run(command, cwd=tmp_path, input=text, capture_output=True, text=True, timeout=300)
        print(f"$ annif {' '.join(map(str, arguments))}", result.stdout, sep="\n")
        assert result.returncode == 0, result.stderr
        assert "failed" not in result.stderr, result.stderr
        return result.stdout

    call("load-vocab", "world", "vocabulary.tsv", "--language", "en")
    shown = call("show-project", "dexter")
    assert [line.split()[-1] for line in shown.splitlines() if "trained" in line.lower()] == ["True"]

    text = world.test.texts[0]
    [expected] = Predictor.load(trained).predict([text], k=5)
    lines = [line.split("\t") for line in call("suggest", "dexter", text=text).splitlines()]
    assert [line[0] for line in lines] == [f"<{label.id}>" for label in expected]
    assert [line[1] for line in lines] == [label.text for label in expected]
    assert all(0.0 < float(line[2]) <= 1.0 for line in lines)

    relevance = world.test.relevance
    documents = [
        f"{text}\t" + " ".join(f"<{world.label_ids[label]}>" for label in relevance[row].indices)
        for row, text in enumerate(world.test.texts)
    ]
    (tmp_path / "test.tsv").write_text("\n".join(documents) + "\n")
    measured = dict(
        line.split(":") for line in call("eval", "dexter", "test.tsv", "--limit", 5).splitlines() if ":" in line
    )
    first = [labels[0].id for labels in Predictor.load(trained).predict(world.test.texts, k=1)]
    hits = [world.label_ids.index(label) in relevance[row].indices for row, label in enumerate(first)]
    assert float(measured["Precision@1"]) == pytest.approx(sum(hits) / len(hits), abs=1e-3)
