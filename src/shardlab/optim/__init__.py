"""The optimizer of a run: how it is made, what it does to parts of tensors, its schedule."""
