"""Answers as functions, and words as people type them."""


def STEP_MS():  # noqa: N802
    return 137.2


LATE_RANK = 1.0
LATE_BECAUSE = " Host"
WAIT_MS = 43.1
COMM_MS = 32.1
OVERLAP_PERCENT = 69.8
BYTES_PER_STEP = 6_650_000


def TOP_OPERATOR():  # noqa: N802
    return "ATen::mm"


EXPOSED_BUCKET = "Bucket 3 "
