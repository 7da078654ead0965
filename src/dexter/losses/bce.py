"""Binary cross-entropy, one versus all: each pair is a decision of its own."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dexter.errors import UsageError
from dexter.losses.differentiable import check_temperature, differentiable
from dexter.losses.streaming import NEGLIGIBLE_EXPONENT, Block, Gradients, ScoreMatrix, Streaming, widened
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
    """Mean binary cross-entropy over all B x L pairs.

    With s_il = <q_i, y_l> / temperature and z_il = scale * s_il + bias::

        loss = 1/(B L) [ sum over positives of w_il softplus(-z_il)  +  sum over all others of softplus(z_il) ]

    With weights of 1 this is the sum of softplus(z) over all pairs minus the positives' z. Unlike in the other losses,
    queries without a positive count: all their labels are negatives.

    Choose it if scores are to be read as probabilities, or for classifier rows (Renee). It needs many or all labels in
    the pool, since no label of the pool is compared with another. For normalised embeddings pass a `bias`: without one
    z = 0 means a probability of one half although nearly all pairs are negatives, and most of the gradient pushes all
    pairs apart. SigLIP learns `scale` and `bias` and starts the bias at -10. The softmax family needs neither, because
    it only compares labels of one query; `soft_topk` finds one bias per query instead of learning one for all.

    Args:
        queries_BD: Query embeddings; normalise them beforehand if cosines are meant.
        labels_LD: Label embeddings of the pool; with several processes, the part that this one holds.
        positives: Relevant pairs; weights, if any, multiply each pair's term.
        temperature: Divides the products.
        scale: A number or a tensor of one element, which may require a gradient; None is 1.
        bias: A number or a tensor of one element, which may require a gradient; None is 0.
        ignore: Pairs that are neither positive nor negative; they still count in B x L.
        streaming: Memory budget and processes. One sweep suffices, so every mode takes three matrix products.

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
        matrix = ScoreMatrix(
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
        sums = matrix.queries_BD.new_zeros(3)
        for block in matrix.blocks():
            sums += _solve_block(block, bias=float(bias_tensor), unscaled_bD=widened(queries[block.rows]) / temperature)
        gradients.scalars = (sums[1], sums[2])
        return settings.processes.sum(sums[0])

    return differentiable(solve, queries_BD, labels_LD, positives, ignore=ignore, scalars=(scale_tensor, bias_tensor))


def _solve_block(block: Block, *, bias: float, unscaled_bD: Tensor) -> Tensor:
    """Return a block's part of the loss and of its derivatives by scale and bias; push its gradients."""
    share = 1.0 / (block.matrix.averaged_over * block.matrix.num_labels_of_all)
    logits_P = block.scores_P + bias
    pull_P = block.weights_P * torch.sigmoid(-logits_P) * share
    loss, by_bias = (block.weights_P * softplus(-logits_P)).sum() * share, -pull_P.sum()
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
    """Return a number as a tensor without dimensions, still attached to its graph."""
    tensor = torch.as_tensor(number, dtype=None if isinstance(number, Tensor) else torch.float32)
    if tensor.numel() != 1 or not tensor.is_floating_point():
        raise UsageError(f"{name} must be one floating number, got shape {tuple(tensor.shape)} of {tensor.dtype}")
    return tensor.reshape(())
