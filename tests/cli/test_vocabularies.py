# ruff: noqa: F811 - fixtures of another file
"""A vocabulary from training to service: labels by URI, other languages, a new release, hits on the parent."""

import json
import shlex
import shutil

import pytest
from starlette.testclient import TestClient

import dexter.training
from dexter import Predictor
from dexter.serving.app import create_app
from tests.cli.test_main import SETTINGS, error_line, run  # noqa: F401 - fixtures
from tests.conftest import SMALL, make_world
from tests.test_readme import ROOT, blocks

pytest.importorskip("rdflib")
EX = "http://example.org/"
PREFIXES = """@prefix skos: <http://www.w3.org/2004/02/skos/core#> .
@prefix owl: <http://www.w3.org/2002/07/owl#> .
@prefix ex: <http://example.org/> .
"""


def write_vocabulary(path, texts, *, more=""):
    concepts = [
        f'ex:{name} a skos:Concept ; skos:prefLabel "{text}"@en, "sv {text}"@sv .' for name, text in texts.items()
    ]
    children = [f"ex:{name} skos:broader ex:L0 ." for name in texts if name != "L0"]
    path.write_text(PREFIXES + "\n".join([*concepts, *children, more]))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """An Annif corpus of the small world, with its vocabulary beside it."""
    world, folder = make_world(), tmp_path_factory.mktemp("corpus")
    write_vocabulary(folder / "vocab.ttl", dict(zip(world.label_ids, world.label_texts, strict=True)))
    for name, split in (("train", world.train), ("test", world.test)):
        rows = ([f"<{EX}{world.label_ids[column]}>" for column in row.indices] for row in split.relevance)
        lines = (f"{text}\t{' '.join(uris)}\n" for text, uris in zip(split.texts, rows, strict=True))
        (folder / f"{name}.tsv").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def library(corpus, tmp_path_factory):
    """A run that was trained with the vocabulary."""
    from dexter.data.formats import load_dataset

    out = tmp_path_factory.mktemp("runs") / "library"
    dexter.training.train(load_dataset(corpus, language="en"), out=out, overrides=SMALL)
    return out


def test_check_reads_the_vocabulary_or_says_that_texts_are_missing(run, corpus, tmp_path):
    assert "--language" in error_line(run("data", "check", corpus), 2)
    code, shown, said = run("data", "check", corpus, "--language", "en")
    assert code == 0 and "vocab.ttl, 37 concepts" in said and "URI" not in shown
    (tmp_path / "train.tsv").write_bytes((corpus / "train.tsv").read_bytes())
    assert "labels whose text is a URI" in run("data", "check", tmp_path)[1]
    code, _, _ = run(
        "train", tmp_path, "--vocabulary", corpus / "none.ttl", "--language", "en", "--out", tmp_path / "r"
    )
    assert code == 3 and not (tmp_path / "r").exists()


def test_every_language_is_shown(run, library, corpus):
    text = make_world().test.texts[0]
    english, swedish = (
        json.loads(run("predict", library, text, "--format", "jsonl", *options)[1])["labels"]
        for options in ((), ("--language", "sv"))
    )
    assert [f"sv {label['text']}" for label in english] == [label["text"] for label in swedish]
    assert [label["score"] for label in english] == [label["score"] for label in swedish]
    assert "choose one of en, sv" in error_line(run("predict", library, text, "--language", "fi"), 2)


def test_the_service_shows_every_language(library):
    with TestClient(create_app(Predictor.load(library)), base_url="http://localhost") as client:
        body = {"inputs": make_world().test.texts[0], "k": 2, "language": "sv"}
        labels = client.post("/v1/predict", json=body).json()["results"][0]["labels"]
        assert all(label["text"].startswith("sv ") for label in labels)
        assert client.post("/v1/predict", json=body | {"language": "fi"}).status_code == 422


def test_a_run_without_a_vocabulary_has_one_language(run, world, tmp_path):
    dexter.training.train(world, out=tmp_path / "run", overrides={**SMALL, "train.epochs": 1})
    assert "train it with a vocabulary" in error_line(run("predict", tmp_path / "run", "x", "--language", "sv"), 2)


def test_evaluation_counts_a_hit_on_the_parent(run, library, corpus):
    code, shown, _ = run("evaluate", library, corpus, "--language", "en")
    assert code == 0 and "With a hit on the parent counted too: P@1 " in shown
    record = json.loads(run("evaluate", library, corpus, "--language", "en", "--json")[1])
    assert set(record["hierarchy"]) >= {"parentP@1", "hP@3", "hR@5"}
    assert record["hierarchy"]["parentP@5"] > record["metrics"]["P@5"], "every label has the parent L0, often predicted"


@pytest.fixture
def release(tmp_path):
    """The next release: one concept new, one renamed, one deprecated, one gone."""
    world = make_world()
    texts = dict(zip(world.label_ids, world.label_texts, strict=True))
    del texts["L3"]
    texts |= {"L1": "a new name", "L99": "kettle drums"}
    write_vocabulary(tmp_path / "new.ttl", texts, more="ex:L2 owl:deprecated true .")
    return tmp_path / "new.ttl"


def test_a_new_release_is_one_edit_with_a_preview(run, library, release):
    before = Predictor.load(library).labels
    expected = "1 added, 1 renamed, 2 removed, 34 as before"
    code, shown, said = run("labels", "sync", library, release, "--dry-run")
    assert code == 0 and f"nothing is written: {expected}" in shown
    assert f"add  {EX}L99  kettle drums" in said and f"remove  {EX}L3" in said and "-> a new name" in said
    assert Predictor.load(library).labels.ids == before.ids and not Predictor.load(library).label_history()
    assert expected in run("labels", "sync", library, release)[1]
    after, history = Predictor.load(library).labels, Predictor.load(library).label_history()
    texts = dict(zip(after.ids, after.texts, strict=True))
    assert texts[EX + "L99"] == "kettle drums" and texts[EX + "L1"] == "a new name"
    assert Predictor.load(library).names("sv")[EX + "L99"] == "sv kettle drums"
    assert not {EX + "L2", EX + "L3"} & set(after.ids) and len(history) == 1
    assert "0 added, 0 renamed, 0 removed, 36 as before" in run("labels", "sync", library, release)[1]
    assert len(Predictor.load(library).label_history()) == 1, "nothing changed, so there is no edit"
    run("labels", "undo", library)
    restored = Predictor.load(library).labels
    assert dict(zip(restored.ids, restored.texts, strict=True)) == dict(zip(before.ids, before.texts, strict=True))
    assert (
        "1 that it does not have are kept" in run("labels", "sync", library, release, "--keep-missing", "--dry-run")[1]
    )


def test_another_vocabulary_is_refused(run, library, tmp_path):
    (tmp_path / "other.tsv").write_text("<http://elsewhere/1>\tone\n")
    assert "no label of the run is in it" in error_line(run("labels", "sync", library, tmp_path / "other.tsv"), 2)


def test_the_commands_of_the_walk_run(run, corpus, release, tmp_path, monkeypatch):
    """Every block of docs/vocabularies.md, in its order, on a small vocabulary."""
    real = dexter.training.train
    monkeypatch.setattr(dexter.training, "train", lambda data, **given: real(data, **given | {"overrides": SMALL}))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus, tmp_path / "corpus")
    release.rename(tmp_path / "release.ttl")
    text = (ROOT / "docs" / "vocabularies.md").read_text(encoding="utf-8")
    commands = [shlex.split(line) for block in blocks(text, "sh") for line in block.splitlines()]
    assert len(commands) == 8
    for command in commands:
        code, shown, said = run(*command[1:])
        assert code == 0 and shown, (command, said)
