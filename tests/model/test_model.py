"""A published model: what is saved is what is loaded, and what was damaged is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import dexter
from dexter.errors import ModelError
from dexter.files import write_manifest
from dexter.model import model as model_module
from dexter.model.model import FORMAT_VERSION, Model
from dexter.model.published import fingerprint
from dexter.predict.predictor import Predictor
from dexter.tensor_files import read_tensors, write_tensors
from tests.conftest import SMALL

FILES = [
    "MANIFEST.json",
    "dexter/heads.safetensors",
    "dexter/labels.jsonl",
    "dexter/labels.safetensors",
    "dexter/training_queries.safetensors",
    "dexter/model.json",
    "dexter/new_labels.safetensors",
    "dexter/scoring.json",
    "dexter_encoder.json",
    "static.safetensors",
    "static_tokenizer.json",
]


def with_label(model, label_id, text):
    predictor = Predictor(model)
    predictor.add_labels([(label_id, text)])
    return predictor.model


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of the published model that may be damaged."""
    return shutil.copytree(trained / "model", tmp_path / "model")


def test_the_folder_holds_these_files_and_no_others(folder):
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == sorted(FILES)


def test_saved_then_loaded_is_the_same(trained, world, tmp_path):
    model = Model.load(trained / "model")
    model.save(tmp_path / "again")
    again = Model.load(tmp_path / "again")
    assert again.facts == model.facts
    assert again.labels.ids == model.labels.ids and again.labels.texts == model.labels.texts
    np.testing.assert_array_equal(again.labels.counts, model.labels.counts)
    np.testing.assert_array_equal(again.label_vectors(), model.label_vectors())
    np.testing.assert_array_equal(again.query_vectors(world.test.texts), model.query_vectors(world.test.texts))


def test_the_same_model_has_the_same_fingerprint_and_a_changed_one_another(trained, tmp_path):
    model = Model.load(trained / "model")
    scoring = json.loads((trained / "model" / "dexter" / "scoring.json").read_text())
    model.save(tmp_path / "same", records={"scoring.json": scoring})
    model = with_label(model, "new", "a new label")
    model.save(tmp_path / "changed", records={"scoring.json": scoring})
    assert fingerprint(trained / "model") == fingerprint(tmp_path / "same") != fingerprint(tmp_path / "changed")


@pytest.mark.parametrize(
    "text", ["line\u2028break\u2029s", "next\x85line", "form\x0cfeed\x1c", "tab\tand\nfeed\r", " padded ", "🙂"]
)
def test_any_label_text_survives(trained, tmp_path, text):
    model = Model.load(trained / "model")
    model = with_label(model, f"id {text}", text)
    model.save(tmp_path / "model")
    labels = Model.load(tmp_path / "model").labels
    assert (labels.ids[-1], labels.texts[-1]) == (f"id {text}", text)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty"])
def test_every_damaged_file_is_refused(folder, name, damage):
    path = folder / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    elif damage == "truncate":
        content = content[: len(content) // 2]
    path.write_bytes(b"" if damage == "empty" else bytes(content))
    if damage == "remove":
        path.unlink()
    with pytest.raises(ModelError, match=str(folder)):
        Model.load(folder)


def rewrite_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def forgeries():
    """Folders that a manifest vouches for and that are wrong all the same."""
    yield "other version", lambda f: rewrite_json(f / "dexter/model.json", format_version=FORMAT_VERSION + 1)
    yield "no version", lambda f: (f / "dexter/model.json").write_text("{}")
    yield "not JSON", lambda f: (f / "dexter/model.json").write_text("{")
    yield "heads of another kind", lambda f: rewrite_json(f / "dexter/model.json", heads=3)
    yield "heads without settings", lambda f: rewrite_json(f / "dexter/model.json", heads={})
    yield "no labels", lambda f: (f / "dexter/labels.jsonl").write_text("")
    yield "labels of another kind", lambda f: (f / "dexter/labels.jsonl").write_text("[1]\n")
    yield "labels not JSON", lambda f: (f / "dexter/labels.jsonl").write_text("{\n")
    line = '{"id": "a", "text": "b", "count": 1}\n'
    yield "fewer labels", lambda f: (f / "dexter/labels.jsonl").write_text(line)
    yield "an id twice", lambda f: (f / "dexter/labels.jsonl").write_text(line * 37)
    vectors = "dexter/labels.safetensors"
    yield "no vectors", lambda f: rewrite_tensors(f / vectors, lambda t: t.update(other=t.pop("representations")))
    yield (
        "narrow vectors",
        lambda f: rewrite_tensors(
            f / vectors, lambda t: t.update(representations=t["representations"][:, :5].contiguous())
        ),
    )
    yield "NaN", lambda f: rewrite_tensors(f / vectors, lambda t: t["representations"].fill_(float("nan")))
    yield "no heads", lambda f: rewrite_tensors(f / "dexter/heads.safetensors", lambda t: t.clear())
    yield "not safetensors", lambda f: (f / vectors).write_bytes(b"\xff" * 100)
    yield "missing file", lambda f: (f / vectors).unlink()
    yield "missing encoder", lambda f: (f / "dexter_encoder.json").unlink()
    yield "encoder of another kind", lambda f: rewrite_json(f / "dexter_encoder.json", kind="magic")


@pytest.mark.parametrize(
    ("name", "forge"), list(forgeries()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_wrong_folder_with_a_right_manifest_is_refused(folder, name, forge):
    forge(folder)
    write_manifest(folder)
    with pytest.raises(ModelError) as caught:
        Model.load(folder)
    assert "\n" not in str(caught.value) or name == "no heads"


def test_a_model_without_prior_and_label_vectors(world, tmp_path):
    import dexter
    from tests.conftest import SMALL

    run = dexter.train(world, recipe="dexml", out=tmp_path / "run", overrides={**SMALL, "train.epochs": 1})
    predictor = Predictor.load(run.path, neighbours=False)
    predictor.add_labels([("new", world.label_texts[0])])
    best = predictor.predict([world.label_texts[0]], k=2)[0]
    assert best[0].score == pytest.approx(best[1].score)
    assert {label.id for label in best} == {"L0", "new"}


def test_a_new_label_leaves_the_scores_of_the_others_alone(world, tmp_path):
    """With a classifier whose rows are not normalised, too: their lengths are part of the score."""
    settings = {"head.classifier": True, "loss.prior": True, "encoder.normalize": False, "train.epochs": 1}
    run = dexter.train(world, recipe="dexml", out=tmp_path / "run", overrides={**SMALL, **settings})
    model = dexter.Predictor.load(run.path).model
    for head in model.heads:
        model = dexter.Predictor.load(run.path).model
        before = model.label_vectors(head=head)
        after = with_label(model, "new", "river falcon").label_vectors(head=head)
        np.testing.assert_array_equal(after[:-1], before)
        assert np.isfinite(after[-1]).all()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs names for open files")
def test_tensors_that_are_exchanged_during_loading_are_not_used(trained, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    shutil.copytree(trained / "model", folder)
    expected = Model.load(folder).representations_LD.copy()
    real, exchanged = model_module.load_encoder, []

    def exchanging(*arguments, **options):
        """Put other tensors in place of every tensor file, once all files are opened."""
        for path in folder.rglob("*.safetensors"):
            arrays = {name: np.zeros_like(array) for name, array in read_tensors(path).items()}
            write_tensors(path.with_suffix(".new"), arrays)
            exchanged.append(path.with_suffix(".new").rename(path))
        return real(*arguments, **options)

    monkeypatch.setattr(model_module, "load_encoder", exchanging)
    loaded = Model.load(folder)
    assert exchanged and loaded.representations_LD.any()
    np.testing.assert_array_equal(loaded.representations_LD, expected)
