import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dexter.encoders.classifier import ClassifierTable
from dexter.errors import UsageError
from dexter.training import rows as rows_module
from dexter.training.rows import RowOptimizer, round_stochastically

BETAS = (0.9, 0.999)


def sparse(rows, values, size):
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, size, check_invariants=True)


def give(parameter, rows, values):
    """Set a float32 row-sparse gradient on a parameter of any type."""
    parameter.grad_dtype = torch.float32
    parameter.grad = sparse(rows, values, parameter.shape)


def make(num_rows=13, dimension=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return nn.Parameter(torch.randn(num_rows, dimension, generator=generator).to(dtype))


def test_equals_the_dense_optimiser_when_every_row_is_touched():
    ours, theirs = make(), make()
    row_optimizer = RowOptimizer([ours], lr=0.1, betas=(0.9, 0.99))
    dense_optimizer = torch.optim.Adam([theirs], lr=0.1, betas=(0.9, 0.99))
    for step in range(7):
        gradient = torch.randn(ours.shape, generator=torch.Generator().manual_seed(step))
        order = torch.randperm(len(ours)).tolist()
        give(ours, order, gradient[order])
        theirs.grad = gradient
        row_optimizer.step()
        dense_optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def update_slowly(row, gradient, state, *, lr, betas=BETAS, eps=1e-8):
    """One row, one update, in double precision: the formulas as they are in the paper."""
    dimension = len(row)
    state["n"] = state.get("n", 0) + 1
    mean, square = state.get("m", [0.0] * dimension), state.get("v", [0.0] * dimension)
    for j in range(dimension):
        mean[j] = betas[0] * mean[j] + (1 - betas[0]) * gradient[j]
        square[j] = betas[1] * square[j] + (1 - betas[1]) * gradient[j] ** 2
        corrected = mean[j] / (1 - betas[0] ** state["n"]), square[j] / (1 - betas[1] ** state["n"])
        row[j] -= lr * corrected[0] / (math.sqrt(corrected[1]) + eps)
    state["m"], state["v"] = mean, square


def test_rarely_touched_rows_equal_a_slow_reference(monkeypatch):
    monkeypatch.setattr(rows_module, "_BLOCK_ELEMENTS", 15)  # several blocks, the last one not full
    table = make()
    optimizer = RowOptimizer([table], lr=0.05, betas=BETAS)
    expected, states = table.detach().double().tolist(), [{} for _ in table]
    for step in range(11):
        touched = [row for row in range(len(table)) if step % (row + 1) == 0 or row == 12]
        gradient = torch.randn(len(touched), 5, generator=torch.Generator().manual_seed(step))
        give(table, touched, gradient)
        optimizer.step()
        for row, values in zip(touched, gradient.double().tolist(), strict=True):
            update_slowly(expected[row], values, states[row], lr=0.05)
    torch.testing.assert_close(table.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_contributions_to_a_row_are_summed_before_the_update():
    parts, whole = make(), make()
    first, second = (torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    give(parts, [4, 12, 4, 0, 12, 4], torch.cat([first, second]))
    give(whole, [0, 4, 12], torch.stack([second[0], first[0] + first[2] + second[2], first[1] + second[1]]))
    for parameter in (parts, whole):
        RowOptimizer([parameter], lr=0.1, betas=BETAS).step()
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_untouched_rows_and_their_state_do_not_change(dtype):
    table = make(dtype=dtype)
    optimizer = RowOptimizer([table], lr=0.1, state_dtype=dtype, betas=BETAS)
    give(table, list(range(13)), torch.randn(13, 5))
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[table].items()} | {"table": table.detach().clone()}
    give(table, [12, 3], torch.randn(2, 5))
    optimizer.step()
    after = optimizer.state[table] | {"table": table.detach()}
    others = [row for row in range(13) if row not in (3, 12)]
    for name, value in before.items():
        if name != "step":
            assert torch.equal(value[others], after[name][others]), name
            assert not torch.equal(value[[3, 12]], after[name][[3, 12]]), name


def test_empty_gradients_and_vectors_of_one_number_per_row():
    bias = nn.Parameter(torch.zeros(6))
    optimizer = RowOptimizer([bias], lr=0.1)
    give(bias, [], torch.zeros(0))
    optimizer.step()
    assert not bias.any()
    give(bias, [5, 2], torch.tensor([1.0, -3.0]))
    optimizer.step()
    torch.testing.assert_close(bias.detach(), torch.tensor([0, 0, 0.1, 0, 0, -0.1]))


def test_groups_have_their_own_settings():
    fast, slow = make(), make()
    start = fast.detach().clone()
    optimizer = RowOptimizer([{"params": [fast], "lr": 0.5}, {"params": [slow], "state_dtype": torch.bfloat16}], lr=0.1)
    for parameter in (fast, slow):
        give(parameter, [1], torch.ones(1, 5))
    optimizer.step()
    torch.testing.assert_close((start - fast.detach())[1], torch.full((5,), 0.5))
    torch.testing.assert_close((start - slow.detach())[1], torch.full((5,), 0.1))
    assert optimizer.state[slow]["exp_avg"].dtype == torch.bfloat16


# Stochastic rounding.


def test_rounding_goes_to_a_neighbour_and_is_unbiased():
    values = torch.tensor([1.001, -1.001, 3.3e-5, -7.77e4, 0.2, 1.0, 0.0])
    draws = round_stochastically(values.repeat(40_001, 1), generator=torch.Generator().manual_seed(0))
    assert draws.dtype == torch.bfloat16
    spacing = 2.0 ** (values.abs().clamp_min(1e-30).log2().floor() - 7)
    assert bool(((draws.float() - values).abs() < spacing).all())
    errors = (draws.double().mean(dim=0) - values.double()).abs()
    assert bool((errors <= 4 * 0.5 * spacing.double() / math.sqrt(40_001)).all())
    assert torch.equal(draws[:, 5:].float(), values[5:].expand(40_001, 2))  # what bfloat16 can hold stays as it is
    assert draws.float().var(dim=0)[:5].min() > 0


def test_rounding_keeps_infinities_and_takes_any_shape():
    values = torch.tensor([torch.inf, -torch.inf])
    assert torch.equal(round_stochastically(values).float(), values)
    assert round_stochastically(torch.tensor([torch.nan])).isnan().all()
    assert round_stochastically(torch.randn(3, 7).t()).shape == (7, 3)
    assert round_stochastically(torch.zeros(0, 4)).shape == (0, 4)


def test_seeds_steps_and_parameters_round_differently():
    def run(seed):
        tables = [nn.Parameter(torch.ones(50, 8, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = RowOptimizer(tables, lr=1e-3, seed=seed)
        for table in tables:
            give(table, list(range(50)), torch.ones(50, 8))
        optimizer.step()
        return [table.detach().clone() for table in tables]

    first, again, other = run(0), run(0), run(1)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], other[0])


def classify(storage, make_optimizer, *, steps=400, num_labels=60, dimension=16):
    """Train a classifier on noisy clusters with pools of labels; its loss over all labels and its accuracy."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(num_labels, dimension, generator=generator)
    truth = torch.randint(num_labels, (2000,), generator=generator)
    queries = functional.normalize(centres[truth] + 0.9 * torch.randn(2000, dimension, generator=generator), dim=1)
    table = ClassifierTable(num_labels, dimension, storage=storage)
    table.initialise(centres)
    optimizer = make_optimizer(table.weight)
    for _ in range(steps):
        chosen = torch.randint(1600, (64,), generator=generator)
        extra = torch.randint(num_labels, (10,), generator=generator)
        pool, places = torch.unique(torch.cat([truth[chosen], extra]), return_inverse=True)
        loss = functional.cross_entropy(queries[chosen] @ table.rows(pool).t() * 2, places[:64])
        table.weight.grad = None
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        scores = queries[1600:] @ table.rows().t() * 2
        return (
            float(functional.cross_entropy(scores, truth[1600:])),
            float((scores.argmax(1) == truth[1600:]).float().mean()),
        )


def test_bfloat16_with_stochastic_rounding_trains_as_well_as_float32():
    lr = 2e-3

    def optimizer(**more):
        return lambda weight: RowOptimizer([weight], lr=lr, betas=BETAS, **more)

    full_loss, full_accuracy = classify("float32", optimizer())
    for more in ({}, {"state_dtype": torch.bfloat16}):
        loss, accuracy = classify("bfloat16", optimizer(**more))
        assert abs(loss - full_loss) < 0.01 * full_loss
        assert abs(accuracy - full_accuracy) < 0.01


def test_bfloat16_rounded_to_nearest_stalls(monkeypatch):
    start, _ = classify("float32", lambda weight: RowOptimizer([weight], lr=0.0), steps=1)
    full, _ = classify("float32", lambda weight: RowOptimizer([weight], lr=2e-3))
    stochastic, _ = classify("bfloat16", lambda weight: RowOptimizer([weight], lr=2e-3))
    monkeypatch.setattr(rows_module, "round_stochastically", lambda values, generator: values.to(torch.bfloat16))
    nearest, _ = classify("bfloat16", lambda weight: RowOptimizer([weight], lr=2e-3))
    assert start - stochastic > 0.97 * (start - full)
    assert start - nearest < 0.2 * (start - full)


# Resuming.


def train(optimizer, table, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randperm(len(table), generator=generator)[:6].tolist()
        give(table, rows, torch.randn(6, 5, generator=generator))
        optimizer.step()


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2])
def test_a_resumed_run_is_the_same_bit_for_bit(dtypes):
    options = {"lr": 0.03, "state_dtype": dtypes[1], "seed": 5, "betas": BETAS}
    table = make(dtype=dtypes[0])
    optimizer = RowOptimizer([table], **options)
    train(optimizer, table, range(4))
    assert all(isinstance(value, torch.Tensor) for value in optimizer.state[table].values())

    resumed = nn.Parameter(table.detach().clone())
    other = RowOptimizer([resumed], **options)
    other.state[resumed] = {name: value.clone() for name, value in optimizer.state[table].items()}
    train(optimizer, table, range(4, 9))
    train(other, resumed, range(4, 9))
    assert torch.equal(table, resumed)
    for name, value in optimizer.state[table].items():
        assert value.dtype == other.state[resumed][name].dtype
        assert torch.equal(value, other.state[resumed][name]), name


# Cost.


class LargestAllocation(TorchDispatchMode):
    """Elements of the largest tensor that any operation made in memory of its own."""

    def __init__(self, *known):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for value in tree_leaves(result):
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                continue
            if value.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, value.untyped_storage().nbytes() // value.element_size())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_the_size_of_the_table_is_made_in_a_step(dtype):
    num_labels, dimension, touched = 5000, 8, 20
    table = ClassifierTable(num_labels, dimension, storage=str(dtype).removeprefix("torch."), dropout=0.1)
    optimizer = RowOptimizer(table.parameters(), lr=0.1, state_dtype=dtype, betas=BETAS)

    def step():
        for _ in range(2):
            table.rows(torch.randint(num_labels, (touched,))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = [value for value in optimizer.state[table.weight].values() if value.ndim]
    with LargestAllocation(table.weight.detach(), *state) as seen:
        step()
    assert 0 < seen.largest <= 2 * touched * dimension


# Errors.


def test_a_dense_gradient_is_an_error_that_says_what_to_do():
    table = make()
    table.grad = torch.ones_like(table)
    with pytest.raises(UsageError, match=r"\(13, 5\).*sparse COO.*dense optimiser"):
        RowOptimizer([table], lr=0.1).step()
    table.grad = torch.ones(13, 5).to_sparse()
    with pytest.raises(UsageError, match="over rows"):
        RowOptimizer([table], lr=0.1).step()


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"betas": (0.9, 1.0)},
        {"eps": -1e-8},
        {"state_dtype": torch.float16},
    ],
)
def test_wrong_settings_are_named(settings):
    with pytest.raises(UsageError, match=next(iter(settings))):
        RowOptimizer([make()], **({"lr": 0.1} | settings))
    with pytest.raises(UsageError, match="float16"):
        RowOptimizer([make(dtype=torch.float16)], lr=0.1)
