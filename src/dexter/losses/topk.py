"""Soft top-k: probabilities that sum to k."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vecdot
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

FEWEST_SAMPLED, MOST_SAMPLED = 2048, 8192
"""Number of labels in the sample that gives the starting point: one in 16, within these limits."""
LAST_STEP = 0.35
"""A step this small is the last one: the Taylor series is exact to 1e-5 up to here, even for probabilities of 1/2."""
POLISHING_STEPS = 3
"""Newton's steps on the Taylor series; each squares the error."""
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
    sets the threshold per query instead of learning one bias. It requires a pool of more than k labels, and costs
    little more than the softmax family where a sample of the labels and the positives tell the threshold well, and
    otherwise a sweep or two more.

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
        ignored_B = matrix.processes.sum(matrix.ignored.counts(matrix.num_rows).to(matrix.dtype))
        choices_B = matrix.num_labels_of_all - ignored_B
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
        # Where p (1 - p) is only the cut-off, all probabilities are 0 or 1 and no label moves the offset.
        row_weight = torch.where(offsets.slope_b > FLATTEST * choices_b, row_pull / offsets.slope_b, 0.0)
        for tile in block.sweep():
            offsets.weigh(tile, row_weight)
            block.push(tile)
        block.push_pairs(-pull)
    return row_loss.sum()


class Offsets:
    """The offsets alpha t at which a block's probabilities sum to k, found in one sweep or two.

    An offset is the sum of a start and a correction. Scores are shifted by the start first, which is exact near the
    threshold, so that the correction has a finer resolution than the spacing of large scores.
    """

    def __init__(self, block: Block, *, k_b: Tensor, choices_b: Tensor) -> None:
        self._block = block
        middle_b = torch.logit(k_b / choices_b)
        # By Cauchy-Schwarz scores lie within +- reach; if all were at one end, the root would be middle -+ reach.
        reach_b = torch.linalg.vector_norm(block.queries_bD, dim=1) * block.matrix.longest_label() * 1.001 + 1e-3
        low_b, high_b = middle_b - reach_b, middle_b + reach_b
        sample = _SampledMoments(block, choices_b)
        self.start_b, _ = find_root(sample, middle_b, k_b=k_b, low_b=low_b, high_b=high_b, most=SAMPLE_SWEEPS)
        low_b, high_b = low_b - self.start_b, high_b - self.start_b
        self.correction_b, self.slope_b = find_root(
            self._moments, torch.zeros_like(k_b), k_b=k_b, low_b=low_b, high_b=high_b, most=MOST_SWEEPS
        )

    def weigh(self, tile: Tile, row_weights_b: Tensor) -> None:
        """Turn a tile, in place, into row_weight_i * p_il (1 - p_il)."""
        # From min(p, 1 - p), which loses no digits when p is close to 1.
        logits = self._shifted(tile).add_(self.correction_b[:, None])
        smaller = logits.abs_().neg_().clamp_min_(NEGLIGIBLE_EXPONENT).sigmoid_()
        smaller.addcmul_(smaller, smaller, value=-1.0).mul_(without_negligible(row_weights_b)[:, None])

    def _moments(self, correction_b: Tensor) -> Moments:
        """Return the sums at a correction, from one sweep."""
        block = self._block
        sums = correction_b.new_zeros(Moments.COUNT, block.num_rows)
        for tile in block.sweep():
            logits, *scratch = block.matrix.work_like(tile)
            sums += Moments.sums(torch.add(self._shifted(tile), correction_b[:, None], out=logits), *scratch)
        return Moments(block.processes.sum(sums))

    def _shifted(self, tile: Tile) -> Tensor:
        """Shift fresh scores by the start, in place."""
        return tile.scores.add_(self.start_b[:, None]) if tile.fresh else tile.scores


class _SampledMoments:
    """Estimates of the sums: exact for the positives, from evenly spaced labels for the others."""

    def __init__(self, block: Block, choices_b: Tensor) -> None:
        num_labels = block.matrix.num_labels_of_all
        step = max(1, min(num_labels // FEWEST_SAMPLED, max(16, num_labels // MOST_SAMPLED)))
        self._block = block
        self._scores_bS = block.queries_bD @ block.labels(slice(0, None, step)).T
        for rows, columns in (block.pairs(block.matrix.positives), block.pairs(block.matrix.ignored)):
            sampled = columns % step == 0
            self._scores_bS[rows[sampled], columns[sampled] // step] = -torch.inf
        self._work = [torch.empty_like(self._scores_bS) for _ in range(3)]
        num_sampled = block.processes.sum(choices_b.new_tensor(float(self._scores_bS.shape[1])))
        self._labels_each_b = choices_b / num_sampled

    def __call__(self, offsets_b: Tensor) -> Moments:
        logits_bS, *scratch = self._work
        torch.add(self._scores_bS, offsets_b[:, None], out=logits_bS)
        sums = Moments.sums(logits_bS, *scratch) * self._labels_each_b
        logits_P = self._block.scores_P + offsets_b[self._block.rows_P]
        work = [each[:, None] for each in (logits_P, torch.empty_like(logits_P), torch.empty_like(logits_P))]
        sums.index_add_(1, self._block.rows_P, Moments.sums(*work))
        return Moments(self._block.processes.sum(sums))


class Moments:
    """Sums over a row's logits that give the sum of the probabilities p near the offset they were taken at.

    With r = min(p, 1 - p), which loses no digits when p is close to 1, p has the slope s = p (1 - p) = r - r^2. With g
    the sign of the logit, the slope of s is -g w, where w = s (1 - 2 r). All further derivatives of p are polynomials
    of s, every second one times -g w: a few sums give the Taylor series of the sum of p, which converges below pi.
    """

    COUNT = 10

    def __init__(self, sums: Tensor) -> None:
        self.num_above, r, gr, s, gs, s2, w2, gw, gws, gws2 = sums.unbind()
        self.below, self.above = ((r - gr) / 2).clamp_min(0.0), ((r + gr) / 2).clamp_min(0.0)
        self.below_slope, self.above_slope = (s - gs) / 2, (s + gs) / 2
        s3 = (s2 - w2) / 4
        self._slopes = [s, -gw, s - 6 * s2, 12 * gws - gw, s - 30 * s2 + 120 * s3, 60 * gws - gw - 360 * gws2]
        """The sum of p's first to sixth derivative."""

    @staticmethod
    def sums(logits: Tensor, *scratch: Tensor) -> Tensor:
        """Return the sums of a tile of logits; overwrites it and two more tensors of its shape."""
        g, s = scratch
        torch.ge(logits, 0.0, out=g)
        num_above = g.sum(1)
        g.mul_(2.0).sub_(1.0)
        r = logits.abs_().neg_().clamp_min_(NEGLIGIBLE_EXPONENT).sigmoid_()
        torch.addcmul(r, r, r, value=-1.0, out=s)
        sums = [num_above, r.sum(1), vecdot(g, r), s.sum(1), vecdot(g, s), vecdot(s, s)]
        w = torch.addcmul(s, r, s, value=-2.0, out=r)
        sums += [vecdot(w, w), vecdot(g, w), vecdot(g.mul_(s), w), vecdot(g.mul_(s), w)]
        return torch.stack(sums)

    def shift(self, step_b: Tensor) -> tuple[Tensor, Tensor]:
        """Return by how much the sum of p changes when offsets move by a step, and its slope there."""
        change_b, slope_b = torch.zeros_like(step_b), torch.zeros_like(step_b)
        for order, derivative_b in reversed(list(enumerate(self._slopes, start=1))):
            change_b = (change_b + derivative_b / math.factorial(order)) * step_b
            slope_b = slope_b * step_b + derivative_b / math.factorial(order - 1)
        return change_b, slope_b

    def newton_step(self, k_b: Tensor) -> Tensor:
        """Return the step of Newton's method: infinite, with the right sign, where one side is empty.

        With n logits above 0, the sum is k if n + (r below) = k + (r above). The method is applied to the logarithm of
        the ratio of the two sides, after subtracting min(n, k) from both. It is nearly linear in the offset, both when
        all probabilities are small and when they are close to 0 and 1.
        """
        surplus_b = self.num_above - k_b
        over_b, under_b = self.below + surplus_b.clamp_min(0.0), self.above + (-surplus_b).clamp_min(0.0)
        slope_b = self.below_slope / over_b.clamp_min(TINY) + self.above_slope / under_b.clamp_min(TINY)
        return torch.log(under_b / over_b) / slope_b

    def polished(self, step_b: Tensor, k_b: Tensor) -> Tensor:
        """Return the step to the root by the Taylor series, starting from Newton's step."""
        missing_b = (k_b - self.num_above) + (self.above - self.below)
        step_b = step_b.nan_to_num(0.0).clamp(-LAST_STEP, LAST_STEP)
        for _ in range(POLISHING_STEPS):
            change_b, slope_b = self.shift(step_b)
            step_b = step_b + (missing_b - change_b) / slope_b.clamp_min(TINY)
        return step_b


def find_root(
    evaluate: Evaluate, offset_b: Tensor, *, k_b: Tensor, low_b: Tensor, high_b: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Return the offsets at which probabilities sum to k, one per row, and the sums of p (1 - p) there.

    Newton's method guarded by bisection: the sum rises with the offset, so each evaluation narrows the bracket. The
    last step, and the slope after it, come from the Taylor series, so that no evaluation is needed at the root.
    """
    for _ in range(most):
        moments = evaluate(offset_b)
        step_b = moments.newton_step(k_b)
        low_b = torch.where(step_b > 0, offset_b, low_b)
        high_b = torch.where(step_b < 0, offset_b, high_b)
        last_b = moments.polished(step_b, k_b)
        near_b = last_b.abs() <= LAST_STEP
        last_b = torch.where(near_b, last_b, 0.0)
        narrow_b = high_b - low_b <= RESOLUTION * offset_b.abs().clamp_min(1.0)
        if bool((near_b | narrow_b).all()):
            break
        proposal_b = offset_b + torch.where(near_b, last_b, step_b)
        inside_b = (proposal_b >= low_b) & (proposal_b <= high_b) & (step_b.abs() < LONGEST_STEP)
        offset_b = torch.where(inside_b, proposal_b, (low_b + high_b) / 2)
    return offset_b + last_b, moments.shift(last_b)[1]


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
