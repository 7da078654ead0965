import numpy as np
import pytest
import torch

from dexter.encoders import embed, load_encoder
from dexter.encoders.static import NUM_POSITIONS, StaticEncoder, StaticSettings, build_vocabulary
from dexter.errors import ModelError

TEXTS = ["the river stone", "a cloud of amber amber", "violin and river", "", "unheardof"]
LABELS = ["river stone", "amber violin", "zebra"]


def build(label_vectors=False, labels_per_vector=1, **settings):
    settings = StaticSettings(**settings)
    encoder = StaticEncoder.build(
        TEXTS,
        LABELS,
        settings,
        pretrained="none",
        dimension=8,
        min_count=1,
        label_vectors=label_vectors,
        labels_per_vector=labels_per_vector,
    )
    encoder.weigh_tokens(encoder.tokenize(TEXTS, side="query"))
    return encoder


def embedded(encoder, texts, side="query"):
    return embed(encoder, encoder.tokenize(texts, side=side))


def slow_embedding(encoder, text):
    """The formula of the module, one token at a time."""
    total, weights = torch.zeros(encoder.dimension), 0.0
    for position, token in enumerate(encoder.tokens.tokenizer.encode(text).ids):
        bucket = min(int(np.floor(2 * np.log2(position + 1))), NUM_POSITIONS - 2)
        weight = (encoder.token_weights[token] + encoder.position_weights[bucket] * encoder.settings.positions).exp()
        total, weights = total + weight * encoder.table[token], weights + weight
    return total / total.norm() if encoder.settings.normalize else total / weights


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
def test_embedding_is_the_weighted_mean(positions, normalize, sparse):
    encoder = build(positions=positions, normalize=normalize)
    encoder.sparse = sparse
    with torch.no_grad():
        encoder.position_weights.normal_(generator=torch.Generator().manual_seed(0))
    got = embedded(encoder, TEXTS[:3])
    for row, text in enumerate(TEXTS[:3]):
        torch.testing.assert_close(got[row], slow_embedding(encoder, text).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", ["query", "label"])
@pytest.mark.parametrize(
    "settings", [{}, {"normalize": False}, {"positions": False}, {"ngrams": 3, "ngram_buckets": 50}]
)
def test_arrays_embed_as_the_module_does(settings, side, tmp_path):
    encoder = build(label_vectors=True, **settings)
    with torch.no_grad():
        for parameter in (encoder.table, encoder.token_weights, encoder.position_weights):
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    encoder.save(tmp_path)
    texts = [*TEXTS, *LABELS, "river " * 300]
    expected = embedded(encoder, texts, side).numpy()
    for arrays in (encoder.arrays(), load_encoder(tmp_path)):
        np.testing.assert_allclose(arrays.embed(arrays.tokenize(texts, side=side)), expected, atol=1e-5)
        one = arrays.embed(arrays.tokenize(texts[1:2], side=side))
        np.testing.assert_allclose(one, expected[1:2], atol=1e-5)


def test_empty_and_unknown_texts_are_finite():
    encoder = build()
    vectors = embedded(encoder, ["", "   ", "日本語", "river"])
    assert torch.isfinite(vectors).all()
    assert torch.equal(vectors[0], torch.zeros(8))
    assert vectors[3].norm() == pytest.approx(1.0, abs=1e-6)


def test_words_of_the_data_are_one_token_and_unseen_words_fall_back_to_pieces():
    vocabulary = build_vocabulary(
        ["electroencephalography tests"] * 3,
        ["zygote"],
        pretrained="minilm",
        dimension=0,
        max_words=10,
        min_count=2,
        seed=0,
    )
    encode = vocabulary.tokenizer.encode
    assert encode("Electroencephalography").tokens == ["electroencephalography"]
    assert encode("zygote").tokens == ["zygote"]
    assert len(encode("electroencephalographer").tokens) > 1
    assert vocabulary.table_VD.shape == (vocabulary.tokenizer.get_vocab_size(), 384)


def test_a_word_starts_as_the_mean_of_its_pieces():
    plain = build_vocabulary([], [], pretrained="minilm", dimension=16, max_words=0, min_count=1, seed=0)
    worded = build_vocabulary(
        ["floccinaucinihilipilification"], [], pretrained="minilm", dimension=16, max_words=5, min_count=1, seed=0
    )
    pieces = plain.tokenizer.encode("floccinaucinihilipilification").ids
    word = worded.tokenizer.token_to_id("floccinaucinihilipilification")
    torch.testing.assert_close(worded.table_VD[word], plain.table_VD[pieces].mean(dim=0), atol=1e-6, rtol=1e-5)


def test_sparse_and_dense_gradients_agree():
    gradients = []
    for sparse in (True, False):
        encoder = build()
        encoder.sparse = sparse
        tokens = encoder.tokenize(TEXTS, side="query")
        ids, offsets = (torch.from_numpy(np.asarray(part, dtype=np.int64)) for part in (tokens.ids, tokens.offsets))
        encoder(ids, offsets)[:, 0].sum().backward()
        gradient = encoder.table.grad
        assert gradient.is_sparse == sparse
        gradients.append(
            [gradient.to_dense() if sparse else gradient, encoder.token_weights.grad, encoder.position_weights.grad]
        )
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


def test_ngrams_tell_word_order_apart():
    plain, ordered = build(positions=False), build(positions=False, ngrams=2, ngram_buckets=64)
    with torch.no_grad():
        ordered.table[-64:].normal_(generator=torch.Generator().manual_seed(0))
    one, other = ["river stone"], ["stone river"]
    torch.testing.assert_close(embedded(plain, one), embedded(plain, other))
    assert not torch.allclose(embedded(ordered, one), embedded(ordered, other), atol=1e-3)
    # n-grams do not cross from one text to the next
    both = embedded(ordered, ["river", "stone"])
    torch.testing.assert_close(both[0], embedded(ordered, ["river"])[0])


def test_label_vectors_belong_to_labels_only():
    encoder = build(label_vectors=True)
    with torch.no_grad():
        encoder.table[-3:].normal_(generator=torch.Generator().manual_seed(0))
    plain = build()
    torch.testing.assert_close(embedded(encoder, ["river stone"]), embedded(plain, ["river stone"]))
    for row, other in zip(embedded(encoder, LABELS, "label"), embedded(plain, LABELS, "label"), strict=True):
        assert not torch.allclose(row, other, atol=1e-3)
    # a label that came later has its words only
    torch.testing.assert_close(embedded(encoder, ["river"], "label"), embedded(plain, ["river"], "label"))


def test_labels_of_a_cluster_share_a_vector():
    encoder = build(label_vectors=True, labels_per_vector=2, positions=False)
    encoder.tokens.share_label_rows(LABELS, [np.array([0, 2]), np.array([1])])
    assert encoder.tokens.first_label_row == encoder.num_rows - 2
    with torch.no_grad():
        encoder.table[-2:].normal_(generator=torch.Generator().manual_seed(0))
        encoder.token_weights.zero_()
    for text, row in zip(LABELS, (-2, -1, -2), strict=True):
        words = encoder.tokens.tokenizer.encode(text).ids
        total = encoder.table[words].sum(dim=0) + encoder.table[row]
        torch.testing.assert_close(embedded(encoder, [text], "label")[0], (total / total.norm()).detach())


def test_rows_of_labels_outside_the_table_are_refused(tmp_path):
    encoder = build(label_vectors=True)
    encoder.tokens.label_rows = encoder.tokens.label_rows + encoder.num_rows
    encoder.save(tmp_path)
    with pytest.raises(ModelError, match="label_rows"):
        load_encoder(tmp_path)


def test_dropout_is_for_training_queries_only():
    encoder = build(token_dropout=0.5)
    tokens = encoder.tokenize(["river stone violin amber cloud the of"], side="query")
    labels = encoder.tokenize(["river stone violin amber"], side="label")
    torch.manual_seed(0)

    def run(tokens):
        return encoder(torch.from_numpy(np.asarray(tokens.ids)), torch.from_numpy(tokens.offsets))

    encoder.train()
    assert not torch.equal(run(tokens), run(tokens))
    assert torch.equal(run(labels), run(labels))
    encoder.eval()
    assert torch.equal(run(tokens), run(tokens))


@pytest.mark.parametrize("tokens_per_batch", [1, 3, 1000])
def test_micro_batches_cover_every_text_once(tokens_per_batch):
    encoder = build()
    encoder.tokens_per_batch = tokens_per_batch
    lengths = np.array([3, 0, 2, 5, 0, 1])
    batches = encoder.micro_batches(lengths)
    assert np.concatenate(batches).tolist() == list(range(6))
    tokens = encoder.tokenize(TEXTS, side="query")
    whole = embed(encoder, tokens)
    encoder.tokens_per_batch = 1000
    torch.testing.assert_close(whole, embed(encoder, tokens))


SHARED = {"label_vectors": True, "labels_per_vector": 2, "ngrams": 2, "ngram_buckets": 32}


@pytest.mark.parametrize("settings", [{}, {"ngrams": 3, "ngram_buckets": 32}, {"label_vectors": True}, SHARED])
def test_saved_then_loaded_is_the_same(tmp_path, settings):
    encoder = build(**settings)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    encoder.save(tmp_path)
    loaded = StaticEncoder.load(tmp_path)
    for side in ("query", "label"):
        assert torch.equal(embedded(encoder, TEXTS, side), embedded(loaded, TEXTS, side))


def test_a_damaged_folder_is_a_model_error(tmp_path):
    build().save(tmp_path)
    (tmp_path / "static.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError):
        StaticEncoder.load(tmp_path)


def test_a_plain_encoder_is_a_sentence_transformers_folder(tmp_path):
    build(positions=False).save(tmp_path)
    assert (tmp_path / "modules.json").exists()
    build(positions=True).save(tmp_path / "with-positions")
    assert not (tmp_path / "with-positions" / "modules.json").exists()


@pytest.mark.slow
def test_sentence_transformers_gives_the_same_vectors(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = build(positions=False)
    encoder.save(tmp_path)
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS[:3])
    np.testing.assert_allclose(theirs, embedded(encoder, TEXTS[:3]).numpy(), atol=1e-5)
