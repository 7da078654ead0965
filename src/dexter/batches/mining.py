"""Hard negatives: labels that score high for a query and are not among its positives.

`mine_hard_negatives` makes a shortlist per query at every refresh. `draw_hard_negatives` draws the few that a step
uses. Draws are a function of the seed, the query and the epoch: there is no state to save.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

import numpy as np

from dexter.errors import ModelError, UsageError

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix
    from torch import Tensor

    from dexter.config import BatchConfig
    from dexter.index import Index
    from dexter.processes import Processes

log = logging.getLogger("dexter")
APPROXIMATE_ABOVE = 200_000
"""Above this many labels hard negatives are found by an approximate index (CPU, extra `ann`)."""


def mine_hard_negatives(
    queries_ND: np.ndarray,
    labels_LD: np.ndarray | Tensor,
    relevance: csr_matrix,
    *,
    num_negatives: int,
    approximate_above: int = APPROXIMATE_ABOVE,
    label_ids: np.ndarray | None = None,
    processes: Processes | None = None,
) -> np.ndarray:
    """The highest-scoring labels of each query that are not relevant to it.

    Args:
        queries_ND: one vector per query.
        labels_LD: one vector per label; the search runs on the device they are on.
        relevance: queries x labels; stored entries are positives and never returned.
        num_negatives: shortlist length, |H|. With eta draws per step and a refresh every r epochs, eta * r lets every
            one be drawn once.
        approximate_above: labels above which an approximate index is built and searched, which finds nearly all of
            what exact search finds; where that is not possible or not worth it (no faiss, vectors on an accelerator,
            several processes), search is exact. 0: always exact.
        label_ids: where several processes hold the labels, the ids of those held here; `labels_LD` and the columns of
            `relevance` are then those of these labels.
        processes: the processes that hold the other labels.

    Returns:
        int32, queries x num_negatives, best first; -1 where there are fewer.
    """
    from dexter.index import search_shards

    is_single = processes is None or processes.size == 1
    has_many_labels = 0 < approximate_above < len(labels_LD)
    index = _approximate_index(queries_ND, labels_LD) if is_single and has_many_labels else None
    if index is not None:
        return index.search(queries_ND, num_negatives, exclude=relevance).ids.astype(np.int32)
    found = search_shards(
        queries_ND,
        labels_LD,
        num_negatives,
        label_ids=label_ids,
        processes=processes,
        exclude=relevance,
    )
    return found.ids.astype(np.int32)


def _approximate_index(queries_ND: np.ndarray, labels_LD: np.ndarray | Tensor) -> Index | None:
    """Build an approximate index, or return None, with a log line that says why, where that is not possible."""
    from dexter.index import build

    if not isinstance(labels_LD, np.ndarray):
        return None
    if importlib.util.find_spec("faiss") is None:
        log.info(
            "mining among %s labels is exact: pip install 'dexter-xmc[ann]' for quicker search", f"{len(labels_LD):,}"
        )
        return None
    try:
        return build("pq", labels_LD, queries_ND=queries_ND)
    except ModelError as error:
        log.warning("mining is exact: %s", error)
        return None


def shortlist_length(batch: BatchConfig, num_labels: int) -> int:
    """Labels kept per query at each mining; 0 without hard negatives."""
    return min(batch.shortlist or batch.hard_negatives * batch.refresh, num_labels)


def draw_hard_negatives(
    shortlist: np.ndarray, rows: np.ndarray, num_draws: int, *, epoch: int, refreshed_at: int, seed: int
) -> np.ndarray:
    """Draw `num_draws` hard negatives of each query from its shortlist, without replacement between refreshes.

    Each query's shortlist is put in a random order of its own, and the epochs since the refresh take successive parts
    of it. When fewer than `num_draws` are left, a new order begins. Empty places of short shortlists come last.

    Args:
        shortlist: queries x |H| label ids, -1 where there is none (see `mine_hard_negatives`).
        rows: the queries of the step.
        num_draws: labels per query, eta.
        epoch: the current epoch.
        refreshed_at: the epoch in which the shortlist was made.
        seed: of the orders.

    Returns:
        len(rows) x min(num_draws, |H|) label ids; -1 where there is none.
    """
    if epoch < refreshed_at or num_draws < 0:
        raise UsageError(
            f"hard negatives need epoch >= refreshed_at and num_draws >= 0: got {epoch}, {refreshed_at}, {num_draws}"
        )
    num_draws = min(num_draws, shortlist.shape[1])
    parts_per_order = shortlist.shape[1] // num_draws if num_draws else 1
    order_number, part = divmod(epoch - refreshed_at, parts_per_order)
    candidates = shortlist[rows]
    keys = _hash(seed, refreshed_at, order_number, rows=rows, width=shortlist.shape[1])
    keys[candidates < 0] = np.iinfo(np.uint64).max
    order = np.argsort(keys, axis=1, kind="stable")[:, part * num_draws : (part + 1) * num_draws]
    return np.take_along_axis(candidates, order, axis=1)


def _hash(*numbers: int, rows: np.ndarray, width: int) -> np.ndarray:
    """len(rows) x width random numbers that depend only on `numbers`, the row and the column."""
    start = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
    with np.errstate(over="ignore"):
        streams = _mix(np.asarray(rows, dtype=np.uint64) + start)
        return _mix(streams[:, None] + np.arange(width, dtype=np.uint64))


def _mix(values: np.ndarray) -> np.ndarray:
    """The output function of the SplitMix64 generator: neighbouring integers become unrelated ones."""
    values = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))
