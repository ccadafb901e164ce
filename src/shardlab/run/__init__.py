"""Training on ranks: how they start, the loop, what is recorded, how a run ends."""
