"""Random damage to the files of every format: one of our errors, or data that passed every check; never a crash."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from dexter.data import Dataset, Split
from dexter.data.formats import FORMATS, load_dataset, save_dataset
from dexter.errors import DataError


def sample() -> Dataset:
    weights = csr_matrix(np.array([[0.5, 1, 0], [0, 0, 0], [0, 2, 1]]))
    train = Split(
        texts=["one two", "none", 'three "x", y'], uids=["q1", "q2", "q3"], relevance=weights, filtered=weights
    )
    test = Split(texts=["five 語"], uids=["t1"], relevance=csr_matrix(np.array([[0, 0, 1]])))
    ids = ["http://x/a", "http://x/b", "http://x/c"]
    return Dataset(name="sample", label_ids=ids, label_texts=["alpha", "beta", "gamma"], train=train, test=test)


def flip(content: bytes, generator: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(generator.choice([1, 1, 2, 8])):
        position = generator.randrange(len(damaged))
        action = generator.randrange(4)
        if action == 0:
            damaged[position] ^= 1 << generator.randrange(8)
        elif action == 1:
            damaged[position] = generator.choice(b'\0\n\r\t",:;|{}[]<>-9\xff')
        elif action == 2 and len(damaged) > 1:
            del damaged[position : position + generator.randrange(1, 9)]
        else:
            damaged[position:position] = generator.choice([b"\n", b'"', b"9" * 20, b"nan", b"\xed\xa0\x80", b"\\ud800"])
        if not damaged:
            break
    return bytes(damaged)


def write_svmlight(folder: Path) -> None:
    folder.mkdir()
    (folder / "train.txt").write_text("2 4 2\n0 1:1 2:0.5\n0,1 2:1\n")
    (folder / "test.txt").write_text("1 4 2\n1 3:1\n")


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_random_damage_gives_our_errors_only(tmp_path: Path, name: str, compress: bool) -> None:
    folder = tmp_path / "data"
    if FORMATS[name].write is None:
        write_svmlight(folder)
    else:
        save_dataset(sample(), folder, format=name, gzip=compress)
    files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    files = {path: content for path, content in files.items() if path.name != "MANIFEST.json"}
    generator = random.Random(f"{name} {compress}")
    failures = 0
    for _ in range(200):
        path = generator.choice(list(files))
        path.write_bytes(flip(files[path], generator))
        try:
            load_dataset(folder, format=name, on_error=generator.choice(["fail", "skip"]))
        except DataError:
            failures += 1
        path.write_bytes(files[path])
    assert failures > 10


@pytest.mark.slow(minutes=2)
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "parquet"])
def test_a_hundred_thousand_fuzzed_lines_give_our_errors_only(tmp_path: Path, name: str) -> None:
    """Ten files of ten thousand damaged lines for each reader, in place of its training lines."""
    folder = tmp_path / "data"
    if FORMATS[name].write is None:
        write_svmlight(folder)
    else:
        save_dataset(sample(), folder, format=name)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "MANIFEST.json"]
    files = [path for path in files if path.suffix not in (".npz", ".npy")]
    generator = random.Random(name)
    for number in range(10):
        path = files[number % len(files)]
        content = path.read_bytes()
        lines = content.splitlines(keepends=True)
        path.write_bytes(lines[0] + b"".join(flip(generator.choice(lines), generator) for _ in range(10_000)))
        for on_error in ("fail", "skip"):
            with contextlib.suppress(DataError):
                load_dataset(folder, format=name, on_error=on_error)
        path.write_bytes(content)
