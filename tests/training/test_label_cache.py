import numpy as np
import torch

from dexter.processes import SingleProcess
from dexter.training.label_cache import LabelCache


def test_no_label_is_older_than_the_refresh_and_needed_ones_are_fresh():
    num, refresh = 11, 4
    cache = LabelCache(num, refresh=refresh, processes=SingleProcess())
    encoded_at = np.zeros(num, dtype=int)
    for step in range(20):
        needed = np.array([step % num, 3])
        texts = cache.texts_to_encode(needed, step=step)
        encoded_at[texts] = step
        assert set(needed) <= set(texts)
        assert (step - encoded_at).max() < refresh
        fresh = torch.full((len(texts), 2), float(step), requires_grad=True)
        mixed = cache.combine(fresh, texts)
        assert mixed[:, 0].tolist() == encoded_at.tolist()
        mixed[3].sum().backward()
        cache.note_gradients()
        assert cache.texts_to_encode(np.array([], dtype=int), step=0).tolist() == [0, 3, 4, 8]


def test_state_survives():
    cache = LabelCache(5, refresh=2, processes=SingleProcess())
    cache.combine(torch.randn(5, 3), np.arange(5))
    other = LabelCache(5, refresh=2, processes=SingleProcess())
    other.load_state(cache.state(), "cpu")
    fresh, texts = torch.randn(2, 3), np.array([1, 4])
    assert torch.equal(cache.combine(fresh, texts), other.combine(fresh, texts))
