"""Value and both gradients of every loss against a float64 double loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import LAYOUTS, NAMES, assert_agrees, make_case, random_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from dexter.batches import Positives
from dexter.losses import Streaming

SIZES = [(7, 53, 11), (1, 1, 1), (1, 2, 3), (2, 9, 5), (13, 8, 4)]


def settings_of(name: str, num_labels: int) -> dict:
    return {"k": min(3, num_labels / 2)} if name == "soft_topk" else {}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_odd_sizes(name, size, layout, error_log):
    case = make_case(*size, settings=settings_of(name, size[1]))
    assert_agrees(name, case, LAYOUTS[layout], log=error_log)


@pytest.mark.parametrize("layout", ["default", "tiles that do not divide", "chunks that do not divide"])
@pytest.mark.parametrize("name", NAMES)
def test_on_the_device(name, layout, device, record_property):
    """Weighted and ignored pairs, on the CPU and by `make test-gpu` on a CUDA device."""
    pairs = {"positives": random_pairs(7, 53, 20, weighted=True), "ignore": random_pairs(7, 53, 30, seed=1)}
    case = make_case(7, 53, 11, settings=settings_of(name, 53), **pairs)
    record_property("errors of value, dq, dy", assert_agrees(name, case, LAYOUTS[layout], device=device))


@pytest.mark.parametrize("layout", ["default", "tiles that do not divide", "chunks that do not divide"])
@pytest.mark.parametrize("name", NAMES)
class TestEdgeRows:
    def check(self, name, layout, error_log, positives, ignore=None, **more):
        case = make_case(7, 53, 11, positives=positives, ignore=ignore, settings={**settings_of(name, 53), **more})
        assert_agrees(name, case, LAYOUTS[layout], log=error_log)

    def test_queries_without_positive(self, name, layout, error_log):
        self.check(name, layout, error_log, Positives([1, 1, 5], [3, 52, 9]))

    def test_no_positive_at_all(self, name, layout, error_log):
        self.check(name, layout, error_log, Positives([], []))

    def test_all_labels_positive(self, name, layout, error_log):
        self.check(name, layout, error_log, Positives([0] * 53 + [2], [*range(53), 4]))

    def test_last_label_positive(self, name, layout, error_log):
        self.check(name, layout, error_log, Positives([0, 6], [52, 52]))

    def test_duplicates_count_once(self, name, layout, error_log):
        self.check(name, layout, error_log, Positives([0, 0, 0, 3], [5, 5, 7, 1]))

    def test_weights(self, name, layout, error_log):
        self.check(name, layout, error_log, random_pairs(7, 53, 20, weighted=True))

    def test_ignored_pairs(self, name, layout, error_log):
        self.check(name, layout, error_log, random_pairs(7, 53, 20), random_pairs(7, 53, 60, seed=1))

    def test_pairs_both_positive_and_ignored_are_ignored(self, name, layout, error_log):
        self.check(name, layout, error_log, Positives([0, 0, 1], [5, 7, 1]), Positives([0, 1], [5, 1]))

    def test_only_positives_are_left(self, name, layout, error_log):
        ignore = Positives([0] * 49, [*range(4, 53)])
        self.check(name, layout, error_log, Positives([0, 0, 2], [1, 2, 4]), ignore)


@pytest.mark.parametrize("reduction", ["pal-n", "pal"])
@pytest.mark.parametrize("name", ["softmax", "decoupled_softmax", "psl"])
def test_reductions(name, reduction, error_log):
    positives = random_pairs(7, 53, 30, weighted=True)
    assert_agrees(name, make_case(7, 53, 11, positives=positives, settings={"reduction": reduction}), log=error_log)


@pytest.mark.parametrize("balance", [0.0, 0.3, 1.0])
def test_psl_sums_over_queries_and_labels(balance, error_log):
    assert_agrees("psl", make_case(7, 53, 11, settings={"balance": balance, "average": "sum"}), log=error_log)


@pytest.mark.parametrize("balance", [0.0, 0.3, 1.0])
def test_balance_of_psl(balance, error_log):
    assert_agrees("psl", make_case(7, 53, 11, settings={"balance": balance}), log=error_log)


@pytest.mark.parametrize("k", [1, 3, 52, 52.5, [1, 2, 3, 4, 5, 6, 50]], ids=str)
@pytest.mark.parametrize("layout", ["default", "tiles that do not divide", "chunks that do not divide"])
def test_k_of_soft_topk(k, layout, error_log):
    case = make_case(7, 53, 11, settings={"k": k, "temperature": 0.3, "alpha": 1.5})
    assert_agrees("soft_topk", case, LAYOUTS[layout], log=error_log)


@pytest.mark.parametrize(
    "more", [{"margin": 0.0}, {"num_negatives": 1}, {"num_negatives": 1000}, {"margin": -0.5}], ids=str
)
def test_settings_of_triplet(more, error_log):
    assert_agrees("triplet", make_case(7, 53, 11, settings=more), log=error_log)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    num_queries=st.integers(1, 6),
    num_labels=st.integers(2, 14),
    num_dimensions=st.integers(1, 5),
    num_positives=st.integers(0, 12),
    num_ignored=st.integers(0, 4),
    temperature=st.sampled_from([0.1, 0.5, 1.0]),
    mode=st.sampled_from(["tiles", "chunks"]),
    row_block=st.integers(1, 8),
    label_chunk=st.integers(1, 16),
    seed=st.integers(0, 10**6),
)
def test_any_shape(
    name,
    num_queries,
    num_labels,
    num_dimensions,
    num_positives,
    num_ignored,
    temperature,
    mode,
    row_block,
    label_chunk,
    seed,
):
    more = {} if name == "triplet" else {"temperature": temperature}
    if name == "soft_topk":
        num_ignored, more["k"] = 0, num_labels / 3
    case = make_case(
        num_queries,
        num_labels,
        num_dimensions,
        seed=seed,
        positives=random_pairs(num_queries, num_labels, num_positives, weighted=seed % 2 == 0, seed=seed),
        ignore=random_pairs(num_queries, num_labels, num_ignored, seed=seed + 1) if num_ignored else None,
        settings=more,
    )
    assert_agrees(name, case, Streaming(mode=mode, row_block=row_block, label_chunk=label_chunk), tolerance=3e-5)


def test_softmax_with_one_positive_is_decoupled_softmax():
    from dexter.losses import decoupled_softmax, psl, softmax

    case = make_case(7, 53, 11, positives=Positives(range(7), range(7)))
    arguments = (case.queries, case.labels, case.positives)
    torch.testing.assert_close(softmax(*arguments), decoupled_softmax(*arguments))
    torch.testing.assert_close(softmax(*arguments), psl(*arguments, balance=1.0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["softmax", "decoupled_softmax", "psl"])
def test_offsets_move_negatives_only(name, layout, error_log):
    """Negatives' scores are shifted by their label's number, positives' are not."""
    offsets = torch.randn(53, generator=torch.Generator().manual_seed(3))
    positives, ignore = Positives([0, 0, 0, 1, 3, 5], [2, 12, 52, 0, 7, 7]), random_pairs(7, 53, 20, seed=1)
    settings = {"temperature": 0.5, "negative_offsets": offsets}
    case = make_case(7, 53, 11, positives=positives, ignore=ignore, settings=settings)
    assert_agrees(name, case, LAYOUTS[layout], log=error_log)


@pytest.mark.parametrize("name", ["softmax", "psl"])
def test_corrected_pools_estimate_the_loss_over_all_labels(name):
    """With one positive, exp(loss) is a sum over labels divided by a constant: its mean over pools is that of all."""
    from dexter import losses

    generator, random = torch.Generator().manual_seed(4), np.random.default_rng(4)
    query, labels = torch.randn(1, 4, generator=generator), torch.randn(30, 4, generator=generator)
    chances = torch.cat([torch.ones(1), torch.linspace(0.2, 0.9, 29)])
    loss, more = getattr(losses, name), {"balance": 1.0} if name == "psl" else {}
    whole = loss(query, labels, Positives([0], [0]), temperature=1.0, **more).exp()
    estimates = []
    for _ in range(2000):
        pool = torch.from_numpy(np.flatnonzero(random.random(30) < chances.numpy()))
        offsets = -chances[pool].log()
        corrected = loss(query, labels[pool], Positives([0], [0]), temperature=1.0, negative_offsets=offsets, **more)
        estimates.append(corrected.exp())
    sums = torch.stack(estimates)
    error = sums.std() / len(sums) ** 0.5
    assert abs(sums.mean() - whole) < 4 * error
    assert error < 0.02 * whole
