"""A PostgreSQL server that restarts or hangs under an index."""

import os
import signal
import time

import pytest
from tests.index.conftest import make_vectors

from dexter.errors import ResourceError
from dexter.index import DatabaseAddress

pgvector = pytest.importorskip("dexter.index.pgvector")
psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed: no PostgreSQL to test with")


@pytest.fixture
def engine(postgres):
    vectors, _ = make_vectors(num_labels=100)
    return pgvector.PgvectorEngine.build(vectors, address=DatabaseAddress(url=postgres, name="dexter_trouble"))


def search(engine):
    _, queries = make_vectors(num_labels=100, num_queries=3)
    return engine.candidates(queries, 10).tolist()


def test_a_connection_that_the_server_closed_is_opened_again(engine, postgres):
    expected = search(engine)
    for _ in range(2):
        with psycopg.connect(postgres, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s)", [engine._connection.info.backend_pid])
        assert search(engine) == expected


def test_a_server_that_hangs_is_given_up_in_time(engine, monkeypatch):
    expected, pid = search(engine), engine._connection.info.backend_pid
    monkeypatch.setattr(pgvector, "_ANSWER_SECONDS", 0.5)
    os.kill(pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(ResourceError, match=r"did not answer within 0\.5 s"):
            search(engine)
        assert time.monotonic() - started < 10
        assert search(engine) == expected, "over a new connection"
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_server_that_is_away_is_a_lack_of_resources(engine, monkeypatch):
    engine._connection.close()
    monkeypatch.setattr(engine, "_address", DatabaseAddress(url="postgresql://localhost:1/none", name="dexter_trouble"))
    with pytest.raises(ResourceError, match="cannot be reached"):
        search(engine)
