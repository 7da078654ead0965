"""PSL, pick some labels: softmax from queries to labels and from labels to queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from dexter.errors import UsageError
from dexter.losses.differentiable import check_temperature, differentiable
from dexter.losses.softmax import Reduction, check_reduction, solve_softmax
from dexter.losses.streaming import Gradients, ScoreMatrix, Streaming, working_type
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
    average: Literal["mean", "sum"] = "mean",
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

    Choose it for batches of similar queries with a pool of their positives and hard negatives. The second direction
    contrasts a label's queries with the other queries of the batch, which the first cannot do. `balance=1` equals
    `softmax`. It requires ALL relevant pairs of the batch and its pool as positives, also those of labels that were
    sampled for another query.

    Args:
        queries_BD: Query embeddings; normalise them beforehand if cosines are meant.
        labels_LD: Label embeddings of the pool; with several processes, the part that this one holds.
        positives: Relevant pairs; weights, if any, multiply each pair's term.
        temperature: Divides the products; UniDEC's scale of 18 is 1/18 here.
        balance: Weight of the direction from queries to labels, in [0, 1].
        reduction: `pal-n` divides by the number of positives of each query and label; `pal` does not.
        average: `sum` takes the sums over queries and over labels, as in UniDEC's equations, instead of the means.
        ignore: Pairs that are neither positive nor in either sum.
        negative_offsets: One number per label, added to its score where it is not a positive, only from queries to
            labels: the other direction sums over queries, which are not a sample of labels.
        streaming: Mode, memory budget and processes.

    Returns:
        A scalar, differentiable by both embeddings.
    """
    check_temperature(temperature)
    check_reduction(reduction)
    if not 0.0 <= balance <= 1.0:
        raise UsageError(
            f"balance must lie in [0, 1], got {balance}: 1 is queries to labels only, 0 labels to queries only"
        )
    if average not in ("mean", "sum"):
        raise UsageError(f'average must be "mean" or "sum", got {average!r}')
    settings = streaming or Streaming()

    def solve(queries: Tensor, labels: Tensor, gradients: Gradients) -> Tensor:
        total = torch.zeros((), device=labels.device, dtype=working_type(queries))
        if balance > 0.0:
            forth = ScoreMatrix(
                queries,
                labels,
                positives,
                gradients,
                multiplier=1.0 / temperature,
                streaming=settings,
                ignore=ignore,
                offsets_L=negative_offsets,
            )
            if average == "sum":
                forth.averaged_over = 1
            total += solve_softmax(forth, reduction=reduction, factor=balance)
        if balance < 1.0:
            # Only labels with a positive query take part: few of a large pool, so this direction costs little.
            back = _labels_to_queries(queries, labels, positives, gradients, temperature, settings, ignore)
            if average == "sum":
                back.averaged_over = 1
            total += settings.processes.sum(solve_softmax(back, reduction=reduction, factor=1.0 - balance))
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
) -> ScoreMatrix:
    """Return the scores with labels as rows. A process holds all queries, so only the number of rows is summed."""
    matrix = ScoreMatrix(
        labels,
        queries,
        positives.transpose(),
        gradients.swapped(),
        multiplier=1.0 / temperature,
        streaming=replace(streaming, processes=SingleProcess()),
        ignore=None if ignore is None else ignore.transpose(),
    )
    matrix.averaged_over = int(streaming.processes.sum(torch.tensor(matrix.num_rows, device=queries.device)))
    return matrix
