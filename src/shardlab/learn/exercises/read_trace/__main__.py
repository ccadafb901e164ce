"""A copy of the run for the learner: python -m shardlab.learn.exercises.read_trace [DIR]"""

import shutil
import sys
from pathlib import Path

from shardlab.learn.exercises.read_trace import TRACE


def main(target: Path) -> int:
    if target.exists():
        print(f"{target} exists: look at it with `shardlab trace analyze {target}`, or name "
              "another folder", file=sys.stderr)  # fmt: skip
        return 2
    shutil.copytree(TRACE, target)
    print(f"{target}: now `shardlab trace analyze {target}`, which writes "
          f"{target}/traces/summary.html")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "read_trace_run")))
