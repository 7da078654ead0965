"""PostgreSQL with the pgvector extension: vectors in a table, an HNSW index over them, one statement per search.

The table is made in one transaction, so that others see the old one or the new one. Rows can be added and deleted while
others search.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError, ResourceError, UsageError, require
from dexter.index.base import Place
from dexter.index.places import checked_place, read_words

_MOST_DIMENSIONS = 2_000
"""Of pgvector's HNSW over float32."""
_MOST_CANDIDATES = 1_000
"""The largest breadth (ef_search) that pgvector takes."""
_LINKS, _BREADTH = 16, 100
_QUERIES_AT_ONCE = 64


class PgvectorEngine:
    """One table on a server."""

    def __init__(self, connection: Any, place: Place, *, next_row: int = 0) -> None:
        self._connection, self._place, self._next_row = connection, place, next_row
        self._alone = threading.Lock()
        """A connection has one transaction at a time."""

    @classmethod
    def build(cls, vectors_LD: NDArray[np.float32], *, place: Place | None = None) -> Self:
        """Make the table and its index, in place of an older one."""
        engine = cls._open(place, next_row=len(vectors_LD))
        if vectors_LD.shape[1] > _MOST_DIMENSIONS:
            raise UsageError(
                f"pgvector indexes at most {_MOST_DIMENSIONS} dimensions, these vectors have {vectors_LD.shape[1]}: "
                "choose another backend, or train with head.projection"
            )
        with _server_errors(engine._place), engine._connection.transaction():
            engine._run("DROP TABLE IF EXISTS {table}")
            engine._run(f"CREATE TABLE {{table}} (id bigint PRIMARY KEY, embedding vector({vectors_LD.shape[1]}))")
            engine._copy(np.arange(len(vectors_LD)), vectors_LD)
            engine._run(
                "CREATE INDEX ON {table} USING hnsw (embedding vector_ip_ops) "
                f"WITH (m = {_LINKS}, ef_construction = {_BREADTH})"
            )
        return engine

    @classmethod
    def read(cls, folder: Path, described: dict[str, Any], *, dimension: int, place: Place | None = None) -> Self:
        """Find the table again, and check that it has as many rows as it should."""
        name, num_rows, next_row = read_words(folder, described)
        engine = cls._open(None if place is None else Place(url=place.url, name=name), next_row=next_row)
        with _server_errors(engine._place):
            if engine._run("SELECT to_regclass({literal})").fetchone()[0] is None:
                raise ModelError(f"{folder}: the server has no table {name}: run `dexter index` again")
            found = engine._run("SELECT count(*) FROM {table}").fetchone()[0]
        if found != num_rows:
            raise ModelError(f"{folder}: table {name} has {found} rows, expected {num_rows}: run `dexter index` again")
        return engine

    @property
    def rows_end(self) -> int:
        """Every row is below this number."""
        return self._next_row

    @property
    def most_candidates(self) -> int:
        """As many as the walk through its graph may hold."""
        return _MOST_CANDIDATES

    def candidates(self, queries_ND: NDArray[np.float32], num_candidates: int) -> NDArray[np.int64]:
        """The rows that the server finds."""
        rows_NW = np.full((len(queries_ND), num_candidates), -1, dtype=np.int64)
        with self._alone, _server_errors(self._place), self._connection.transaction():
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

    def change(self, gone: NDArray[np.int64], vectors_MD: NDArray[np.float32]) -> NDArray[np.int64]:
        """Delete rows and insert others under new numbers, in one transaction."""
        rows = np.arange(self._next_row, self._next_row + len(vectors_MD))
        with self._alone, _server_errors(self._place), self._connection.transaction():
            self._copy(rows, vectors_MD)
            self._run("DELETE FROM {table} WHERE id = ANY(%s)", (gone.tolist(),))
        self._next_row += len(vectors_MD)
        return rows

    def write(self, folder: Path) -> dict[str, Any]:
        """The server has the rows already; say which table they are in. The address is not written anywhere."""
        with self._alone, _server_errors(self._place):
            num_rows = self._run("SELECT count(*) FROM {table}").fetchone()[0]
        return {"name": self._place.name, "num_rows": num_rows, "next_row": self._next_row}

    @classmethod
    def _open(cls, place: Place | None, *, next_row: int) -> Self:
        place = checked_place(place, backend="pgvector", example="postgresql://user@host/database")
        psycopg = require("psycopg", extra="pgvector", purpose="an index in PostgreSQL")
        types = require("pgvector.psycopg", extra="pgvector", purpose="an index in PostgreSQL")
        with _server_errors(place):
            connection = psycopg.connect(place.url, autocommit=True)
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            types.register_vector(connection)
        return cls(connection, place, next_row=next_row)

    def _run(self, statement: str, values: tuple[Any, ...] = ()) -> Any:
        """Run a statement in which {table} stands for the table's name."""
        from psycopg import sql

        name = self._place.name
        composed = sql.SQL(statement).format(table=sql.Identifier(name), literal=sql.Literal(name))
        return self._connection.execute(composed, values or None)

    def _copy(self, rows: NDArray[np.int64], vectors_MD: NDArray[np.float32]) -> None:
        from psycopg import sql

        statement = sql.SQL("COPY {} (id, embedding) FROM STDIN WITH (FORMAT BINARY)")
        with (
            self._connection.cursor() as cursor,
            cursor.copy(statement.format(sql.Identifier(self._place.name))) as copy,
        ):
            copy.set_types(["int8", "vector"])
            for row, vector in zip(rows.tolist(), vectors_MD, strict=True):
                copy.write_row((row, vector))


@contextmanager
def _server_errors(place: Place) -> Iterator[None]:
    """Turn what the server or its driver refuses into one line, without the address, which may hold a password."""
    import psycopg

    try:
        yield
    except psycopg.OperationalError as error:
        raise ResourceError(f"PostgreSQL cannot be reached: {_first_line(error)}: check the address") from error
    except psycopg.Error as error:
        raise ModelError(f"PostgreSQL, table {place.name}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
