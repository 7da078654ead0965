"""Labels share the representations of equal texts."""

import numpy as np
import torch

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
