"""Qdrant: vectors as the points of a collection, in a server or cluster by its URL, or in a folder (local mode).

Local mode is part of the client, compares with every vector, and is meant for trials: one process, few labels.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from dexter.errors import ModelError, ResourceError, require
from dexter.index.base import DatabaseAddress, Engine, SavedEngine, checked_address, read_table_description

log = logging.getLogger("dexter")

_POINTS_AT_ONCE, _QUERIES_AT_ONCE = 1_000, 64
_ANSWER_SECONDS = 10
"""How long to wait for the server; the client connects again by itself."""
_LOCAL_CLIENTS: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""The open folders of local mode, each of which can be opened only once."""


class QdrantEngine(Engine):
    """One collection."""

    MAX_CANDIDATES = 10_000
    """A bound on what one answer over the network holds."""

    def __init__(self, client: Any, address: DatabaseAddress, *, num_rows: int) -> None:
        self._client, self._address, self.num_rows = client, address, num_rows

    @classmethod
    def build(cls, vectors_LD: NDArray[np.float32], *, address: DatabaseAddress | None = None) -> Self:
        """Make the collection, in place of an older one of the same name."""
        engine = cls._connect(address, num_rows=len(vectors_LD))
        models = _models()
        with _client_errors(engine._address):
            engine._client.delete_collection(engine._address.name)
            parameters = models.VectorParams(size=vectors_LD.shape[1], distance=models.Distance.DOT)
            engine._client.create_collection(engine._address.name, vectors_config=parameters)
        engine._insert(vectors_LD)
        return engine

    @classmethod
    def restore(cls, saved: SavedEngine) -> Self:
        """Find the collection again, and check its number of points."""
        name, num_rows = read_table_description(saved.description)
        address = None if saved.url is None else DatabaseAddress(url=saved.url, name=name)
        engine = cls._connect(address, num_rows=num_rows)
        with _client_errors(engine._address):
            if not engine._client.collection_exists(name):
                raise ModelError(f"Qdrant has no collection {name}")
            found = int(engine._client.count(name, exact=True).count)
        if found != num_rows:
            raise ModelError(f"collection {name} has {found} points, expected {num_rows}")
        return engine

    def candidates(self, queries_ND: NDArray[np.float32], num_candidates: int) -> NDArray[np.int64]:
        """Return the rows that Qdrant finds."""
        models = _models()
        rows_NW = np.full((len(queries_ND), num_candidates), -1, dtype=np.int64)
        # Local mode has no graph, and warns where it is given parameters for one.
        parameters = None if self._address.url in _LOCAL_CLIENTS else models.SearchParams(hnsw_ef=num_candidates)
        for start in range(0, len(queries_ND), _QUERIES_AT_ONCE):
            requests = [
                models.QueryRequest(query=query.tolist(), limit=num_candidates, params=parameters)
                for query in queries_ND[start : start + _QUERIES_AT_ONCE]
            ]
            with _client_errors(self._address):
                answers = self._client.query_batch_points(self._address.name, requests=requests)
            for row, answer in enumerate(answers, start):
                ids = [point.id for point in answer.points]
                rows_NW[row, : len(ids)] = ids
        return rows_NW

    def describe(self) -> dict[str, Any]:
        """Return the collection's name and number of points. The address is not written anywhere."""
        return {"name": self._address.name, "num_rows": self.num_rows}

    @classmethod
    def _connect(cls, address: DatabaseAddress | None, *, num_rows: int) -> Self:
        address = checked_address(address, backend="qdrant", example="http://host:6333 (or a folder)")
        library = require("qdrant_client", extra="qdrant", purpose="an index in Qdrant")
        with _client_errors(address):
            client = _LOCAL_CLIENTS.get(address.url)
            if "://" in address.url:
                key = os.environ.get("QDRANT_API_KEY")
                client = library.QdrantClient(url=address.url, api_key=key, timeout=_ANSWER_SECONDS)
            elif client is None:
                # The client would warn at every call.
                warnings.filterwarnings("ignore", message="Local mode is not recommended", category=UserWarning)
                log.info("qdrant: a folder is for trials: every search compares with every vector, in Python")
                client = library.QdrantClient(path=address.url, force_disable_check_same_thread=True)
                _LOCAL_CLIENTS[address.url] = client
        return cls(client, address, num_rows=num_rows)

    def _insert(self, vectors_LD: NDArray[np.float32]) -> None:
        models = _models()
        for start in range(0, len(vectors_LD), _POINTS_AT_ONCE):
            vectors = vectors_LD[start : start + _POINTS_AT_ONCE]
            batch = models.Batch(ids=list(range(start, start + len(vectors))), vectors=vectors.tolist())
            with _client_errors(self._address):
                self._client.upsert(self._address.name, points=batch, wait=True)


def _models() -> Any:
    return require("qdrant_client.models", extra="qdrant", purpose="an index in Qdrant")


@contextmanager
def _client_errors(address: DatabaseAddress) -> Iterator[None]:
    """Turn what the client or the server refuses into one line, without the address."""
    from qdrant_client.http.exceptions import ApiException

    try:
        yield
    except (ApiException, OSError, RuntimeError) as error:
        # Local mode reports a folder that another process has open as a RuntimeError.
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ResourceError(f"Qdrant, collection {address.name}: {reason}: check the address") from error
