"""Triplet loss with a margin to the hardest negatives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dexter.errors import UsageError
from dexter.losses.differentiable import check_inputs
from dexter.losses.streaming import Gradients, ScoreMatrix, Streaming, widened
from dexter.positives import Positives
from dexter.processes import Processes, stack

NEGATIVE_TEMPERATURE = 0.1
"""Temperature of the weights among violating negatives, as in NGAME."""


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

    and the loss is the mean over queries with a positive. A positive whose margin no label violates adds 0. The
    gradient is that of the formula: it includes the weights a.

    Choose it to reproduce NGAME. It requires normalised embeddings, since the margin is a difference of scores. Only
    the hardest negatives have a gradient; the softmax family uses all labels at little more cost. NGAME draws one
    positive per query: pass that one as `positives` and the others as `ignore`.

    Args:
        queries_BD: Query embeddings, normalised as a rule.
        labels_LD: Label embeddings of the pool.
        positives: Relevant pairs; weights, if any, multiply each pair's term.
        margin: Required difference between the scores of a positive and a negative.
        num_negatives: Number of hardest negatives per query.
        ignore: Pairs that are neither positive nor negative.
        streaming: Mode, memory budget and processes of the search for negatives.

    Returns:
        A scalar, differentiable by both embeddings.
    """
    settings = streaming or Streaming()
    if num_negatives < 1:
        raise UsageError(f"num_negatives must be at least 1, got {num_negatives}")
    check_inputs(queries_BD, labels_LD, positives, ignore)
    with torch.no_grad(), torch.autocast(queries_BD.device.type, enabled=False):
        matrix = ScoreMatrix(
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
        hardest = _find_hardest(matrix, num_negatives)
    with torch.autocast(queries_BD.device.type, enabled=False):
        return _hinge(queries_BD, labels_LD, matrix, hardest, margin=margin)


class HardestNegatives(NamedTuple):
    """The hardest negatives of the queries that take part, of the labels that this process holds."""

    columns: Tensor
    """[B, M]; M is N, the number of hardest negatives, or 0 in a process without labels."""
    positions: Tensor
    """[B, M]: position of each among the N hardest of all processes; N for one that is not among them."""
    valid: Tensor
    """[B, N], the same in all processes: false where a query has fewer than N negatives."""


def _find_hardest(matrix: ScoreMatrix, num_negatives: int) -> HardestNegatives:
    """Find the labels of highest score that are not masked: a running top-k over tiles, then over processes."""
    num_kept = min(num_negatives, matrix.num_labels_of_all)
    scores_BN = matrix.queries_BD.new_full((matrix.num_rows, num_kept), -torch.inf)
    columns_BN = torch.zeros(scores_BN.shape, dtype=torch.int64, device=scores_BN.device)
    for block in matrix.blocks():
        for tile in block.sweep():
            top = tile.scores.topk(min(num_kept, tile.scores.shape[1]), dim=1)
            scores = torch.cat([scores_BN[block.rows], top.values], dim=1)
            columns = torch.cat([columns_BN[block.rows], top.indices + tile.columns.start], dim=1)
            scores_BN[block.rows], order = scores.topk(num_kept, dim=1)
            columns_BN[block.rows] = columns.gather(1, order)
    positions_BN, valid_BN = _merge_over_processes(matrix.processes, scores_BN)
    held = slice(num_kept if matrix.num_labels else 0)
    return HardestNegatives(columns_BN[:, held], positions_BN[:, held], valid_BN)


def _merge_over_processes(processes: Processes, scores_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position of each of this process's best among the best of all (N: none), and which of those exist."""
    num_kept = scores_BN.shape[1]
    if processes.size == 1:
        return torch.arange(num_kept, device=scores_BN.device).expand_as(scores_BN), torch.isfinite(scores_BN)
    stacked_RBN = stack(processes, scores_BN)
    # Every process sorts the same numbers in the same way, so they agree on the positions, also of equal scores.
    best = stacked_RBN.transpose(0, 1).flatten(1).sort(dim=1, descending=True, stable=True)
    winners_BN = best.indices[:, :num_kept] - processes.rank * num_kept
    mine_BN = (winners_BN >= 0) & (winners_BN < num_kept)
    positions_BN = torch.full((len(scores_BN), num_kept + 1), num_kept, device=scores_BN.device)
    order_BN = torch.arange(num_kept, device=scores_BN.device).expand_as(winners_BN)
    positions_BN.scatter_(1, torch.where(mine_BN, winners_BN, num_kept), order_BN)
    return positions_BN[:, :num_kept], torch.isfinite(best.values[:, :num_kept])


class _OnAllProcesses(torch.autograd.Function):
    """Combine scores of several processes into one matrix by position; each receives the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, scores_BM: Tensor, positions_BM: Tensor, processes: Processes, num_kept: int) -> Tensor:
        ctx.processes = processes
        ctx.save_for_backward(positions_BM)
        # One more column, for those that are not among the hardest.
        placed = scores_BM.new_zeros(len(scores_BM), num_kept + 1).scatter_(1, positions_BM, scores_BM)
        return processes.sum(placed[:, :num_kept].contiguous())

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (positions_BM,) = ctx.saved_tensors
        summed_BN = ctx.processes.sum(outer[0].contiguous())
        return functional.pad(summed_BN, (0, 1)).gather(1, positions_BM), None, None, None


def _hinge(
    queries_BD: Tensor, labels_LD: Tensor, matrix: ScoreMatrix, hardest: HardestNegatives, *, margin: float
) -> Tensor:
    """Return the loss of the gathered pairs, differentiated by autograd."""
    if not matrix.num_rows:
        return (widened(queries_BD).sum() + widened(labels_LD).sum()) * 0.0
    queries = widened(queries_BD[matrix.chosen_B])
    rows, columns = matrix.positives.rows, matrix.positives.columns
    # One gather for positives and negatives: the backward of each gather allocates a gradient of the label table.
    gathered = widened(labels_LD[torch.cat([hardest.columns.reshape(-1), columns])])
    negatives_BMD = gathered[: hardest.columns.numel()].view(*hardest.columns.shape, labels_LD.shape[1])
    # Products and sums, not a matrix product: autocast would run the backward of the latter in low precision.
    negatives_BN = (queries[:, None] * negatives_BMD).sum(2)
    processes = matrix.processes
    if processes.size > 1:
        negatives_BN = _OnAllProcesses.apply(negatives_BN, hardest.positions, processes, hardest.valid.shape[1])  # type: ignore[no-untyped-call]
    positives_P = (queries[rows] * gathered[hardest.columns.numel() :]).sum(1)
    hinge_PN = negatives_BN[rows] - positives_P[:, None] + margin
    violating_PN = (hinge_PN > 0) & hardest.valid[rows]
    # Rows without a violation get finite logits; their weights multiply only zeros.
    logits_PN = (negatives_BN[rows] / NEGATIVE_TEMPERATURE).masked_fill(~violating_PN, -torch.inf)
    logits_PN = torch.where(violating_PN.any(1, keepdim=True), logits_PN, 0.0)
    losses_P = (torch.softmax(logits_PN, dim=1) * hinge_PN.masked_fill(~violating_PN, 0.0)).sum(1)
    weights = matrix.positives.weights
    share_P = (torch.ones_like(losses_P) if weights is None else weights) / matrix.counts_B[rows]
    own = (losses_P * share_P).sum() / matrix.num_rows
    # The value is the sum over processes; each has the gradient of its own part.
    return own + (processes.sum(own.detach()) - own.detach())
