"""Binary cross-entropy, one versus all: every pair is a yes or a no of its own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dexter.errors import UsageError
from dexter.losses.differentiable import differentiable
from dexter.losses.settings import Streaming
from dexter.losses.softmax import check_temperature
from dexter.losses.streaming import NEGLIGIBLE_EXPONENT, Block, Gradients, Problem, widened
from dexter.positives import Positives


def bce(
    queries_BD: Tensor,
    labels_LD: Tensor,
    positives: Positives,
    *,
    temperature: float = 0.05,
    scale: float | Tensor | None = None,
    bias: float | Tensor | None = None,
    ignore: Positives | None = None,
    streaming: Streaming | None = None,
) -> Tensor:
    """The sum of the binary cross-entropies of all pairs, divided by the number of pairs B x L.

    With s_il = <q_i, y_l> / temperature and z_il = scale * s_il + bias::

        loss = 1/(B L) [ sum over positives of w_il softplus(-z_il)  +  sum over all others of softplus(z_il) ]

    which is the usual sum of softplus(z) minus the positives' z when weights are 1. Unlike in the other losses, queries
    without a positive count: all their labels are negatives.

    Choose it when scores are to be read as probabilities, or for classifier rows (Renee). For normalised embeddings
    pass a `bias`: without one z = 0 stands for "as likely as not" while nearly all pairs are negatives, and the loss
    spends its force on pushing everything apart. SigLIP learns `scale` and `bias` and starts the bias at -10. The
    softmax family needs neither, because it only compares labels of one query.

    Args:
        queries_BD: Query embeddings; normalise them beforehand if cosines are meant.
        labels_LD: Label embeddings of the pool (of this rank's part of it).
        positives: Relevant pairs; weights, if any, multiply each pair's term.
        temperature: Divides the products.
        scale: A number or a tensor of one element, which may require a gradient; None is 1.
        bias: A number or a tensor of one element, which may require a gradient; None is 0.
        ignore: Pairs that are neither positive nor negative; they still count in B x L.
        streaming: Budget and shard. One sweep suffices, so every mode takes three matrix products.

    Returns:
        A scalar, differentiable by both embeddings, and by scale and bias where they are tensors.
    """
    check_temperature(temperature)
    settings = streaming or Streaming()
    scale_tensor, bias_tensor = (
        _as_scalar("scale", 1.0 if scale is None else scale),
        _as_scalar("bias", 0.0 if bias is None else bias),
    )

    def solve(queries: Tensor, labels: Tensor, gradients: Gradients) -> Tensor:
        learned = scale_tensor.requires_grad or bias_tensor.requires_grad
        if learned and gradients.queries is None:
            gradients_by_row = replace(gradients, queries=torch.zeros_like(widened(queries)))
        else:
            gradients_by_row = gradients
        problem = Problem(
            queries,
            labels,
            positives,
            gradients_by_row,
            multiplier=float(scale_tensor) / temperature,
            streaming=settings,
            ignore=ignore,
            mask_positives=True,
            only_with_positives=False,
            single_sweep=True,
        )
        sums = problem.queries_BD.new_zeros(3)
        for block in problem.blocks():
            sums += _solve_block(block, bias=float(bias_tensor), unscaled_bD=widened(queries[block.rows]) / temperature)
        gradients.scalars = (sums[1], sums[2])
        return settings.shard.sum(sums[0])

    return differentiable(solve, queries_BD, labels_LD, positives, ignore=ignore, scalars=(scale_tensor, bias_tensor))


def _solve_block(block: Block, *, bias: float, unscaled_bD: Tensor) -> Tensor:
    """A block's part of the loss and of its derivatives by scale and bias."""
    problem, pairs = block.problem, block.pairs
    share = 1.0 / (problem.averaged_over * problem.num_labels_over_ranks)
    logits_P = pairs.scores + bias
    pull_P = pairs.weights * torch.sigmoid(-logits_P) * share
    loss, by_bias = (pairs.weights * softplus(-logits_P)).sum() * share, -pull_P.sum()
    for tile in block.sweep():
        logits = tile.scores.add_(bias).clamp_min_(NEGLIGIBLE_EXPONENT)
        loss += softplus(logits).sum() * share
        if block.wants_gradients:
            by_bias += logits.sigmoid_().mul_(share).sum()
            block.push(tile)
    block.push_pairs(-pull_P)
    by_scale = loss.new_zeros(()) if block.gradient_bD is None else (unscaled_bD * block.gradient_bD).sum()
    return torch.stack([loss, by_scale, by_bias])


def _as_scalar(name: str, number: float | Tensor) -> Tensor:
    """A number as a tensor without dimensions, still attached to its graph."""
    tensor = torch.as_tensor(number, dtype=None if isinstance(number, Tensor) else torch.float32)
    if tensor.numel() != 1 or not tensor.is_floating_point():
        raise UsageError(f"{name} must be one floating number, got shape {tuple(tensor.shape)} of {tensor.dtype}")
    return tensor.reshape(())
