"""Nearest labels: which labels have the largest inner product with a query."""

from dexter.index.exact import search
from dexter.ranking import TopK

__all__ = ["TopK", "search"]
