"""Speed and memory of `dexter.metrics.score` beside napkinxc, in one run on the same predictions.

    python bench/metrics.py                 100k x 100 predictions, napkinxc on a sample of them
    python bench/metrics.py --rows 1000000  1M x 100

napkinxc loops over queries in Python, so it is timed on the first `--peer-rows` rows and scaled to all of them (its
time grows in proportion to the rows). Both compute P, R, nDCG, PSP and PSnDCG, napkinxc at 1 to 100, dexter at KS
with MRR, coverage and macro-F1 besides. napkinxc's time includes turning the arrays into the lists it loops over.
Peak memory is the growth of the process's high-water mark.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from dexter.metrics import score

KS = (1, 3, 5, 10, 100)


def make_case(rows: int, *, places: int, labels: int, positives: int) -> tuple[np.ndarray, csr_matrix]:
    """Return random rankings without repeats, and relevance of which they find a third."""
    rng = np.random.default_rng(0)
    # A row is an arithmetic progression modulo the number of labels: distinct ids without sorting 100M numbers.
    start = rng.integers(0, labels, (rows, 1))
    top_ids = np.empty((rows, places), dtype=np.int32)
    for place in range(places):
        top_ids[:, place] = (start[:, 0] + place * 7919) % labels
    relevant = rng.integers(0, labels, (rows, positives))
    relevant[:, ::3] = (start + rng.integers(0, places, (rows, len(range(0, positives, 3)))) * 7919) % labels
    offsets = np.arange(0, rows * positives + 1, positives)
    relevance = csr_matrix(
        (np.ones(rows * positives, dtype=np.float64), relevant.ravel(), offsets), shape=(rows, labels)
    )
    relevance.sum_duplicates()
    relevance.data[:] = 1.0
    return top_ids, relevance


def measure(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return seconds, growth of peak memory in MB, and the result."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, result


def score_with_napkinxc(top_ids: np.ndarray, relevance: csr_matrix, train: csr_matrix) -> dict[str, float]:
    from napkinxc import metrics as napkin

    truth = [relevance.indices[a:b].tolist() for a, b in zip(relevance.indptr[:-1], relevance.indptr[1:], strict=True)]
    rankings = top_ids.tolist()
    weights = napkin.Jain_et_al_inverse_propensity(train)
    k = max(KS)
    values = {
        "P": napkin.precision_at_k(truth, rankings, k=k),
        "R": napkin.recall_at_k(truth, rankings, k=k),
        "nDCG": napkin.ndcg_at_k(truth, rankings, k=k),
        "PSP": napkin.psprecision_at_k(truth, rankings, weights, k=k),
        "PSnDCG": napkin.psndcg_at_k(truth, rankings, weights, k=k),
    }
    return {f"{name}@{place}": 100 * array[place - 1] for name, array in values.items() for place in KS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--places", type=int, default=100)
    parser.add_argument("--labels", type=int, default=1_000_003)
    parser.add_argument("--positives", type=int, default=5)
    parser.add_argument("--peer-rows", type=int, default=5_000)
    arguments = parser.parse_args()

    top_ids, relevance = make_case(
        arguments.rows, places=arguments.places, labels=arguments.labels, positives=arguments.positives
    )
    inputs = (top_ids.nbytes + relevance.data.nbytes + relevance.indices.nbytes + relevance.indptr.nbytes) / 2**20
    ours, our_peak, _ = measure(lambda: score(top_ids, relevance, relevance, ks=KS))
    _print_row("dexter", len(top_ids), ours, f"+{our_peak:,.0f} MB over {inputs:,.0f} MB of input")

    few = min(arguments.peer_rows, len(top_ids))
    sample, sample_relevance = top_ids[:few], relevance[:few]
    theirs, _, their_values = measure(lambda: score_with_napkinxc(sample, sample_relevance, sample_relevance))
    same, _, our_values = measure(lambda: score(sample, sample_relevance, sample_relevance, ks=KS))
    scaled = theirs * len(top_ids) / few
    difference = max(abs(our_values[name] - value) for name, value in their_values.items())
    _print_row("napkinxc", few, theirs, f"scaled to {len(top_ids):,} rows: {scaled:,.0f} s")
    _print_row("dexter", few, same, f"largest difference of a metric {difference:.1e}")
    print(f"ratio     {theirs / same:.0f}x on the sample, {scaled / ours:.0f}x on all rows")


def _print_row(name: str, rows: int, seconds: float, note: str) -> None:
    print(f"{name:<9} {rows:>9,} rows {seconds:8.2f} s   {note}")


if __name__ == "__main__":
    main()
