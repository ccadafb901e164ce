"""A training run on 2 nodes with 4 ranks on each, with Ray Train.

Copy this file, edit it, and submit it:

    ray job submit --working-dir . -- python ray_job.py

The nodes need shardlab, and must share the folder of the run.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer

# --resume auto begins in the folder, or continues from the newest checkpoint there.
COMMAND = [
    "train", "--size", "tiny", "--checkpoint-every", "5",
    "--resume", "auto", "--out", "/shared/runs/gpt",
]  # fmt: skip
RANKS = 8  # on all nodes together
# The ranks start in the folder that was submitted, not in one of Ray's.
os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"


def work() -> int:
    """One rank in a separate process: Ray has set the variables that torchrun would set."""
    import torch.distributed as dist

    # Ray's own process group uses MASTER_PORT. Rank 0 finds a free port for the ranks.
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = [probe.getsockname()[1]]
    dist.broadcast_object_list(port, src=0)
    libc = ctypes.CDLL(None)  # loaded here: little is safe between fork and exec
    code = subprocess.run(
        [sys.executable, "-m", "shardlab", *COMMAND],
        env={**os.environ, "MASTER_PORT": str(port[0])},
        # PR_SET_PDEATHSIG: when this worker ends, however it ends, its rank ends too.
        preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),
    ).returncode
    here = f"rank {dist.get_rank()} on {socket.gethostname()}"
    if code < 0:
        raise RuntimeError(f"{here} was ended by {signal.Signals(-code).name}")
    if code not in (0, 2):
        raise RuntimeError(f"{here} ended with exit code {code}")
    return code  # 2: the ranks rejected their input, and would again


try:
    result = TorchTrainer(
        work,
        torch_config=TorchConfig(backend="gloo"),  # of Ray's group; the ranks choose their own
        scaling_config=ScalingConfig(
            num_workers=RANKS,
            placement_strategy="SPREAD",  # over the nodes
            # use_gpu=True,  # a GPU for each rank
        ),
        run_config=RunConfig(
            name="gpt",
            # If the nodes do not reach each other, name their interface here, and in COMMAND:
            # "--set", "launch.interface=eth0".
            # worker_runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "eth0"}},
            # When a rank dies, Ray starts all ranks again.
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()
except WorkerGroupError as error:
    # Of those that failed, a rank that was killed is the cause; the others have lost it.
    said = [str(e).strip().splitlines()[-1] for e in error.worker_failures.values()]
    said.sort(key=lambda line: "was ended by" not in line)
    sys.exit(f"error: {said[0]}")
sys.exit(result.return_value)
