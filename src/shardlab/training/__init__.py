"""A training run: what its ranks build, the loop, what they leave."""
