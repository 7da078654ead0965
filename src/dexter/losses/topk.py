"""Soft top-k: probabilities that sum to k."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

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

Evaluate: TypeAlias = Callable[[Tensor], "Moments"]

SAMPLED_LABELS = 2048
"""Number of labels in the sample that gives the starting point."""
LAST_STEP = 5e-3
"""A step this small is the last one: the remaining error of t is below its square, that of p below a quarter of it."""
LONGEST_STEP = 30.0
"""Longer steps come from logits that were cut off: their sign is right, their length is not."""
RESOLUTION = 1e-6
"""A bracket this narrow, relative to the offset, cannot be halved in float32."""
TINY = 1e-30
"""Keeps quotients of empty sums finite."""
FLATTEST = 1e-12
"""Smallest mean of p (1 - p) for which an offset is determined."""
SAMPLE_SWEEPS = 12
MOST_SWEEPS = 64
"""Limits on the evaluations of the root search, on the sample and on all labels."""


def soft_topk(
    queries_BD: Tensor,
    labels_LD: Tensor,
    positives: Positives,
    *,
    temperature: float = 0.05,
    k: float | Sequence[float] | np.ndarray | Tensor = 5,
    alpha: float = 2.0,
    ignore: Positives | None = None,
    streaming: Streaming | None = None,
) -> Tensor:
    """Log-likelihood of the positives under probabilities that sum to k for each query.

    With s_il = <q_i, y_l> / temperature, t_i solves sum_l sigmoid(alpha (s_il + t_i)) = k_i and::

        p_il = sigmoid(alpha (s_il + t_i)),     loss_i = - 1/|P_i|  sum_{p in P_i}  w_ip log p_ip

    and the loss is the mean over queries with a positive. The gradient includes that t_i moves with the scores.

    Choose it if precision or recall at a known k is the goal: unlike in `decoupled_softmax`, a positive gains nothing
    from rising further once it is well within the first k. Like `bce` it gives each label a probability of its own, but
    sets the threshold per query instead of learning one bias. It requires a pool of more than k labels, and costs a few
    sweeps more than the softmax family.

    Args:
        queries_BD: Query embeddings; normalise them beforehand if cosines are meant.
        labels_LD: Label embeddings of the pool; with several processes, the part that this one holds.
        positives: Relevant pairs; weights, if any, multiply each pair's term.
        temperature: Divides the products.
        k: Target number of labels: one number, or one per query such as its number of positives. It must be above 0 and
            below the number of labels that are not ignored.
        alpha: Sharpness of the threshold.
        ignore: Pairs that are left out: neither positive nor among the labels whose probabilities sum to k.
        streaming: Mode, memory budget and processes.

    Returns:
        A scalar, differentiable by both embeddings.
    """
    check_temperature(temperature)
    if not 0.0 < alpha < math.inf:
        raise UsageError(f"alpha must be above 0, got {alpha}")
    settings = streaming or Streaming()

    def solve(queries: Tensor, labels: Tensor, gradients: Gradients) -> Tensor:
        matrix = ScoreMatrix(
            queries, labels, positives, gradients, multiplier=alpha / temperature, streaming=settings, ignore=ignore
        )
        masked_B = matrix.processes.sum(matrix.masked.counts(matrix.num_rows).to(matrix.dtype))
        choices_B = matrix.num_labels_of_all - masked_B
        k_B = _check_k(k, choices_B, matrix.chosen_B, num_queries=len(queries))
        total = matrix.queries_BD.new_zeros(())
        for block in matrix.blocks():
            total += _solve_block(block, k_b=k_B[block.rows], choices_b=choices_B[block.rows])
        return total

    return differentiable(solve, queries_BD, labels_LD, positives, ignore=ignore)


def _solve_block(block: Block, *, k_b: Tensor, choices_b: Tensor) -> Tensor:
    """Return a block's part of the loss and push its gradients. Scores and offsets include alpha: alpha s, alpha t."""
    offsets = Offsets(block, k_b=k_b, choices_b=choices_b)
    share = block.weights_P / (block.matrix.averaged_over * block.counts_b[block.rows_P])
    logits_P = (block.scores_P + offsets.start_b[block.rows_P]) + offsets.correction_b[block.rows_P]
    pull = share * torch.sigmoid(-logits_P)
    row_loss, row_pull = block.sums_by_row(share * softplus(-logits_P), pull).unbind()
    if block.wants_gradients:
        slope_b = offsets.slopes()
        # Where p (1 - p) is only the cut-off, all probabilities are 0 or 1 and no label moves the offset.
        row_weight = torch.where(slope_b > FLATTEST * choices_b, row_pull / slope_b, 0.0)
        for tile in block.sweep():
            offsets.weigh(tile, row_weight)
            block.push(tile)
        block.push_pairs(-pull)
    return row_loss.sum()


class Offsets:
    """The offsets alpha t at which a block's probabilities sum to k, found in a few sweeps.

    An offset is the sum of a start and a correction. Scores are shifted by the start first, which is exact near the
    threshold, so that the correction has a finer resolution than the spacing of large scores.
    """

    def __init__(self, block: Block, *, k_b: Tensor, choices_b: Tensor) -> None:
        self._block = block
        middle_b = torch.logit(k_b / choices_b)
        # By Cauchy-Schwarz scores lie within +- reach; if all were at one end, the root would be middle -+ reach.
        reach_b = torch.linalg.vector_norm(block.queries_bD, dim=1) * block.matrix.longest_label() * 1.001 + 1e-3
        low_b, high_b = middle_b - reach_b, middle_b + reach_b
        root = RootFinder(k_b)
        sample = _SampledMoments(block, choices_b)
        self.start_b = root.find(sample, middle_b, low_b=low_b, high_b=high_b, most=SAMPLE_SWEEPS)
        low_b, high_b = low_b - self.start_b, high_b - self.start_b
        self.correction_b = root.find(
            self._moments, torch.zeros_like(k_b), low_b=low_b, high_b=high_b, most=MOST_SWEEPS
        )

    def slopes(self) -> Tensor:
        """Return the sum of p (1 - p) by row; kept tiles then hold p (1 - p)."""
        slope_b = torch.zeros_like(self.start_b)
        for tile in self._block.sweep():
            slope_b += self._to_slopes(tile).sum(1)
        return self._block.processes.sum(slope_b)

    def weigh(self, tile: Tile, row_weights_b: Tensor) -> None:
        """Turn a tile, in place, into row_weight_i * p_il (1 - p_il); `slopes` must have been called before."""
        if tile.fresh:
            self._to_slopes(tile)
        tile.scores.mul_(without_negligible(row_weights_b)[:, None])

    def _to_slopes(self, tile: Tile) -> Tensor:
        """Turn scores into p (1 - p), in place, from min(p, 1 - p), which loses no digits when p is close to 1."""
        logits = self._shifted(tile).add_(self.correction_b[:, None])
        smaller = logits.abs_().neg_().clamp_min_(NEGLIGIBLE_EXPONENT).sigmoid_()
        return smaller.addcmul_(smaller, smaller, value=-1.0)

    def _moments(self, correction_b: Tensor) -> Moments:
        """Return the sums at a correction, from one sweep."""
        block = self._block
        sums = correction_b.new_zeros(Moments.COUNT, block.num_rows)
        for tile in block.sweep():
            logits, scratch = block.matrix.work_like(tile)
            sums += Moments.of(torch.add(self._shifted(tile), correction_b[:, None], out=logits), scratch)
        return Moments(block.processes.sum(sums))

    def _shifted(self, tile: Tile) -> Tensor:
        """Shift fresh scores by the start, in place."""
        return tile.scores.add_(self.start_b[:, None]) if tile.fresh else tile.scores


class _SampledMoments:
    """Estimates of the sums from evenly spaced labels."""

    def __init__(self, block: Block, choices_b: Tensor) -> None:
        step = max(1, block.matrix.num_labels_of_all // SAMPLED_LABELS)
        self._processes = block.processes
        self._scores_bS = block.queries_bD @ block.labels(slice(0, None, step)).T
        self._logits_bS, self._scratch_bS = torch.empty_like(self._scores_bS), torch.empty_like(self._scores_bS)
        num_sampled = self._processes.sum(choices_b.new_tensor(float(self._scores_bS.shape[1])))
        self._labels_each_b = choices_b / num_sampled

    def __call__(self, offsets_b: Tensor) -> Moments:
        torch.add(self._scores_bS, offsets_b[:, None], out=self._logits_bS)
        return Moments(self._processes.sum(Moments.of(self._logits_bS, self._scratch_bS)) * self._labels_each_b)


class Moments:
    """Statistics of a row's logits for Newton's method: how many are above 0, and sums over those above and below.

    Sums are over r = min(p, 1 - p). The sum of p is the number of logits above 0, minus their r, plus the r of the
    others: no digits are lost when all probabilities are near 0 or 1.
    """

    COUNT = 5

    def __init__(self, sums: Tensor) -> None:
        self.num_above, total, total_squared, self.below, below_squared = sums.unbind()
        self.above = total - self.below
        self.below_slope = self.below - below_squared
        self.above_slope = self.above - (total_squared - below_squared)

    @staticmethod
    def of(logits: Tensor, scratch: Tensor) -> Tensor:
        """Return the sums of a tile of logits; overwrites both tensors, which have the same shape."""
        # Ones and zeros in float32: operations on booleans take several times as long.
        below = torch.le(logits, 0.0, out=scratch)
        smaller = logits.abs_().neg_().clamp_min_(NEGLIGIBLE_EXPONENT).sigmoid_()
        sums = [logits.shape[1] - below.sum(1), smaller.sum(1), torch.linalg.vector_norm(smaller, dim=1).square_()]
        smaller.mul_(below)
        return torch.stack([*sums, smaller.sum(1), torch.linalg.vector_norm(smaller, dim=1).square_()])


@dataclass(frozen=True)
class RootFinder:
    """Newton's method for the offset at which probabilities sum to k, one root per row, guarded by bisection.

    With n logits above 0, the sum is k if n + (r below) = k + (r above). Newton's method is applied to the logarithm of
    the ratio of the two sides, after subtracting min(n, k) from both. It is nearly linear in the offset, both when all
    probabilities are small and when they are close to 0 and 1. The sum rises with the offset, so each evaluation
    narrows the bracket.
    """

    k_b: Tensor

    def find(self, evaluate: Evaluate, start_b: Tensor, *, low_b: Tensor, high_b: Tensor, most: int) -> Tensor:
        """Return the offsets after at most `most` evaluations."""
        offset_b = start_b
        for _ in range(most):
            step_b = self._step(evaluate(offset_b))
            low_b = torch.where(step_b > 0, offset_b, low_b)
            high_b = torch.where(step_b < 0, offset_b, high_b)
            proposal_b = offset_b + step_b
            inside_b = (proposal_b >= low_b) & (proposal_b <= high_b) & (step_b.abs() < LONGEST_STEP)
            offset_b = torch.where(inside_b, proposal_b, (low_b + high_b) / 2)
            narrow_b = high_b - low_b <= RESOLUTION * offset_b.abs().clamp_min(1.0)
            if bool((narrow_b | (inside_b & (step_b.abs() <= LAST_STEP))).all()):
                break
        return offset_b

    def _step(self, moments: Moments) -> Tensor:
        """Return Newton's step: infinite, with the right sign, where one side is empty."""
        surplus_b = moments.num_above - self.k_b
        over_b, under_b = moments.below + surplus_b.clamp_min(0.0), moments.above + (-surplus_b).clamp_min(0.0)
        slope_b = moments.below_slope / over_b.clamp_min(TINY) + moments.above_slope / under_b.clamp_min(TINY)
        return torch.log(under_b / over_b) / slope_b


def _check_k(
    k: float | Sequence[float] | np.ndarray | Tensor, choices_B: Tensor, chosen_B: Tensor, *, num_queries: int
) -> Tensor:
    """Return k of each query that takes part; raise `UsageError` with the first query whose k has no solution."""
    k_all = torch.as_tensor(k, dtype=choices_B.dtype, device=choices_B.device)
    if k_all.ndim > 1 or (k_all.ndim == 1 and len(k_all) != num_queries):
        raise UsageError(f"k must be one number or one per query ({num_queries}), got shape {tuple(k_all.shape)}")
    k_B = k_all.expand(num_queries)[chosen_B]
    unsolvable = ~((k_B > 0) & (k_B < choices_B))
    if bool(unsolvable.any()):
        first = int(unsolvable.nonzero()[0, 0])
        raise UsageError(
            f"soft top-k needs 0 < k < number of labels: got k = {float(k_B[first]):g} with {int(choices_B[first])} "
            f"labels for query {int(chosen_B[first])}; lower k or enlarge the pool"
        )
    return k_B
