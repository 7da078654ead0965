"""Triplet loss with a margin over the hardest negatives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dexter.errors import UsageError
from dexter.losses.differentiable import check_inputs
from dexter.losses.settings import Shard, Streaming
from dexter.losses.streaming import Gradients, Problem, widened
from dexter.positives import Positives
from dexter.processes import stack

NEGATIVE_TEMPERATURE = 0.1
"""Sharpness of the weights among violating negatives, as NGAME sets it."""


def triplet(
    queries_BD: Tensor,
    labels_LD: Tensor,
    positives: Positives,
    *,
    margin: float = 0.3,
    num_negatives: int = 10,
    ignore: Positives | None = None,
    streaming: Streaming | None = None,
) -> Tensor:
    """Hinge between each positive and the hardest negatives of its query, as NGAME trains.

    Scores are plain products s_il = <q_i, y_l>, without a temperature. H_i are the `num_negatives` labels of highest
    score among those that are neither positive nor ignored for query i. For a positive p, V_ip are the labels n in H_i
    that violate the margin, s_in - s_ip + margin > 0, and::

        a_ipn  = exp(s_in / 0.1) / sum_{m in V_ip} exp(s_im / 0.1)
        loss_i = 1/|P_i|  sum_{p in P_i}  w_ip  sum_{n in V_ip} a_ipn [ s_in - s_ip + margin ]

    and the loss is the mean over queries with a positive. A positive whose margin nobody violates adds 0. The gradient
    is that of the formula: it passes through the weights a, too.

    Choose it to reproduce NGAME, or with normalised embeddings when a few hard negatives per query are all that is
    wanted. It is blind to every other label; the softmax family sees them all at little more cost. NGAME draws one
    positive per query: pass that one as `positives` and the others as `ignore`.

    Args:
        queries_BD: Query embeddings, normalised as a rule.
        labels_LD: Label embeddings of the pool.
        positives: Relevant pairs; weights, if any, multiply each pair's term.
        margin: How far a positive must be above a negative.
        num_negatives: Hardest negatives per query.
        ignore: Pairs that are neither positive nor negative.
        streaming: Mode, memory budget and shard of the search for negatives.

    Returns:
        A scalar, differentiable by both embeddings.
    """
    settings = streaming or Streaming()
    if num_negatives < 1:
        raise UsageError(f"num_negatives must be at least 1, got {num_negatives}")
    check_inputs(queries_BD, labels_LD, positives, ignore)
    with torch.no_grad(), torch.autocast(queries_BD.device.type, enabled=False):
        problem = Problem(
            queries_BD.detach(),
            labels_LD.detach(),
            positives,
            Gradients(None, None),
            multiplier=1.0,
            streaming=settings,
            ignore=ignore,
            mask_positives=True,
            single_sweep=True,
        )
        hardest = _hardest(problem, num_negatives)
    with torch.autocast(queries_BD.device.type, enabled=False):
        return _hinge(queries_BD, labels_LD, problem, hardest, margin=margin)


class Hardest(NamedTuple):
    """The hardest negatives of the queries that take part, as far as this rank holds them."""

    columns: Tensor
    """[B, M]; M is N, the number of hardest negatives, or 0 on a rank without labels."""
    places: Tensor
    """[B, M]: where each of them stands among the N hardest of all ranks; N for one that is not among them."""
    valid: Tensor
    """[B, N], the same on all ranks: false where a query has fewer negatives than asked for."""


def _hardest(problem: Problem, num_negatives: int) -> Hardest:
    """The labels of highest score that are not masked: a running top-k over the tiles, then one over the ranks."""
    num_kept = min(num_negatives, problem.num_labels_over_ranks)
    scores_BN = problem.queries_BD.new_full((problem.num_rows, num_kept), -torch.inf)
    columns_BN = torch.zeros(scores_BN.shape, dtype=torch.int64, device=scores_BN.device)
    for block in problem.blocks():
        for tile in block.sweep():
            top = tile.scores.topk(min(num_kept, tile.scores.shape[1]), dim=1)
            scores = torch.cat([scores_BN[block.rows], top.values], dim=1)
            columns = torch.cat([columns_BN[block.rows], top.indices + tile.columns.start], dim=1)
            scores_BN[block.rows], order = scores.topk(num_kept, dim=1)
            columns_BN[block.rows] = columns.gather(1, order)
    places_BN, valid_BN = _merge_over_ranks(problem.shard, scores_BN)
    held = slice(num_kept if problem.num_labels else 0)
    return Hardest(columns_BN[:, held], places_BN[:, held], valid_BN)


def _merge_over_ranks(shard: Shard, scores_BN: Tensor) -> tuple[Tensor, Tensor]:
    """For each of this rank's best, its place among the best of all ranks (N: none), and which of these are scores."""
    num_kept = scores_BN.shape[1]
    if shard.size == 1:
        return torch.arange(num_kept, device=scores_BN.device).expand_as(scores_BN), torch.isfinite(scores_BN)
    stacked_RBN = stack(shard, scores_BN)
    # Every rank sorts the same numbers in the same way: they agree on who holds which place, also among equals.
    best = stacked_RBN.transpose(0, 1).flatten(1).sort(dim=1, descending=True, stable=True)
    winners_BN = best.indices[:, :num_kept] - shard.rank * num_kept
    mine_BN = (winners_BN >= 0) & (winners_BN < num_kept)
    places_BN = torch.full((len(scores_BN), num_kept + 1), num_kept, device=scores_BN.device)
    positions_BN = torch.arange(num_kept, device=scores_BN.device).expand_as(winners_BN)
    places_BN.scatter_(1, torch.where(mine_BN, winners_BN, num_kept), positions_BN)
    return places_BN[:, :num_kept], torch.isfinite(best.values[:, :num_kept])


class _OnAllRanks(torch.autograd.Function):
    """Scores that each rank has at some places, as one matrix on every rank; its gradient goes back where they are."""

    @staticmethod
    def forward(ctx: Any, scores_BM: Tensor, places_BM: Tensor, shard: Shard, num_places: int) -> Tensor:
        ctx.shard = shard
        ctx.save_for_backward(places_BM)
        # One column more, for what is not among the hardest.
        placed = scores_BM.new_zeros(len(scores_BM), num_places + 1).scatter_(1, places_BM, scores_BM)
        return shard.sum(placed[:, :num_places].contiguous())

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (places_BM,) = ctx.saved_tensors
        summed_BN = ctx.shard.sum(outer[0].contiguous())
        return functional.pad(summed_BN, (0, 1)).gather(1, places_BM), None, None, None


def _hinge(queries_BD: Tensor, labels_LD: Tensor, problem: Problem, hardest: Hardest, *, margin: float) -> Tensor:
    """The loss on the few gathered pairs, left to autograd."""
    if not problem.num_rows:
        return (widened(queries_BD).sum() + widened(labels_LD).sum()) * 0.0
    queries = widened(queries_BD[problem.chosen_B])
    rows, columns = problem.positives.rows, problem.positives.columns
    # One gather for both kinds of labels: the backward of each makes a gradient as large as the label table.
    gathered = widened(labels_LD[torch.cat([hardest.columns.reshape(-1), columns])])
    negatives_BMD = gathered[: hardest.columns.numel()].view(*hardest.columns.shape, labels_LD.shape[1])
    # Products and sums, not a matrix product: autocast would run the latter's backward in low precision.
    negatives_BN = (queries[:, None] * negatives_BMD).sum(2)
    shard = problem.shard
    if shard.size > 1:
        negatives_BN = _OnAllRanks.apply(negatives_BN, hardest.places, shard, hardest.valid.shape[1])  # type: ignore[no-untyped-call]
    positives_P = (queries[rows] * gathered[hardest.columns.numel() :]).sum(1)
    hinge_PN = negatives_BN[rows] - positives_P[:, None] + margin
    violating_PN = (hinge_PN > 0) & hardest.valid[rows]
    # Rows without a violation get any finite logits: their weights meet only zeros.
    logits_PN = (negatives_BN[rows] / NEGATIVE_TEMPERATURE).masked_fill(~violating_PN, -torch.inf)
    logits_PN = torch.where(violating_PN.any(1, keepdim=True), logits_PN, 0.0)
    losses_P = (torch.softmax(logits_PN, dim=1) * hinge_PN.masked_fill(~violating_PN, 0.0)).sum(1)
    weights = problem.positives.weights
    share_P = (torch.ones_like(losses_P) if weights is None else weights) / problem.counts_B[rows]
    own = (losses_P * share_P).sum() / problem.num_rows
    # The value is that of all ranks; the gradient of what they add is theirs.
    return own + (shard.sum(own.detach()) - own.detach())
