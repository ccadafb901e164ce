"""What the commands that measure refuse: in a line, before anything runs or is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import commands
from results import cell, result_of
from shardlab import config as configs

EARLIER = {
    "old.json": json.dumps(result_of(cell("a", 100)) | {"config": configs.Config().to_dict()}),
    "text.json": "hello",
    "other.json": "{}",
}
TINY = "--size tiny --data synthetic"
TO_LOSS = "compare --strategies simple_ddp --to-loss 3"
TOKENS = "compare --strategies simple_ddp --tokens 9"
REFUSED = [
    ("compare --strategies single,zero9", "unknown strategy 'zero9'"),
    ("compare --strategies single,single", "strategy single is named twice"),
    ("compare --strategies pytorch_ddp:bucket=4", "unknown option of strategy pytorch_ddp"),
    ("compare --strategies pytorch_ddp:bucket_mb=x", "pytorch_ddp's bucket_mb must be a number"),
    ("compare --world 2,x", "--world 2,x: not whole numbers"),
    ("compare --world 0", "--world must be at least 1, got 0"),
    ("compare --precision fp32,bf61", "value of --precision 'bf61'; did you mean 'bf16'"),
    ("compare --micro-batch 1.5", "--micro-batch 1.5: not whole numbers"),
    ("compare --world 16", "training.global_batch 8 is too small for 16 ranks"),
    ("compare --strategies zero1:bucket_mb=", "has no value"),
    ("compare --strategies zero1:a=1:a=2", "a is given twice"),
    ("compare --strategies a:b=1:c", "is not option=value"),
    ("compare --strategies zero1::bucket_mb=2", "a colon in 'zero1::bucket_mb=2' has no option"),
    ("compare --strategies zero1:", "a colon in 'zero1:' has no option=value"),
    ("compare --repeats 0", "--repeats must be at least 1"),
    ("compare --fresh --no-prove", "--fresh makes proofs anew, and --no-prove makes none"),
    ("compare --size huge", "unknown gpt2 size 'huge'"),
    # A goal that is trained for.
    ("compare --to-loss 3", "say which: --strategies"),
    (f"{TO_LOSS} --tokens 9", "give one of them"),
    ("compare --strategies simple_ddp --size tiny --to-loss 0", "--to-loss 0 is never reached"),
    (f"{TOKENS} --workload resnet_cifar10", "are no tokens; use --to-loss"),
    ("compare --strategies simple_ddp --to-loss nan", "--to-loss nan: not a loss"),
    ("compare --strategies simple_ddp --tokens 0", "--tokens must be at least 1, got 0"),
    (f"{TOKENS} --steps 9", "leave out --steps"),
    (f"{TO_LOSS} --seeds 0", "--seeds must be at least 1, got 0"),
    (f"{TO_LOSS} --steps 0", "--steps must be at least 1, got 0"),
    (f"{TO_LOSS} --time-limit 0", "--time-limit must be above 0 s"),
    (f"{TOKENS} --against x", "--against is for comparing steps, and --tokens"),
    (f"{TO_LOSS} --against x", "--against is for comparing steps, and --to-loss"),
    (f"{TO_LOSS} --fail-if wrong", "--fail-if is for comparing steps"),
    (f"{TO_LOSS} --repeats 2", "--repeats is for comparing steps"),
    (f"{TO_LOSS} --profile", "--profile is for comparing steps"),
    (f"{TO_LOSS} --no-prove", "--prove is for comparing steps"),
    ("compare --strategies simple_ddp --seeds 2", "--seeds is for --to-loss and --tokens"),
    # An earlier comparison.
    ("compare --fail-if slower=5%", "--fail-if slower is for a comparison with an earlier one"),
    ("compare --fail-if wrong --no-prove", "looks at the proofs; leave out --no-prove"),
    ("compare --fail-if wrong=5%", "wrong has no share; a strategy is wrong or not"),
    ("compare --against old.json --fail-if slow=5%", "did you mean 'slower'"),
    ("compare --against old.json --fail-if slower=5", "not a share, as in slower=5%"),
    ("compare --against none.json", "cannot read none.json"),
    ("compare --against text.json", "text.json is not JSON"),
    ("compare --against other.json", "other.json is not a compare.json of schema 1"),
    ("compare --against old.json -b 16", "measured with training.global_batch 8"),
    ("compare --against old.json --size tiny", "measured with model.size None"),
    ("compare --against old.json", "none of these strategies in this world; it has a in world 2"),
    # The estimate of memory.
    ("memory --fits lots", "--fits lots: not a size"),
    ("memory --micro-batch 0", "a batch has at least one sample"),
    ("memory --strategy zero4", "did you mean 'zero"),
    ("memory --size tinny", "error: unknown gpt2 size 'tinny'; did you mean 'tiny'?\n"),
    (f"memory --strategy zero1 --snapshot {TINY}", "CUDA allocator"),
    # Throughput, and the network.
    ("throughput --micro-batch 1,x", "--micro-batch 1,x: not whole numbers"),
    ("throughput --memory-limit much", "--memory-limit much: not a size"),
    ("throughput --sweep --micro-batch 1,2", "give --micro-batch one number"),
    ("throughput --micro-batch 4,0", "at least one sample"),
    ("throughput --warmup 1", "at least 2: its state makes the peak"),
    ("throughput --tokens 0", "--tokens must be above 0"),
    ("throughput --price-per-hour 0", "--price-per-hour must be above 0, got 0"),
    ("throughput --strategy simple --world 2", "did you mean 'simple_ddp'?"),
    ("throughput --strategy single --world 2", "'single' is one process"),
    ("network --rounds 1", "--rounds 1: at least 2"),
    ("network --max-size 1KiB", "--max-size 1KiB: at least 16KiB"),
    ("network --max-size much", "--max-size much: not a size"),
    ("network --total-time 0", "--total-time 0: not a number of seconds above 0"),
    ("network --world 1", "one rank has no network; use --world 2"),
]


@pytest.mark.parametrize(("command", "message"), REFUSED)
def test_wrong_input_is_refused(command: str, message: str, tmp_path: Path) -> None:
    for name, content in EARLIER.items():
        (tmp_path / name).write_text(content)
    done = commands.here(*command.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("error: ") == 1  # not once for each strategy
    assert len(done.stderr.partition("error: ")[2].splitlines()) <= 2
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == EARLIER.keys()
