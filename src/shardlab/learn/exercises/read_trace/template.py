"""Questions about a trace.

The contract. Each constant below gets an answer: a number or a text, or a function without
arguments that returns it. You may read the answers off `shardlab trace analyze`, look at the trace
in Perfetto, or compute them here; the folder with the traces of both ranks is ``TRACE``:

    from shardlab.learn.exercises.read_trace import TRACE

A copy to look at:

    python -m shardlab.learn.exercises.read_trace read_trace_run
    shardlab trace analyze read_trace_run

Times are means over the steps without the first, ``ProfilerStep#0``: it is warm-up.

Check it: shardlab learn check read_trace
"""

# TODO: answer these.

# How long is a step on rank 0, in milliseconds?
STEP_MS = None

# Which rank makes the other one wait: 0 or 1?
LATE_RANK = None

# Why is it late: "compute", "communication" or "host" (Python, or the data)?
LATE_BECAUSE = None

# How long does rank 0 wait for rank 1 in a step, in milliseconds: it is in a collective, and rank 1
# is not yet, and rank 0 computes nothing meanwhile?
WAIT_MS = None

# For how long in a step is rank 1 communicating, in milliseconds: at least one collective is under
# way on it?
COMM_MS = None

# How much of that is hidden behind computing on rank 1, in percent?
OVERLAP_PERCENT = None

# How many bytes do the collectives of one step work on? (Each counts once, though both ranks have
# it in their trace. The ledger beside the traces has the sizes.)
BYTES_PER_STEP = None

# Which operator takes the most time on rank 0, without the operators inside it ("aten::...")?
TOP_OPERATOR = None

# Which bucket of gradients, by its label ("bucket 0" …), costs rank 1 the most time that computing
# does not hide, over these steps?
EXPOSED_BUCKET = None
