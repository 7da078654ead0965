"""How good a model is now: embed, search, score the validation queries. The same search that serves."""

from __future__ import annotations

import re

from scipy.sparse import csr_matrix
from torch import Tensor

from dexter.data import Split
from dexter.errors import UsageError
from dexter.index.exact import search
from dexter.metrics import overfetch, remove_filtered, score

_METRIC = re.compile(r"(P|R|nDCG|PSP|PSnDCG|MRR)@([1-9][0-9]*)")


def cut_off(metric: str) -> int:
    """The k of a metric's name, such as 5 of `PSP@5`."""
    match = _METRIC.fullmatch(metric)
    if match is None:
        raise UsageError(
            f"validation.metric {metric!r}: expected P, R, nDCG, PSP, PSnDCG or MRR at a number, such as P@1"
        )
    return int(match[2])


def validate(
    queries_ND: Tensor, labels_LD: Tensor, split: Split, train_relevance: csr_matrix, *, metric: str
) -> dict[str, float]:
    """Metrics at 1, 3, 5 and at the cut-off of the metric that decides."""
    ks = sorted({1, 3, 5, cut_off(metric)} & set(range(1, split.num_labels + 1)))
    extra = overfetch(split.filtered) if split.filtered is not None else 0
    found = search(queries_ND, labels_LD, min(max(ks) + extra, split.num_labels))
    top_ids = found.ids
    if split.filtered is not None:
        top_ids = remove_filtered(found.ids, found.scores, split.filtered, max(ks)).ids
    return score(top_ids, split.relevance, train_relevance, ks=ks)
