"""What a run will need, before it is started: memory, disk, time, and bytes between ranks.

`sizes` and `shapes` say what is large; `terms`, `storage`, `duration` and `communication` hold the formulas; `probe`
measures this machine on a `sample` of the data; `advice` looks for the settings that make a run fit; `plan` puts all of
it together and `report` prints it.
"""
