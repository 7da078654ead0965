"""Time, matrix-product rate and memory of every loss, beside plain autograd on the full matrix: one run, one table.

    python bench/losses.py                      the full table (B=1024, L=131,072, then L=1,310,720 with B=256)
    python bench/losses.py --threads 1 --queries 256 --skip-many      a quick look
    python bench/losses.py --errors             largest errors against float64 autograd instead

"of floor" compares with the three matrix products that any exact gradient needs (scores, query gradients, label
gradients), made of cache-sized tiles by the library that the losses choose (MKL or oneDNN), with nothing done to the
scores, and timed in turn with every row: the clock of a shared machine changes within seconds. Plain autograd has what
torch takes, MKL. "x plain" compares the two rows' shares of the floor. Extra memory is the peak of the resident set
above what was resident before, less the two gradients.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

import dexter.losses
from dexter.batches import Positives
from dexter.losses import Streaming
from dexter.products import add_product, product

MEGABYTE = 1e6
TEMPERATURE = 0.05
CLOCK = time.perf_counter
PLAIN_NAMES = ("softmax", "decoupled_softmax", "psl", "bce")
NAMES = (*PLAIN_NAMES, "soft_topk", "triplet")


@dataclass
class Data:
    """Embeddings and pairs of one size."""

    queries: Tensor
    labels: Tensor
    positives: Positives


def make_data(num_queries: int, num_labels: int, num_dimensions: int, *, per_query: int = 4, seed: int = 0) -> Data:
    """Unit vectors; a query lies between its positives, as in a model that has begun to learn."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.empty(num_labels, num_dimensions).normal_(generator=generator)
    labels /= labels.norm(dim=1, keepdim=True)
    columns = torch.randint(0, num_labels, (num_queries, per_query), generator=generator)
    noise = 0.05 * torch.randn(num_queries, num_dimensions, generator=generator)
    queries = normalize(0.7 * normalize(labels[columns].sum(1), dim=1) + noise, dim=1)
    rows = torch.arange(num_queries).repeat_interleave(per_query)
    return Data(queries, labels, Positives(rows, columns.reshape(-1)))


@dataclass
class Measured:
    """One line of the table."""

    seconds: float
    extra_bytes: float


def measure(work: Callable[[], object], *, repeats: int, gradient_bytes: int = 0) -> Measured:
    """Best time of some repeats and the largest memory of any."""
    seconds, extra = float("inf"), 0.0
    for _ in range(repeats):
        gc.collect()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        start = CLOCK()
        result = work()
        seconds = min(seconds, CLOCK() - start)
        extra = max(extra, _resident("VmHWM") - before - gradient_bytes)
        del result
    return Measured(seconds, extra)


def _resident(field: str) -> int:
    """A memory figure of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def square_rate(repeats: int) -> float:
    """Floating-point operations per second of a square product."""
    size = 2048
    left, out = torch.randn(size, size), torch.empty(size, size)
    best = min(measure(lambda: product(left, left, out=out), repeats=1).seconds for _ in range(repeats + 2))
    return 2 * size**3 / best


def three_products(data: Data, *, row_block: int = 256, label_chunk: int = 4096) -> tuple[Tensor, Tensor]:
    """The floor: scores, query gradients and label gradients, tile by tile, with nothing done to the scores."""
    scores = torch.empty(row_block * label_chunk)
    out_q, out_y = torch.zeros_like(data.queries), torch.zeros_like(data.labels)
    for row in range(0, len(data.queries), row_block):
        q = data.queries[row : row + row_block]
        for column in range(0, len(data.labels), label_chunk):
            y = data.labels[column : column + label_chunk]
            tile = scores[: len(q) * len(y)].view(len(q), len(y))
            tile = product(q, y.T, out=tile)
            add_product(out_q[row : row + row_block], tile, y)
            add_product(out_y[column : column + label_chunk], tile.T, q)
    return out_q, out_y


def plain(name: str, queries: Tensor, labels: Tensor, positives: Positives) -> Tensor:
    """The usual implementation: the full matrix of scores, left to autograd."""
    scores, rows, columns = queries @ labels.T / TEMPERATURE, positives.rows, positives.columns
    share = 1.0 / (positives.counts(len(queries))[rows] * len(queries))
    chosen = scores[rows, columns]
    if name == "softmax":
        return (share * (scores.logsumexp(1)[rows] - chosen)).sum()
    if name == "decoupled_softmax":
        negatives = scores.index_put((rows, columns), torch.tensor(-torch.inf, dtype=scores.dtype)).logsumexp(1)
        return (share * softplus(negatives[rows] - chosen)).sum()
    if name == "bce":
        return (softplus(scores).sum() - chosen.sum()) / scores.numel()
    counts = positives.transpose().counts(len(labels))
    back = 1.0 / (counts[columns] * (counts > 0).sum())
    forth_loss = (share * (scores.logsumexp(1)[rows] - chosen)).sum()
    return 0.5 * forth_loss + 0.5 * (back * (scores.logsumexp(0)[columns] - chosen)).sum()


def plain_value_and_grad(name: str, data: Data) -> tuple[Tensor, ...]:
    """Plain autograd's value and gradients."""
    queries, labels = data.queries.detach().requires_grad_(), data.labels.detach().requires_grad_()
    value = plain(name, queries, labels, data.positives)
    return value.detach(), *torch.autograd.grad(value, (queries, labels))


def bisected_topk(data: Data, *, k: float = 5.0, alpha: float = 2.0, halvings: int = 32) -> tuple[Tensor, ...]:
    """DEXML's soft top-k: 32 halvings over a stored matrix (its bracket corrected), gradients by formula."""
    queries, labels, rows, columns = data.queries, data.labels, data.positives.rows, data.positives.columns
    scores = queries @ labels.T / TEMPERATURE
    middle = torch.logit(torch.tensor(k / len(labels), dtype=scores.dtype)) / alpha
    low, high = middle - scores.amax(1), middle - scores.amin(1)
    for _ in range(halvings):
        offset = (low + high) / 2
        below = torch.sigmoid(alpha * (scores + offset[:, None])).sum(1) < k
        low, high = torch.where(below, offset, low), torch.where(below, high, offset)
    p = torch.sigmoid(alpha * (scores + offset[:, None]))
    share = 1.0 / (data.positives.counts(len(queries))[rows] * len(queries))
    chosen = p[rows, columns]
    value, pull = -(share * chosen.log()).sum(), share * alpha * (1 - chosen)
    slopes = alpha * p * (1 - p)
    gradient = slopes * (torch.zeros(len(queries), dtype=p.dtype).index_add_(0, rows, pull) / slopes.sum(1))[:, None]
    gradient.index_put_((rows, columns), -pull, accumulate=True)
    return value, gradient @ labels / TEMPERATURE, gradient.T @ queries / TEMPERATURE


def ours(name: str, data: Data, streaming: Streaming) -> tuple[Tensor, ...]:
    """The streamed loss."""
    more = {} if name == "triplet" else {"temperature": TEMPERATURE}
    queries, labels = data.queries.detach().requires_grad_(), data.labels.detach().requires_grad_()
    value = getattr(dexter.losses, name)(queries, labels, data.positives, streaming=streaming, **more)
    return value.detach(), *torch.autograd.grad(value, (queries, labels))


def print_table(data: Data, arguments: argparse.Namespace, *, modes: tuple[str, ...], with_plain: bool) -> None:
    """One block of the table: a size, all losses, all ways."""
    num_queries, num_labels, width = len(data.queries), len(data.labels), data.labels.shape[1]
    gradient_bytes = 4 * width * (num_queries + num_labels)
    rate = square_rate(arguments.repeats)
    print(f"\nB={num_queries}  L={num_labels:,}  D={width}  threads={torch.get_num_threads()}")
    print(
        f"square product {rate / 1e9:.0f} GFLOP/s; floor: the 3 products of the gradients, timed in turn with each row"
    )
    print(f"{'loss':18s} {'how':24s} {'seconds':>8s} {'floor s':>8s} {'of floor':>9s} {'x plain':>8s} {'extra MB':>9s}")

    def line(name: str, how: str, work: Callable[[], object], baseline: float | None = None) -> float:
        turns = [
            (
                measure(lambda: three_products(data), repeats=1).seconds,
                measure(work, repeats=1, gradient_bytes=gradient_bytes),
            )
            for _ in range(arguments.repeats)
        ]
        floor, seconds = (
            statistics.median(turn[0] for turn in turns),
            statistics.median(turn[1].seconds for turn in turns),
        )
        extra = max(turn[1].extra_bytes for turn in turns)
        ratio = "" if baseline is None else f"{baseline / (seconds / floor):.1f}"
        figures = f"{seconds:8.2f} {floor:8.2f} {floor / seconds:9.0%} {ratio:>8s} {extra / MEGABYTE:9.0f}"
        print(f"{name:18s} {how:24s} {figures}", flush=True)
        return seconds / floor

    for name in arguments.only:
        baseline = None
        if with_plain and name in PLAIN_NAMES:
            baseline = line(name, "plain autograd", lambda name=name: plain_value_and_grad(name, data))
        elif with_plain and name == "soft_topk":
            baseline = line(name, "32 bisections, stored", lambda: bisected_topk(data))
        for mode in modes:
            line(name, f"dexter, {mode}", lambda name=name, mode=mode: ours(name, data, Streaming(mode=mode)), baseline)


def print_errors() -> None:
    """The largest error of value and gradients against float64, relative to the largest entry."""
    data = make_data(65, 5003, 96)
    exact = Data(data.queries.double(), data.labels.double(), data.positives)
    print(f"{'loss':18s} {'mode':8s} {'value':>8s} {'dq':>8s} {'dy':>8s}   (B=65, L=5003, D=96, against float64)")
    for name in (*PLAIN_NAMES, "soft_topk"):
        expected = bisected_topk(exact, halvings=64) if name == "soft_topk" else plain_value_and_grad(name, exact)
        for mode in ("tiles", "chunks"):
            got = ours(name, data, Streaming(mode=mode))
            errors = [
                float((have - want).abs().max() / want.abs().max()) for have, want in zip(got, expected, strict=True)
            ]
            print(f"{name:18s} {mode:8s} " + " ".join(f"{error:8.1e}" for error in errors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--queries", type=int, default=1024)
    parser.add_argument("--labels", type=int, default=131_072)
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--many-queries", type=int, default=256)
    parser.add_argument("--many-labels", type=int, default=1_310_720)
    parser.add_argument("--skip-many", action="store_true", help="leave the largest label count out")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="these losses")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--errors", action="store_true", help="print errors instead of times")
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor instead of wall time, for a busy machine and 1 thread"
    )
    arguments = parser.parse_args()
    if arguments.cpu_time:
        global CLOCK
        CLOCK = time.process_time
    torch.set_num_threads(arguments.threads)
    if arguments.errors:
        print_errors()
        return
    data = make_data(arguments.queries, arguments.labels, arguments.dimensions)
    print_table(data, arguments, modes=("tiles", "chunks"), with_plain=True)
    if not arguments.skip_many:
        del data
        data = make_data(arguments.many_queries, arguments.many_labels, arguments.dimensions)
        print_table(data, arguments, modes=("chunks",), with_plain=False)


if __name__ == "__main__":
    main()
