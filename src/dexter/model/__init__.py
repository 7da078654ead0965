"""A trained encoder with its labels: in memory, on disk, and while labels are added, renamed and removed."""
