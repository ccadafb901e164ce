"""The run that is read here: ``TRACE`` is its folder, with the traces of two ranks.

It was recorded by ``benchmarks/exercise_trace.py``.
"""

from pathlib import Path

TRACE = Path(__file__).parent / "run"
