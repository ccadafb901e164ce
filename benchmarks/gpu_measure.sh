#!/usr/bin/env bash
# What `throughput`, `memory` and `compare` measure on a GPU, with GPT-2 small.
#   bash benchmarks/gpu_measure.sh DIR
# Throughput from one sample to the largest batch that fits, fp32 and bf16; the memory estimate
# beside the measured peak for batches 1 to 64 (one rank over NCCL, two that share the GPU over
# Gloo); a comparison with MFU; a proof of the strategies that leave work under way.
set -uo pipefail
out=${1:?where to put the results}
run() { echo "+ $*"; "$@" || echo "FAILED with $?: $*"; }
lab() { run python -m shardlab "$@"; }
lab throughput --device cuda --size small --data synthetic --precision bf16 --sweep --sweep-time 100 \
  --out "$out/throughput-bf16"
lab throughput --device cuda --size small --data synthetic --precision fp32 --sweep --sweep-time 100 \
  --out "$out/throughput-fp32"
for batch in 1 4 16 64; do
  lab memory --device cuda --size small --data synthetic --world 1 --micro-batch $batch --measure \
    --strategies single,bucket_ddp_async,zero2,zero3,pytorch_ddp,pytorch_zero3 --quiet --out "$out/memory-w1-b$batch"
  lab memory --device cuda --size small --data synthetic --world 1 --micro-batch $batch --measure \
    --precision bf16 --strategies single,zero3,pytorch_zero3 --quiet --out "$out/memory-w1-bf16-b$batch"
done
for batch in 1 8; do
  lab memory --device cuda --size small --data synthetic --world 2 --micro-batch $batch --measure \
    --strategies pytorch_zero1,pytorch_zero2,pytorch_zero3,pytorch_hsdp,zero1,zero2,zero3 --quiet --out "$out/memory-w2-b$batch"
done
lab compare --device cuda --world 1 --size small --set data.source=synthetic --precision fp32,bf16 --global-batch 16 \
  --strategies single,pytorch_ddp,zero3 --repeats 2 --warmup 3 --steps 5 --out "$out/compare-w1"
lab prove --device cuda --world 2 --strategies bucket_ddp_async,zero1,zero2,zero3 --out "$out/prove-w2"
