"""PostgreSQL with the pgvector extension: vectors in a table, an HNSW index over them, one statement per search.

The table is made in one transaction, so that others see the old one or the new one. A connection that the server has
closed is opened again; a server that does not answer in time is given up.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError, ResourceError, UsageError, require
from dexter.index.base import DatabaseAddress, Engine, SavedEngine, checked_address, read_table_description

_MAX_DIMENSIONS = 2_000
"""Limit of pgvector's HNSW over float32."""
_LINKS, _BREADTH = 16, 100
_QUERIES_AT_ONCE = 64
_CONNECT_SECONDS, _ANSWER_SECONDS = 5, 10.0
"""How long to wait for a connection, and for the answer to a search."""


class PgvectorEngine(Engine):
    """One table on a server."""

    MAX_CANDIDATES = 1_000
    """The largest breadth (ef_search) that pgvector takes."""

    def __init__(self, connection: Any, address: DatabaseAddress, *, num_rows: int) -> None:
        self._connection, self._address, self.num_rows = connection, address, num_rows
        self._lock = threading.Lock()
        """A connection has one transaction at a time."""

    @classmethod
    def build(cls, vectors_LD: NDArray[np.float32], *, address: DatabaseAddress | None = None) -> Self:
        """Make the table and its index, in place of an older one."""
        engine = cls._connect(address, num_rows=len(vectors_LD))
        if vectors_LD.shape[1] > _MAX_DIMENSIONS:
            raise UsageError(
                f"pgvector indexes at most {_MAX_DIMENSIONS} dimensions, these vectors have {vectors_LD.shape[1]}: "
                "choose another backend, or train with head.projection"
            )
        with _server_errors(engine._address), engine._connection.transaction():
            engine._run("DROP TABLE IF EXISTS {table}")
            engine._run(f"CREATE TABLE {{table}} (id bigint PRIMARY KEY, embedding vector({vectors_LD.shape[1]}))")
            engine._copy(vectors_LD)
            engine._run(
                "CREATE INDEX ON {table} USING hnsw (embedding vector_ip_ops) "
                f"WITH (m = {_LINKS}, ef_construction = {_BREADTH})"
            )
        return engine

    @classmethod
    def restore(cls, saved: SavedEngine) -> Self:
        """Find the table again, and check its number of rows."""
        name, num_rows = read_table_description(saved.description)
        address = None if saved.url is None else DatabaseAddress(url=saved.url, name=name)
        engine = cls._connect(address, num_rows=num_rows)
        with _server_errors(engine._address):
            if engine._run("SELECT to_regclass({literal})").fetchone()[0] is None:
                raise ModelError(f"the server has no table {name}")
            found = engine._run("SELECT count(*) FROM {table}").fetchone()[0]
        if found != num_rows:
            raise ModelError(f"table {name} has {found} rows, expected {num_rows}")
        return engine

    def candidates(self, queries_ND: NDArray[np.float32], num_candidates: int) -> NDArray[np.int64]:
        """Return the rows that the server finds."""
        with self._lock, _server_errors(self._address):
            if self._connection.closed:
                self._connection = _open(self._address)
            try:
                with _hang_up_later(self._connection):
                    return self._search(queries_ND, num_candidates)
            except ResourceError:
                raise
            except Exception:
                if not self._connection.closed:
                    raise
            # The server was restarted, or has closed the connection while it was idle.
            self._connection = _open(self._address)
            with _hang_up_later(self._connection):
                return self._search(queries_ND, num_candidates)

    def _search(self, queries_ND: NDArray[np.float32], num_candidates: int) -> NDArray[np.int64]:
        rows_NW = np.full((len(queries_ND), num_candidates), -1, dtype=np.int64)
        with self._connection.transaction():
            self._run(f"SET LOCAL hnsw.ef_search = {num_candidates}")
            # Without this the server may prefer to sort the whole table.
            self._run("SET LOCAL enable_seqscan = off")
            for start in range(0, len(queries_ND), _QUERIES_AT_ONCE):
                part = queries_ND[start : start + _QUERIES_AT_ONCE]
                found = self._run(
                    "SELECT number, array_agg(nearest.id) FROM unnest(%s::vector[]) WITH ORDINALITY AS q(v, number), "
                    "LATERAL (SELECT id FROM {table} ORDER BY embedding <#> q.v LIMIT %s) AS nearest GROUP BY number",
                    (list(part), num_candidates),
                )
                for number, ids in found:
                    rows_NW[start + number - 1, : len(ids)] = ids
        return rows_NW

    def describe(self) -> dict[str, Any]:
        """Return the table's name and number of rows. The address is not written anywhere."""
        return {"name": self._address.name, "num_rows": self.num_rows}

    @classmethod
    def _connect(cls, address: DatabaseAddress | None, *, num_rows: int) -> Self:
        address = checked_address(address, backend="pgvector", example="postgresql://user@host/database")
        require("psycopg", extra="pgvector", purpose="an index in PostgreSQL")
        with _server_errors(address):
            return cls(_open(address), address, num_rows=num_rows)

    def _run(self, statement: str, values: tuple[Any, ...] = ()) -> Any:
        """Run a statement in which {table} stands for the table's name."""
        from psycopg import sql

        name = self._address.name
        composed = sql.SQL(statement).format(table=sql.Identifier(name), literal=sql.Literal(name))
        return self._connection.execute(composed, values or None)

    def _copy(self, vectors_LD: NDArray[np.float32]) -> None:
        from psycopg import sql

        statement = sql.SQL("COPY {} (id, embedding) FROM STDIN WITH (FORMAT BINARY)")
        with (
            self._connection.cursor() as cursor,
            cursor.copy(statement.format(sql.Identifier(self._address.name))) as copy,
        ):
            copy.set_types(["int8", "vector"])
            for row, vector in enumerate(vectors_LD):
                copy.write_row((row, vector))


def _open(address: DatabaseAddress) -> Any:
    """Connect to the server."""
    psycopg = require("psycopg", extra="pgvector", purpose="an index in PostgreSQL")
    types = require("pgvector.psycopg", extra="pgvector", purpose="an index in PostgreSQL")
    connection = psycopg.connect(address.url, autocommit=True, connect_timeout=_CONNECT_SECONDS)
    with _hang_up_later(connection):
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        types.register_vector(connection)
    return connection


@contextmanager
def _hang_up_later(connection: Any) -> Iterator[None]:
    """Close the connection's socket if the block takes too long: a server that hangs keeps no time-out of its own."""
    has_hung_up = threading.Event()

    def hang_up() -> None:
        has_hung_up.set()
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_ANSWER_SECONDS, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if has_hung_up.is_set():
            raise ResourceError(f"PostgreSQL did not answer within {_ANSWER_SECONDS:g} s: check the server") from error
        raise
    finally:
        timer.cancel()


@contextmanager
def _server_errors(address: DatabaseAddress) -> Iterator[None]:
    """Turn what the server or its driver refuses into one line, without the address, which may hold a password."""
    import psycopg

    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        raise ResourceError(f"PostgreSQL cannot be reached: {_first_line(error)}: check the address") from error
    except psycopg.Error as error:
        raise ModelError(f"PostgreSQL, table {address.name}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
