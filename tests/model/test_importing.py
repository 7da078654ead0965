"""Published encoders, evaluated without training: their vectors are those of transformers, and a run like any other."""

import json

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from transformers import DistilBertConfig, DistilBertModel

import dexter
from dexter import Predictor
from dexter.encoders.transformer import TransformerEncoder
from dexter.errors import ModelError, UsageError
from dexter.model.importing import import_encoder
from dexter.serving.app import create_app


@pytest.fixture(scope="module")
def checkpoint(world, tmp_path_factory):
    """A folder with a small DistilBERT of random weights and a tokenizer, as DEXML publishes its encoders."""
    folder = tmp_path_factory.mktemp("checkpoint") / "dexml"
    tokenizer = TransformerEncoder.random(world.label_texts)._pretrained_tokenizer
    torch.manual_seed(0)
    model = DistilBertModel(DistilBertConfig(vocab_size=len(tokenizer), dim=24, n_layers=2, n_heads=3, hidden_dim=40))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def add_stages(folder, tmp_path, *, normalize, length):
    """A copy of the folder with the files of sentence-transformers: mean pooling."""
    import shutil

    copy = shutil.copytree(folder, tmp_path / "sentence")
    names = [("", "Transformer"), ("1_Pooling", "Pooling")] + [("2_Normalize", "Normalize")] * normalize
    stages = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate(names)
    ]
    (copy / "modules.json").write_text(json.dumps(stages))
    (copy / "1_Pooling").mkdir()
    (copy / "1_Pooling/config.json").write_text('{"word_embedding_dimension": 24, "pooling_mode_mean_tokens": true}')
    (copy / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    return copy


def transformers_vectors(folder, texts, *, pooling, normalize, length):
    """The reference: transformers' own output, padded, pooled by hand."""
    from transformers import AutoModel, AutoTokenizer

    given = AutoTokenizer.from_pretrained(folder)(
        list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt"
    )
    with torch.inference_mode():
        states = AutoModel.from_pretrained(folder)(
            input_ids=given.input_ids, attention_mask=given.attention_mask
        ).last_hidden_state
    mask = given.attention_mask[:, :, None].float()
    vectors = states[:, 0] if pooling == "cls" else (states * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(vectors, dim=1) if normalize else vectors


@pytest.mark.parametrize(("pooling", "normalize"), [("cls", True), ("mean", True), ("cls", False)])
def test_a_plain_folder_is_evaluated_as_transformers_embeds(checkpoint, world, tmp_path, pooling, normalize):
    out = tmp_path / "run"
    import_encoder(checkpoint, world, out, pooling=pooling, normalize=normalize, max_length_query=8)
    settings = {"pooling": pooling, "normalize": normalize, "length": 8}
    queries, labels = (
        transformers_vectors(checkpoint, texts, **settings) for texts in (world.test.texts, world.label_texts)
    )
    predictor = Predictor.load(out)
    np.testing.assert_allclose(predictor.model.encode_queries(world.test.texts), queries, atol=1e-5, rtol=0)
    np.testing.assert_allclose(predictor.model.label_vectors(), labels, atol=1e-5, rtol=0)
    scores, best = (queries @ labels.T).numpy(), predictor.top(world.test.texts, 1).ids[:, 0]
    np.testing.assert_allclose(scores[np.arange(len(best)), best], scores.max(axis=1), atol=1e-5, rtol=0)
    expected = 100 * np.mean(world.test.relevance.toarray()[np.arange(len(best)), best] > 0)
    assert dexter.evaluate(out, world, num_resamples=0).metrics["P@1"] == pytest.approx(expected)


@pytest.mark.parametrize("normalize", [False, True])
def test_a_sentence_transformers_folder_says_how(checkpoint, world, tmp_path, normalize):
    folder = add_stages(checkpoint, tmp_path, normalize=normalize, length=6)
    model = import_encoder(folder, world, tmp_path / "run")
    expected = transformers_vectors(checkpoint, world.test.texts, pooling="mean", normalize=normalize, length=6)
    np.testing.assert_allclose(model.encode_queries(world.test.texts), expected, atol=1e-5, rtol=0)
    assert (model.encoder.settings.max_length_query, model.encoder.settings.max_length_label) == (6, 6)
    other = import_encoder(folder, world, tmp_path / "other", pooling="cls", normalize=True, max_length_label=5)
    expected = transformers_vectors(checkpoint, world.label_texts, pooling="cls", normalize=True, length=5)
    np.testing.assert_allclose(other.label_vectors(), expected, atol=1e-5, rtol=0)


def test_it_is_a_run_like_any_other(checkpoint, world, tmp_path):
    """It takes new labels, is compared, saved, and served."""
    import_encoder(checkpoint, world, tmp_path / "run", pooling="cls")
    predictor = Predictor.load(tmp_path / "run")
    predictor.add_labels([("new", "river stone cloud")])
    assert predictor.predict(["river stone cloud"], k=1)[0][0].id == "new"
    with TestClient(create_app({"imported": tmp_path / "run"}), base_url="http://localhost") as client:
        answer = client.post("/v1/predict", json={"inputs": "river stone", "k": 2})
        assert client.get("/training").status_code == 200
    assert answer.status_code == 200
    wanted = [one.id for one in Predictor.load(tmp_path / "run").predict(["river stone"], k=2)[0]]
    assert [label["id"] for label in answer.json()["results"][0]["labels"]] == wanted


def test_what_cannot_be_imported_says_why(checkpoint, world, tmp_path):
    with pytest.raises(UsageError, match="does not say how token vectors become one: give --pooling cls"):
        import_encoder(checkpoint, world, tmp_path / "run")
    with pytest.raises(UsageError, match="max_length_query = 600: expected 3 to 512 tokens"):
        import_encoder(checkpoint, world, tmp_path / "run", pooling="cls", max_length_query=600)
    assert not (tmp_path / "run").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        import_encoder(tmp_path / "empty", world, tmp_path / "run", pooling="cls")
    with pytest.raises(UsageError, match="not an empty folder: choose another --out"):
        import_encoder(checkpoint, world, checkpoint, pooling="cls")
