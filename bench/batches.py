"""Speed of exact search, of clustering and of batch making.

    python bench/batches.py                    everything, one thread
    python bench/batches.py --threads 2
    python bench/batches.py --only search      or clusters, or pools

Search is timed beside faiss IndexFlatIP and plain torch.topk over full rows, in turns within one run; the ratios are
of the medians of the turns, in wall time and in CPU time (which other processes on the machine disturb less).
The OpenBLAS in faiss's wheel may not know a new CPU and then runs slow kernels (OPENBLAS_VERBOSE=2 prints its choice):
on a CPU with AVX-512, set OPENBLAS_CORETYPE=SkylakeX for a fair comparison.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np


class Seconds(NamedTuple):
    """Time of one call."""

    wall: float
    cpu: float


def measure(work: Callable[[], Any]) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def median(times: list[Seconds]) -> Seconds:
    return Seconds(*(statistics.median(values) for values in zip(*times, strict=True)))


def unit_vectors(num_points: int, dimensions: int, *, num_centres: int, seed: int) -> np.ndarray:
    """Vectors around random centres, of length 1."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((num_centres, dimensions), dtype=np.float32)
    vectors = centres[rng.integers(0, num_centres, num_points)]
    vectors += 0.7 * rng.standard_normal(vectors.shape, dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def bench_search(arguments: argparse.Namespace) -> None:
    import faiss
    import torch

    from dexter.index import search

    labels = unit_vectors(arguments.labels, 384, num_centres=20_000, seed=0)
    queries = unit_vectors(arguments.queries, 384, num_centres=20_000, seed=0)
    k = 100
    flat = faiss.IndexFlatIP(384)
    flat.add(labels)
    query_tensor, label_tensor = torch.from_numpy(queries), torch.from_numpy(labels)
    contestants: dict[str, Callable[[], Any]] = {
        "dexter search": lambda: search(queries, labels, k),
        "faiss Flat": lambda: flat.search(queries, k),
        "torch.topk": lambda: [torch.topk(part @ label_tensor.T, k) for part in query_tensor.split(64)],
        "product only": lambda: [
            part @ rows.T for part in query_tensor.split(512) for rows in label_tensor.split(8192)
        ],
    }
    times: dict[str, list[Seconds]] = {name: [] for name in contestants}
    for _ in range(arguments.turns):
        for name, work in contestants.items():
            times[name].append(measure(work))
    print(f"search: {len(queries):,} queries x {len(labels):,} labels x 384, k = {k}, {arguments.threads} thread(s)")
    ours = median(times["dexter search"])
    for name in contestants:
        theirs = median(times[name])
        print(
            f"  {name:<14} {len(queries) / theirs.wall:7.0f} q/s wall {len(queries) / theirs.cpu:7.0f} q/s cpu   "
            f"dexter is {theirs.wall / ours.wall:.2f}x wall, {theirs.cpu / ours.cpu:.2f}x cpu"
        )
    found, (scores, ids) = search(queries, labels, k), flat.search(queries, k)
    difference = np.abs(found.scores - scores).max()
    print(f"  same ids as faiss {100 * (found.ids == ids).mean():.3f}%, largest score difference {difference:.1e}")


def bench_clusters(arguments: argparse.Namespace) -> None:
    from dexter.batches.clusters import balanced_clusters

    vectors = unit_vectors(arguments.points, 128, num_centres=5_000, seed=0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for leaf_size in (1024, 32):
        leaves: list[np.ndarray] = []
        spent = measure(lambda size=leaf_size, out=leaves: out.extend(balanced_clusters(vectors, size, seed=0)))
        tightness = np.mean([np.linalg.norm(vectors[leaf].mean(axis=0)) for leaf in leaves[:256]])
        growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(
            f"clusters: {len(vectors):,} x 128 in {len(leaves):,} of at most {leaf_size}: {spent.wall:.1f} s wall, "
            f"{spent.cpu:.1f} s cpu, length of a cluster's mean {tightness:.2f}, peak memory +{growth:,.0f} MB"
        )


def bench_pools(arguments: argparse.Namespace) -> None:
    from scipy.sparse import csr_matrix

    from dexter.batches.mining import draw_hard_negatives
    from dexter.batches.pool import (
        all_labels,
        draw_positives,
        in_batch,
        log_inclusion_probability,
        sampled,
        with_extra_positives,
    )

    rng = np.random.default_rng(0)
    num_queries, num_labels, batch_size = 200_000, 1_300_000, 1024
    per_query = rng.geometric(1 / 8, num_queries)
    # A heavy head: label ids by a power law.
    ids = (num_labels * rng.random(per_query.sum()) ** 3).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(per_query)])
    relevance = csr_matrix((np.ones(len(ids), dtype=np.float32), ids, offsets), shape=(num_queries, num_labels))
    relevance.sum_duplicates()
    relevance.data[:] = 1
    shortlist = rng.integers(0, num_labels, (num_queries, 30), dtype=np.int32)
    counts = np.bincount(relevance.indices, minlength=num_labels)
    log_p = log_inclusion_probability(counts, num_queries=num_queries, batch_size=batch_size, num_random=4000)
    rows = rng.permutation(num_queries)[:batch_size]

    def with_hard_negatives(extra: int = 0) -> Any:
        hard = draw_hard_negatives(shortlist, rows, 6, epoch=2, refreshed_at=0, seed=0)
        pool = sampled(relevance, rows, hard, rng=rng, max_positives=3, cap=5000)
        return with_extra_positives(pool, relevance, rows, rng=rng, num_extra=extra) if extra else pool

    pools: dict[str, Callable[[], Any]] = {
        "all labels": partial(all_labels, relevance, rows),
        "all labels, 1 positive": lambda: draw_positives(all_labels(relevance, rows), 1, rng=rng),
        "in-batch": partial(in_batch, relevance, rows, rng=rng),
        "in-batch, 1 positive": partial(in_batch, relevance, rows, rng=rng, sample_positives=1),
        "in-batch + 4,000 random": partial(in_batch, relevance, rows, rng=rng, num_random=4000, log_inclusion=log_p),
        "3 positives + 6 hard, capped": with_hard_negatives,
        "the same + 6 for classifier": partial(with_hard_negatives, 6),
    }
    print(
        f"pools: {batch_size:,} queries of {num_queries:,} with {per_query.mean():.0f} positives, {num_labels:,} labels"
    )
    for name, work in pools.items():
        work()
        spent = median([measure(work) for _ in range(30)])
        pool = work()
        print(
            f"  {name:<29} {1000 * spent.wall:6.2f} ms wall {1000 * spent.cpu:6.2f} ms cpu   "
            f"{pool.num_labels:,} labels, {len(pool.positives):,} positives"
        )


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "search": bench_search,
    "clusters": bench_clusters,
    "pools": bench_pools,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=list(PARTS))
    parser.add_argument("--labels", type=int, default=131_072)
    parser.add_argument("--queries", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--points", type=int, default=1_000_000)
    arguments = parser.parse_args()
    # Before faiss and torch are imported: their thread pools read it once.
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(arguments.threads)
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            part(arguments)


if __name__ == "__main__":
    main()
