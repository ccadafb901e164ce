"""Checkpoints: all that a run needs to continue exactly where it was, under any strategy and world.

All ranks write, each its own part, in one form: ``checkpoint.json`` and a safetensors file per
rank. No pickle is written or read.
"""
