"""The backends, a PostgreSQL server for as long as the tests run, and vectors like those of a model with priors."""

import importlib.util
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from dexter.index import BACKENDS, DatabaseAddress, Stamp

MODULES = {
    "pq": ("faiss",),
    "hnsw": ("faiss",),
    "pgvector": ("psycopg", "pgvector", "pgserver"),
    "qdrant": ("qdrant_client",),
}


def missing_modules(backend):
    return [name for name in MODULES.get(backend, ()) if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="session")
def postgres(tmp_path_factory):
    """The address of a server of our own."""
    pgserver = pytest.importorskip("pgserver", reason="pgserver is not installed: no PostgreSQL to test with")
    server = pgserver.get_server(tmp_path_factory.mktemp("postgres"), cleanup_mode="delete")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    missing = missing_modules(request.param)
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: no backend {request.param}")
    return request.param


def make_address(backend, request, folder, name):
    """The address of this backend's database, if it has one."""
    if backend == "pgvector":
        return DatabaseAddress(url=request.getfixturevalue("postgres"), name=name)
    return DatabaseAddress(url=str(folder / name), name=name) if backend == "qdrant" else None


@pytest.fixture
def address(backend, request, quick_folder):
    """An address for one test alone."""
    return make_address(backend, request, quick_folder, "dexter_test")


@pytest.fixture(scope="module")
def shared_address(backend, request):
    """An address for an index that many tests search."""
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        yield make_address(backend, request, Path(folder), "dexter_shared")


@pytest.fixture
def quick_folder():
    """A folder in memory where the system has one: Qdrant's local mode waits for the disk after every point."""
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        yield Path(folder)


def _memory():
    return "/dev/shm" if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 2**26 else None


def make_vectors(num_labels=1203, num_queries=61, dimension=16, seed=0):
    """Clustered label vectors of length one with a prior behind them, and queries with a one there."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((40, dimension))
    labels = centres[rng.integers(0, 40, num_labels)] + 0.6 * rng.standard_normal((num_labels, dimension))
    queries = centres[rng.integers(0, 40, num_queries)] + 0.6 * rng.standard_normal((num_queries, dimension))
    labels, queries = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (labels, queries))
    priors = 0.05 * np.log(rng.random((num_labels, 1)) + 0.01)
    labels = np.concatenate([labels, priors], axis=1).astype(np.float32)
    queries = np.concatenate([queries, np.ones((num_queries, 1))], axis=1).astype(np.float32)
    return labels, queries


def make_stamp(num_labels, *, fingerprint="feed", head="encoder", first=0):
    return Stamp(fingerprint=fingerprint, head=head, label_keys=np.arange(first, first + num_labels, dtype=np.int64))
