"""How a loss is streamed: which mode, how much memory, which ranks. One small record that every loss takes.

Two modes, one function:

- *tiles*: the scores of a block of queries against all labels stay in memory between the sweeps. Three matrix products
  (scores, query gradients, label gradients), which is the least there is.
- *chunks*: only one chunk of labels is in memory, so the scores are computed once per sweep: four products for the
  softmax family, memory independent of the number of labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from dexter.errors import UsageError
from dexter.processes import Processes, SingleProcess

FLOAT_BYTES = 4
TILE_ELEMENTS = 1 << 19
"""A tile of 2 MB: large enough for the matrix product, small enough to stay in cache while it is worked on."""
FEWEST_ROWS = 64
"""Below this many rows per block, rereading all labels for each block costs more than a fourth matrix product."""
MOST_ROWS = 512
"""In chunks mode more rows per block only make the chunks narrower."""

Shard: TypeAlias = Processes
"""The ranks that hold the same queries and different labels."""


@dataclass
class Saving:
    """What `skip_below` saved, summed over the calls that were given this record."""

    considered: int = 0
    """Labels whose gradient was due, counted once per block of queries."""
    skipped: int = 0
    """Those of them that were left out."""

    @property
    def fraction(self) -> float:
        """The part of the gradient products that was not computed."""
        return self.skipped / self.considered if self.considered else 0.0


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Settings of the sweeps. The defaults suit one process with some hundred megabytes to spare."""

    mode: Literal["auto", "tiles", "chunks"] = "auto"
    """`auto` takes tiles whenever the budget holds a block of enough full rows."""
    memory_budget: int = 256 * 2**20
    """Bytes for scores. Embeddings and their gradients come on top, a few tile-sized buffers too."""
    row_block: int | None = None
    """Queries per block; None derives it from the budget."""
    label_chunk: int | None = None
    """Labels per tile; None derives it from the cache-sized tile."""
    skip_below: float = 0.0
    """Labels whose largest gradient weight |d loss_i / d s_il| within a block of queries is below this are left out of
    the gradient products. The value is not affected. Each gradient row is off by at most skip_below x the sum of the
    norms of what was left out (divided by the temperature and the number of queries). 0 is exact."""
    shard: Shard = field(default_factory=SingleProcess)
    """The ranks that hold the other labels. Gradients of queries are then this rank's part: the caller sums them."""
    saving: Saving | None = None
    """A record that is added to when `skip_below` is set."""

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "tiles", "chunks"):
            raise UsageError(f'streaming mode must be "auto", "tiles" or "chunks", got {self.mode!r}')
        for name in ("memory_budget", "row_block", "label_chunk"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise UsageError(f"streaming {name} must be at least 1, got {size}")
        if not 0.0 <= self.skip_below < 1.0:
            raise UsageError(f"skip_below is a gradient weight in [0, 1), got {self.skip_below}: try 1e-6")


@dataclass(frozen=True)
class Layout:
    """The sizes that follow from the settings for one problem."""

    keep: bool
    """Whether the scores of a block stay in memory between sweeps."""
    row_block: int
    label_chunk: int


def choose_layout(streaming: Streaming, num_rows: int, num_labels: int) -> Layout:
    """Sizes within the budget. Unless sizes are set by hand, no buffer holds all rows x all labels."""
    num_rows, num_labels = max(num_rows, 1), max(num_labels, 1)
    half_of_rows = math.ceil(num_rows / 2)
    full_rows = max(1, min(streaming.memory_budget // (FLOAT_BYTES * num_labels), half_of_rows))
    keep = streaming.mode == "tiles" or (streaming.mode == "auto" and full_rows >= min(FEWEST_ROWS, half_of_rows))
    rows = streaming.row_block or balanced(num_rows, full_rows if keep else MOST_ROWS)
    if streaming.label_chunk is not None:
        return Layout(keep, rows, streaming.label_chunk)
    tile = TILE_ELEMENTS if keep else min(TILE_ELEMENTS, streaming.memory_budget // FLOAT_BYTES)
    widest = num_labels if keep else math.ceil(num_labels / 2)
    return Layout(keep, rows, min(widest, max(1, tile // rows)))


def balanced(total: int, largest: int) -> int:
    """The size of equal parts of `total` that are not larger than `largest`."""
    return math.ceil(total / math.ceil(total / max(1, largest)))
