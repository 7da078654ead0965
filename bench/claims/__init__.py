"""The papers' claims, tried on data that can be looked at: one module per claim, a runner, and a page from records.

    python -m bench.claims run 1 4 2          run what is missing of these claims; stop it at any time and run it again
    python -m bench.claims status             how much of each claim has been run
    python -m bench.claims page               write docs/claims.md and docs/plots from the records

A trial is one training run (or baseline) on a fixed sample with one seed; its record is one JSON file in `records/`,
shared by all claims that need the same trial. Nothing on the page is written by hand but the words of the claims'
modules.
"""
