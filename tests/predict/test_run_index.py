"""The index of a run: made, found again, kept up with the labels, refused when damaged or of another model."""

import json
import logging
import random
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dexter
from dexter.errors import ModelError, UsageError
from dexter.files import MANIFEST, write_manifest
from dexter.index import ExactIndex, approximate
from dexter.index.folder import open_index
from dexter.model.published import encoder_fingerprint
from dexter.predict.predictor import Predictor
from dexter.predict.run_index import build_run_index, index_folder
from tests.conftest import SMALL, make_world

faiss = pytest.importorskip("faiss", reason="faiss is not installed: no approximate index to test with")
TEXTS = ["a violin of copper", "the old stone garden", "falcon and harbor", "very small quartz with a ribbon"]


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch):
    """With 37 labels, candidates are few only if few are asked for."""
    monkeypatch.setattr(approximate, "MIN_PLACES", 1)
    monkeypatch.setattr(approximate, "MIN_RECALL", 0.0)
    monkeypatch.setattr(approximate, "DEPTHS", (4,))


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def make_index(run, backend="pq", **settings):
    predictor = Predictor.load(run, index="exact")
    return build_run_index(predictor.model, run / "model", head=predictor.choice.head, backend=backend, **settings)


@pytest.mark.parametrize("backend", ["exact", "pq", "hnsw"])
def test_the_predictor_uses_the_index_of_the_run(run, backend):
    exact = Predictor.load(run)
    assert isinstance(exact.index, ExactIndex)
    report = make_index(run, backend)
    assert report.backend == backend
    assert report.num_labels == 37
    predictor = Predictor.load(run)
    assert predictor.index.backend == backend
    assert Predictor.load(run / "model").index.backend == backend
    for found, wanted in zip(predictor.predict(TEXTS, 3), exact.predict(TEXTS, 3), strict=True):
        assert {(label.id, round(label.score, 4)) for label in found} == {(x.id, round(x.score, 4)) for x in wanted}
    assert isinstance(Predictor.load(run, index="exact").index, ExactIndex)


def test_the_default_is_said(run, caplog):
    caplog.set_level(logging.INFO, logger="dexter")
    report = make_index(run, None)
    assert report.backend == "exact"
    assert report.chosen
    assert "index exact: the default for 37 labels" in caplog.text


def test_recall_is_measured_on_the_queries_given(run):
    assert make_index(run, "pq", queries=TEXTS).recall <= 1.0
    described = json.loads((run / "index" / "index.json").read_text())
    assert 0 < described["recall"] <= 1


def test_the_record_of_an_evaluation_names_the_index(run, world):
    from dexter.evaluation.runs import evaluate_run

    assert evaluate_run(run, world).record["search"]["index"] == "exact"
    make_index(run, "pq")
    found = evaluate_run(run, world).record["search"]
    assert found["index"] == "pq"
    assert found["recall"] == json.loads((run / "index" / "index.json").read_text())["recall"]
    assert evaluate_run(run, world, index="exact").record["search"]["index"] == "exact"


def test_the_index_follows_the_labels(run):
    make_index(run, "pq")
    # Votes of training queries for other labels could come first.
    predictor, exact = (Predictor.load(run, index=index, neighbours=False) for index in (None, "exact"))
    for model in (predictor, exact):
        model.add_labels([("new", "violin quartz harbor"), ("newer", "lantern")])
        model.remove_labels(["L3", "L17", "newer"])
    assert predictor.index.backend == "pq"
    text = "violin quartz harbor"
    assert [x.id for x in predictor.predict([text], 4)[0]] == [x.id for x in exact.predict([text], 4)[0]]
    assert predictor.predict([text], 1)[0][0].id == "new"
    everything = predictor.predict([text], 100)[0]
    assert len(everything) == 36
    assert not {"L3", "L17", "newer"} & {label.id for label in everything}


def test_another_head_is_searched_exactly(tmp_path, caplog):
    settings = {**SMALL, "head.classifier": True}
    run = dexter.train(make_world(), recipe="dexter", out=tmp_path / "run", overrides=settings).path
    make_index(run, "pq")
    assert Predictor.load(run).index.backend == "pq"
    other = Predictor.load(run, head="encoder")
    assert other.index.backend == "exact"
    assert "is for head unified, not encoder: search is exact" in caplog.text


def test_the_index_of_another_model_is_refused(run, tmp_path):
    make_index(run, "pq")
    world = make_world(seed=1)
    other = dexter.train(world, recipe="dexter", out=tmp_path / "other", overrides=SMALL).path
    shutil.copytree(run / "index", other / "index")
    with pytest.raises(ModelError, match="made for another encoder"):
        Predictor.load(other)
    assert Predictor.load(other, index="exact").index.backend == "exact"


def test_the_fingerprint_is_of_the_encoder_and_not_of_what_is_noted_beside_it(run):
    model = Predictor.load(run).model
    before = encoder_fingerprint(run / "model")
    model.facts["note"] = "tuned"
    model.save(run / "model")
    assert encoder_fingerprint(run / "model") == before


def test_an_unknown_backend_is_refused(run):
    with pytest.raises(UsageError, match="unknown index backend 'annoy'"):
        make_index(run, "annoy")
    assert not (run / "index").exists()


def test_an_index_below_the_bar_leaves_nothing_behind(run, monkeypatch):
    monkeypatch.setattr(approximate, "MIN_RECALL", 1.01)
    with pytest.raises(ModelError, match=r"expected 1\.01 or more"):
        make_index(run, "pq")
    assert not (run / "index").exists()


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 0xFF
    path.write_bytes(bytes(content))


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncate,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "first byte": lambda path: flip(path, 0),
    "a third in": lambda path: flip(path, 1 / 3),
    "last byte": lambda path: flip(path, 1),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe{"),
    "HTML": lambda path: path.write_text("<html>404</html>"),
}
FILES = ["index.json", "labels.safetensors", MANIFEST]


@pytest.mark.parametrize("backend", ["pq", "hnsw"])
def test_every_damaged_file_is_an_error(run, backend):
    make_index(run, backend)
    kinds = [(name, kind) for name in [*FILES, "engine.safetensors"] for kind in DAMAGE]
    for name, kind in kinds:
        copy = run.with_name("copy")
        shutil.copytree(run, copy)
        DAMAGE[kind](copy / "index" / name)
        with pytest.raises(ModelError) as caught:
            Predictor.load(copy)
        assert "\n" not in str(caught.value), (name, kind)
        shutil.rmtree(copy)


def change_json(**values):
    def change(folder):
        path = folder / "index.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def change_tensor(file, name, edit):
    def change(folder):
        tensors = load_file(folder / file)
        tensors[name] = np.ascontiguousarray(edit(tensors[name]))
        save_file(tensors, folder / file)

    return change


def put(place, value):
    def edit(array):
        changed = array.copy()
        changed.reshape(-1)[place] = value
        return changed

    return edit


FORGED = {
    "no such backend": change_json(backend="annoy"),
    "backend of another kind": change_json(backend="hnsw"),
    "a database": change_json(backend="pgvector"),
    "another version": change_json(format_version=2),
    "no version": change_json(format_version=None),
    "another encoder": change_json(fingerprint="0" * 16),
    "no fingerprint": change_json(fingerprint=None),
    "fewer labels": change_json(num_labels=36),
    "no labels": change_json(num_labels=0),
    "labels as text": change_json(num_labels="37"),
    "another dimension": change_json(dimension=31),
    "a huge dimension": change_json(dimension=2**40),
    "recall as text": change_json(recall="high"),
    "no depth": change_json(depth=0),
    "negative depth": change_json(depth=-8),
    "engine is a list": change_json(engine=[1]),
    "a list": lambda folder: (folder / "index.json").write_text("[1, 2]"),
    "deeply nested": lambda folder: (folder / "index.json").write_text("[" * 100_000),
    "too few keys": change_tensor("labels.safetensors", "keys", lambda keys: keys[:-1]),
    "keys of another type": change_tensor("labels.safetensors", "keys", lambda keys: keys.astype(np.float32)),
    "keys in a square": change_tensor("labels.safetensors", "keys", lambda keys: keys[:36].reshape(6, 6)),
    "too few codes": change_tensor("engine.safetensors", "codes", lambda codes: codes[:10]),
    "no codes": change_tensor("engine.safetensors", "codes", lambda codes: codes[:0]),
    "narrow codes": change_tensor("engine.safetensors", "codes", lambda codes: codes[:, :-1]),
    "flat codes": change_tensor("engine.safetensors", "codes", np.ravel),
    "few centroids": change_tensor("engine.safetensors", "centroids", lambda centroids: centroids[:, :8]),
    "fewer quantisers": change_tensor("engine.safetensors", "centroids", lambda centroids: centroids[:-1]),
    "not a number": change_tensor("engine.safetensors", "centroids", put(3, np.nan)),
    "infinite": change_tensor("engine.safetensors", "centroids", put(3, np.inf)),
}


@pytest.mark.parametrize("kind", FORGED)
def test_an_index_that_is_sealed_but_wrong_is_an_error_too(run, kind):
    make_index(run, "pq")
    FORGED[kind](run / "index")
    write_manifest(run / "index")
    with pytest.raises((ModelError, UsageError)) as caught:
        Predictor.load(run)
    assert "\n" not in str(caught.value)


FORGED_GRAPHS = {
    "a link to nowhere": ("neighbors", put(0, 37)),
    "a link below zero": ("neighbors", put(0, -2)),
    "too few links": ("neighbors", lambda links: links[:-1]),
    "no links": ("neighbors", lambda links: links[:0]),
    "a level too high": ("levels", put(0, 1000)),
    "no level": ("levels", put(0, 0)),
    "offsets beyond the end": ("offsets", put(-1, 2**40)),
    "offsets that go back": ("offsets", put(3, 0)),
    "entry beyond the end": ("entry", put(0, 37)),
    "entry below zero": ("entry", put(0, -1)),
    "a level above the highest": ("entry", put(1, 7)),
    "three entries": ("entry", lambda entry: np.append(entry, entry[:1])),
    "too few codes": ("codes", lambda codes: codes[:-1]),
    "narrow codes": ("codes", lambda codes: codes[:, :-1]),
    "no codes": ("codes", lambda codes: codes[:0]),
    "not a number": ("trained", put(0, np.nan)),
    "too few ranges": ("trained", lambda trained: trained[:-2]),
}


@pytest.mark.parametrize("kind", FORGED_GRAPHS)
def test_a_graph_is_checked_before_it_is_walked(run, kind):
    make_index(run, "hnsw")
    name, edit = FORGED_GRAPHS[kind]
    change_tensor("engine.safetensors", name, edit)(run / "index")
    write_manifest(run / "index")
    with pytest.raises(ModelError, match="dexter index"):
        Predictor.load(run)


def test_links_must_not_lead_below_their_level():
    from dexter.index.faiss_engines import HNSWEngine, check_graph, links_up_to_level

    vectors = np.random.default_rng(0).standard_normal((3000, 8)).astype(np.float32)
    engine = HNSWEngine.build(vectors)
    arrays = {name: array.copy() for name, array in engine.arrays().items()}
    ends = links_up_to_level(engine._graph)
    check_graph(arrays, 8, ends)
    high, low = int(arrays["levels"].argmax()), int(arrays["levels"].argmin())
    arrays["neighbors"][int(arrays["offsets"][high]) + ends[1]] = low
    with pytest.raises(ModelError, match="a link of level 1 leads below it"):
        check_graph(arrays, 8, ends)


def test_a_killed_writer_leaves_the_old_index(run, monkeypatch):
    make_index(run, "pq")
    before = (run / "index" / MANIFEST).read_bytes()

    def die(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("dexter.index.faiss_engines.PQEngine.describe", die)
    with pytest.raises(KeyboardInterrupt):
        make_index(run, "pq")
    assert (run / "index" / MANIFEST).read_bytes() == before
    assert Predictor.load(run).index.backend == "pq"
    assert index_folder(run / "model") == run / "index"


@pytest.mark.slow(minutes=1)
@pytest.mark.parametrize("backend", ["pq", "hnsw"])
def test_a_thousand_mutated_index_files_are_all_noticed(run, backend):
    """Flipped, cut and longer files: noticed by their hash before faiss sees them."""
    make_index(run, backend)
    generator = random.Random(backend)
    files = {path: path.read_bytes() for path in (run / "index").iterdir()}
    for trial in range(1_000):
        path, content = generator.choice(list(files.items()))
        place = generator.randrange(len(content))
        flipped = content[:place] + bytes([content[place] ^ 1 << generator.randrange(8)]) + content[place + 1 :]
        path.write_bytes([flipped, content[:place], content + b"\0"][min(trial % 10, 2)])
        with pytest.raises(ModelError):
            print(path.name, place, open_index(run / "index"))
        path.write_bytes(content)
