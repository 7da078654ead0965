"""One suite for every backend: what each must do, beside exact search."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from tests.index.conftest import make_stamp, make_vectors

from dexter.errors import ModelError, ResourceError, UsageError
from dexter.index import BACKENDS, DatabaseAddress, approximate, build, default_backend, open_index, save_index, search
from dexter.index.approximate import MIN_RECALL, measure_recall
from dexter.index.base import EXACT_UP_TO, checked_backend
from dexter.index.folder import engine_class

LABELS, QUERIES = make_vectors()


@pytest.fixture(scope="module")
def index(backend, shared_address):
    """An index that tests search and derive others from, without saving it."""
    return build(backend, LABELS, queries_ND=QUERIES, address=shared_address)


@pytest.fixture
def own_index(backend, address):
    return build(backend, LABELS, queries_ND=QUERIES, address=address)


def load_again(folder, vectors, address, stamp):
    return open_index(folder, url=None if address is None else address.url).over(vectors, stamp=stamp)


def assert_nearly_exact(found, queries, labels, k, *, forbidden=None, recall=0.98):
    """Scores are true inner products, best first, ties by position; nearly all the best are there."""
    scores = queries @ labels.T
    if forbidden is not None:
        scores[forbidden] = -np.inf
    wanted = -np.sort(-scores, axis=1)[:, :k]
    assert ((found.ids >= 0) == (found.scores > -np.inf)).all()
    real = np.where(found.ids >= 0, np.take_along_axis(scores, np.maximum(found.ids, 0), axis=1), -np.inf)
    np.testing.assert_allclose(found.scores, real, atol=1e-5)
    there = found.ids[:, 1:] >= 0
    assert (found.scores[:, 1:] <= found.scores[:, :-1]).all()
    tied = (found.scores[:, 1:] == found.scores[:, :-1]) & there
    assert (np.diff(found.ids, axis=1)[tied] > 0).all()
    assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in found.ids)
    assert (found.scores >= wanted[:, -1:] - 1e-5).mean() >= recall


@pytest.mark.parametrize("k", [1, 10, 100])
def test_finds_what_exact_search_finds(index, k):
    found = index.search(QUERIES, k)
    assert found.ids.shape == (len(QUERIES), k)
    assert found.ids.dtype == np.int64
    assert found.scores.dtype == np.float32
    assert_nearly_exact(found, QUERIES, LABELS, k)


def test_recall_is_measured_and_kept(index):
    assert index.recall >= MIN_RECALL
    assert index.recall == pytest.approx(measure_recall(index, QUERIES, exact=search(QUERIES, LABELS, 100)))


def test_more_places_than_labels(index):
    found = index.search(QUERIES[:3], len(LABELS) + 5)
    np.testing.assert_array_equal(np.sort(found.ids[:, :-5]), np.tile(np.arange(len(LABELS)), (3, 1)))
    assert (found.ids[:, -5:] == -1).all()


def test_no_query_and_one_query(index):
    assert index.search(QUERIES[:0], 4).ids.shape == (0, 4)
    np.testing.assert_array_equal(index.search(QUERIES[:1], 4).ids, index.search(QUERIES, 4).ids[:1])


def test_labels_of_equal_score_come_in_order(backend, address):
    labels = np.concatenate([LABELS[:400]] * 3)
    found = build(backend, labels, queries_ND=QUERIES, address=address).search(QUERIES, 30)
    assert_nearly_exact(found, QUERIES, labels, 30)
    equal = found.scores[:, :-1] == found.scores[:, 1:]  # a product may round the copies of a vector differently
    assert equal.mean() > 0.4
    assert (np.diff(found.ids, axis=1)[equal] > 0).all()


def test_excluded_pairs_make_room_for_the_next(index):
    forbidden = np.zeros((len(QUERIES), len(LABELS)), dtype=bool)
    best = search(QUERIES, LABELS, 300).ids
    for row, num in enumerate(np.random.default_rng(1).integers(0, 300, len(QUERIES))):
        forbidden[row, best[row, :num]] = True
    forbidden[4, :-3] = True
    forbidden[5] = True
    found = index.search(QUERIES, 10, exclude=csr_matrix(forbidden))
    assert_nearly_exact(found, QUERIES, LABELS, 10, forbidden=forbidden)
    assert (found.ids[4] >= 0).sum() == 3
    assert (found.ids[5] == -1).all()


def test_labels_above_a_ceiling_make_room_too(index):
    scores = QUERIES @ LABELS.T
    ceiling = np.sort(scores, axis=1)[:, -21:-19].mean(axis=1)
    ceiling[:2] = (-np.inf, np.inf)
    found = index.search(QUERIES, 10, ceiling=ceiling)
    assert (found.ids[0] == -1).all()
    forbidden = scores > ceiling[:, None]
    assert_nearly_exact(found, QUERIES, LABELS, 10, forbidden=forbidden)


def test_saved_and_loaded_is_the_same(own_index, address, tmp_path):
    stamp = make_stamp(len(LABELS))
    save_index(own_index, tmp_path / "index", stamp=stamp)
    before = own_index.search(QUERIES, 20)
    after = load_again(tmp_path / "index", LABELS, address, stamp)
    found = after.search(QUERIES, 20)
    np.testing.assert_array_equal(found.ids, before.ids)
    np.testing.assert_array_equal(found.scores, before.scores)
    assert after.recall >= MIN_RECALL


def test_labels_changed_since_it_was_saved(own_index, address, tmp_path):
    save_index(own_index, tmp_path / "index", stamp=make_stamp(len(LABELS)))
    # The first 50 are gone, the next 30 stand at the end, 20 are new.
    order = np.concatenate([np.arange(80, len(LABELS)), np.arange(50, 80)])
    vectors = np.concatenate([LABELS[order], QUERIES[:20]])
    stamp = make_stamp(len(vectors))
    stamp.label_keys[:] = np.concatenate([order, 10**6 + np.arange(20)])
    found = load_again(tmp_path / "index", vectors, address, stamp).search(QUERIES, 10)
    assert_nearly_exact(found, QUERIES, vectors, 10)
    assert (found.ids[:20, 0] == len(order) + np.arange(20)).all()


def test_most_labels_removed_since_it_was_saved(own_index, address, tmp_path):
    save_index(own_index, tmp_path / "index", stamp=make_stamp(len(LABELS)))
    kept = np.arange(3, len(LABELS), 4)
    stamp = make_stamp(len(kept))
    stamp.label_keys[:] = kept
    vectors = LABELS[kept]
    found = load_again(tmp_path / "index", vectors, address, stamp).search(QUERIES, 5)
    assert_nearly_exact(found, QUERIES, vectors, 5)


def test_another_encoder_or_head_is_refused(own_index, address, tmp_path):
    save_index(own_index, tmp_path / "index", stamp=make_stamp(len(LABELS)))
    with pytest.raises(ModelError, match=r"another encoder \(feed, the model has beef"):
        load_again(tmp_path / "index", LABELS, address, make_stamp(len(LABELS), fingerprint="beef"))
    with pytest.raises(ModelError, match="made for head encoder"):
        load_again(tmp_path / "index", LABELS, address, make_stamp(len(LABELS), head="unified"))
    with pytest.raises(ModelError, match="17 dimensions, got encoder with 16"):
        load_again(tmp_path / "index", LABELS[:, :-1], address, make_stamp(len(LABELS)))


def test_wrong_arguments_are_refused(index):
    with pytest.raises(UsageError, match="1 or more"):
        index.search(QUERIES, 0)
    with pytest.raises(UsageError, match="one width"):
        index.search(QUERIES[:, :5], 3)
    with pytest.raises(UsageError, match="queries x labels"):
        index.search(QUERIES, 3, exclude=csr_matrix((2, 2)))


def test_one_label(backend, address):
    index = build(backend, LABELS[:1], queries_ND=QUERIES[:2], address=address)
    np.testing.assert_array_equal(index.search(QUERIES[:2], 2).ids, [[0, -1], [0, -1]])


def test_an_index_that_misses_much_is_refused(backend, address, monkeypatch):
    if backend == "exact":
        pytest.skip("exact search misses nothing")
    engine = engine_class(backend)
    real = engine.candidates

    def forgetful(self, queries, num):
        rows = real(self, queries, num)
        return np.where(rows % 10 == 3, -1, rows)

    monkeypatch.setattr(engine, "candidates", forgetful)
    monkeypatch.setattr(approximate, "DEPTHS", (4, 8))
    with pytest.raises(ModelError, match=r"recall@100 is 0\.\d+ against exact search, expected 0.98 or more"):
        build(backend, LABELS, queries_ND=QUERIES, address=address)


def test_without_queries_recall_is_measured_on_noisy_labels():
    pytest.importorskip("faiss")
    assert build("pq", LABELS).recall >= MIN_RECALL


@pytest.mark.parametrize(
    ("backend", "module", "extra"),
    [
        ("pq", "faiss", "ann"),
        ("hnsw", "faiss", "ann"),
        ("pgvector", "psycopg", "pgvector"),
        ("qdrant", "qdrant_client", "qdrant"),
    ],
)
def test_a_missing_package_names_its_extra(backend, module, extra, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ResourceError, match=rf"pip install 'dexter-xmc\[{extra}\]'"):
        engine_class(backend).build(LABELS, address=DatabaseAddress(url="somewhere", name="dexter_test"))


def test_databases_need_an_address():
    for name in ("pgvector", "qdrant"):
        with pytest.raises(UsageError, match="needs the address of a server"):
            build(name, LABELS, queries_ND=QUERIES)


def test_the_default_follows_from_the_number_of_labels():
    assert default_backend(1) == default_backend(EXACT_UP_TO) == "exact"
    assert default_backend(EXACT_UP_TO + 1) == "pq"
    with pytest.raises(UsageError, match="'annoy': expected one of exact, pq, hnsw, pgvector, qdrant"):
        checked_backend("annoy")
    assert all(checked_backend(name) == name for name in BACKENDS)
