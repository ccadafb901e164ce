#!/bin/bash
# A training run on 2 nodes with 4 ranks on each, with Open MPI. Copy this file, edit it, and
# start it on the first node with the names of all nodes:
#   bash mpirun.sh first,second
# With MPICH or Intel MPI the command begins: mpirun -n 8 -ppn 4 -hosts "$hosts"
# On one machine leave out --map-by, --host and launch.address.
hosts=${1:?name the nodes, with commas between them}

# Rank 0 listens on the first node. mpirun does not start ranks again: start this file again, and
# --resume auto continues from the newest checkpoint.
exec mpirun -np 8 --map-by ppr:4:node --host "${hosts//,/:4,}:4" \
    shardlab train --size tiny --checkpoint-every 5 \
    --resume auto --out runs/gpt \
    --set launch.address="${hosts%%,*}"
