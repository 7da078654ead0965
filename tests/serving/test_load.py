"""Many clients get the answers of one; changes of labels under load mix nothing and lose nothing."""

import asyncio
import random
import shutil

import httpx
import pytest

from dexter import Predictor
from dexter.serving.app import create_app
from dexter.serving.settings import ServeSettings
from tests.conftest import WORDS


def with_client(app, scenario):
    """Run a scenario of clients that share an event loop with the service."""

    async def main():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            return await scenario(client)

    return asyncio.run(main())


async def predict(client, inputs, **fields):
    answer = await client.post("/v1/predict", json={"inputs": inputs, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def mixed_requests(count, seed=0):
    """Requests of one to six texts of one to two hundred words, with k from 1 to 9."""
    generator = random.Random(seed)
    return [
        (
            [" ".join(generator.choices(WORDS, k=generator.choice([1, 3, 20, 200]))) for _ in range(size)],
            generator.randint(1, 9),
        )
        for size in generator.choices(range(1, 7), k=count)
    ]


def test_64_clients_get_the_answers_of_one(trained):
    predictor = Predictor.load(trained)
    requests = mixed_requests(256)
    expected = [Predictor.load(trained).predict(texts, k) for texts, k in requests]

    async def scenario(client):
        turns = iter(range(len(requests)))

        async def one_client(found):
            for turn in turns:
                texts, k = requests[turn]
                found[turn] = await predict(client, texts, k=k)

        found = {}
        await asyncio.gather(*(one_client(found) for _ in range(64)))
        return found

    app = create_app(predictor)
    found = with_client(app, scenario)
    assert len(found) == len(requests)
    for turn, texts in enumerate(expected):
        results = found[turn]["results"]
        assert len(results) == len(texts)
        for result, labels in zip(results, texts, strict=True):
            scores = {label.id: label.score for label in labels}
            assert [label["score"] for label in result["labels"]] == pytest.approx(list(scores.values()), abs=1e-5)
            # Where two scores differ by rounding only, either label may be the last.
            assert sum(label["id"] in scores for label in result["labels"]) >= len(scores) - 1
    batches = with_client(app, lambda client: client.get("/metrics")).text
    together = float(batches.split("dexter_batch_texts_sum")[1].split()[1])
    assert together / float(batches.split("dexter_batch_texts_count")[1].split()[1]) > 4


def test_edits_under_load_are_whole_and_lose_nothing(trained, tmp_path, world):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    app = create_app({"run": run})
    known = {0: set(world.label_ids)}
    answered = []

    async def edit(client, writer):
        for turn in range(4):
            name = f"new-{writer}-{turn}"
            added = await client.post("/v1/labels", json={"labels": [{"id": name, "text": f"{name} river"}]})
            assert added.status_code == 200
            known[added.json()["version"]] = ("+", name)
            if turn % 2:
                removed = await client.delete("/v1/labels", params={"id": name})
                known[removed.json()["version"]] = ("-", name)

    async def ask(client, stop):
        while not stop.is_set():
            answered.append(await predict(client, ["river stone", "amber cloud"], k=100))

    async def scenario(client):
        stop = asyncio.Event()
        askers = [asyncio.create_task(ask(client, stop)) for _ in range(16)]
        await asyncio.gather(*(edit(client, writer) for writer in range(3)))
        stop.set()
        await asyncio.gather(*askers)

    with_client(app, scenario)
    for version in range(1, len(known)):
        sign, name = known[version]
        known[version] = known[version - 1] | {name} if sign == "+" else known[version - 1] - {name}
    assert len(known) == 1 + 3 * 6
    for answer in answered:
        for result in answer["results"]:
            assert {label["id"] for label in result["labels"]} == known[answer["version"]]
    assert len({answer["version"] for answer in answered}) > 3
    assert set(Predictor.load(run).labels.ids) == known[len(known) - 1]


def test_heads_of_one_model_side_by_side(world, tmp_path):
    import dexter
    from tests.conftest import SMALL

    run = dexter.train(world, recipe="unidec", out=tmp_path / "run", overrides={**SMALL, "train.epochs": 1})
    app = create_app(Predictor.load(run.path), ServeSettings(max_variants=1))
    heads = ["encoder", "classifier", "unified", None]
    text = world.test.texts[0]

    async def scenario(client):
        before = await asyncio.gather(*(predict(client, text, head=head) for head in heads * 3))
        await client.post("/v1/labels", json={"labels": [{"id": "new", "text": text}]})
        after = await asyncio.gather(*(predict(client, text, head=head, k=100) for head in heads))
        return before, after

    before, after = with_client(app, scenario)
    for head, found in zip(heads * 3, before, strict=True):
        [labels] = Predictor.load(run.path, head=head).predict([text])
        assert [label["id"] for label in found["results"][0]["labels"]] == [label.id for label in labels]
    for found in after:
        assert found["version"] == 1
        assert "new" in [label["id"] for label in found["results"][0]["labels"]]


HOSTILE = [
    "a" * 1_000_000,
    "á" * 20_000 + "̈" * 20_000,
    "​‍﻿" * 1_000,
    "‮ abc ‬",
    "👩‍👩‍👧‍👦" * 20_000,
    "\x00\x01\x02\x7f",
    "<script>alert(1)</script>" * 100,
    "'; DROP TABLE labels; --",
    "{{ 7 * 7 }} ${7*7} %s %n",
    "".join(chr(block) for block in range(0x20, 0x3_0000, 0x101) if not 0xD800 <= block < 0xE000),
    "ﷺ" * 20_000,
    "\n\r\t x",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_get_labels_with_finite_scores(client, text):
    answer = client.post("/v1/predict", json={"inputs": text})
    assert answer.status_code == 200
    [result] = answer.json()["results"]
    assert len(result["labels"]) == 5 and all(abs(label["score"]) < 1e6 for label in result["labels"])
    assert result["truncated"] == (len(text) > 20_000)


@pytest.mark.parametrize(
    "path",
    [
        "/static/../__init__.py",
        "/static/..%2f__init__.py",
        "/static/%2e%2e/%2e%2e/app.py",
        "/static//etc/passwd",
        "/static/page.css%00",
        "/v1/projects/..%2f..%2fetc%2fpasswd",
        "/v1/projects/%00",
        "/v1/predict/../../etc/passwd",
    ],
)
def test_paths_lead_nowhere_else(client, path):
    answer = client.get(path)
    assert answer.status_code in (400, 404, 405)
    assert "root:" not in answer.text and "import" not in answer.text


def test_many_ranges_are_no_work(client):
    ranges = "bytes=" + ",".join(f"{start}-" for start in range(10_000))
    assert client.get("/static/page.css", headers={"range": ranges}).status_code < 500
