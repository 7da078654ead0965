"""Qdrant: vectors as the points of a collection, in a server or cluster by its URL, or in a folder (local mode).

Local mode is part of the client, looks at every vector, and is meant for trials: one process at a time, few labels.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError, ResourceError, require
from dexter.index.base import Place
from dexter.index.places import checked_place, read_words

log = logging.getLogger("dexter")

_MOST_CANDIDATES = 10_000
_POINTS_AT_ONCE, _QUERIES_AT_ONCE = 1_000, 64
_LOCAL_CLIENTS: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""The open folders of local mode, which can be opened once only."""


class QdrantEngine:
    """One collection."""

    def __init__(self, client: Any, place: Place, *, next_row: int = 0) -> None:
        self._client, self._place, self._next_row = client, place, next_row

    @classmethod
    def build(cls, vectors_LD: NDArray[np.float32], *, place: Place | None = None) -> Self:
        """Make the collection, in place of an older one of the same name."""
        engine = cls._open(place, next_row=len(vectors_LD))
        models = _models()
        with _client_errors(engine._place):
            engine._client.delete_collection(engine._place.name)
            parameters = models.VectorParams(size=vectors_LD.shape[1], distance=models.Distance.DOT)
            engine._client.create_collection(engine._place.name, vectors_config=parameters)
        engine._insert(np.arange(len(vectors_LD)), vectors_LD)
        return engine

    @classmethod
    def read(cls, folder: Path, described: dict[str, Any], *, dimension: int, place: Place | None = None) -> Self:
        """Find the collection again, and check that it has as many points as it should."""
        name, num_rows, next_row = read_words(folder, described)
        engine = cls._open(None if place is None else Place(url=place.url, name=name), next_row=next_row)
        with _client_errors(engine._place):
            if not engine._client.collection_exists(name):
                raise ModelError(f"{folder}: Qdrant has no collection {name}: run `dexter index` again")
        found = engine._count()
        if found != num_rows:
            raise ModelError(
                f"{folder}: collection {name} has {found} points, expected {num_rows}: run `dexter index` again"
            )
        return engine

    @property
    def rows_end(self) -> int:
        """Every row is below this number."""
        return self._next_row

    @property
    def most_candidates(self) -> int:
        """As many as make sense over a network."""
        return _MOST_CANDIDATES

    def candidates(self, queries_ND: NDArray[np.float32], num_candidates: int) -> NDArray[np.int64]:
        """The rows that Qdrant finds."""
        models = _models()
        rows_NW = np.full((len(queries_ND), num_candidates), -1, dtype=np.int64)
        # Local mode has no graph, and warns where it is given parameters for one.
        parameters = None if self._place.url in _LOCAL_CLIENTS else models.SearchParams(hnsw_ef=num_candidates)
        for start in range(0, len(queries_ND), _QUERIES_AT_ONCE):
            requests = [
                models.QueryRequest(query=query.tolist(), limit=num_candidates, params=parameters)
                for query in queries_ND[start : start + _QUERIES_AT_ONCE]
            ]
            with _client_errors(self._place):
                answers = self._client.query_batch_points(self._place.name, requests=requests)
            for row, answer in enumerate(answers, start):
                ids = [point.id for point in answer.points]
                rows_NW[row, : len(ids)] = ids
        return rows_NW

    def change(self, gone: NDArray[np.int64], vectors_MD: NDArray[np.float32]) -> NDArray[np.int64]:
        """Insert points under new numbers and delete others."""
        rows = np.arange(self._next_row, self._next_row + len(vectors_MD))
        self._insert(rows, vectors_MD)
        self._next_row += len(vectors_MD)
        if len(gone):
            with _client_errors(self._place):
                points = _models().PointIdsList(points=gone.tolist())
                self._client.delete(self._place.name, points_selector=points, wait=True)
        return rows

    def write(self, folder: Path) -> dict[str, Any]:
        """Qdrant has the points already; say which collection they are in. The address is not written anywhere."""
        return {"name": self._place.name, "num_rows": self._count(), "next_row": self._next_row}

    @classmethod
    def _open(cls, place: Place | None, *, next_row: int) -> Self:
        place = checked_place(place, backend="qdrant", example="http://host:6333 (or a folder)")
        library = require("qdrant_client", extra="qdrant", purpose="an index in Qdrant")
        with _client_errors(place):
            client = _LOCAL_CLIENTS.get(place.url)
            if "://" in place.url:
                client = library.QdrantClient(url=place.url, api_key=os.environ.get("QDRANT_API_KEY"))
            elif client is None:
                # The client would say so at every call.
                warnings.filterwarnings("ignore", message="Local mode is not recommended", category=UserWarning)
                log.info("qdrant: a folder is for trials: it looks at every vector, in Python")
                client = library.QdrantClient(path=place.url, force_disable_check_same_thread=True)
                _LOCAL_CLIENTS[place.url] = client
        return cls(client, place, next_row=next_row)

    def _insert(self, rows: NDArray[np.int64], vectors_MD: NDArray[np.float32]) -> None:
        models = _models()
        for start in range(0, len(rows), _POINTS_AT_ONCE):
            part = slice(start, start + _POINTS_AT_ONCE)
            batch = models.Batch(ids=rows[part].tolist(), vectors=vectors_MD[part].tolist())
            with _client_errors(self._place):
                self._client.upsert(self._place.name, points=batch, wait=True)

    def _count(self) -> int:
        with _client_errors(self._place):
            return int(self._client.count(self._place.name, exact=True).count)


def _models() -> Any:
    return require("qdrant_client.models", extra="qdrant", purpose="an index in Qdrant")


@contextmanager
def _client_errors(place: Place) -> Iterator[None]:
    """Turn what the client or the server refuses into one line, without the address."""
    from qdrant_client.http.exceptions import ApiException

    try:
        yield
    except (ApiException, OSError, RuntimeError) as error:
        # Local mode reports a folder that another process has open as a RuntimeError.
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ResourceError(f"Qdrant, collection {place.name}: {reason}: check the address") from error
