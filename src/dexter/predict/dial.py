"""The frequency dial: how much a label's frequency counts in its score, from 0 (not at all) to 1 (as it was learned).

A learned label prior is an element of each label's vector; the dial is what queries hold against it. A model that
learned no prior can be given one that was not learned: the temperature times the logarithm of the label's count, which
is what a learned prior starts from. Such a model is as trained at 0, others at 1.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def frequency_prior(counts_L: NDArray[np.integer], temperature: float) -> Tensor:
    """What full frequency adds to each label's score, at most 0: the most common label is left as it is."""
    logarithms = np.log(np.asarray(counts_L, dtype=np.float64) + 0.5)
    return torch.from_numpy(temperature * (logarithms - logarithms.max())).float()


def with_element(vectors_ND: Tensor, element: Tensor | float) -> Tensor:
    """The vectors with one more element, the same for all or one for each."""
    column_N1 = torch.as_tensor(element, dtype=vectors_ND.dtype, device=vectors_ND.device).reshape(-1, 1)
    return torch.cat([vectors_ND, column_N1.expand(len(vectors_ND), 1)], dim=1)
