"""Decoupled softmax: each positive against the negatives only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dexter.losses.differentiable import check_temperature, differentiable
from dexter.losses.softmax import LogSumExp, Reduction, check_reduction, positive_weights
from dexter.losses.streaming import Block, Gradients, ScoreMatrix, Streaming, without_negligible
from dexter.positives import Positives


def decoupled_softmax(
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
    """Cross-entropy of each positive against the labels that are not positives of the query.

    With s_il = <q_i, y_l> / temperature, P_i the positives of query i and neg_i = logsumexp of s_il over the labels
    that are neither positive nor ignored::

        loss_i = - 1/|P_i|  sum_{p in P_i}  w_ip [ s_ip - logaddexp(s_ip, neg_i) ]

    and the loss is the mean over queries with a positive. A query without any negative has loss 0.

    Choose it if queries have several positives and many or all labels are in the pool (DEXML). Unlike in `softmax`, a
    positive is never pushed down because another one is high; with one positive per query the two are equal. It
    requires that the pool's relevant pairs are all given: a relevant label that is missing from `positives` counts as a
    negative. To train on a sample of the positives, pass the sample as `positives` and the rest as `ignore`.

    Args:
        queries_BD: Query embeddings; normalise them beforehand if cosines are meant.
        labels_LD: Label embeddings of the pool; with several processes, the part that this one holds.
        positives: Relevant pairs; weights, if any, multiply each pair's term.
        temperature: Divides the products.
        reduction: `pal-n` divides by |P_i|, which ranks for recall; `pal` does not, which ranks for precision.
        ignore: Pairs that are neither positive nor negative.
        negative_offsets: One number per label, added to its score where it is a negative. With minus the log of the
            probability that the label is in the pool, exp(neg_i) is an unbiased estimate of the sum over all labels.
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
            mask_positives=True,
            offsets_L=negative_offsets,
        )
        total = matrix.queries_BD.new_zeros(())
        for block in matrix.blocks():
            total += _solve_block(block, reduction, scale=1.0 / matrix.averaged_over)
        return total

    return differentiable(solve, queries_BD, labels_LD, positives, ignore=ignore)


def _solve_block(block: Block, reduction: Reduction, *, scale: float) -> Tensor:
    """Return `scale` times the sum of a block's losses and push its gradients."""
    negatives = LogSumExp(block)
    share = scale * positive_weights(block, reduction)
    excess = negatives.value_b[block.rows_P] - block.scores_P
    pull = share * torch.sigmoid(excess)
    row_loss, row_weight = block.sums_by_row(share * softplus(excess), pull).unbind()
    if block.wants_gradients:
        entries = -without_negligible(pull)
        for tile in block.sweep():
            negatives.weigh(tile, row_weight)
            block.place_pairs(tile, entries)
            block.push(tile)
    return row_loss.sum()
