"""Ranks that stop beating are named; ranks that are late are named too, but waited for."""

import time

from dexter.training.distributed import Heartbeat
from tests.conftest import eventually


class DictStore(dict):
    def set(self, name, text):
        self[name] = text.encode()

    def multi_get(self, names):
        return [self[name] for name in names]


def pair(seconds=0.4):
    store, said = DictStore(), []
    beats = [Heartbeat(store, rank=rank, size=2, seconds=seconds, end=said.append) for rank in range(2)]
    return store, beats, said


def test_a_silent_rank_is_named():
    _, (first, _second), said = pair()
    first.start()
    first.enter("sum")
    eventually(lambda: said)
    assert len(said) == 1
    assert "rank 1 gave no sign of life" in said[0]
    assert "waited in sum" in said[0]


def test_a_late_rank_is_waited_for_and_named(caplog):
    _, beats, said = pair(seconds=4.0)
    [beat.start() for beat in beats]
    beats[0].enter("gradients")
    eventually(lambda: "rank 0 has waited" in caplog.text)
    assert not said
    assert "rank 0 has waited" in caplog.text
    assert "rank 1 (working)" in caplog.text
    beats[1].enter("gradients")
    [beat.exit() for beat in beats]
    [beat.leave() for beat in beats]


def test_nobody_is_blamed_while_nobody_waits():
    _, (first, _second), said = pair(seconds=0.2)
    first.start()
    time.sleep(0.6)
    assert not said
    first.enter("sum")
    eventually(lambda: said)
    assert len(said) == 1, "the second rank is blamed as soon as the first waits for it"
    first.leave()


def test_a_store_that_is_gone_ends_the_wait():
    store, (first, _), said = pair(seconds=0.2)
    first.start()
    store.clear()
    eventually(lambda: said)
    assert "cannot reach" in said[0]
