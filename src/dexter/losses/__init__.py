"""Losses: pure functions of embeddings and positive pairs, streamed so that no B x L matrix exists.

All have the shape `loss(queries_BD, labels_LD, positives, *, ...) -> scalar`; their docstrings say which to choose.
"""

from dexter.losses.bce import bce
from dexter.losses.decoupled import decoupled_softmax
from dexter.losses.differentiable import ValueAndGradients, value_and_grad
from dexter.losses.psl import psl
from dexter.losses.settings import Saving, Shard, Streaming
from dexter.losses.softmax import softmax
from dexter.losses.topk import soft_topk
from dexter.losses.triplet import triplet
from dexter.processes import SingleProcess

__all__ = [
    "Saving",
    "Shard",
    "SingleProcess",
    "Streaming",
    "ValueAndGradients",
    "bce",
    "decoupled_softmax",
    "psl",
    "soft_topk",
    "softmax",
    "triplet",
    "value_and_grad",
]
