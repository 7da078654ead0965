import numpy as np
import torch

from dexter.training.labels import DistinctTexts, LabelSide, spread


def test_equal_texts_are_kept_once():
    distinct = DistinctTexts.of(["b", "a", "b", "c", "a"])
    assert distinct.texts == ("b", "a", "c")
    assert distinct.places.tolist() == [0, 1, 0, 2, 1]


def test_a_pool_is_put_together_from_its_distinct_texts():
    side = LabelSide(np.array([0, 1, 0, 2, 1]))
    pool = np.array([2, 3, 4])
    texts = side.texts_to_encode(pool, needed=pool, step=0)
    assert texts.tolist() == [0, 1, 2]
    vectors = torch.tensor([[0.0], [1.0], [2.0]])
    assert side.assemble(vectors, texts, pool).flatten().tolist() == [0.0, 2.0, 1.0]
    texts = side.texts_to_encode(np.array([3]), needed=np.array([3]), step=0)
    assert side.assemble(torch.tensor([[2.0]]), texts, np.array([3])).tolist() == [[2.0]]


def test_no_label_is_older_than_the_refresh_and_needed_ones_are_fresh():
    num, refresh = 11, 4
    side = LabelSide(np.arange(num), refresh=refresh)
    encoded_at = np.zeros(num, dtype=int)
    for step in range(20):
        needed = np.array([step % num, 3])
        texts = side.texts_to_encode(None, needed=needed, step=step)
        encoded_at[texts] = step
        assert set(needed) <= set(texts)
        assert (step - encoded_at).max() < refresh
        fresh = torch.full((len(texts), 2), float(step), requires_grad=True)
        mixed = side.assemble(fresh, texts, None)
        assert mixed[:, 0].tolist() == encoded_at.tolist()
        mixed[3].sum().backward()
        side.learn()
        assert side.texts_to_encode(None, needed=np.array([], dtype=int), step=0).tolist() == [0, 3, 4, 8]


def test_state_survives():
    side = LabelSide(np.arange(5), refresh=2)
    side.assemble(torch.randn(5, 3), np.arange(5), None)
    other = LabelSide(np.arange(5), refresh=2)
    other.load_state(side.state(), "cpu")
    fresh, texts = torch.randn(2, 3), np.array([1, 4])
    assert torch.equal(side.assemble(fresh, texts, None), other.assemble(fresh, texts, None))


def test_labels_have_the_rows_of_their_texts_without_a_copy_where_none_is_repeated():
    rows = torch.randn(3, 2)
    assert spread(rows, np.arange(3)) is rows
    torch.testing.assert_close(spread(rows, np.array([0, 1, 0, 2, 1])), rows[[0, 1, 0, 2, 1]])
    torch.testing.assert_close(spread(rows, np.array([2, 0, 1])), rows[[2, 0, 1]])
