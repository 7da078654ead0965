"""The export of a run: checked, kept beside the model, used when asked for; refused when damaged or of another."""

import json
import logging
import shutil
import sys

import numpy as np
import pytest
import torch
from tests.conftest import make_world
from tests.predict.test_run_index import DAMAGE

import dexter
from dexter.cli import main as cli
from dexter.data.formats import save_dataset
from dexter.encoders.transformer import TransformerEncoder
from dexter.errors import ModelError, ResourceError, UsageError
from dexter.files import MANIFEST, write_manifest
from dexter.predict.predictor import Predictor

for extra in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(extra, reason="the extra onnx is not installed")

from dexter.evaluation import export  # noqa: E402
from dexter.evaluation.export import export_run  # noqa: E402

TEXTS = ["a violin of copper", "", "the old stone garden and some very new river " * 9, "falcon", "harbor island"]


@pytest.fixture(scope="module")
def small_world():
    return make_world(num_train=120, num_test=30, num_labels=19)


@pytest.fixture(scope="module")
def original(small_world, tmp_path_factory):
    """A run of a small transformer with its export: look, do not touch."""
    place = tmp_path_factory.mktemp("onnx")
    texts = [*small_world.train.texts, *small_world.label_texts]
    TransformerEncoder.random(texts, num_layers=1, hidden_size=32).save(place / "encoder")
    settings = {
        "encoder.kind": "transformer",
        "encoder.pretrained": str(place / "encoder"),
        "encoder.max_length_query": 24,
        "encoder.max_length_label": 8,
        "batch.size": 32,
        "train.learning_rate": 0.002,
        "train.epochs": 2,
        "train.threads": 1,
        "validation.fraction": 0.1,
    }
    run = dexter.train(small_world, recipe="dexml", out=place / "run", overrides=settings).path
    export_run(run)
    return run


@pytest.fixture
def run(original, tmp_path):
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def same_graph(original, monkeypatch):
    """The graph of the same weights again, without the seconds that making it takes."""
    content = (original / "onnx" / "encoder.onnx").read_bytes()
    monkeypatch.setattr(export, "export_graph", lambda encoder: content)


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["dexter", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0, *capsys.readouterr()


def test_predictions_are_those_of_torch(run, caplog):
    caplog.set_level(logging.INFO, logger="dexter")
    plain, exported = Predictor.load(run), Predictor.load(run, runtime="onnx")
    assert plain.model.query_encoder is None
    assert "queries are encoded by ONNX Runtime, float32" in caplog.text
    for found, wanted in zip(exported.predict(TEXTS, 5), plain.predict(TEXTS, 5), strict=True):
        assert [label.id for label in found] == [label.id for label in wanted]
        np.testing.assert_allclose([x.score for x in found], [x.score for x in wanted], atol=1e-5)
    assert exported.explain(TEXTS[0], "L1").parts.keys() == plain.explain(TEXTS[0], "L1").parts.keys()


def test_labels_are_encoded_by_torch(run):
    plain, exported = Predictor.load(run), Predictor.load(run, runtime="onnx", persistent=True)
    for model in (plain, exported):
        model.add_labels([("new", "violin quartz harbor")])
    np.testing.assert_array_equal(plain.model.representations_LD, exported.model.representations_LD)
    exported.compact_labels()
    assert exported.model.query_encoder is not None
    assert "new" in Predictor.load(run, runtime="onnx").labels.ids


def test_services_use_it_too(run):
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    from dexter.serving.runs import ServedRun
    from dexter.serving.settings import ServeSettings

    served = ServedRun("run", run, ServeSettings(runtime="onnx")).predictor
    plain = Predictor.load(run)
    for side in ("query", "label"):
        found, wanted = (np.stack([x.vector_D for x in p.embed(TEXTS, side=side)]) for p in (served, plain))
        assert np.abs(found - wanted).max() <= 1e-5
        assert (found == wanted).all() == (side == "label")


def test_what_is_stored(run):
    described = json.loads((run / "onnx" / "export.json").read_text())
    assert described["precision"] == "float32"
    assert described["changes"] is None
    assert 0 < described["difference"] <= 1e-5
    assert described["num_texts"] > 100
    assert sorted(path.name for path in (run / "onnx").iterdir()) == [MANIFEST, "encoder.onnx", "export.json"]


def test_the_commands(run, same_graph, small_world, tmp_path, monkeypatch, capsys):
    code, printed, _ = call(monkeypatch, capsys, "predict", run, "violin of copper")
    assert call(monkeypatch, capsys, "predict", run, "violin of copper", "--runtime", "onnx")[:2] == (code, printed)
    code, _, complaint = call(monkeypatch, capsys, "predict", run, "text", "--runtime", "tensorrt")
    assert code == 2
    assert "is not one of 'torch', 'onnx'" in complaint
    code, _, complaint = call(monkeypatch, capsys, "export", run, "--int8")
    assert code == 2
    assert "--data DATA" in complaint
    save_dataset(small_world, tmp_path / "data")
    code, printed, _ = call(monkeypatch, capsys, "export", run, "--int8", "--data", tmp_path / "data")
    assert code == 0
    assert all(f"P@{k} " in printed for k in (1, 3, 5))
    assert "int8 on 30 test queries of 'data'" in printed
    code, printed, said = call(monkeypatch, capsys, "evaluate", run, tmp_path / "data", "--runtime", "onnx", "--json")
    assert "int8 on 30 test queries of 'data': P@1" in said
    record = json.loads(printed)
    assert (record["model"]["runtime"], record["model"]["dtype"]) == ("onnx", "int8")
    stored = json.loads((run / "onnx" / "export.json").read_text())
    assert record["metrics"]["P@3"] == pytest.approx(stored["changes"]["P@3"]["after"])


def test_a_difference_above_the_bar_is_refused(run, same_graph, monkeypatch):
    shutil.rmtree(run / "onnx")
    monkeypatch.setattr(export, "MAX_DIFFERENCE", 1e-12)
    with pytest.raises(ModelError, match="differs from torch by up to"):
        export_run(run)
    assert not (run / "onnx").exists()


def test_the_difference_of_long_vectors_is_relative():
    wanted = np.array([[300.0, 400.0], [0.1, 0.0]])
    assert export.largest_difference(wanted + np.array([[1.0, 0.0], [0.0, 0.001]]), wanted) == pytest.approx(0.002)


def test_the_export_of_another_model_is_refused(run, monkeypatch, capsys):
    model = Predictor.load(run).model
    with torch.no_grad():
        next(model.encoder.parameters()).mul_(1.01)
    model.save(run / "model")
    code, printed, complaint = call(monkeypatch, capsys, "predict", run, "text", "--runtime", "onnx")
    assert (code, printed) == (4, "")
    assert "exported from another encoder" in complaint.splitlines()[-1]
    assert "dexter export" in complaint.splitlines()[-1]
    assert call(monkeypatch, capsys, "predict", run, "text")[0] == 0


def test_a_run_without_export_says_how_to_make_one(run):
    shutil.rmtree(run / "onnx")
    with pytest.raises(ModelError, match="make it with `dexter export`"):
        Predictor.load(run, runtime="onnx")


def test_every_damaged_file_is_an_error(run):
    for name in ("encoder.onnx", "export.json", MANIFEST):
        for kind, damage in DAMAGE.items():
            shutil.copytree(run / "onnx", run / "kept")
            damage(run / "onnx" / name)
            with pytest.raises(ModelError) as caught:
                Predictor.load(run, runtime="onnx")
            assert "\n" not in str(caught.value), (name, kind)
            shutil.rmtree(run / "onnx")
            (run / "kept").rename(run / "onnx")


@pytest.mark.parametrize(
    "changes",
    [
        {"format_version": 1},
        {"format_version": None},
        {"precision": "int8"},
        {"precision": "int4"},
        {"precision": ["int8"]},
        {"fingerprint": None},
        {"changes": [1]},
        {"changes": {"P@1": {}}},
        {"changes": {"P@1": {"before": 1, "after": 1, "low": 0, "high": 0}}},
        {"surplus": 1},
    ],
    ids=str,
)
def test_a_description_that_is_sealed_but_wrong_is_an_error_too(run, changes):
    path = run / "onnx" / "export.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    write_manifest(run / "onnx")
    with pytest.raises(ModelError) as caught:
        Predictor.load(run, runtime="onnx")
    assert "\n" not in str(caught.value)


def test_a_graph_that_the_manifest_does_not_list_is_not_read(run):
    content = (run / "onnx" / "encoder.onnx").read_bytes()
    (run / "onnx" / "encoder.onnx").unlink()
    write_manifest(run / "onnx")
    (run / "onnx" / "encoder.onnx").write_bytes(content)
    with pytest.raises(ModelError, match="not listed in the manifest"):
        Predictor.load(run, runtime="onnx")


def test_a_static_encoder_has_no_use_for_it(trained):
    for use in (export_run, lambda run: Predictor.load(run, runtime="onnx")):
        with pytest.raises(UsageError, match="static encoder"):
            use(trained)


def test_wrong_uses_are_one_line(run, monkeypatch):
    with pytest.raises(UsageError, match="measure by how much"):
        export_run(run, int8=True)
    with pytest.raises(UsageError, match="on a CPU"):
        Predictor.load(run, runtime="onnx", device="meta")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ResourceError, match=r"dexter-xmc\[onnx\]"):
        Predictor.load(run, runtime="onnx")
