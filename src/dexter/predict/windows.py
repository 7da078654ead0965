"""Long texts: those beyond the encoder's length are cut into windows, which are encoded one by one and pooled.

    first   only the beginning is read, as in training
    mean    the mean of the windows' vectors
    max     each label's best score among the windows

Which one is chosen on validation (`dexter.training.tuning`); where no validation text is long it is `first`, and costs
nothing. The mean of the windows' scores is not offered: it gave no more P@5 than the mean of their vectors.

Shapes: N texts, W windows of all texts, D dimensions, K places.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dexter.index import Index
from dexter.model.model import Model
from dexter.predict.rank import RankingChoice, Voters, find_voters, rank
from dexter.types import TopK

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


class EncodedTexts(NamedTuple):
    """Texts, or the windows of texts, as they are ranked."""

    representations_WD: NDArray[np.float32]
    voters: Voters
    starts: NDArray[np.int64] | None = None
    """The row of the first window of each text, and the end; None: a row is a text."""


class Windows(NamedTuple):
    """The windows of texts of which at least one has several."""

    texts: list[str]
    starts: NDArray[np.int64]
    """Where those of each text begin, and the end of the last."""
    representations_WD: NDArray[np.float32]


def encode_texts(
    model: Model, texts: Sequence[str], choice: RankingChoice, *, windows: Windows | None = None
) -> EncodedTexts:
    """Encode texts, long ones as the choice says, and find who votes on them; `windows` if they are encoded already."""
    if choice.windows != "first" and windows is None:
        windows = encode_windows(model, texts)
    if choice.windows == "first" or windows is None:
        representations_ND = model.encode_queries(texts)
        return EncodedTexts(representations_ND, find_voters(model, texts, representations_ND, choice))
    flat, starts, representations_WD = windows
    if choice.windows == "max":
        return EncodedTexts(representations_WD, find_voters(model, flat, representations_WD, choice), starts)
    mean_ND: NDArray[np.float32] = np.add.reduceat(representations_WD, starts[:-1])
    mean_ND /= np.diff(starts)[:, None]
    return EncodedTexts(mean_ND, find_voters(model, texts, mean_ND, choice))


def encode_windows(model: Model, texts: Sequence[str]) -> Windows | None:
    """Cut texts into windows that the encoder reads whole, and encode them; None where no text has more than one."""
    windows = [model.encoder.split_query(text) for text in texts]
    if not any(len(each) > 1 for each in windows):
        return None
    flat, starts = [window for each in windows for window in each], np.cumsum([0, *map(len, windows)])
    return Windows(flat, starts, model.encode_queries(flat))


def rank_texts(
    model: Model,
    index: Index,
    encoded: EncodedTexts,
    choice: RankingChoice,
    k: int,
    *,
    exclude: csr_matrix | None = None,
    allowed: NDArray[np.int64] | None = None,
) -> TopK:
    """Return the k best labels of each text, as `rank` does."""
    representations_WD, voters, starts = encoded
    if starts is None:
        return rank(model, index, representations_WD, choice, k, voters=voters, exclude=exclude, allowed=allowed)
    owners_W = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    left_out = None if exclude is None else exclude[owners_W]
    found = rank(model, index, representations_WD, choice, k, voters=voters, exclude=left_out, allowed=allowed)
    # The best label of a text is the best of one of its windows, and so on: k of each are enough.
    shape = len(starts) - 1, found.ids.shape[1]
    best = TopK(np.full(shape, -1, np.int64), np.full(shape, -np.inf, np.float32))
    for row, (start, end) in enumerate(pairwise(starts.tolist())):
        ids, scores = found.ids[start:end].ravel(), found.scores[start:end].ravel()
        order = np.lexsort((ids, -scores))
        _, first = np.unique(ids[order], return_index=True)
        kept = order[np.sort(first)][: found.ids.shape[1]]
        best.ids[row, : len(kept)], best.scores[row, : len(kept)] = ids[kept], scores[kept]
    return best
