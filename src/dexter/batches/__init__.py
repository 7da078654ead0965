"""Batches: the queries of each step and the labels they are scored against."""

from dexter.positives import Positives

__all__ = ["Positives"]
