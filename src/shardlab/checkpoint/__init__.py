"""Checkpoints: everything a run needs to go on exactly where it was, under any strategy and world.

Written by all ranks with PyTorch's distributed checkpoint (DCP), each its own part, in one form on
disk: ``checkpoint.json`` and a safetensors file per rank. No pickle is written or read.
"""
