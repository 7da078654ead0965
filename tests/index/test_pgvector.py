"""A PostgreSQL server that restarts or hangs under an index."""

import os
import signal
import subprocess
import time
from pathlib import Path

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


@pytest.fixture
def server(tmp_path):
    """A server of this test's own, which may be stopped."""
    pgserver = pytest.importorskip("pgserver", reason="pgserver is not installed: no PostgreSQL to test with")
    try:
        server = pgserver.get_server(tmp_path / "postgres", cleanup_mode="delete")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("PostgreSQL did not start: pgserver gives it ten seconds")
    yield server
    server.cleanup()


@pytest.fixture
def own_engine(server):
    vectors, _ = make_vectors(num_labels=100)
    return pgvector.PgvectorEngine.build(vectors, address=DatabaseAddress(url=server.get_uri(), name="dexter_own"))


def control(server, *arguments):
    """Stop or start the server itself."""
    import pgserver

    options = {"pgdata": server.pgdata, "user": server.system_user}
    pgserver.pg_ctl([*arguments, "-w", "-l", str(server.log), "-o", f"-k {server.pgdata} -h ''"], **options)


def test_a_real_restart_is_survived_and_the_time_between_is_a_lack_of_resources(own_engine, server):
    expected = search(own_engine)
    control(server, "-m", "fast", "stop")
    for _ in range(2):
        with pytest.raises(ResourceError, match="cannot be reached"):
            search(own_engine)
    control(server, "start")
    assert search(own_engine) == expected
    control(server, "-m", "immediate", "restart")
    assert search(own_engine) == expected


def test_a_server_of_which_every_process_hangs_is_given_up_in_time_and_used_again(own_engine, server, monkeypatch):
    expected = search(own_engine)
    monkeypatch.setattr(pgvector, "_ANSWER_SECONDS", 1)
    monkeypatch.setattr(pgvector, "_CONNECT_SECONDS", 2)
    postmaster = int((Path(server.pgdata) / "postmaster.pid").read_text().split()[0])
    children = subprocess.run(["pgrep", "-P", str(postmaster)], capture_output=True, text=True, check=True).stdout
    processes = [postmaster, *map(int, children.split())]
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        for _ in range(2):  # the connection there is, then a new one
            started = time.monotonic()
            with pytest.raises(ResourceError):
                search(own_engine)
            assert time.monotonic() - started < 20
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)
    assert search(own_engine) == expected
