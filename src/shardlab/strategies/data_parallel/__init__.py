"""Data parallelism: every rank holds the whole model."""
