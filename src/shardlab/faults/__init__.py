"""Faults on purpose: how they are written, and how they strike."""
