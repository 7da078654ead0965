"""Labels that come, go and change their text without training: in memory, and beside a published model on disk.

edits       what a user asks for, and when it is refused
replay      what a list of edits makes of a model: the one way labels change, live or after a restart
journal     the edits on disk: append-only, checksummed, committed by one rename
lock        one writer at a time
live_model  the model that all of it happens to
catalog     labels by a part of their id or text
similar     labels that mean nearly the same, and the warning about them
"""
