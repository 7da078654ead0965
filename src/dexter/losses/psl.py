"""PSL, pick some labels: softmax from queries to labels and from labels to queries."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dexter.errors import UsageError
from dexter.losses.differentiable import differentiable
from dexter.losses.settings import Streaming
from dexter.losses.softmax import Reduction, check_reduction, check_temperature, solve_softmax
from dexter.losses.streaming import Gradients, Problem, working_type
from dexter.positives import Positives
from dexter.processes import SingleProcess


def psl(
    queries_BD: Tensor,
    labels_LD: Tensor,
    positives: Positives,
    *,
    temperature: float = 0.05,
    balance: float = 0.5,
    reduction: Reduction = "pal-n",
    ignore: Positives | None = None,
    negative_offsets: Tensor | None = None,
    streaming: Streaming | None = None,
) -> Tensor:
    """The symmetric softmax of SupConDE and UniDEC over a pool of labels.

    With s_il = <q_i, y_l> / temperature, P_i the positives of query i in the pool and Q_l the positive queries of
    label l in the batch::

        q2l = mean over queries i with a positive of  - 1/|P_i| sum_{p in P_i} w_ip [ s_ip - logsumexp_l s_il ]
        l2q = mean over labels  l with a positive of  - 1/|Q_l| sum_{i in Q_l} w_il [ s_il - logsumexp_i s_il ]
        loss = balance * q2l + (1 - balance) * l2q

    Choose it for batches of similar queries with a pool of their positives and hard negatives: the second direction
    also tells the queries of a label apart, which the first cannot. `balance=1` is `softmax`. Pass ALL relevant pairs
    of the batch and its pool as positives, whatever brought the labels into the pool.

    Args:
        queries_BD: Query embeddings; normalise them beforehand if cosines are meant.
        labels_LD: Label embeddings of the pool (of this rank's part of it).
        positives: Relevant pairs; weights, if any, multiply each pair's term.
        temperature: Divides the products; UniDEC's scale of 18 is 1/18 here.
        balance: Weight of the direction from queries to labels, in [0, 1].
        reduction: `pal-n` divides by the number of positives of each query and label; `pal` does not.
        ignore: Pairs that are neither positive nor in either sum.
        negative_offsets: One number per label that is added to its score where it is no positive, in the direction from
            queries to labels alone: the way back sums over queries, and these are no sample of labels.
        streaming: Mode, memory budget, shard.

    Returns:
        A scalar, differentiable by both embeddings.
    """
    check_temperature(temperature)
    check_reduction(reduction)
    if not 0.0 <= balance <= 1.0:
        raise UsageError(
            f"balance must lie in [0, 1], got {balance}: 1 is queries to labels only, 0 labels to queries only"
        )
    settings = streaming or Streaming()

    def solve(queries: Tensor, labels: Tensor, gradients: Gradients) -> Tensor:
        total = torch.zeros((), device=labels.device, dtype=working_type(queries))
        if balance > 0.0:
            forth = Problem(
                queries,
                labels,
                positives,
                gradients,
                multiplier=1.0 / temperature,
                streaming=settings,
                ignore=ignore,
                offsets_L=negative_offsets,
            )
            total += solve_softmax(forth, reduction=reduction, factor=balance)
        if balance < 1.0:
            # Only labels with a positive query take part: few of a large pool, so the way back costs little.
            back = _labels_to_queries(queries, labels, positives, gradients, temperature, settings, ignore)
            total += settings.shard.sum(solve_softmax(back, reduction=reduction, factor=1.0 - balance))
        return total

    return differentiable(solve, queries_BD, labels_LD, positives, ignore=ignore)


def _labels_to_queries(
    queries: Tensor,
    labels: Tensor,
    positives: Positives,
    gradients: Gradients,
    temperature: float,
    streaming: Streaming,
    ignore: Positives | None,
) -> Problem:
    """The problem with labels as rows. A rank holds all queries, so only the number of rows is shared."""
    problem = Problem(
        labels,
        queries,
        positives.transpose(),
        gradients.swapped(),
        multiplier=1.0 / temperature,
        streaming=replace(streaming, shard=SingleProcess()),
        ignore=None if ignore is None else ignore.transpose(),
    )
    problem.averaged_over = int(streaming.shard.sum(torch.tensor(problem.num_rows, device=queries.device)))
    return problem
