"""How good a run is: score it, compare it with others, and show the result.

report.py      `Report` and `Comparison`: metrics of rankings, by frequency band and decile, with intervals
intervals.py   bootstrap intervals over queries
runs.py        `evaluate`, and the other evaluations of trained runs
unseen.py      labels that training never saw
baselines.py   what every model has to beat
records.py     what an evaluation writes to disk
tables.py, plots.py, page.py   reports as text, PNG and HTML
export.py      the query encoder as an ONNX file, compared with torch
"""
