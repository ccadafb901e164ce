"""mpirun on two hosts of tests/support/hosts.py, which it reaches by a script in place of ssh."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import commands
import hosts

# --allow-run-as-root and --oversubscribe, as variables.
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def why_not() -> str:
    """Why there is no MPI here; empty if there is."""
    return "" if shutil.which("mpirun") else "mpirun is missing: apt-get install openmpi-bin"


def run(
    two: hosts.Hosts, *words: str, cwd: Path, timeout: float = 100
) -> subprocess.CompletedProcess[str]:
    """mpirun, or a script that calls it, on the first host. The hosts are called n1 and n2, also in
    the words."""
    words = tuple(re.sub(r"\bn([12])\b", lambda m: two.address(int(m[1]) - 1), w) for w in words)
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "agent"  # called with an address and the words of a command
        agent.write_text(
            "#!/bin/sh\naddress=$1; shift\n"
            f'exec ip netns exec "{two.name}$((${{address##*.}} - 1))" unshare --uts \\\n'
            '    sh -c "hostname n${address##*.}; $*"\n'
        )
        agent.chmod(0o755)
        own = {
            "OMPI_MCA_plm": "rsh",
            "OMPI_MCA_plm_rsh_agent": str(agent),
            "OMPI_MCA_oob_tcp_if_include": hosts.DEVICE,
        }
        named = ["unshare", "--uts", "sh", "-c", 'hostname n1; exec "$@"', "sh"]
        inside = ["ip", "netns", "exec", two.namespace(0), *named]
        return commands.run(
            *inside, *words, cwd=cwd, timeout=timeout, OMP_NUM_THREADS="1", **AS_ROOT, **own
        )
