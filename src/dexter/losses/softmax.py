"""Softmax over the pool (InfoNCE with several positives)."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from dexter.errors import UsageError
from dexter.losses.differentiable import differentiable
from dexter.losses.logsumexp import LogSumExp
from dexter.losses.settings import Streaming
from dexter.losses.streaming import Block, Gradients, Problem
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

    Choose it when a query has one positive in the pool, or as the baseline that DPR and ANCE train with. With several
    positives per query they compete with each other: the best the loss can do is to share the probability among them.
    `decoupled_softmax` removes that competition; `psl` adds the direction from labels to queries.

    Args:
        queries_BD: Query embeddings; normalise them beforehand if cosines are meant.
        labels_LD: Label embeddings of the pool (of this rank's part of it).
        positives: Relevant pairs; weights, if any, multiply each pair's term.
        temperature: Divides the products.
        reduction: `pal-n` divides by |P_i|; `pal` does not, so that queries with many positives count more.
        ignore: Pairs that are neither positive nor in the sum over labels.
        negative_offsets: One number per label that is added to its score where it is no positive. With minus the log of
            the chance that the label is in the pool, the sum over labels estimates that over all labels without bias.
        streaming: Mode, memory budget, shard.

    Returns:
        A scalar, differentiable by both embeddings.
    """
    check_temperature(temperature)
    check_reduction(reduction)
    settings = streaming or Streaming()

    def solve(queries: Tensor, labels: Tensor, gradients: Gradients) -> Tensor:
        problem = Problem(
            queries,
            labels,
            positives,
            gradients,
            multiplier=1.0 / temperature,
            streaming=settings,
            ignore=ignore,
            offsets_L=negative_offsets,
        )
        return solve_softmax(problem, reduction=reduction)

    return differentiable(solve, queries_BD, labels_LD, positives, ignore=ignore)


def solve_softmax(problem: Problem, *, reduction: Reduction, factor: float = 1.0) -> Tensor:
    """`factor` times the mean of the rows' losses, with its gradients pushed."""
    total = problem.queries_BD.new_zeros(())
    for block in problem.blocks():
        total += _solve_block(block, reduction=reduction, scale=factor / problem.averaged_over)
    return total


def _solve_block(block: Block, *, reduction: Reduction, scale: float) -> Tensor:
    """`scale` times the sum of a block's losses."""
    pairs = block.pairs
    normaliser = LogSumExp(block)
    share = scale * positive_weights(block, reduction)
    losses = share * (normaliser.value_b[pairs.rows] - pairs.scores)
    row_loss, row_weight = block.sums_by_row(losses, share).unbind()
    if block.wants_gradients:
        for tile in block.sweep():
            normaliser.weigh(tile, row_weight)
            block.push(tile)
        block.push_pairs(-share)
    return row_loss.sum()


def positive_weights(block: Block, reduction: Reduction) -> Tensor:
    """What each positive of a block counts."""
    weights = block.pairs.weights
    return weights / block.counts_b[block.pairs.rows] if reduction == "pal-n" else weights


def check_temperature(temperature: float) -> None:
    """Raise unless the temperature is a positive number."""
    if not 0.0 < temperature < float("inf"):
        raise UsageError(
            f"temperature must be above 0, got {temperature}: scores are divided by it (0.05 multiplies by 20)"
        )


def check_reduction(reduction: str) -> None:
    """Raise unless the reduction is a known name."""
    if reduction not in ("pal-n", "pal"):
        raise UsageError(f'reduction must be "pal-n" (mean over positives) or "pal" (sum), got {reduction!r}')
