"""Fuzzed bodies, straight to the socket of a service: an answer below 500 for each, on a connection that goes on."""

import http.client
import json
import random

import pytest

from tests.conftest import WORDS, scaled
from tests.serving.sockets import resident_bytes, start_service, wait_ready

ROUTES = {
    ("POST", "/v1/predict"): {"inputs": ["river stone", {"id": "a", "text": "cloud"}], "k": 5, "exclude": ["L1"]},
    ("POST", "/v1/embeddings"): {"input": ["river", "stone"], "model": "run"},
    ("POST", "/v1/labels"): {"labels": [{"id": "n", "text": "new", "examples": ["river"]}], "dry_run": True},
    ("PATCH", "/v1/labels"): {"labels": [{"id": "L1", "text": "new"}], "keep_vectors": True},
    ("POST", "/v1/labels/undo"): {"edit": 1},
    ("POST", "/v1/projects/run/suggest-batch"): {"documents": [{"text": "river", "document_id": "d"}]},
    ("POST", "/v1/projects/run/suggest"): None,
    ("POST", "/labels/add"): None,
    ("POST", "/"): None,
}
ODD = [
    "null", "true", "-1", "1e400", "-1e400", "NaN", "Infinity", "0.5", "9" * 5_000, '"\\ud800"', '"\\u0000"', '""',
    '" "', "{}", "[]", "[[]]", '{"a":1,"a":2}', "[" * 50_000, "[" * 50_000 + "]" * 50_000, '{"a":' * 50_000,
    '"' + "x" * 30_000 + '"', "[1,]", "'a'", "\ufeff{}", '{"id":"' + "i" * 2_000 + '","text":"t"}',
    "[" + ",".join(["{}"] * 5_000) + "]",
]  # fmt: skip


def fuzzed(body, generator):
    """A body that is nearly right: a value replaced, bytes flipped, cut, doubled or inserted; or one that is not."""
    kind = generator.randrange(6)
    if kind == 0 and body:
        key = generator.choice(list(body))
        text = json.dumps({**body, key: "@"}).replace('"@"', generator.choice(ODD))
        return text.encode("utf-8", "surrogatepass")
    if kind == 1:
        return generator.choice(ODD).encode("utf-8", "surrogatepass")
    if kind == 2:
        return generator.randbytes(generator.randrange(200))
    content = bytearray(json.dumps(body or dict.fromkeys(WORDS[:3], "text")).encode())
    for _ in range(generator.randint(1, 4)):
        place = generator.randrange(len(content) + 1)
        if kind == 3:
            content[place : place + 1] = generator.randbytes(1)
        elif kind == 4:
            content[place:place] = content[place : place + generator.randrange(20)]
        else:
            del content[place : place + generator.randrange(20)]
    return bytes(content)


@pytest.mark.slow(minutes=1)
@pytest.mark.timeout(1_800)
def test_fuzzed_bodies_are_answered_below_500(trained, record_property):
    process, port = start_service(trained)
    try:
        wait_ready(port)
        generator, routes = random.Random(0), list(ROUTES.items())
        types = ["application/json"] * 8 + ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "a"]
        before, connection, statuses = resident_bytes(process), None, {}
        for _ in range(scaled(100_000)):
            (method, path), body = generator.choice(routes)
            content = fuzzed(body, generator)
            connection = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request(method, path, content, {"Content-Type": generator.choice(types)})
            answer = connection.getresponse()
            answer.read()
            assert answer.status < 500, (method, path, content[:2_000])
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            if answer.will_close:
                connection = connection.close()
        assert statuses.get(200, 0) and statuses.get(422, 0)
        assert resident_bytes(process) - before < 100 * 2**20
        record_property("statuses", json.dumps(statuses))
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
