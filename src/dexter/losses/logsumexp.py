"""The log-sum-exp of each row of a block, found online, and the softmax weights that follow from it."""

from __future__ import annotations

import torch
from torch import Tensor

from dexter.losses.streaming import NEGLIGIBLE_EXPONENT, Block, Tile, without_negligible


class LogSumExp:
    """One sweep over a block's tiles (and a reduction over ranks); `value_b` is the result.

    Each tile is shifted by the largest score of its row so far, exponentiated while it is in cache, and summed. Kept
    tiles stay exponentiated: what is missing to the final weights is one factor per row and tile.
    """

    def __init__(self, block: Block) -> None:
        largest_b = block.queries_bD.new_full((block.num_rows,), torch.finfo(torch.float32).min)
        sum_b = torch.zeros_like(largest_b)
        self._shifts: list[Tensor] = []
        for tile in block.sweep():
            shift_b = torch.maximum(largest_b, tile.scores.amax(1))
            sum_b.mul_((largest_b - shift_b).exp_()).add_(_exponentials(tile.scores, shift_b).sum(1))
            largest_b = shift_b
            self._shifts.append(shift_b)
        top_b = block.shard.max(largest_b)
        self.value_b = top_b + block.shard.sum(sum_b * (largest_b - top_b).exp()).log()
        """Finite for every row; about -3e38 for a row that has no score at all."""

    def weigh(self, tile: Tile, row_weights_b: Tensor) -> None:
        """Turn a tile, in place, into row_weight_i * exp(s_il - logsumexp_i)."""
        if tile.fresh:
            _exponentials(tile.scores, self.value_b)
        else:
            row_weights_b = row_weights_b * (self._shifts[tile.index] - self.value_b).exp()
        tile.scores.mul_(without_negligible(row_weights_b)[:, None])


def _exponentials(scores_bc: Tensor, shift_b: Tensor) -> Tensor:
    """exp(s - shift), in place."""
    return scores_bc.sub_(shift_b[:, None]).clamp_min_(NEGLIGIBLE_EXPONENT).exp_()
