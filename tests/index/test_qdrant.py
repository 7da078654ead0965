"""A Qdrant server that never answers, or is away."""

import socket
import time

import numpy as np
import pytest

from dexter.errors import ResourceError
from dexter.index import DatabaseAddress

pytest.importorskip("qdrant_client", reason="qdrant_client is not installed")
qdrant = pytest.importorskip("dexter.index.qdrant")


@pytest.mark.parametrize("hangs", [True, False])
def test_a_server_that_does_not_answer_is_given_up_in_time(hangs, monkeypatch):
    monkeypatch.setattr(qdrant, "_ANSWER_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = DatabaseAddress(url=f"http://127.0.0.1:{server.getsockname()[1]}", name="dexter_hanging")
        if not hangs:
            server.close()
        started = time.monotonic()
        with pytest.raises(ResourceError, match="collection dexter_hanging"):
            qdrant.QdrantEngine.build(np.ones((3, 2), np.float32), address=address)
        assert time.monotonic() - started < 20
        engine = qdrant.QdrantEngine(qdrant.QdrantEngine._connect(address, num_rows=3)._client, address, num_rows=3)
        with pytest.raises(ResourceError, match="collection dexter_hanging"):
            engine.candidates(np.ones((1, 2), np.float32), 2)
        assert time.monotonic() - started < 40
