"""Seconds per unit of work on a machine, as `probe` measures them and `duration` multiplies them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds per unit of work on this machine."""

    per_character: float
    """Building the vocabulary and tokenising."""
    per_query: float
    """A query through the encoder, forth and back."""
    per_query_forward: float
    per_label: float
    """The same for a label text."""
    per_label_forward: float
    per_score: float
    """A query against a label in the objective, with gradients; all heads."""
    per_dense_weight: float
    """A weight through its gradient and AdamW."""
    per_row_element: float
    """A number in a touched row through the row optimiser."""
    per_search: float
    """A query against a label in a search, per dimension."""
    per_clustered: float
    """A query in one halving of the clusters, per dimension."""
    per_byte: float
    """A byte to disk, hashed and flushed."""
