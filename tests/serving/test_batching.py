"""The queue: which texts are computed together, which requests are refused, and that none disturbs another."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dexter.serving.batching import Batcher, Disconnected, QueueFull


class Work:
    """Doubles texts; can be held up, and fails on some."""

    def __init__(self):
        self.batches, self.free = [], threading.Event()
        self.free.set()

    def __call__(self, key, texts):
        self.batches.append((key, list(texts)))
        assert self.free.wait(60)
        if "bad" in texts:
            raise ValueError("a bad text")
        return [(key, 2 * text) for text in texts]


def run(scenario, **limits):
    """Run a scenario of a batcher and its work in an event loop."""
    work = Work()

    async def main():
        with ThreadPoolExecutor(1) as executor:
            settings = {"max_texts": 8, "max_characters": 1_000, "max_queued": 20, "wait_seconds": 0.0, **limits}
            batcher = Batcher(work, executor, **settings)
            try:
                await asyncio.wait_for(scenario(batcher, work), 60)
            finally:
                work.free.set()
            assert batcher.num_queued == 0

    asyncio.run(main())
    return work


async def hold(batcher, work):
    """Keep the worker busy with one text until `work.free` is set again."""
    work.free.clear()
    held = asyncio.create_task(batcher.submit("hold", ["h"]))
    while not work.batches:
        await asyncio.sleep(0.001)
    return held


def submit_all(batcher, texts, key="a"):
    return [asyncio.create_task(batcher.submit(key, [text])) for text in texts]


def test_what_arrives_meanwhile_is_computed_together_and_given_back_in_order():
    async def scenario(batcher, work):
        held = await hold(batcher, work)
        tasks = submit_all(batcher, "stuvwxyz")
        await asyncio.sleep(0.01)
        work.free.set()
        assert await asyncio.gather(*tasks) == [[("a", 2 * text)] for text in "stuvwxyz"]
        await held

    work = run(scenario)
    assert work.batches[1:] == [("a", list("stuvwxyz"))]


def test_a_batch_has_one_key_and_bounded_size():
    async def scenario(batcher, work):
        held = await hold(batcher, work)
        tasks = [asyncio.create_task(batcher.submit("ab"[n % 2], [f"{n}x", f"{n}y", f"{n}z"])) for n in range(6)]
        await asyncio.sleep(0.01)
        work.free.set()
        await asyncio.gather(held, *tasks)

    work = run(scenario)
    assert [(key, len(texts)) for key, texts in work.batches[1:]] == [("a", 6), ("b", 6), ("a", 3), ("b", 3)]


def test_long_texts_make_small_batches_and_one_too_long_goes_alone():
    async def scenario(batcher, work):
        held = await hold(batcher, work)
        tasks = submit_all(batcher, ["x" * 40, "y" * 40, "z" * 200])
        await asyncio.sleep(0.01)
        work.free.set()
        await asyncio.gather(held, *tasks)

    work = run(scenario, max_characters=100)
    assert [len(texts) for _, texts in work.batches[1:]] == [2, 1]


def test_a_full_queue_says_so_and_forgets_nobody():
    async def scenario(batcher, work):
        held = await hold(batcher, work)
        tasks = submit_all(batcher, "abcd")
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFull):
            await batcher.submit("a", ["one too many"])
        work.free.set()
        assert len(await asyncio.gather(held, *tasks)) == 5

    run(scenario, max_queued=4)


def test_a_bad_text_fails_only_those_who_sent_it():
    async def scenario(batcher, work):
        held = await hold(batcher, work)
        tasks = submit_all(batcher, ["good", "bad", "fine"])
        await asyncio.sleep(0.01)
        work.free.set()
        good, bad, fine = await asyncio.gather(*tasks, return_exceptions=True)
        assert (good, fine) == ([("a", "goodgood")], [("a", "finefine")])
        assert isinstance(bad, ValueError)
        await held

    run(scenario)


def test_who_is_cancelled_or_gone_disturbs_nobody_and_costs_nothing():
    def gone():
        return True

    async def scenario(batcher, work):
        held = await hold(batcher, work)
        tasks = submit_all(batcher, "abc")
        left = asyncio.create_task(batcher.submit("a", ["left"], is_disconnected=gone))
        await asyncio.sleep(0.01)
        tasks[1].cancel()
        await asyncio.sleep(0.01)
        assert batcher.num_queued == 3
        work.free.set()
        assert await tasks[0] == [("a", "aa")] and await tasks[2] == [("a", "cc")]
        with pytest.raises(Disconnected):
            await left
        await held

    work = run(scenario)
    assert work.batches[1:] == [("a", ["a", "c"])]


def test_cancelled_while_computed():
    async def scenario(batcher, work):
        held = await hold(batcher, work)
        held.cancel()
        await asyncio.sleep(0.01)
        work.free.set()
        assert await batcher.submit("a", ["next"]) == [("a", "nextnext")]

    run(scenario)


def test_a_batch_waits_to_be_as_large_as_the_last():
    async def scenario(batcher, work):
        assert await batcher.submit("a", ["alone"]) == [("a", "alonealone")]
        await batcher.submit("a", ["1", "2"])
        third = asyncio.create_task(batcher.submit("a", ["3"]))
        await asyncio.sleep(0.02)
        await asyncio.gather(third, asyncio.create_task(batcher.submit("a", ["4"])))

    work = run(scenario, wait_seconds=600)
    assert work.batches == [("a", ["alone"]), ("a", ["1", "2"]), ("a", ["3", "4"])]


def test_a_batch_does_not_wait_for_long():
    async def scenario(batcher, work):
        await batcher.submit("a", ["1", "2"])
        assert await batcher.submit("a", ["3"]) == [("a", "33")]

    run(scenario, wait_seconds=0.02)


def test_enough_texts_do_not_wait():
    async def scenario(batcher, work):
        await asyncio.gather(*submit_all(batcher, "abcdefgh"))

    run(scenario, wait_seconds=600)
