"""Exact search on an accelerator, for training: the labels are a tensor there. On a CPU `dexter.index.exact` is faster.

Shapes: N queries, L labels, D dimensions, B queries and C labels in a tile, K places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dexter.errors import ModelError
from dexter.index.exact import (
    LOWER_HALF,
    NOT_A_NUMBER,
    ROWS,
    ExcludedPairs,
    nothing_found,
    slices,
    write_found,
)
from dexter.types import TopK

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

COLUMNS = 8_192
"""Labels in a tile: starting a kernel takes as long as the product of a small one."""


@torch.inference_mode()
def search_on_device(
    queries_ND: NDArray[Any],
    labels_LD: Tensor,
    k: int,
    *,
    exclude: csr_matrix | None = None,
    ceiling: NDArray[np.float32] | None = None,
) -> TopK:
    """Find the k best labels of each query; arguments and result as those of `dexter.index.search`."""
    device, found = labels_LD.device, nothing_found(len(queries_ND), k)
    for rows in slices(len(queries_ND), ROWS):
        queries_BD = torch.as_tensor(queries_ND[rows]).to(device, torch.float32)
        excluded = None if exclude is None else ExcludedPairs.of(exclude[rows])
        best_BK = torch.empty(len(queries_BD), 0, dtype=torch.int64, device=device)
        for columns in slices(len(labels_LD), COLUMNS):
            scores_BC = queries_BD @ labels_LD[columns].to(torch.float32).T
            if bool(scores_BC.isnan().any()):
                raise ModelError(NOT_A_NUMBER)
            if excluded is not None:
                places = (torch.from_numpy(each).to(device) for each in excluded.within(columns))
                scores_BC[tuple(places)] = -torch.inf
            if ceiling is not None:
                limits_B1 = torch.as_tensor(ceiling[rows, None]).to(scores_BC)
                scores_BC.masked_fill_(scores_BC > limits_B1, -torch.inf)
            keys_BC = _make_keys(scores_BC, torch.arange(columns.start, columns.stop, device=device))
            keys_BK = torch.cat([best_BK, keys_BC.topk(min(k, keys_BC.shape[1]), dim=1).values], dim=1)
            best_BK = keys_BK.topk(min(k, keys_BK.shape[1]), dim=1).values
        write_found(found, rows, best_BK.cpu().numpy())
    return found


def _make_keys(scores_BC: Tensor, columns_C: Tensor) -> Tensor:
    """Return keys as `dexter.index.exact.make_keys` does."""
    bits = (scores_BC + 0.0).view(torch.int32)
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    return bits.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(LOWER_HALF - columns_C)
