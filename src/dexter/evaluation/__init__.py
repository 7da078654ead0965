"""Evaluation: reports with bands and intervals, result records, baselines, tables, plots, a page, cards, exports."""
