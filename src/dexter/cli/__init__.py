"""The command line: one verb per step of the flow."""
