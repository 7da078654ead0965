"""The sweeps over tiles of scores that the losses share. Knows no loss.

Every streamed loss has a gradient of the form G = (row-scaled function of the scores) + (a few entries at the positive
pairs). A loss therefore asks for four things, and this module provides them without a B x L matrix:

1. `Problem.blocks()`: blocks of queries, each with its positives and their scores;
2. `Block.sweep()`: the tiles of scores of a block, as often as wanted, to gather statistics per row;
3. `Block.push(tile)`: once a tile holds the entries of G, add G y to the queries' gradient, G^T q to the labels';
4. `Block.push_pairs(values)`: the same for the entries of G at the positive pairs.

Shapes: B queries that take part, b of them in a block, L labels, c of them in a tile, D dimensions, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dexter.losses.settings import TILE_ELEMENTS, Shard, Streaming, choose_layout
from dexter.positives import Positives

PAIR_ELEMENTS = 1 << 20
"""Pairs are gathered in pieces of this many numbers."""
NEGLIGIBLE_EXPONENT = -40.0
"""Where exponents are cut off: e^-40 is 4e-18, nothing beside a sum that holds e^0 = 1, even a billion times. Without
the cut subnormal numbers appear, with which matrix products are a hundred times slower."""
NEGLIGIBLE_WEIGHT = 1e-15
"""Row weights below this are zero, for the same reason."""


@dataclass
class Gradients:
    """Where a problem's gradients are summed, in the working type; None for a side that does not require one."""

    queries: Tensor | None
    labels: Tensor | None
    scalars: tuple[Tensor, ...] = ()
    """Gradients of a loss's learned numbers, in the order they were passed; a loss that has any sets them."""

    @property
    def wanted(self) -> bool:
        """Whether any side requires a gradient."""
        return self.queries is not None or self.labels is not None

    def swapped(self) -> Gradients:
        """The same sums with the roles of queries and labels exchanged."""
        return Gradients(self.labels, self.queries)


@dataclass
class Tile:
    """The scores of a block of queries against a run of labels; a loss overwrites them in place."""

    index: int
    """Position within the sweep."""
    columns: slice
    """The labels."""
    scores: Tensor
    """b x c."""
    fresh: bool
    """True when these are scores just computed, False when they are what an earlier sweep left here."""


@dataclass(frozen=True)
class Pairs:
    """Positive pairs of one block, rows counted within the block."""

    rows: Tensor
    columns: Tensor
    weights: Tensor
    scores: Tensor


@dataclass(frozen=True)
class _PairsByTile:
    """Pairs of one block in column order."""

    rows: Tensor
    columns: Tensor
    bounds: list[int]
    """Where each tile's run of pairs begins, and where the last one ends; empty without pairs."""

    def of(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Rows and columns of a tile's pairs, counted within the tile."""
        part = slice(self.bounds[tile.index], self.bounds[tile.index + 1]) if self.bounds else slice(0)
        return self.rows[part], self.columns[part] - tile.columns.start


class Problem:
    """One pass of a loss over its data: embeddings, pairs and where gradients go."""

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
        """Count positives over all ranks and choose the layout, the same on every rank.

        Args:
            queries_BD: Detached queries of any floating type.
            labels_LD: Detached labels; this rank's shard of them.
            positives: Pairs to be scored; pairs that are also ignored are dropped.
            gradients: Sums to add to.
            multiplier: Scores are products times this: one over the temperature, as a rule.
            streaming: Mode, budget and shard.
            ignore: Pairs that are neither positive nor negative: their scores are minus infinity.
            mask_positives: Whether scores of positives in tiles are minus infinity too.
            only_with_positives: Leave out the queries without a positive.
            single_sweep: Whether the loss sweeps once, so that keeping tiles would serve nobody.
            offsets_L: Added by label to the scores in tiles; those of positive pairs stay as they are.
        """
        device = queries_BD.device
        positives = positives.to(device)
        ignore = None if ignore is None else ignore.to(device)
        if ignore is not None and len(ignore):
            positives = positives.select(~torch.isin(_keys(positives, len(labels_LD)), _keys(ignore, len(labels_LD))))
        self.labels_LD = labels_LD
        self.gradients = gradients
        self.multiplier = multiplier
        self.streaming = streaming
        self.shard: Shard = streaming.shard
        counts = self.shard.sum(positives.counts(len(queries_BD)).to(working_type(queries_BD)))
        num_labels = torch.tensor(len(labels_LD), device=device)
        self.num_labels_over_ranks = int(self.shard.sum(num_labels))
        # The widest shard decides for all: ranks must have the same blocks to meet at each reduction.
        widest_shard = int(self.shard.max(num_labels))
        self.chosen_B = (
            (counts > 0).nonzero()[:, 0] if only_with_positives else torch.arange(len(counts), device=device)
        )
        self.counts_B = counts[self.chosen_B]
        self.queries_BD = widened(_chosen_rows(queries_BD, self.chosen_B)) * multiplier
        self.averaged_over = len(self.chosen_B)
        """What the sum of the rows' losses is divided by; another number only where ranks hold different rows."""
        self.positives = _renumber(positives, self.chosen_B, len(counts))
        masked = [] if ignore is None else [_renumber(ignore, self.chosen_B, len(counts))]
        self.masked = _union([*masked, self.positives] if mask_positives else masked, device)
        settings = replace(streaming, mode="chunks") if single_sweep else streaming
        self.layout = choose_layout(settings, len(self.chosen_B), widest_shard)
        self.offsets_L = None if offsets_L is None else offsets_L.detach().to(device, self.dtype)
        self._tiles: Tensor | None = None
        self._work: Tensor | None = None
        self._longest_label: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The working type: what scores and sums are computed in."""
        return self.queries_BD.dtype

    @property
    def num_rows(self) -> int:
        """Queries that take part."""
        return len(self.chosen_B)

    @property
    def num_labels(self) -> int:
        """Labels of this rank."""
        return len(self.labels_LD)

    def longest_label(self) -> float:
        """The largest norm of a label, on any rank."""
        if self._longest_label is None:
            step = max(1, TILE_ELEMENTS // max(1, self.labels_LD.shape[1]))
            longest = torch.zeros((), device=self.labels_LD.device, dtype=self.dtype)
            for start in range(0, self.num_labels, step):
                norms = torch.linalg.vector_norm(widened(self.labels_LD[start : start + step]), dim=1)
                longest = torch.maximum(longest, norms.amax())
            self._longest_label = float(self.shard.max(longest))
        return self._longest_label

    def blocks(self) -> Iterator[Block]:
        """The queries that take part, block by block; a block's gradient is delivered before the next begins."""
        for start in range(0, self.num_rows, self.layout.row_block):
            block = Block(self, slice(start, min(start + self.layout.row_block, self.num_rows)))
            yield block
            block.deliver()

    def tile_buffer(self, num_rows: int, index: int) -> Tensor:
        """Memory for one tile: its own when rows are kept, the same for all otherwise."""
        chunk = self.layout.label_chunk
        if self._tiles is None:
            size = self.num_labels if self.layout.keep else min(chunk, self.num_labels)
            self._tiles = torch.empty(num_rows * size, device=self.labels_LD.device, dtype=self.dtype)
        start = index * chunk if self.layout.keep else 0
        width = min(chunk, self.num_labels - index * chunk)
        return self._tiles[num_rows * start : num_rows * (start + width)].view(num_rows, width)

    def work_like(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Twice the memory of a tile's shape for intermediate results, the same for all tiles."""
        size = tile.scores.numel()
        if self._work is None or self._work.shape[1] < size:
            self._work = torch.empty(2, size, device=tile.scores.device, dtype=self.dtype)
        return self._work[0, :size].view_as(tile.scores), self._work[1, :size].view_as(tile.scores)


class Block:
    """A block of queries: their positives, their tiles of scores and their gradient."""

    def __init__(self, problem: Problem, rows: slice) -> None:
        self.problem = problem
        self.rows = rows
        self.queries_bD = problem.queries_BD[rows]
        self.counts_b = problem.counts_B[rows]
        self.num_rows = len(self.queries_bD)
        self.shard = problem.shard
        self.gradient_bD = None if problem.gradients.queries is None else torch.zeros_like(self.queries_bD)
        """The sum over labels of G y, to which the multiplier is still to be applied."""
        self._filled = False
        self._masked = self._by_tile(problem.masked)
        self._not_offset = None if problem.offsets_L is None else self._by_tile(problem.positives)
        self.pairs = self._positive_pairs()

    @property
    def keeps(self) -> bool:
        """Whether tiles stay as a sweep left them."""
        return self.problem.layout.keep

    @property
    def wants_gradients(self) -> bool:
        """Whether there is anything to push."""
        return self.problem.gradients.wanted

    def sweep(self) -> Iterator[Tile]:
        """All tiles of the block: kept ones as the last sweep left them, others computed anew."""
        problem, chunk = self.problem, self.problem.layout.label_chunk
        fresh = not (self.keeps and self._filled)
        for index, start in enumerate(range(0, problem.num_labels, chunk)):
            tile = Tile(index, slice(start, start + chunk), problem.tile_buffer(self.num_rows, index), fresh)
            if fresh:
                torch.mm(self.queries_bD, self.labels(tile.columns).T, out=tile.scores)
                self._offset(tile)
                self._mask(tile)
            yield tile
        self._filled = True

    def labels(self, columns: slice | Tensor) -> Tensor:
        """Some labels in the working type."""
        return widened(self.problem.labels_LD[columns])

    def sums_by_row(self, *values_P: Tensor) -> Tensor:
        """For each of some values per positive pair, its sum over the pairs of each row, on all ranks."""
        sums = self.queries_bD.new_zeros(len(values_P), self.num_rows)
        return self.shard.sum(sums.index_add_(1, self.pairs.rows, torch.stack(values_P)))

    def push(self, tile: Tile) -> None:
        """Add the part of a tile that holds entries of G to both gradients."""
        if self.problem.streaming.skip_below > 0.0:
            self._push_above_threshold(tile)
        else:
            self._push(tile.scores, tile.columns)

    def push_pairs(self, values_P: Tensor) -> None:
        """Add entries of G at the positive pairs to both gradients."""
        label_sums = self.problem.gradients.labels
        for piece in _pieces(len(values_P), self.queries_bD.shape[1]):
            rows, columns, values = self.pairs.rows[piece], self.pairs.columns[piece], values_P[piece, None]
            if self.gradient_bD is not None:
                self.gradient_bD.index_add_(0, rows, self.labels(columns).mul_(values))
            if label_sums is not None:
                label_sums.index_add_(0, columns, self.queries_bD[rows].mul_(values))

    def deliver(self) -> None:
        """Hand the block's own gradient over."""
        if self.gradient_bD is not None and self.problem.gradients.queries is not None:
            chosen = self.problem.chosen_B[self.rows]
            self.problem.gradients.queries.index_add_(0, chosen, self.gradient_bD, alpha=self.problem.multiplier)

    def _push(self, entries_bc: Tensor, columns: slice | Tensor) -> None:
        """Add G y to the queries' gradient and G^T q to the labels' for some columns of G."""
        label_sums = self.problem.gradients.labels
        if self.gradient_bD is not None:
            self.gradient_bD.addmm_(entries_bc, self.labels(columns))
        if label_sums is None:
            return
        if isinstance(columns, slice):
            label_sums[columns].addmm_(entries_bc.T, self.queries_bD)
        else:
            label_sums.index_add_(0, columns, entries_bc.T @ self.queries_bD)

    def _push_above_threshold(self, tile: Tile) -> None:
        """The same for the labels that have at least one entry of size `skip_below` per query."""
        streaming = self.problem.streaming
        largest_c = torch.maximum(tile.scores.amax(0), tile.scores.amin(0).neg_())
        chosen = (largest_c * self.problem.averaged_over >= streaming.skip_below).nonzero()[:, 0]
        if len(chosen) == len(largest_c):
            self._push(tile.scores, tile.columns)
        elif len(chosen):
            self._push(tile.scores[:, chosen], chosen + tile.columns.start)
        if streaming.saving is not None:
            streaming.saving.considered += len(largest_c)
            streaming.saving.skipped += len(largest_c) - len(chosen)

    def _mask(self, tile: Tile) -> None:
        """Put minus infinity where pairs are left out."""
        rows, columns = self._masked.of(tile)
        if len(rows):
            tile.scores[rows, columns] = -torch.inf

    def _offset(self, tile: Tile) -> None:
        """Add each label's offset, if there are any, to its scores but to those of positive pairs."""
        offsets_L = self.problem.offsets_L
        if offsets_L is not None and self._not_offset is not None:
            rows, columns = self._not_offset.of(tile)
            positive_scores = tile.scores[rows, columns]
            tile.scores.add_(offsets_L[tile.columns])
            tile.scores[rows, columns] = positive_scores

    def _by_tile(self, pairs: Positives) -> _PairsByTile:
        """The pairs of the block in column order, and where each tile's run of them begins."""
        part = _part(pairs, self.rows)
        rows, columns = pairs.rows[part] - self.rows.start, pairs.columns[part]
        if not len(rows):
            return _PairsByTile(rows, columns, [])
        columns, order = torch.sort(columns, stable=True)
        chunk, num_labels = self.problem.layout.label_chunk, self.problem.num_labels
        edges = torch.arange(0, num_labels + chunk, chunk, device=columns.device)
        return _PairsByTile(rows[order], columns, torch.searchsorted(columns, edges).tolist())

    def _positive_pairs(self) -> Pairs:
        """The block's positives with their scores, each the dot product of its two vectors."""
        positives, part = self.problem.positives, _part(self.problem.positives, self.rows)
        rows, columns = positives.rows[part] - self.rows.start, positives.columns[part]
        scores = self.queries_bD.new_empty(len(rows))
        weights = torch.ones_like(scores) if positives.weights is None else positives.weights[part].to(scores.dtype)
        for piece in _pieces(len(rows), self.queries_bD.shape[1]):
            scores[piece] = self.labels(columns[piece]).mul_(self.queries_bD[rows[piece]]).sum(1)
        return Pairs(rows, columns, weights, scores)


def working_type(values: Tensor) -> torch.dtype:
    """What is computed in: float64 for embeddings of that type, float32 for all others."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def widened(values: Tensor) -> Tensor:
    """Values in the working type."""
    return values.to(working_type(values))


def without_negligible(row_weights: Tensor) -> Tensor:
    """Row weights with zero in place of those that would only slow products down."""
    return torch.where(row_weights >= NEGLIGIBLE_WEIGHT, row_weights, 0.0)


def _pieces(num_pairs: int, num_dimensions: int) -> Iterator[slice]:
    """Runs of pairs whose gathered vectors stay small."""
    step = max(1, PAIR_ELEMENTS // max(1, num_dimensions))
    for start in range(0, num_pairs, step):
        yield slice(start, min(start + step, num_pairs))


def _part(pairs: Positives, rows: slice) -> slice:
    """Where the pairs of a run of rows lie: pairs are sorted by row."""
    bounds = torch.tensor([rows.start, rows.stop], device=pairs.rows.device)
    start, stop = torch.searchsorted(pairs.rows, bounds).tolist()
    return slice(start, stop)


def _keys(pairs: Positives, num_labels: int) -> Tensor:
    """One number per pair."""
    return pairs.rows * num_labels + pairs.columns


def _chosen_rows(queries_BD: Tensor, chosen: Tensor) -> Tensor:
    """The rows that take part, without a copy when all do."""
    return queries_BD if len(chosen) == len(queries_BD) else queries_BD[chosen]


def _renumber(pairs: Positives, chosen: Tensor, num_rows: int) -> Positives:
    """The pairs of the chosen rows, with rows counted among the chosen."""
    if len(chosen) == num_rows:
        return pairs
    place = torch.full((num_rows,), -1, dtype=torch.int64, device=chosen.device)
    place[chosen] = torch.arange(len(chosen), device=chosen.device)
    rows = place[pairs.rows]
    inside = rows >= 0
    return Positives(rows[inside], pairs.columns[inside], None if pairs.weights is None else pairs.weights[inside])


def _union(parts: list[Positives], device: torch.device) -> Positives:
    """All pairs of several sets."""
    empty = torch.empty(0, dtype=torch.int64, device=device)
    rows = torch.cat([empty, *(part.rows for part in parts)])
    return Positives(rows, torch.cat([empty, *(part.columns for part in parts)]))
