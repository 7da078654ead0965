"""The sentence-transformers folder: what is saved loads equal, there and here; what is hostile or torn is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertModel, DistilBertConfig, DistilBertModel

from dexter.encoders import embed
from dexter.encoders.folder import write_static_folder
from dexter.encoders.transformer import TransformerEncoder
from dexter.errors import ModelError, UsageError

TEXTS = ["read files", "", "plot a long line of numbers " * 9, "Émile", "read"]
ALL_SETTINGS = {
    "pooling": "cls",
    "projection": 10,
    "normalize": False,
    "max_length_query": 50,
    "max_length_label": 9,
    "query_prefix": "find: ",
    "label_prefix": "label: ",
    "dropout": 0.25,
}


def small_encoder(**settings) -> TransformerEncoder:
    return TransformerEncoder.random(TEXTS, hidden_size=24, num_heads=3, **settings)


def vectors(encoder: TransformerEncoder, side: str = "query") -> torch.Tensor:
    return embed(encoder, encoder.tokenize(TEXTS, side=side))


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def saved(tmp_path) -> Path:
    small_encoder(projection=10).save(tmp_path / "encoder")
    return tmp_path / "encoder"


@pytest.mark.parametrize("settings", [{}, ALL_SETTINGS, {"max_length_query": 200, "max_length_label": 150}])
def test_saved_then_loaded_is_the_same_without_arguments(settings, tmp_path):
    encoder = small_encoder(**settings)
    encoder.save(tmp_path / "encoder")
    loaded = TransformerEncoder.load(tmp_path / "encoder")
    for side in ("query", "label"):
        assert torch.equal(vectors(encoder, side), vectors(loaded, side))
    for name in ("pooling", "normalize", "max_length_query", "max_length_label", "query_prefix", "dropout"):
        assert getattr(encoder.settings, name) == getattr(loaded.settings, name)
    assert loaded.model.embeddings.dropout.p == settings.get("dropout", 0.1)


def test_loading_leaves_the_random_state_alone(saved):
    state = torch.get_rng_state()
    first = TransformerEncoder.load(saved)
    torch.manual_seed(99)
    assert torch.equal(vectors(first), vectors(TransformerEncoder.load(saved)))
    torch.set_rng_state(state)
    TransformerEncoder.load(saved)
    assert torch.equal(state, torch.get_rng_state())


def test_the_model_keeps_its_own_dropout_in_the_folder(saved):
    assert json.loads((saved / "config.json").read_text())["hidden_dropout_prob"] == 0.1


@pytest.mark.parametrize("settings", [{}, ALL_SETTINGS, {"projection": 5}, {"pooling": "cls"}])
def test_sentence_transformers_gives_the_same_vectors(settings, tmp_path):
    package = pytest.importorskip("sentence_transformers")
    encoder = small_encoder(**{**settings, "max_length_label": settings.get("max_length_query", 128)})
    encoder.save(tmp_path / "encoder")
    peer = package.SentenceTransformer(str(tmp_path / "encoder"), device="cpu")
    np.testing.assert_allclose(peer.encode_query(TEXTS), vectors(encoder, "query"), atol=1e-5)
    np.testing.assert_allclose(peer.encode_document(TEXTS), vectors(encoder, "label"), atol=1e-5)


def test_a_folder_written_by_sentence_transformers_loads(tmp_path):
    package = pytest.importorskip("sentence_transformers")
    small_encoder(projection=5, pooling="cls").save(tmp_path / "ours")
    peer = package.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    peer.save(str(tmp_path / "theirs"))
    loaded = TransformerEncoder.from_pretrained(tmp_path / "theirs")
    assert loaded.settings.pooling == "cls"
    np.testing.assert_allclose(peer.encode(TEXTS), vectors(loaded), atol=1e-5)


def test_a_plain_hugging_face_folder_loads(tmp_path):
    tokenizer = small_encoder()._pretrained_tokenizer
    config = DistilBertConfig(vocab_size=len(tokenizer), dim=24, n_layers=2, n_heads=3, hidden_dim=40)
    model = DistilBertModel(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encoder = TransformerEncoder.from_pretrained(tmp_path, pooling="cls", normalize=False, max_length_query=30)
    given = tokenizer(TEXTS, padding=True, truncation=True, max_length=30, return_tensors="pt")
    with torch.inference_mode():
        expected = model(input_ids=given.input_ids, attention_mask=given.attention_mask).last_hidden_state[:, 0]
    torch.testing.assert_close(vectors(encoder), expected, atol=1e-5, rtol=0)


def test_a_folder_with_a_pooling_layer_loads_without_it(tmp_path):
    encoder = small_encoder()
    BertModel(encoder.model.config, add_pooling_layer=True).save_pretrained(tmp_path)
    encoder._pretrained_tokenizer.save_pretrained(tmp_path)
    loaded = TransformerEncoder.from_pretrained(tmp_path)
    assert not any("pooler" in name for name in loaded.state_dict())


def test_settings_override_a_folder_but_a_projection_is_not_replaced(saved):
    encoder = TransformerEncoder.from_pretrained(saved, pooling="cls", normalize=False, query_prefix="read ")
    assert (encoder.settings.pooling, encoder.settings.normalize, encoder.settings.query_prefix) == (
        "cls",
        False,
        "read ",
    )
    with pytest.raises(UsageError, match="already"):
        TransformerEncoder.from_pretrained(saved, projection=4)


def refuses(folder: Path, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        TransformerEncoder.load(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_custom_code_is_refused(saved, name):
    (saved / "evil.py").write_text("raise SystemExit('custom code was run')")
    edit(
        saved / name,
        auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoTokenizer": ["evil.T", None]},
    )
    refuses(saved, "never loaded")


def test_a_custom_stage_is_refused(saved):
    stages = json.loads((saved / "modules.json").read_text())
    stages[1]["type"] = "evil.Pooling"
    (saved / "modules.json").write_text(json.dumps(stages))
    refuses(saved, "custom code")


def test_a_stage_outside_the_folder_is_refused(saved):
    stages = json.loads((saved / "modules.json").read_text())
    stages[2]["path"] = "../elsewhere"
    (saved / "modules.json").write_text(json.dumps(stages))
    refuses(saved, "outside")


@pytest.mark.parametrize("content", ["[]", "{}", "[3]", '[{"type": "x"}]', "[[[", "\x00"])
def test_a_malformed_list_of_stages_is_refused(saved, content):
    (saved / "modules.json").write_text(content)
    refuses(saved, "modules.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**12),
        ("vocab_size", 9_000_000),
        ("hidden_size", 10**6),
        ("num_labels", 10**9),
        ("intermediate_size", 10**6),
        ("max_position_embeddings", 9_000_000),
        ("num_attention_heads", -1),
    ],
)
def test_sizes_that_the_weights_do_not_bear_out_are_refused_before_memory_is_taken(saved, key, value):
    edit(saved / "config.json", **{key: value})
    refuses(saved, "config.json")


@pytest.mark.parametrize("changes", [{"out_features": 10**9}, {"in_features": 25}, {"activation_function": "evil.f"}])
def test_a_wrong_dense_stage_is_refused(saved, changes):
    edit(saved / "2_Dense" / "config.json", **changes)
    refuses(saved, "Dense")


def test_other_poolings_are_refused(saved):
    edit(saved / "1_Pooling" / "config.json", pooling_mode_max_tokens=True)
    refuses(saved, "pooling")


def test_missing_weights_are_an_error_not_random_numbers(saved):
    weights = load_file(saved / "model.safetensors")
    weights["something.else"] = weights.pop("encoder.layer.1.output.dense.weight")
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    refuses(saved, "missing")


@pytest.mark.parametrize("name", ["model.safetensors", "2_Dense/model.safetensors", "config.json", "tokenizer.json"])
def test_torn_files_are_one_clear_error(saved, name):
    content = (saved / name).read_bytes()
    (saved / name).write_bytes(content[: len(content) // 2])
    refuses(saved, "encoder")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "2_Dense/model.safetensors", "config.json", "1_Pooling/config.json"]
)
def test_absent_files_are_one_clear_error(saved, name):
    (saved / name).unlink()
    refuses(saved, "encoder")


def test_pickled_weights_and_adapters_are_refused(saved):
    (saved / "adapter_config.json").write_text("{}")
    refuses(saved, "adapter")
    (saved / "adapter_config.json").unlink()
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    refuses(saved, "safetensors")


def test_a_static_table_is_a_sentence_transformers_folder(tmp_path):
    package = pytest.importorskip("sentence_transformers")
    tokenizer = small_encoder()._pretrained_tokenizer.backend_tokenizer
    random = np.random.default_rng(2)
    table = random.normal(size=(tokenizer.get_vocab_size(), 12)).astype(np.float32)
    weight = random.uniform(0.1, 3.0, size=(len(table), 1)).astype(np.float32)
    write_static_folder(tmp_path, table_RD=weight * table, tokenizer=tokenizer, normalize=True)
    expected = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        mean = (weight[ids] * table[ids]).sum(axis=0) / max(weight[ids].sum(), 1e-9)
        expected.append(mean / max(np.linalg.norm(mean), 1e-12))
    peer = package.SentenceTransformer(str(tmp_path), device="cpu")
    np.testing.assert_allclose(peer.encode(TEXTS), np.array(expected), atol=1e-5)
    with pytest.raises(ModelError, match="one row"):
        write_static_folder(tmp_path, table_RD=table[:-1], tokenizer=tokenizer, normalize=False)
