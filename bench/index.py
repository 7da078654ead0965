"""Indexes beside plain faiss and torch, over real label vectors: build time, queries per second, recall@100, memory.

    python bench/index.py --threads 1                     131,072 and 1,000,000 labels
    python bench/index.py --threads 2 --sizes 131072
    python bench/index.py --vectors vectors.npz           keep the encoded vectors there, and take them from there

The vectors are what MiniLM makes of the label texts of three data sets, and the queries what it makes of test queries.
A larger number of labels repeats them with noise of half their length, scaled back to length one. Searches take turns
within one run; rates are of the median turn, per second of processor time and per second of wall time. Memory is what
the process grew by while an index was built: those of dexter share the label vectors with the model and do not count
them, those of faiss have their own copy. The OpenBLAS in faiss's wheel may not know a new CPU; the script then sets
OPENBLAS_CORETYPE=SkylakeX where there is AVX-512, for a fair comparison.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

K = 100
SETS = ("debian-related", "moby-thesaurus", "npm-deps")
NUM_REAL = 131_072
Search = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Maps queries to ids and scores."""


@dataclass
class Contestant:
    """An index that was built, and the times of its searches."""

    name: str
    build_seconds: float
    megabytes: float
    search: Search
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


def real_vectors(cache: Path | None, num_queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the vectors of labels and of queries."""
    if cache is not None and cache.exists():
        with np.load(cache) as stored:
            return stored["labels"], stored["queries"][:num_queries]
    from dexter.config import EncoderConfig
    from dexter.encoders import build_encoder, embed
    from shared_data import load

    sets = [load(name) for name in SETS]
    texts = list(dict.fromkeys(text for dataset in sets for text in dataset.label_texts))
    texts = [texts[row] for row in np.random.default_rng(0).permutation(len(texts))[:NUM_REAL]]
    query_texts = [text for dataset in sets if dataset.test is not None for text in dataset.test.texts[:400]][:1024]
    encoder = build_encoder(EncoderConfig(kind="transformer", max_length_query=64), [], [])
    labels, queries = (
        embed(encoder, encoder.tokenize(values, side=side), progress=True).numpy()
        for values, side in ((texts, "label"), (query_texts, "query"))
    )
    if cache is not None:
        np.savez(cache, labels=labels, queries=queries)
    return labels, queries[:num_queries]


def enlarge(labels: np.ndarray, size: int) -> np.ndarray:
    """Return the first `size` labels; where there are fewer, repeat them with noise."""
    if size <= len(labels):
        return np.ascontiguousarray(labels[:size])
    rng = np.random.default_rng(1)
    larger = np.empty((size, labels.shape[1]), dtype=np.float32)
    for start in range(0, size, len(labels)):
        part = labels[: min(len(labels), size - start)]
        noise = rng.standard_normal(part.shape, dtype=np.float32) / (2 * np.sqrt(part.shape[1]))
        repeated = part + noise if start else part
        larger[start : start + len(part)] = repeated / np.linalg.norm(repeated, axis=1, keepdims=True)
    return larger


def resident_megabytes() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def built(name: str, make: Callable[[], Search]) -> Contestant:
    before, started = resident_megabytes(), time.process_time()
    search = make()
    return Contestant(name, time.process_time() - started, resident_megabytes() - before, search)


def faiss_search(index: Any) -> Search:
    def search(queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scores, ids = index.search(queries, K)
        return ids, scores

    return search


def dexter_index(backend: str, labels: np.ndarray, sample: np.ndarray) -> Callable[[], Search]:

    from dexter.index import build

    def make() -> Search:
        index = build(backend, labels, queries_ND=sample)
        return lambda queries: tuple(index.search(queries, K))

    return make


def plain_faiss(recipe: str, labels: np.ndarray, k_factor: int = 0, breadth: int = 0) -> Callable[[], Search]:
    import faiss

    def make() -> Search:
        index = faiss.index_factory(labels.shape[1], recipe, faiss.METRIC_INNER_PRODUCT)
        index.train(labels)
        index.add(labels)
        if k_factor:
            index.k_factor = k_factor
        if breadth:
            index.hnsw.efSearch = breadth
        return faiss_search(index)

    return make


def torch_topk(labels: np.ndarray) -> Callable[[], Search]:
    import torch

    label_tensor = torch.from_numpy(labels)

    def search(queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = [torch.topk(part @ label_tensor.T, K) for part in torch.from_numpy(queries).split(64)]
        return np.concatenate([top.indices for top in found]), np.concatenate([top.values for top in found])

    return lambda: search


def contestants(labels: np.ndarray, sample: np.ndarray, *, graphs: bool) -> list[Contestant]:
    codes = f"PQ{labels.shape[1] // 2}x4fs,RFlat"
    makers = {
        "dexter exact": dexter_index("exact", labels, sample),
        "faiss Flat": plain_faiss("Flat", labels),
        "torch.topk": torch_topk(labels),
        "dexter pq": dexter_index("pq", labels, sample),
        f"faiss {codes} k_factor 4": plain_faiss(codes, labels, k_factor=4),
        f"faiss {codes} k_factor 8": plain_faiss(codes, labels, k_factor=8),
    }
    if graphs:
        makers |= {
            "dexter hnsw": dexter_index("hnsw", labels, sample),
            "faiss HNSW32,SQ8 efSearch 400": plain_faiss("HNSW32,SQ8", labels, breadth=400),
        }
    return [built(name, make) for name, make in makers.items()]


def bench(labels: np.ndarray, queries: np.ndarray, arguments: argparse.Namespace) -> None:
    """Build everything, search in turns, print a table."""
    # Recall is tuned on one half of the queries and reported on the other.
    sample, test_queries = queries[::2], queries[1::2]
    entries = contestants(labels, sample, graphs=len(labels) <= arguments.graphs_up_to)
    wanted = next(entry for entry in entries if entry.name == "faiss Flat").search(test_queries)[1]
    recalls = {}
    for _ in range(arguments.turns):
        for entry in entries:
            wall, cpu = time.perf_counter(), time.process_time()
            found = entry.search(test_queries)[1]
            entry.wall.append(time.perf_counter() - wall)
            entry.cpu.append(time.process_time() - cpu)
            recalls[entry.name] = float((found >= wanted[:, -1:] - 1e-5).mean())
    exact = statistics.median(entries[0].cpu)
    print(
        f"\n{len(labels):,} labels x {labels.shape[1]}, {len(test_queries)} queries, k = {K}, "
        f"{arguments.threads} thread(s)"
    )
    print("| index | build CPU s | MB | recall@100 | q/s CPU | q/s wall | x dexter exact (CPU) |")
    print("|---|---|---|---|---|---|---|")
    for entry in entries:
        cpu, wall = statistics.median(entry.cpu), statistics.median(entry.wall)
        print(
            f"| {entry.name} | {entry.build_seconds:.1f} | {entry.megabytes:,.0f} | {recalls[entry.name]:.4f} | "
            f"{len(test_queries) / cpu:,.0f} | {len(test_queries) / wall:,.0f} | {exact / cpu:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="+", default=[NUM_REAL, 1_000_000])
    parser.add_argument("--queries", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--vectors", type=Path)
    parser.add_argument("--graphs-up-to", type=int, default=NUM_REAL, help="labels up to which HNSW is built")
    parser.add_argument("--as-installed", action="store_true", help="leave faiss's OpenBLAS to find out the CPU")
    arguments = parser.parse_args()
    # Before faiss and torch are imported: their thread pools read it once.
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(arguments.threads)
    if not arguments.as_installed and "avx512f" in Path("/proc/cpuinfo").read_text():
        os.environ.setdefault("OPENBLAS_CORETYPE", "SkylakeX")
    labels, queries = real_vectors(arguments.vectors, arguments.queries)
    for size in arguments.sizes:
        bench(enlarge(labels, size), queries, arguments)


if __name__ == "__main__":
    main()
