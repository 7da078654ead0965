"""What streaming promises: memory, several processes, the tiles planned for a budget."""

from __future__ import annotations

import threading

import pytest
import torch
from cases import NAMES, make_case, random_pairs, relative_errors, run, value_and_gradients
from reference_losses import Case, reference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dexter.losses
from dexter.batches import Positives
from dexter.errors import UsageError
from dexter.losses import Streaming
from dexter.losses.streaming import plan_tiles


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


@pytest.mark.parametrize("mode", ["auto", "tiles", "chunks"])
@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_reaches_queries_times_labels(name, mode):
    num_queries, num_labels = 64, 6000
    case = make_case(num_queries, num_labels, 8)
    with LargestTensor() as seen:
        run(name, case, Streaming(mode=mode))
    assert seen.num_elements < num_queries * num_labels


@pytest.mark.parametrize("name", NAMES)
def test_chunks_stay_small_however_many_labels(name):
    case = make_case(64, 6000, 2)
    with LargestTensor() as seen:
        run(name, case, Streaming(mode="chunks", memory_budget=4 * 64 * 100))
    # The label table and its gradient are the largest tensors left; soft top-k adds its sample of labels.
    sample = 64 * 3000 if name == "soft_topk" else 0
    assert seen.num_elements <= max(6000 * 2, sample)


def test_tiles_fit_the_budget():
    megabyte = 2**20
    tiles = plan_tiles(Streaming(memory_budget=128 * megabyte), 1024, 131_072)
    assert (tiles.keep, tiles.row_block) == (True, 256)
    assert tiles.row_block * tiles.label_chunk <= megabyte
    chunks = plan_tiles(Streaming(memory_budget=128 * megabyte), 1024, 1_310_720)
    assert not chunks.keep
    assert (chunks.row_block, chunks.label_chunk) == (512, 1024)
    tight = plan_tiles(Streaming(mode="chunks", memory_budget=megabyte), 1024, 1_310_720)
    assert 4 * tight.row_block * tight.label_chunk <= megabyte
    assert plan_tiles(Streaming(row_block=3, label_chunk=5), 7, 53).row_block == 3


def test_tiles_suit_the_device():
    """On an accelerator tiles are 32 times as large, so that kernels are few; budgets hold on both."""
    megabyte = 2**20
    streaming = Streaming(memory_budget=256 * megabyte)
    for num_rows, num_labels in ((3_000, 131_073), (3_000, 1_305_265), (512, 3_956), (1, 1), (7, 53)):
        cpu = plan_tiles(streaming, num_rows, num_labels, device_type="cpu")
        assert cpu == plan_tiles(streaming, num_rows, num_labels)
        cuda = plan_tiles(streaming, num_rows, num_labels, device_type="cuda")
        for plan, most in ((cpu, 2 * megabyte), (cuda, 64 * megabyte)):
            assert 4 * plan.row_block * plan.label_chunk <= max(most, 4 * plan.row_block)
            held = plan.row_block * (num_labels if plan.keep else plan.label_chunk)
            assert 4 * held <= 256 * megabyte
        assert cuda.row_block * cuda.label_chunk >= cpu.row_block * cpu.label_chunk
        if num_rows * num_labels > 2**26:
            assert cuda.row_block * cuda.label_chunk >= 16 * cpu.row_block * cpu.label_chunk
    few_rows = (
        plan_tiles(streaming, 3_000, 600_000, device_type="cpu"),
        plan_tiles(streaming, 3_000, 600_000, device_type="cuda"),
    )
    assert [plan.keep for plan in few_rows] == [True, False]
    tight = plan_tiles(Streaming(mode="chunks", memory_budget=megabyte), 1_024, 1_310_720, device_type="cuda")
    assert 4 * tight.row_block * tight.label_chunk <= megabyte


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "rows"},
        {"memory_budget": 0},
        {"row_block": 0},
        {"label_chunk": -1},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(UsageError):
        Streaming(**wrong)


class Exchange:
    """Collectives over threads: each brings a tensor and receives those of all."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=20)
        self.values: list[Tensor | None] = [None] * num_ranks

    def all_values(self, rank: int, value: Tensor) -> list[Tensor]:
        self.values[rank] = value.detach().clone()
        self.barrier.wait()
        everybodys = list(self.values)
        self.barrier.wait()
        return everybodys


class ThreadProcess:
    """A thread as one of several processes."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank, self.size = exchange, rank, len(exchange.values)

    def max(self, values: Tensor) -> Tensor:
        return torch.stack(self.exchange.all_values(self.rank, values)).amax(0)

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self.exchange.all_values(self.rank, values)).sum(0)

    def concatenate(self, values: Tensor) -> Tensor:
        return torch.cat(self.exchange.all_values(self.rank, values))


def run_sharded(name: str, case: Case, bounds: list[int], **sizes) -> tuple[Tensor, Tensor, Tensor]:
    """The loss over ranks that hold the labels between consecutive bounds."""
    num_ranks = len(bounds) - 1
    exchange, results, failures = Exchange(num_ranks), [None] * num_ranks, []

    def part_of(pairs: Positives | None, start: int, stop: int) -> Positives | None:
        if pairs is None:
            return None
        inside = (pairs.columns >= start) & (pairs.columns < stop)
        weights = None if pairs.weights is None else pairs.weights[inside]
        return Positives(pairs.rows[inside], pairs.columns[inside] - start, weights)

    def work(rank: int) -> None:
        try:
            start, stop = bounds[rank : rank + 2]
            streaming = Streaming(processes=ThreadProcess(exchange, rank), **sizes)
            pairs, ignore = part_of(case.positives, start, stop), part_of(case.ignore, start, stop)
            loss = getattr(dexter.losses, name)
            more = dict(case.settings, ignore=ignore, streaming=streaming)
            results[rank] = value_and_gradients(loss, case.queries, case.labels[start:stop], pairs, **more)
        except BaseException as failure:
            failures.append(failure)
            exchange.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if failures:
        raise failures[0]
    for result in results:
        torch.testing.assert_close(result.value, results[0].value)
    return results[0].value, sum(result.queries for result in results), torch.cat([result.labels for result in results])


@pytest.mark.parametrize("mode", ["tiles", "chunks", "auto"])
@pytest.mark.parametrize("bounds", [[0, 20, 31, 53], [0, 50, 50, 53], [0, 1, 53, 53]], ids=str)
@pytest.mark.parametrize(("name", "average"), [*((name, "mean") for name in NAMES), ("psl", "sum")])
def test_shards_agree_with_one_process(name, average, bounds, mode):
    case = make_case(
        7, 53, 11, positives=random_pairs(6, 53, 15, weighted=True), ignore=random_pairs(7, 53, 12, seed=3)
    )
    case.settings = {"k": 3} if name == "soft_topk" else {"average": average} if name == "psl" else {}
    sizes = {} if mode == "auto" else {"row_block": 3, "label_chunk": 8}
    got = run_sharded(name, case, bounds, mode=mode, **sizes)
    assert max(relative_errors(got, tuple(tensor.double() for tensor in run(name, case)))) < 2e-6


def test_triplet_over_ranks_with_fewer_negatives_than_asked_for():
    case = make_case(5, 9, 4, positives=random_pairs(5, 9, 12), settings={"num_negatives": 20})
    got = run_sharded("triplet", case, [0, 0, 4, 9])
    assert max(relative_errors(got, tuple(tensor.double() for tensor in run("triplet", case)))) < 2e-6


@pytest.mark.parametrize("name", NAMES)
def test_double_precision_stays_double(name):
    case = make_case(
        7, 53, 11, queries=make_case(7, 53, 11).queries.double(), labels=make_case(7, 53, 11).labels.double()
    )
    assert all(tensor.dtype == torch.float64 for tensor in run(name, case))
    assert max(relative_errors(run(name, case), reference(name, case))) < (1e-5 if name == "soft_topk" else 1e-9)
