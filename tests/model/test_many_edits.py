"""A thousand label edits by two writers that are killed now and then, with readers that reload in between."""

import os
import random
import signal
import time

import pytest

from tests.model.test_store import start, store_of

pytestmark = [pytest.mark.slow(minutes=4), pytest.mark.timeout(1_200)]

WRITER = """
import random, sys, time
import numpy as np
from pathlib import Path
from dexter.model.label_file import ChangedLabel
from dexter.model.untrusted_sqlite import LabelsBusy
from tests.model.test_store import store_of

run, name, generator = Path(sys.argv[1]), sys.argv[2], random.Random(sys.argv[2])
stored, vector = store_of(run), np.ones(32, dtype=np.float32)
number = 0
print("ready", flush=True)
while True:
    number += 1
    try:
        with stored.writing() as writer:
            version = stored.version() + 1
            label = f"{name}-{number}"
            print("try", label, flush=True)
            writer.write(version, [ChangedLabel(label, "text " * 9, vector, (0.5,), version)], by=name)
        print("did", label, flush=True)
    except LabelsBusy:
        time.sleep(generator.uniform(0, 0.02))
"""


def test_two_writers_and_kills_lose_and_double_nothing(run):
    generator, expected, unknown = random.Random(11), set(), set()
    rounds = 0
    while len(expected) < 1_000:
        writers = [start(WRITER, run, f"{rounds}{side}") for side in "ab"]
        for process in writers:
            assert process.stdout.readline() == "ready\n"
        time.sleep(generator.uniform(0.5, 4))
        for process in writers:
            os.kill(process.pid, signal.SIGKILL)
            said = [line.split() for line in process.stdout.read().splitlines() if line.count(" ") == 1]
            process.wait()
            did = {label for verb, label in said if verb == "did"}
            expected |= did
            unknown |= {label for verb, label in said if verb == "try"} - did
        rounds += 1
        found = [label.id for label in store_of(run).read().changed]
        assert len(found) == len(set(found)), "no label twice"
        assert expected <= set(found) <= expected | unknown, "no announced label is lost, none appears from nowhere"
        expected |= set(found)
        assert store_of(run).verify() == len(found)
    history = store_of(run).history()
    assert [edit.version for edit in history] == list(range(len(history), 0, -1)) and len(history) == len(expected)
    print(f"{len(expected)} edits, {2 * rounds} kills")
