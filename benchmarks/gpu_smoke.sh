#!/usr/bin/env bash
# Every strategy on a GPU: one rank over NCCL, then two ranks that share it over Gloo.
#   bash benchmarks/gpu_smoke.sh DIR
set -uo pipefail
out=${1:?where to put the results}
run() { echo "+ $*"; "$@" || echo "FAILED with $?: $*"; }
run python -m shardlab doctor
for world in 1 2; do
  run python -m shardlab prove --device cuda --world $world --out "$out/prove-w$world"
  run python -m shardlab compare --device cuda --world $world --size small --set data.seq_len=256 \
    --global-batch 8 --repeats 2 --warmup 3 --steps 5 --out "$out/fp32-w$world"
done
run python -m shardlab compare --device cuda --world 1 --size small --precision bf16 \
  --global-batch 8 --repeats 2 --warmup 3 --steps 5 --out "$out/bf16-w1"
for model in frozen_first out_of_order pass_through in_other_orders; do
  for world in 1 2; do
    run python -m shardlab prove --device cuda --world $world --strategies zero3 \
      --workload benchmarks/odd_models.py:$model --out "$out/$model-w$world"
  done
done
run python -m shardlab train --device cuda --world 2 --global-batch 5 \
  --size small --seq-len 64 --steps 3 --out "$out/uneven-w2"
run python -m shardlab train --device cuda --world 2 --set launch.backend=nccl --out "$out/refused"
