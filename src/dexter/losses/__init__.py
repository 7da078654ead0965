"""Losses: functions of embeddings and positive pairs, streamed so that no B x L matrix is ever in memory.

All are called as `loss(queries_BD, labels_LD, positives, *, ...)` and return a scalar that backpropagates into both
embeddings. Scores are inner products divided by a temperature; the functions do not normalise. Which to choose:

| loss                | a positive is compared with              | choose it                                           |
|---------------------|------------------------------------------|-----------------------------------------------------|
| `softmax`           | all labels, other positives included     | for one positive per query; the InfoNCE baseline    |
| `decoupled_softmax` | the negatives only                       | for several positives and a pool of many labels     |
| `psl`               | all labels, and all queries of the batch | for clustered batches with hard negatives           |
| `soft_topk`         | a threshold that k labels exceed         | if precision or recall at a known k is the goal     |
| `bce`               | nothing: each pair is a yes or a no      | for calibrated probabilities and classifier rows    |
| `triplet`           | the few hardest negatives                | to reproduce NGAME                                  |
"""

from dexter.losses.bce import bce
from dexter.losses.decoupled import decoupled_softmax
from dexter.losses.psl import psl
from dexter.losses.softmax import softmax
from dexter.losses.streaming import Streaming
from dexter.losses.topk import soft_topk
from dexter.losses.triplet import triplet

__all__ = ["Streaming", "bce", "decoupled_softmax", "psl", "soft_topk", "softmax", "triplet"]
