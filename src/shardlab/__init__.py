"""shardlab: a laboratory for distributed training in PyTorch.

Importing the package costs nothing: no torch, no files, no command line. Each
room is imported where it is used (``shardlab.strategies``, ``shardlab.train``…).
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
