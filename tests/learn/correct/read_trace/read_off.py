"""Read off the tables of `shardlab trace analyze`, rounded as people do."""

STEP_MS = 137
LATE_RANK = 1
LATE_BECAUSE = "host"
WAIT_MS = 43
COMM_MS = 32
OVERLAP_PERCENT = 70
BYTES_PER_STEP = 6.65e6
TOP_OPERATOR = "aten::mm"
EXPOSED_BUCKET = "bucket 3"
