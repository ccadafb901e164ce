#!/bin/sh
# Install what the cluster tests need: sh tests/cluster/install.sh PYTHON. What cannot be installed
# is said, and its tests are skipped.

# Ray, and the models of Kubeflow's manifests (a package of types; nothing of it runs).
"$1" -c 'import aiohttp_cors, kubeflow_trainer_api, ray.train' 2>/dev/null ||
    "$1" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
        'ray[default,train]' kubeflow-trainer-api ||
    echo "Ray or kubeflow-trainer-api could not be installed: those tests skip"

# Slurm and MPI, if this is a Debian and we are root.
for program in slurmctld munged mpirun; do
    command -v "$program" >/dev/null || missing=yes
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "Slurm or MPI is missing, and only root on Debian can install them: those tests skip"
    exit 0
fi
# Run level 1: the packages start no daemons. The tests start their own.
apt-get update -qq
RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    slurm-wlm munge openmpi-bin >/dev/null || echo "the install failed: those tests skip"
