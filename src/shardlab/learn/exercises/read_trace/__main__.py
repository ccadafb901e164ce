"""A copy of the run for the learner: python -m shardlab.learn.exercises.read_trace [DIR]"""

import shutil
import sys
from pathlib import Path

from shardlab.learn.exercises.read_trace import TRACE

target = Path(sys.argv[1] if len(sys.argv) > 1 else "read_trace_run")
if target.exists():
    sys.exit(f"{target} exists already; look at it with `shardlab trace analyze {target}`")
shutil.copytree(TRACE, target)
print(f"{target}: now `shardlab trace analyze {target}`, and open {target}/traces/summary.html")
