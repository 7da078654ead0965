"""Gradient caching equals one plain backward pass, dropout on, for micro-batches that do not divide."""

import numpy as np
import pytest
import torch
from torch import nn

from dexter.batches import Positives
from dexter.losses import decoupled_softmax
from dexter.training.gradcache import EncoderInput, backward


class Encoder(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 5))

    def forward(self, inputs):
        return nn.functional.normalize(self.layers(inputs), dim=-1)


def cut(num_rows, size):
    order = np.random.default_rng(0).permutation(num_rows)
    return [order[start : start + size] for start in range(0, num_rows, size)]


def objective(queries, labels):
    positives = Positives([0, 1, 1, 4, 6], [0, 3, 10, 2, 9])
    return decoupled_softmax(queries, labels, positives, temperature=0.3)


def gradients(encoder):
    return [parameter.grad.clone() for parameter in encoder.parameters()]


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    return torch.randn(7, 6), torch.randn(11, 6)


def encoder_inputs(encoder, inputs, size):
    return [
        EncoderInput(encode=lambda rows, x=x: encoder(x[torch.from_numpy(rows)]), micro_batches=cut(len(x), size))
        for x in inputs
    ]


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_equals_plain_backward_without_dropout(inputs, size):
    encoder = Encoder(0.0)
    objective(encoder(inputs[0]), encoder(inputs[1])).backward()
    expected = gradients(encoder)
    encoder.zero_grad()
    backward(objective, *encoder_inputs(encoder, inputs, size))
    for got, wanted in zip(gradients(encoder), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 5, 100])
def test_replays_the_same_dropout(inputs, size):
    """A plain graph over the same micro-batches, drawn from the same random state, is what must come out."""
    encoder = Encoder(0.4)
    torch.manual_seed(7)
    parts = []
    for x in inputs:
        output = torch.empty(len(x), 5)
        for rows in cut(len(x), size):
            output = output.index_copy(0, torch.from_numpy(rows), encoder(x[torch.from_numpy(rows)]))
        parts.append(output)
    loss = objective(*parts)
    loss.backward()
    expected, after = gradients(encoder), torch.get_rng_state()
    encoder.zero_grad()
    torch.manual_seed(7)
    result = backward(objective, *encoder_inputs(encoder, inputs, size))
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(result.loss, loss.detach())
    for got, wanted in zip(gradients(encoder), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_the_objective_keeps_its_own_gradients(inputs):
    encoder = Encoder(0.0)
    scale = nn.Parameter(torch.tensor(2.0))
    backward(lambda q, y: objective(q * scale, y), *encoder_inputs(encoder, inputs, 4))
    assert scale.grad is not None and scale.grad != 0
