"""Labels share the representations of equal texts; in training, vectors have room for the prior and are aligned."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from dexter.encoders.heads import DualHead, LabelPrior, unit_rows
from dexter.training.objective import spread
from dexter.training.trainer import distinct_texts


def test_equal_texts_are_kept_once():
    texts, text_of_label = distinct_texts(["b", "a", "b", "c", "a"])
    assert texts == ["b", "a", "c"]
    assert text_of_label.tolist() == [0, 1, 0, 2, 1]


def test_labels_have_the_rows_of_their_texts_without_a_copy_where_none_is_repeated():
    rows = torch.randn(3, 2)
    assert spread(rows, np.arange(3)) is rows
    torch.testing.assert_close(spread(rows, np.array([0, 1, 0, 2, 1])), rows[[0, 1, 0, 2, 1]])
    torch.testing.assert_close(spread(rows, np.array([2, 0, 1])), rows[[2, 0, 1]])


@pytest.mark.parametrize("width", [7, 8, 13])
def test_training_scores_are_those_of_the_trained_head_plus_the_prior(width):
    torch.manual_seed(0)
    head = DualHead(temperature=0.1, prior=LabelPrior(np.array([3, 0, 9]), num_queries=12), normalize=True)
    queries, labels = torch.randn(5, width), torch.randn(2, width)
    in_training = head.queries(queries) @ head.labels(labels, torch.tensor([1, 2])).T
    assert head.queries(queries).shape[1] % 8 == 0
    expected = head.vectors(queries) @ head.vectors(labels).T + 0.1 * head.prior.bias[1:]
    torch.testing.assert_close(in_training, expected)
    trained = head.arrays()
    in_use = np.hstack(trained.queries(queries.numpy(), 1.0)) @ np.hstack(trained.labels(labels.numpy(), slice(1, 3))).T
    np.testing.assert_allclose(in_use, expected.detach().numpy(), atol=1e-5)


def test_unit_rows_and_their_gradient_are_those_of_normalize():
    vectors = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    vectors[2] = 0.0
    weights = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    first, second = vectors.clone().requires_grad_(), vectors.clone().requires_grad_()
    made, expected = unit_rows(first), functional.normalize(second, dim=-1)
    torch.testing.assert_close(made, expected)
    (made * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(first.grad, second.grad)
