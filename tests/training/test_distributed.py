"""The world of several processes, on gloo: meetings, losses over label shards, ranks that die or hang."""

import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse
import torch

import dexter.losses
from dexter.batches import Positives
from dexter.batches.clusters import balanced_clusters
from dexter.batches.mining import mine_hard_negatives
from dexter.index import search_shards
from dexter.losses import Streaming
from dexter.model.unseen import fill_unseen_rows
from dexter.processes import sum_arrays
from tests.training.ranks import free_port, run_ranks


def meet(world):
    mine = torch.arange(world.rank * 3.0).reshape(world.rank, 3)
    halves = torch.full((2, 3), float(world.rank + 1), requires_grad=True)
    rows = halves[: world.part(5).stop - world.part(5).start]
    joined = world.joined_rows(rows, 5)
    (joined * (world.rank + 1)).sum().backward()
    return {
        "max": world.max(torch.tensor([world.rank, -world.rank])).tolist(),
        "sum": world.sum(torch.tensor([world.rank + 1.0])).tolist(),
        "concatenate": world.concatenate(mine).tolist(),
        "joined": joined[:, 0].tolist(),
        "gradient": halves.grad[:, 0].tolist(),
        "broadcast": world.broadcast(torch.tensor([world.rank + 7])).tolist(),
        "collect": [part.tolist() for part in world.collect(mine)],
        "agree": world.agree(world.rank, 0.5),
        "calls": {name: record.calls for name, record in world.traffic.items()},
        "bytes": world.traffic["queries"].bytes,
    }


def test_meetings_of_three():
    answers = run_ranks(3, meet)
    rows = [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    for rank, answer in enumerate(answers):
        assert answer["max"] == [2, 0]
        assert answer["sum"] == [6.0]
        assert answer["concatenate"] == rows
        assert answer["joined"] == [1.0, 1.0, 2.0, 2.0, 3.0]
        assert answer["gradient"] == ([6.0, 6.0] if rank < 2 else [6.0, 0.0])
        assert answer["broadcast"] == [7]
        assert answer["collect"] == ([[], rows[:1], rows[1:]] if rank == 0 else [])
        assert answer["agree"] == [2.0, 0.5]
        assert answer["calls"]["queries"] == 1
        assert answer["bytes"] == 2 * 2 * 3 * 4


def meet_on_device(world, device):
    """Each collective with a tensor of the device, and a gradient that crosses ranks."""
    device = world.device(device)
    mine = torch.full((world.rank + 1, 2), float(world.rank + 1), device=device)
    rows = torch.full((world.part(5).stop - world.part(5).start, 3), 1.0, device=device, requires_grad=True)
    (world.joined_rows(rows, 5) * (world.rank + 1)).sum().backward()
    found = {
        "max": world.max(mine[0]),
        "sum": world.sum(mine[0]),
        "concatenate": world.concatenate(mine)[:, 0],
        "gradient": rows.grad[0],
        "broadcast": world.broadcast(mine[0].clone()),
    }
    assert all(value.device == torch.device(device) for value in found.values())
    return {name: value.tolist() for name, value in found.items()}


def test_two_devices_communicate(device):
    """By NCCL on two CUDA devices, by gloo on the CPU."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices")
    for answer in run_ranks(2, meet_on_device, device, start="spawn" if device == "cuda" else "fork"):
        assert answer == {
            "max": [2.0, 2.0],
            "sum": [3.0, 3.0],
            "concatenate": [1.0, 2.0, 2.0],
            "gradient": [3.0, 3.0, 3.0],
            "broadcast": [1.0, 1.0],
        }


_ONE_PROCESS = """
import sys, torch
from torch import distributed as dist
from dexter.training.distributed import ProcessGroup
device, backend = sys.argv[1], "nccl" if sys.argv[1] == "cuda" else "gloo"
dist.init_process_group(backend, init_method="tcp://127.0.0.1:" + sys.argv[2], rank=0, world_size=1)
group, values = ProcessGroup(), torch.arange(6.0, device=device).reshape(2, 3)
assert torch.equal(group._reduced(values.clone(), dist.ReduceOp.SUM, "sum"), values)
assert torch.equal(group._concatenated(values, [2], "rows"), values)
dist.broadcast(values, src=0)
assert values.sum() == 15
print(dist.get_backend())
dist.destroy_process_group()
"""


def test_one_device_communicates(device):
    """The library itself, in a process of its own: with a single process no collective reaches it otherwise."""
    arguments = [sys.executable, "-c", _ONE_PROCESS, device, str(free_port())]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["nccl" if device == "cuda" else "gloo"], done.stderr


def sharded_losses(world, cases):
    results = []
    for name, queries, labels, rows, columns, settings in cases:
        chosen = torch.from_numpy(np.flatnonzero(np.arange(len(labels)) % world.size == world.rank))
        inside = columns % world.size == world.rank
        positives = Positives(rows[inside], columns[inside] // world.size)
        streaming = Streaming(processes=world, row_block=3, label_chunk=4)
        inputs = queries.clone().requires_grad_(), labels[chosen].requires_grad_()
        value = getattr(dexter.losses, name)(*inputs, positives, streaming=streaming, **settings)
        value.backward()
        labels_gradient = torch.zeros_like(labels)
        labels_gradient[chosen] = inputs[1].grad
        results.append([part.tolist() for part in (value, world.sum(inputs[0].grad), world.sum(labels_gradient))])
    return results


LOSSES = {
    "softmax": {},
    "decoupled_softmax": {},
    "psl": {"balance": 0.3},
    "bce": {"scale": 1.5, "bias": -2.0},
    "soft_topk": {"k": 2},
    "triplet": {"num_negatives": 4},
}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_loss_over_shards_equals_one_process(num_ranks):
    generator = torch.Generator().manual_seed(0)
    cases = []
    for num_queries, num_labels in ((7, 23), (4, 5), (5, 2)):
        for name, settings in LOSSES.items():
            queries, labels = (
                torch.randn(count, 6, generator=generator, dtype=torch.float64) / 3
                for count in (num_queries, num_labels)
            )
            pairs = torch.randint(0, 1000, (2, 9), generator=generator)
            settings = settings | ({"k": 1} if name == "soft_topk" and num_labels == 2 else {})
            cases.append((name, queries, labels, pairs[0] % num_queries, pairs[1] % num_labels, settings))
    expected = run_ranks(1, sharded_losses, cases)[0]
    for answers in run_ranks(num_ranks, sharded_losses, cases):
        for case, got, wanted in zip(cases, answers, expected, strict=True):
            for have, want in zip(got, wanted, strict=True):
                torch.testing.assert_close(torch.tensor(have), torch.tensor(want), rtol=1e-9, atol=1e-12, msg=case[0])


def search_together(world, queries, labels, rows, counts, relevance):
    """Search, mining, clusters and rows of unseen labels, with labels dealt out."""
    ids = np.arange(world.rank, len(labels), world.size)
    own = {"label_ids": ids, "processes": world}
    found = search_shards(queries, labels[ids], 6, exclude=relevance[:, ids], **own)
    mined = mine_hard_negatives(queries, labels[ids], relevance[:, ids], num_negatives=7, **own)
    leaves = balanced_clusters(queries, 4, seed=1, processes=world)
    filled, unseen = np.zeros_like(rows), rows[ids][counts[ids] == 0][:, ::-1]
    filled[ids] = fill_unseen_rows(
        rows[ids], counts[ids], texts_UC=unseen, label_vectors_LD=labels[ids], num_neighbours=3, processes=world
    )
    return found, mined, [leaf.tolist() for leaf in leaves], sum_arrays(world, filled)


@pytest.mark.parametrize("num_labels", [23, 2])
def test_search_mining_clusters_and_filled_rows_over_ranks(num_labels):
    generator = np.random.default_rng(3)
    # Whole numbers, so that scores are exact and many are equal: ties must fall as they do in one process.
    queries, labels = (generator.integers(-2, 3, (count, 4)).astype(np.float32) for count in (50, num_labels))
    rows = generator.standard_normal((num_labels, 5), dtype=np.float32)
    relevance = scipy.sparse.random(50, num_labels, density=0.2, format="csr", random_state=0)
    arguments = (queries, labels, rows, np.arange(num_labels) % 4, relevance)
    wanted = run_ranks(1, search_together, *arguments)[0]
    for found, mined, leaves, filled in run_ranks(3, search_together, *arguments):
        np.testing.assert_array_equal(found.ids, wanted[0].ids)
        np.testing.assert_array_equal(found.scores, wanted[0].scores)
        np.testing.assert_array_equal(mined, wanted[1])
        assert leaves == wanted[2]
        np.testing.assert_allclose(filled, wanted[3], atol=1e-6)
