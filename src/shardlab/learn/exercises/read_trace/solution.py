"""Every answer from the trace; in the package: trace/traceset.py has the tables."""

from collections import Counter

import numpy as np

from shardlab import trace
from shardlab.learn.exercises.read_trace import TRACE
from shardlab.trace.intervals import union

traces = trace.load(TRACE)
rows = [row for row in traces.breakdown() if row.step]  # without step 0: it is warm-up
collectives = [c for c in traces.collectives() if c.step]


def mean_ms(rank: int, part: str) -> float:
    values = [getattr(row, part) for row in rows if row.rank == rank]
    return sum(values) / len(values) / 1000


def more_on_rank_1(part: str) -> float:
    return mean_ms(1, part) - mean_ms(0, part)


STEP_MS = mean_ms(0, "wall_us")
LATE_RANK = traces.stragglers()[0].rank
PARTS = {"compute": "compute_us", "communication": "exposed_comm_us", "host": "idle_host_us"}
LATE_BECAUSE = max(PARTS, key=lambda name: more_on_rank_1(PARTS[name]))
WAIT_MS = mean_ms(0, "wait_us")
COMM_MS = mean_ms(1, "comm_us")
OVERLAP_PERCENT = 100 * mean_ms(1, "hidden_comm_us") / COMM_MS
BYTES_PER_STEP = sum(c.bytes or 0 for c in collectives) / len({c.step for c in collectives})
TOP_OPERATOR = next(kernel.name for kernel in traces.kernels() if kernel.rank == 0)

lane = next(lane for lane in traces.lanes() if (lane.rank, lane.lane) == (1, "compute"))
computing = union(lane.start_ns, lane.end_ns)
exposed: Counter[str] = Counter()
for c in collectives:
    mine = next(p for p in c.participants if p.rank == 1)
    span = union(np.array([mine.start_ns]), np.array([mine.end_ns]))
    if c.label.startswith("bucket"):
        exposed[c.label] += (span - computing).length
EXPOSED_BUCKET = exposed.most_common(1)[0][0]
