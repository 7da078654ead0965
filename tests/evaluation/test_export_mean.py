"""The export of a static encoder: what sentence-transformers and model2vec load is what was measured."""

import json
import sys

import numpy as np
import pytest
from tests.conftest import SMALL

import dexter
from dexter.cli import main as cli
from dexter.errors import UsageError
from dexter.evaluation.export_mean import export_mean
from dexter.predict.predictor import Predictor

TEXTS = ["the old stone garden", "a violin of copper", "river", "needle " * 300, "unknownword falcon 东京"]
PLAIN = {**SMALL, "encoder.positions": False, "encoder.label_vectors": False, "head.classifier": False}


@pytest.fixture(scope="module")
def plain_run(world, tmp_path_factory):
    return dexter.train(world, out=tmp_path_factory.mktemp("plain") / "run", overrides=PLAIN).path


@pytest.fixture(scope="module")
def default_run(world, tmp_path_factory):
    return dexter.train(world, out=tmp_path_factory.mktemp("default") / "run", overrides=SMALL).path


def own_vectors(run, texts=TEXTS):
    vectors = np.array([each.vector_D for each in Predictor.load(run).embed(texts)])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_sentence_transformers_gives_the_vectors_of_a_plain_run(plain_run, tmp_path):
    package = pytest.importorskip("sentence_transformers")
    report = export_mean(plain_run, tmp_path / "encoder")
    assert report.left_out == () and report.lowest_cosine > 1 - 1e-5
    theirs = package.SentenceTransformer(str(tmp_path / "encoder"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(theirs, own_vectors(plain_run), atol=1e-5)


def test_model2vec_gives_the_vectors_of_a_plain_run(plain_run, tmp_path):
    package = pytest.importorskip("model2vec")
    export_mean(plain_run, tmp_path / "encoder")
    theirs = package.StaticModel.from_pretrained(tmp_path / "encoder").encode(TEXTS)
    np.testing.assert_allclose(theirs, own_vectors(plain_run), atol=1e-5)


def test_a_default_run_says_what_is_left_out_and_how_near_it_is(default_run, world, tmp_path):
    package = pytest.importorskip("model2vec")
    report = export_mean(default_run, tmp_path / "encoder", data=world)
    assert report.left_out == ("weights by position", "vectors of whole label texts")
    texts = list(world.test.texts)
    theirs = package.StaticModel.from_pretrained(tmp_path / "encoder").encode(texts)
    cosines = (theirs * own_vectors(default_run, texts)).sum(axis=1)
    assert report.num_texts == len(texts)
    assert report.mean_cosine == pytest.approx(cosines.mean(), abs=1e-5)
    assert report.lowest_cosine == pytest.approx(cosines.min(), abs=1e-5)
    labels = package.StaticModel.from_pretrained(tmp_path / "encoder").encode(list(world.label_texts))
    top = np.argsort(-(theirs @ labels.T), axis=1)[:, :10]
    hits = [np.isin(row.indices, best).mean() for row, best in zip(world.test.relevance, top, strict=True)]
    assert report.recall["R@10"].after == pytest.approx(100 * np.mean(hits), abs=0.5)
    assert 0.5 < report.mean_cosine < 1


def test_the_verb_measures_and_refuses(default_run, tmp_path, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["dexter", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, capsys.readouterr()

    code, printed = call("export", default_run, "--to", "sentence-transformers", "--out", tmp_path / "e", "--json")
    assert code == 0 and json.loads(printed.out)["mean_cosine"] < 1
    for wrong in (
        ("--to", "sentence-transformers"),
        ("--to", "pickle", "--out", tmp_path / "f"),
        ("--out", tmp_path / "f"),
        ("--to", "sentence-transformers", "--out", tmp_path / "e"),
    ):
        code, printed = call("export", default_run, *wrong)
        assert code == 2 and len(printed.err.splitlines()) == 1, wrong


def test_what_a_mean_cannot_hold_is_refused(world, tmp_path):
    settings = {**PLAIN, "head.projection": 16}
    run = dexter.train(world, out=tmp_path / "run", overrides=settings).path
    with pytest.raises(UsageError, match="projects"):
        export_mean(run, tmp_path / "encoder")
    assert not (tmp_path / "encoder").exists()
