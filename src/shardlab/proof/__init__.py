"""The evidence, measured on the ranks, and the judge of it, pure."""

TIMEOUT_S = 60.0  # a collective of so small a model that waits longer hangs
