"""What a run will need, before it is started: memory, disk, time, and bytes between processes.

`sizes` holds the numbers that everything follows from, `memory` and `network` the formulas, `timing` times a few real
steps, and `plan` puts them together, finds settings that make a run fit, and prints.
"""
