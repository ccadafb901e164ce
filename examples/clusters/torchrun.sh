#!/bin/bash
# A training run on 2 nodes with 4 ranks on each. Copy this file, edit it, and start it on every
# node:
#   bash torchrun.sh FIRST_HOST
# On one machine write --standalone in place of --nnodes and the three --rdzv flags.
first=${1:?name the first of the nodes}

# The nodes meet at port 29400 of the first. When a rank dies, torchrun starts all ranks again, up
# to 3 times. --resume auto continues from the newest checkpoint, also when this file starts again.
exec torchrun --nnodes=2 --nproc-per-node=4 --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-id=gpt --rdzv-endpoint="$first:29400" \
    -m shardlab train --size tiny --checkpoint-every 5 \
    --resume auto --out runs/gpt
