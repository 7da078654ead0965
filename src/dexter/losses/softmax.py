"""Softmax over the pool (InfoNCE with several positives)."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from dexter.errors import UsageError
from dexter.losses.differentiable import check_temperature, differentiable
from dexter.losses.streaming import (
    NEGLIGIBLE_EXPONENT,
    Block,
    Gradients,
    ScoreMatrix,
    Streaming,
    Tile,
    without_negligible,
)
from dexter.positives import Positives

Reduction: TypeAlias = Literal["pal-n", "pal"]


def softmax(
    queries_BD: Tensor,
    labels_LD: Tensor,
    positives: Positives,
    *,
    temperature: float = 0.05,
    reduction: Reduction = "pal-n",
    ignore: Positives | None = None,
    negative_offsets: Tensor | None = None,
    streaming: Streaming | None = None,
) -> Tensor:
    """Cross-entropy of each positive against all labels of the pool, other positives included.

    With s_il = <q_i, y_l> / temperature and P_i the positives of query i::

        loss_i = - 1/|P_i|  sum_{p in P_i}  w_ip [ s_ip - logsumexp_l s_il ]

    and the loss is the mean over queries with a positive.

    Choose it if a query has one positive in the pool, or as the baseline that DPR and ANCE train with. Positives of the
    same query compete with each other: at the minimum they share the probability equally. `decoupled_softmax` removes
    that competition; `psl` adds the direction from labels to queries, and with `balance=1` equals this loss.

    Args:
        queries_BD: Query embeddings; normalise them beforehand if cosines are meant.
        labels_LD: Label embeddings of the pool; with several processes, the part that this one holds.
        positives: Relevant pairs; weights, if any, multiply each pair's term.
        temperature: Divides the products.
        reduction: `pal-n` divides by |P_i|; `pal` does not, so that queries with many positives count more.
        ignore: Pairs that are neither positive nor in the sum over labels.
        negative_offsets: One number per label, added to its score where it is not a positive. With minus the log of the
            probability that the label is in the pool, the sum is an unbiased estimate of that over all labels.
        streaming: Mode, memory budget and processes.

    Returns:
        A scalar, differentiable by both embeddings.
    """
    check_temperature(temperature)
    check_reduction(reduction)
    settings = streaming or Streaming()

    def solve(queries: Tensor, labels: Tensor, gradients: Gradients) -> Tensor:
        matrix = ScoreMatrix(
            queries,
            labels,
            positives,
            gradients,
            multiplier=1.0 / temperature,
            streaming=settings,
            ignore=ignore,
            offsets_L=negative_offsets,
        )
        return solve_softmax(matrix, reduction=reduction)

    return differentiable(solve, queries_BD, labels_LD, positives, ignore=ignore)


class LogSumExp:
    """The log-sum-exp of each row of a block, from one sweep over its tiles and a reduction over processes.

    The scores of a tile are shifted by the largest score of their row so far, exponentiated while in cache, and summed.
    Kept tiles stay exponentiated: `weigh` then only multiplies them by one factor per row and tile.
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
        top_b = block.processes.max(largest_b)
        self.value_b = top_b + block.processes.sum(sum_b * (largest_b - top_b).exp()).log()
        """Finite for every row; about -3e38 for a row without any score."""

    def weigh(self, tile: Tile, row_weights_b: Tensor) -> None:
        """Turn a tile, in place, into row_weight_i * exp(s_il - logsumexp_i)."""
        if tile.fresh:
            _exponentials(tile.scores, self.value_b)
        else:
            row_weights_b = row_weights_b * (self._shifts[tile.index] - self.value_b).exp()
        tile.scores.mul_(without_negligible(row_weights_b)[:, None])


def _exponentials(scores_bc: Tensor, shift_b: Tensor) -> Tensor:
    """Replace scores by exp(score - shift), in place."""
    return scores_bc.sub_(shift_b[:, None]).clamp_min_(NEGLIGIBLE_EXPONENT).exp_()


def solve_softmax(matrix: ScoreMatrix, *, reduction: Reduction, factor: float = 1.0) -> Tensor:
    """Return `factor` times the mean of the rows' losses and add its gradients to the matrix's sums."""
    total = matrix.queries_BD.new_zeros(())
    for block in matrix.blocks():
        total += _solve_block(block, reduction=reduction, scale=factor / matrix.averaged_over)
    return total


def _solve_block(block: Block, *, reduction: Reduction, scale: float) -> Tensor:
    """Return `scale` times the sum of a block's losses and push its gradients."""
    normaliser = LogSumExp(block)
    share = scale * positive_weights(block, reduction)
    losses = share * (normaliser.value_b[block.rows_P] - block.scores_P)
    row_loss, row_weight = block.sums_by_row(losses, share).unbind()
    if block.wants_gradients:
        for tile in block.sweep():
            normaliser.weigh(tile, row_weight)
            block.push(tile)
        block.push_pairs(-share)
    return row_loss.sum()


def positive_weights(block: Block, reduction: Reduction) -> Tensor:
    """Return the weight of each positive pair of a block in the loss of its query."""
    return block.weights_P / block.counts_b[block.rows_P] if reduction == "pal-n" else block.weights_P


def check_reduction(reduction: str) -> None:
    """Raise unless the reduction is a known name."""
    if reduction not in ("pal-n", "pal"):
        raise UsageError(f'reduction must be "pal-n" (mean over positives) or "pal" (sum), got {reduction!r}')
