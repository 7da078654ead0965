"""A score and its label as one integer: comparing two keys compares the scores and then prefers the lower label.

The score is in the upper half of an int64 in an order-preserving form, the complement of the label in the lower half.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LOWER_HALF = 0xFFFFFFFF
"""Mask of the bits of a key that hold the label."""


NO_KEY = -0x7F800001 << 32
"""Below every other key: minus infinity, and no column."""


def make_keys(scores: Tensor, columns: Tensor) -> Tensor:
    """Int64 keys that order by score and then by lower column."""
    # Adding zero turns -0 into 0. The bits of negative floats count downwards: flip them all but the sign.
    bits = (scores + 0.0).view(torch.int32)
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    return bits.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(LOWER_HALF - columns)


def columns_of(keys: Tensor) -> Tensor:
    """The columns in keys."""
    return LOWER_HALF - (keys & LOWER_HALF)


def scores_of(keys: Tensor) -> Tensor:
    """The scores in keys."""
    bits = (keys >> 32).to(torch.int32)
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)
    return bits.view(torch.float32)


def largest(keys: Tensor, k: int) -> Tensor:
    """The k largest keys of each row (all of them where there are fewer), in any order."""
    if keys.shape[1] <= k:
        return keys
    if keys.device.type != "cpu":
        return keys.topk(k, dim=1, sorted=False).values
    # NumPy's partition is several times faster on a CPU than torch.topk; it works in place on the tensor's memory.
    array = keys.numpy()
    array.partition(array.shape[1] - k, axis=1)
    return keys[:, -k:]


def kth_largest(values: Tensor, k: int) -> Tensor:
    """The k-th largest value of each row, as a column; minus infinity where a row has fewer."""
    if values.shape[1] < k:
        return values.new_full((len(values), 1), -torch.inf)
    if values.device.type != "cpu":
        return values.topk(k, dim=1).values[:, -1:]
    array = values.numpy().copy()
    array.partition(array.shape[1] - k, axis=1)
    return torch.from_numpy(array[:, -k, None].copy())


def places_reaching(values: Tensor, floors: Tensor) -> Tensor:
    """Where values are no less than the floor of their row, counted through the rows."""
    if values.device.type != "cpu":
        return (values >= floors).view(-1).nonzero().squeeze(1)
    # Twice to three times as fast as torch on a CPU.
    return torch.from_numpy(np.flatnonzero(values.numpy() >= floors.numpy()))
