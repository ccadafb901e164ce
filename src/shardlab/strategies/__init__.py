"""The strategies: one file each. Their names, in order of difficulty, are in ``naming.py``."""
