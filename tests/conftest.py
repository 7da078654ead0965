"""A small world with an answer: every label is a pair of words, and a query that holds both words wants the label."""

import logging
import os
import subprocess
import time
from contextlib import contextmanager

# Some virtual machines announce AMX and end a process that uses it (`dexter.training.precision`).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix

from dexter.data import Dataset, Split

WORDS = [
    "river", "stone", "cloud", "amber", "violin", "copper", "falcon", "garden", "harbor", "island", "jungle", "kettle",
    "lantern", "meadow", "needle", "orchid", "pepper", "quartz", "ribbon", "saddle",
]  # fmt: skip
FILLER = ["the", "of", "and", "with", "about", "some", "very", "old", "new", "small"]


SCALE = float(os.environ.get("DEXTER_TEST_SCALE", "0.1"))
"""Share of the numbers in docs/reliability.md with which the slow tests repeat; 1 takes an hour or two."""


def scaled(count):
    """How often to repeat what would be repeated `count` times at full scale."""
    return max(1, round(SCALE * count))


def eventually(condition, seconds=100.0):
    """Wait for a condition, as long as the slowest machine might take."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never"
        time.sleep(0.02)


@contextmanager
def small_disk(folder, size):
    """A real file system of a size, such as "256k"."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)  # mapped files may still be open


def make_world(*, num_train=400, num_test=80, num_labels=37, seed=0):
    """A data set whose queries name their labels among filler words."""
    generator = np.random.default_rng(seed)
    pairs = [(a, b) for a in range(len(WORDS)) for b in range(a + 1, len(WORDS))]
    chosen = [pairs[index] for index in generator.permutation(len(pairs))[:num_labels]]
    label_texts = [f"{WORDS[a]} {WORDS[b]}" for a, b in chosen]

    def split(size, name):
        texts, rows, columns = [], [], []
        for row in range(size):
            labels = generator.choice(num_labels, size=generator.integers(1, 4), replace=False)
            words = [word for label in labels for word in label_texts[label].split()]
            words += list(generator.choice(FILLER, size=5))
            texts.append(" ".join(generator.permutation(words)))
            rows += [row] * len(labels)
            columns += list(labels)
        relevance = csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(size, num_labels))
        return Split(texts, [f"{name}-{row}" for row in range(size)], relevance)

    return Dataset(
        "world", label_texts, [f"L{i}" for i in range(num_labels)], split(num_train, "trn"), split(num_test, "tst")
    )


def all_verbs():
    """Every verb of the command line, subcommands as two words, from the command line itself."""
    import typer

    from dexter.cli.main import app

    for name, command in typer.main.get_command(app).commands.items():
        yield from (f"{name} {inner}" for inner in command.commands) if hasattr(command, "commands") else (name,)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    """Where to compute: each test that takes this runs on the CPU, and by `make test-gpu` on a CUDA device."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


@pytest.fixture(scope="session")
def world():
    return make_world()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Two threads on a shared machine are slower than one, and the arithmetic must not depend on the load."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def quiet_after():
    """The command line sets up logging for its process; the tests share theirs."""
    logger = logging.getLogger("dexter")
    handlers, level = logger.handlers[:], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


SMALL = {
    "encoder.pretrained": "none",
    "encoder.dimension": 32,
    "batch.size": 32,
    "train.learning_rate": 0.02,
    "train.threads": 1,
    "train.epochs": 2,
    "validation.fraction": 0.1,
}
"""Settings of a run that takes a second or two."""


@pytest.fixture(scope="session")
def trained(world, tmp_path_factory):
    """The folder of a finished run with one head, the encoder's: look, do not touch."""
    import dexter

    out = tmp_path_factory.mktemp("runs") / "world"
    settings = {**SMALL, "train.epochs": 5, "head.classifier": False, "encoder.normalize": True}
    dexter.train(world, recipe="dexter", out=out, overrides=settings)
    return out
