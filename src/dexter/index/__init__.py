"""Nearest labels: which labels have the largest inner product with a query."""

from dexter.index.exact import TopK, search

__all__ = ["TopK", "search"]
