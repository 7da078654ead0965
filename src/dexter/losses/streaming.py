"""The matrix of scores behind all losses, streamed in tiles so that it is never in memory as a whole. Knows no loss.

Every streamed loss has a gradient by the scores of the form G = (a function of the scores, scaled by row) + (a few
entries at the positive pairs). A loss is computed from four operations, none of which needs a B x L matrix:

1. `ScoreMatrix.blocks()` yields blocks of queries, each with its positive pairs and their scores;
2. `Block.sweep()` yields the tiles of scores of a block, as often as needed, to compute statistics per row;
3. `Block.push(tile)`, once the tile holds entries of G, adds G y to the queries' gradient and G^T q to the labels';
4. `Block.push_pairs(values)` does the same for the entries of G at the positive pairs. A loss whose tiles have nothing
   at these pairs puts them there instead (`Block.place_pairs`): the products of `push` then carry them at no cost.

There are two modes. With *tiles* the scores of a block against all labels stay in memory between sweeps: three matrix
products (scores, query gradients, label gradients), which is the minimum. With *chunks* only one chunk of labels is in
memory, so the scores are computed once per sweep: four products for the softmax family, and memory that does not depend
on the number of labels.

Shapes: B queries that take part, b of them in a block, L labels, c of them in a tile, D dimensions, P positive pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from dexter.errors import UsageError
from dexter.positives import Positives
from dexter.processes import Processes, SingleProcess
from dexter.products import add_product, product

FLOAT_BYTES = 4
PAIR_ELEMENTS = 1 << 20
"""Vectors of pairs are gathered in pieces of this many numbers."""
NEGLIGIBLE_EXPONENT = -40.0
"""Smallest exponent: e^-40 is 4e-18, negligible in a sum that contains e^0 = 1, even a billion times. Without this
limit subnormal numbers appear, with which matrix products are a hundred times slower."""
NEGLIGIBLE_WEIGHT = 1e-15
"""Row weights below this are set to zero, for the same reason."""


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """How a loss streams the scores. The defaults suit one process with a few hundred megabytes to spare."""

    mode: Literal["auto", "tiles", "chunks"] = "auto"
    """`auto` takes tiles if the budget holds a block of enough full rows."""
    memory_budget: int = 256 * 2**20
    """Bytes for scores. Embeddings, their gradients and a few buffers of the size of a tile come on top."""
    row_block: int | None = None
    """Queries per block; None derives it from the budget."""
    label_chunk: int | None = None
    """Labels per tile; None derives it from the tile that suits the device."""
    processes: Processes = field(default_factory=SingleProcess)
    """The processes that hold the other labels. Each computes its part of the queries' gradient: the caller sums."""

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "tiles", "chunks"):
            raise UsageError(f'streaming mode must be "auto", "tiles" or "chunks", got {self.mode!r}')
        for name in ("memory_budget", "row_block", "label_chunk"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise UsageError(f"streaming {name} must be at least 1, got {size}")


@dataclass(frozen=True)
class TilePlan:
    """Sizes of blocks and tiles for one matrix of scores."""

    keep: bool
    """Whether the scores of a block stay in memory between sweeps."""
    row_block: int
    label_chunk: int


@dataclass(frozen=True)
class TileLimits:
    """What sizes suit a kind of device."""

    elements: int
    """Scores in a tile."""
    fewest_rows: int
    """With fewer rows per block, rereading all labels for each block costs more than a fourth matrix product."""
    most_rows: int
    """In chunks mode more rows per block only make the chunks narrower."""


CPU_LIMITS = TileLimits(elements=1 << 19, fewest_rows=64, most_rows=512)
"""A tile of 2 MB: large enough for the matrix product, small enough to stay in cache while it is worked on."""
ACCELERATOR_LIMITS = TileLimits(elements=1 << 24, fewest_rows=256, most_rows=2_048)
"""A tile of 64 MB: starting a kernel takes as long as the product of a small tile, and no cache holds a large one. The
product of 256 rows or more takes longer than reading the labels from the device's memory."""


def tile_limits(device_type: str) -> TileLimits:
    """Return the sizes that suit a kind of device, such as `cpu` or `cuda`."""
    return CPU_LIMITS if device_type == "cpu" else ACCELERATOR_LIMITS


def plan_tiles(streaming: Streaming, num_rows: int, num_labels: int, *, device_type: str = "cpu") -> TilePlan:
    """Choose sizes within the budget. Unless sizes are set by hand, no buffer holds all rows x all labels."""
    limits = tile_limits(device_type)
    num_rows, num_labels = max(num_rows, 1), max(num_labels, 1)
    half_of_rows = math.ceil(num_rows / 2)
    full_rows = max(1, min(streaming.memory_budget // (FLOAT_BYTES * num_labels), half_of_rows))
    keep = streaming.mode == "tiles" or (
        streaming.mode == "auto" and full_rows >= min(limits.fewest_rows, half_of_rows)
    )
    rows = streaming.row_block or _equal_parts(num_rows, full_rows if keep else limits.most_rows)
    if streaming.label_chunk is not None:
        return TilePlan(keep, rows, streaming.label_chunk)
    tile = limits.elements if keep else min(limits.elements, streaming.memory_budget // FLOAT_BYTES)
    widest = num_labels if keep else math.ceil(num_labels / 2)
    return TilePlan(keep, rows, min(widest, max(1, tile // rows)))


def _equal_parts(total: int, largest: int) -> int:
    """Size of the parts when `total` is split into the fewest equal parts not larger than `largest`."""
    return math.ceil(total / math.ceil(total / max(1, largest)))


@dataclass
class Gradients:
    """Sums that a loss adds its gradients to, in the working type; None for embeddings that do not require one."""

    queries: Tensor | None
    labels: Tensor | None
    scalars: tuple[Tensor, ...] = ()
    """Gradients of a loss's learned numbers, in the order they were passed; set by the losses that have any."""

    @property
    def wanted(self) -> bool:
        """Whether any embeddings require a gradient."""
        return self.queries is not None or self.labels is not None

    def swapped(self) -> Gradients:
        """Return the same sums with queries and labels exchanged."""
        return Gradients(self.labels, self.queries)


@dataclass
class Tile:
    """The scores of a block of queries against consecutive labels; a loss overwrites them in place."""

    index: int
    """Position within the sweep."""
    columns: slice
    """The labels."""
    scores: Tensor
    """b x c."""
    fresh: bool
    """True if the scores were just computed, False if they are what an earlier sweep left here."""


class ScoreMatrix:
    """Scores of queries and labels in blocks of rows, with the positive pairs and the sums for the gradients."""

    def __init__(
        self,
        queries_BD: Tensor,
        labels_LD: Tensor,
        positives: Positives,
        gradients: Gradients,
        *,
        multiplier: float,
        streaming: Streaming,
        ignore: Positives | None = None,
        mask_positives: bool = False,
        only_with_positives: bool = True,
        single_sweep: bool = False,
        offsets_L: Tensor | None = None,
    ) -> None:
        """Count positives over all processes and plan the tiles, identically in every process.

        Args:
            queries_BD: Detached queries of any floating type.
            labels_LD: Detached labels; the part that this process holds.
            positives: Positive pairs; pairs that are also ignored are dropped.
            gradients: Sums to add to.
            multiplier: Scores are inner products times this, usually one over the temperature.
            streaming: Mode, budget and processes.
            ignore: Pairs that are neither positive nor negative: their scores are minus infinity.
            mask_positives: Whether scores of positives in tiles are minus infinity too.
            only_with_positives: Leave out the queries without a positive.
            single_sweep: Whether the loss sweeps only once, so that keeping tiles would be of no use.
            offsets_L: Added to the scores in tiles, one number per label; scores of positive pairs are not changed.
        """
        device = queries_BD.device
        positives = positives.to(device)
        ignore = None if ignore is None else ignore.to(device)
        if ignore is not None and len(ignore):
            positives = positives.select(~torch.isin(_keys(positives, len(labels_LD)), _keys(ignore, len(labels_LD))))
        self.labels_LD = labels_LD
        self.gradients = gradients
        self.multiplier = multiplier
        self.processes = streaming.processes
        counts = self.processes.sum(positives.counts(len(queries_BD)).to(working_type(queries_BD)))
        num_labels = torch.tensor(len(labels_LD), device=device)
        self.num_labels_of_all = int(self.processes.sum(num_labels))
        # The largest part decides for all: processes must have the same blocks to call each collective together.
        largest_part = int(self.processes.max(num_labels))
        self.chosen_B = (
            (counts > 0).nonzero()[:, 0] if only_with_positives else torch.arange(len(counts), device=device)
        )
        self.counts_B = counts[self.chosen_B]
        self.queries_BD = widened(_chosen_rows(queries_BD, self.chosen_B)) * multiplier
        self.averaged_over = len(self.chosen_B)
        """Divisor of the sum of the rows' losses; differs from the number of rows only if processes hold other rows."""
        self.positives = _renumber_rows(positives, self.chosen_B, len(counts))
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        self.ignored = _renumber_rows(ignore or Positives(nothing, nothing), self.chosen_B, len(counts))
        self.mask_positives = mask_positives
        settings = replace(streaming, mode="chunks") if single_sweep else streaming
        self.plan = plan_tiles(settings, len(self.chosen_B), largest_part, device_type=device.type)
        self.offsets_L = None if offsets_L is None else offsets_L.detach().to(device, self.dtype)
        self._tiles: Tensor | None = None
        self._work: list[Tensor] = []
        self._longest_label: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The working type, in which scores and sums are computed."""
        return self.queries_BD.dtype

    @property
    def num_rows(self) -> int:
        """Number of queries that take part."""
        return len(self.chosen_B)

    @property
    def num_labels(self) -> int:
        """Number of labels that this process holds."""
        return len(self.labels_LD)

    def longest_label(self) -> float:
        """Return the largest norm of a label of any process."""
        if self._longest_label is None:
            step = max(1, tile_limits(self.labels_LD.device.type).elements // max(1, self.labels_LD.shape[1]))
            longest = torch.zeros((), device=self.labels_LD.device, dtype=self.dtype)
            for start in range(0, self.num_labels, step):
                norms = torch.linalg.vector_norm(widened(self.labels_LD[start : start + step]), dim=1)
                longest = torch.maximum(longest, norms.amax())
            self._longest_label = float(self.processes.max(longest))
        return self._longest_label

    def blocks(self) -> Iterator[Block]:
        """Yield the queries that take part in blocks; a block's gradient is added before the next one begins."""
        for start in range(0, self.num_rows, self.plan.row_block):
            block = Block(self, slice(start, min(start + self.plan.row_block, self.num_rows)))
            yield block
            block.add_query_gradient()

    def tile_buffer(self, num_rows: int, index: int) -> Tensor:
        """Return memory for one tile: its own if tiles are kept, the same for all otherwise."""
        chunk = self.plan.label_chunk
        if self._tiles is None:
            size = self.num_labels if self.plan.keep else min(chunk, self.num_labels)
            self._tiles = torch.empty(num_rows * size, device=self.labels_LD.device, dtype=self.dtype)
        start = index * chunk if self.plan.keep else 0
        width = min(chunk, self.num_labels - index * chunk)
        return self._tiles[num_rows * start : num_rows * (start + width)].view(num_rows, width)

    def work_like(self, tile: Tile) -> list[Tensor]:
        """Return three buffers of a tile's shape for intermediate results, the same for all tiles."""
        size = tile.scores.numel()
        if not self._work or len(self._work[0]) < size:
            self._work = [torch.empty(size, device=tile.scores.device, dtype=self.dtype) for _ in range(3)]
        return [work[:size].view_as(tile.scores) for work in self._work]


class Block:
    """A block of queries: their positive pairs, their tiles of scores and their gradient."""

    def __init__(self, matrix: ScoreMatrix, rows: slice) -> None:
        self.matrix = matrix
        self.rows = rows
        self.queries_bD = matrix.queries_BD[rows]
        self.counts_b = matrix.counts_B[rows]
        self.num_rows = len(self.queries_bD)
        self.processes = matrix.processes
        self.gradient_bD = None if matrix.gradients.queries is None else torch.zeros_like(self.queries_bD)
        """The sum over labels of G y, not yet multiplied by the multiplier."""
        self._kept: list[Tensor] | None = None
        """The scores of all tiles once they were swept, where the plan keeps them."""
        self._ignored_by_tile = self._split_by_tile(matrix.ignored)
        self.rows_P, self.columns_P = self.pairs(matrix.positives)
        """Rows of the positive pairs, counted within the block, and their labels."""
        self._scores_P: Tensor | None = None
        weights = matrix.positives.weights
        self.weights_P = (
            self.queries_bD.new_ones(len(self.rows_P))
            if weights is None
            else weights[_part(matrix.positives, rows)].to(matrix.dtype)
        )

    @property
    def wants_gradients(self) -> bool:
        """Whether any gradient is to be computed."""
        return self.matrix.gradients.wanted

    @property
    def scores_P(self) -> Tensor:
        """Scores of the positive pairs: those that the first sweep found in its tiles; before it, computed apart."""
        if self._scores_P is None:
            self._scores_P = self._score_pairs()
        return self._scores_P

    @cached_property
    def _positives_by_tile(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return self._split_by_tile(self.matrix.positives)

    def sweep(self) -> Iterator[Tile]:
        """Yield all tiles of the block: kept ones as the last sweep left them, others computed again."""
        matrix, chunk, kept = self.matrix, self.matrix.plan.label_chunk, self._kept
        found_P = self.queries_bD.new_empty(len(self.rows_P)) if self._scores_P is None else None
        made = []
        for index, start in enumerate(range(0, matrix.num_labels, chunk)):
            columns = slice(start, start + chunk)
            if kept is None:
                buffer = matrix.tile_buffer(self.num_rows, index)
                tile = Tile(index, columns, product(self.queries_bD, self.labels(columns).T, out=buffer), fresh=True)
                self._change(tile, found_P)
                if matrix.plan.keep:
                    made.append(tile.scores)
            else:
                tile = Tile(index, columns, kept[index], fresh=False)
            yield tile
        if matrix.plan.keep and kept is None:
            self._kept = made
        if self._scores_P is None:
            self._scores_P = found_P

    def pairs(self, pairs: Positives) -> tuple[Tensor, Tensor]:
        """Return the rows, counted within the block, and the labels of the block's share of some pairs."""
        part = _part(pairs, self.rows)
        return pairs.rows[part] - self.rows.start, pairs.columns[part]

    def labels(self, columns: slice | Tensor) -> Tensor:
        """Return some labels in the working type."""
        return widened(self.matrix.labels_LD[columns])

    def sums_by_row(self, *values_P: Tensor) -> Tensor:
        """Sum values of positive pairs by row, over all processes: one row of sums for each argument."""
        sums = self.queries_bD.new_zeros(len(values_P), self.num_rows)
        return self.processes.sum(sums.index_add_(1, self.rows_P, torch.stack(values_P)))

    def push(self, tile: Tile) -> None:
        """Add a tile that holds entries of G to both gradients: G y to the queries', G^T q to the labels'."""
        if self.gradient_bD is not None:
            add_product(self.gradient_bD, tile.scores, self.labels(tile.columns))
        label_sums = self.matrix.gradients.labels
        if label_sums is not None:
            add_product(label_sums[tile.columns], tile.scores.T, self.queries_bD)

    def place_pairs(self, tile: Tile, values_P: Tensor) -> None:
        """Add entries of G at the positive pairs to a tile that holds entries of G, before it is pushed."""
        if self._positives_by_tile:
            rows, columns, places = self._positives_by_tile[tile.index]
            tile.scores.index_put_((rows, columns), values_P[places], accumulate=True)

    def push_pairs(self, values_P: Tensor) -> None:
        """Add entries of G at the positive pairs to both gradients."""
        label_sums = self.matrix.gradients.labels
        for piece in _pieces(len(values_P), self.queries_bD.shape[1]):
            rows, columns, values = self.rows_P[piece], self.columns_P[piece], values_P[piece, None]
            if self.gradient_bD is not None:
                self.gradient_bD.index_add_(0, rows, self.labels(columns).mul_(values))
            if label_sums is not None:
                label_sums.index_add_(0, columns, self.queries_bD[rows].mul_(values))

    def add_query_gradient(self) -> None:
        """Add the block's gradient to the queries' sums."""
        if self.gradient_bD is not None and self.matrix.gradients.queries is not None:
            chosen = self.matrix.chosen_B[self.rows]
            self.matrix.gradients.queries.index_add_(0, chosen, self.gradient_bD, alpha=self.matrix.multiplier)

    def _change(self, tile: Tile, found_P: Tensor | None) -> None:
        """Note the scores of positive pairs; add each label's offset to the others; mask pairs."""
        scores_bc, offsets_L, mask = tile.scores, self.matrix.offsets_L, self.matrix.mask_positives
        positives = self._positives_by_tile and (found_P is not None or offsets_L is not None or mask)
        if positives:
            rows, columns, places = self._positives_by_tile[tile.index]
            own_scores = scores_bc[rows, columns]
            if found_P is not None:
                found_P[places] = own_scores
        if offsets_L is not None:
            scores_bc.add_(offsets_L[tile.columns])
        if positives and (mask or offsets_L is not None):
            scores_bc[rows, columns] = -torch.inf if mask else own_scores
        if self._ignored_by_tile:
            rows, columns, _ = self._ignored_by_tile[tile.index]
            scores_bc[rows, columns] = -torch.inf

    def _split_by_tile(self, pairs: Positives) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the rows and columns, counted within the tile, of each tile's pairs, and their places among the pairs.

        Nothing if there are no pairs.
        """
        rows, columns = self.pairs(pairs)
        if not len(rows):
            return []
        columns, order = torch.sort(columns, stable=True)
        chunk = self.matrix.plan.label_chunk
        starts = torch.arange(0, self.matrix.num_labels, chunk, device=columns.device)
        bounds = torch.searchsorted(columns, starts).tolist()[1:]
        by_tile = (rows[order].tensor_split(bounds), (columns % chunk).tensor_split(bounds), order.tensor_split(bounds))
        return list(zip(by_tile[0], by_tile[1], by_tile[2], strict=True))

    def _score_pairs(self) -> Tensor:
        """Return the scores of the positive pairs, each the inner product of its two vectors."""
        scores_P = self.queries_bD.new_empty(len(self.rows_P))
        for piece in _pieces(len(self.rows_P), self.queries_bD.shape[1]):
            vectors = self.labels(self.columns_P[piece]).mul_(self.queries_bD[self.rows_P[piece]])
            scores_P[piece] = vectors.sum(1)
        return scores_P


def working_type(values: Tensor) -> torch.dtype:
    """Return the type to compute in: float64 for embeddings of that type, float32 for all others."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def widened(values: Tensor) -> Tensor:
    """Return values in the working type."""
    return values.to(working_type(values))


def without_negligible(row_weights: Tensor) -> Tensor:
    """Replace row weights that would only slow products down by zero."""
    return torch.where(row_weights >= NEGLIGIBLE_WEIGHT, row_weights, 0.0)


def _pieces(num_pairs: int, num_dimensions: int) -> Iterator[slice]:
    """Yield slices of pairs whose gathered vectors stay small."""
    step = max(1, PAIR_ELEMENTS // max(1, num_dimensions))
    for start in range(0, num_pairs, step):
        yield slice(start, min(start + step, num_pairs))


def _part(pairs: Positives, rows: slice) -> slice:
    """Return the slice of the pairs of consecutive rows: pairs are sorted by row."""
    bounds = torch.tensor([rows.start, rows.stop], device=pairs.rows.device)
    start, stop = torch.searchsorted(pairs.rows, bounds).tolist()
    return slice(start, stop)


def _keys(pairs: Positives, num_labels: int) -> Tensor:
    """Return a number that identifies each pair."""
    return pairs.rows * num_labels + pairs.columns


def _chosen_rows(queries_BD: Tensor, chosen: Tensor) -> Tensor:
    """Return the rows that take part, without a copy if all do."""
    return queries_BD if len(chosen) == len(queries_BD) else queries_BD[chosen]


def _renumber_rows(pairs: Positives, chosen: Tensor, num_rows: int) -> Positives:
    """Return the pairs of the chosen rows, with rows counted among the chosen."""
    if len(chosen) == num_rows:
        return pairs
    new_rows = torch.full((num_rows,), -1, dtype=torch.int64, device=chosen.device)
    new_rows[chosen] = torch.arange(len(chosen), device=chosen.device)
    return pairs.renumber(rows=new_rows)
