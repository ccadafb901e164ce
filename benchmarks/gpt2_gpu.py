"""GPT-2 small on one GPU: our loop against a plain PyTorch loop in nanoGPT's manner.

    python benchmarks/gpt2_gpu.py [--batches 8,32,64] [--compile model,blocks]
                                  [--heads plain,float8] [--out FILE]

Sequence 1024, bf16 autocast over fp32 weights, torch.compile, fused AdamW. Ours is all that
``shardlab train --strategy single`` runs: the sampler, the loader, the strategy, the recorder. The
reference is a model and a loop of its own below, on one batch that never leaves the GPU, with a
vocabulary padded to 50304 as nanoGPT has it (ours has the published 50257). Ours, with each of the
heads, and the reference are warmed up, then take turns of a few steps on the same GPU, so that its
clock slows all. Prints tokens/s of each (median, p10–p90 of the turns), the ratio with its 95%
bootstrap interval, and peak memory.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardlab import config as configs
from shardlab.launch import environment
from shardlab.launch.ranks import Ranks
from shardlab.ledger import LEDGER
from shardlab.stats import spread
from shardlab.training import builders, loop
from shardlab.training.recorder import Recorder

SEQ, DIM, HEADS, LAYERS, VOCAB = 1024, 768, 12, 12, 50304
WARMUP, TURNS = 6, 10


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.wide, self.narrow = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:  # (batch, seq, dim)
        parts = self.qkv(self.norms[0](x)).split(DIM, dim=2)
        q, k, v = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.narrow(F.gelu(self.wide(self.norms[1](x))))
        return out


class PlainGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.blocks = nn.Sequential(*(PlainBlock() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(SEQ, device=tokens.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def reference(batch: int) -> Callable[[int], None]:
    """Makes so many steps of the plain loop."""
    model = PlainGPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.1, fused=True)
    compiled = torch.compile(model)
    stream = torch.randint(0, 50257, (batch, SEQ + 1), device="cuda")
    tokens, targets = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()

    def steps(count: int) -> None:
        for _ in range(count):
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return steps


def ours(world: Any, batch: int, compile_what: str, head: str) -> Callable[[int], None]:
    """Makes so many steps as ``shardlab train --strategy single`` would."""
    config = configs.load(
        None,
        {
            "model.size": "small",
            "model.options": {"head": head},
            "strategy.name": "single",
            "precision.compute": "bf16",
            "training.compile": compile_what,
            "training.global_batch": batch,
            "training.steps": 10_000,
            "launch.world": 1,
        },
    )
    workload = builders.build_workload(config)
    strategy = builders.build_strategy(config, workload, world)
    data = loop.Batches(workload, config, world)
    LEDGER.reset(full_steps=0)

    def steps(count: int) -> None:
        with Recorder(None, world, LEDGER, count) as recorder:
            loop.train(strategy, data, recorder, range(count))

    return steps


def timed(steps: Callable[[int], None], count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    steps(count)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(make: Callable[[], Callable[[int], None]]) -> int:
    """Of one of them alone on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    make()(3)
    return torch.cuda.max_memory_allocated()


def measure(world: Any, batch: int, compile_what: str, heads: list[str]) -> list[dict[str, Any]]:
    """A row for each head, beside the one reference."""
    makers: dict[str, Callable[[], Callable[[int], None]]] = {
        head: partial(ours, world, batch, compile_what, head) for head in heads
    }
    makers["reference"] = lambda: reference(batch)
    peaks = {kind: peak_bytes(make) for kind, make in makers.items()}
    gc.collect()
    runs = {kind: make() for kind, make in makers.items()}
    for steps in runs.values():
        steps(WARMUP)
    count = max(5, 320 // batch)  # steps of a turn: more where they are short
    tokens = count * batch * SEQ
    rates: dict[str, list[float]] = {kind: [] for kind in runs}
    for turn in range(TURNS):
        for kind in list(runs)[:: 1 if turn % 2 else -1]:
            rates[kind].append(tokens / timed(runs[kind], count))
    draw = np.random.default_rng(0)
    medians = {k: np.median(draw.choice(v, (4000, len(v))), axis=1) for k, v in rates.items()}
    rows = []
    for head in heads:
        low, high = np.percentile(medians[head] / medians["reference"], [2.5, 97.5])
        both = {"ours": head, "reference": "reference"}
        rows.append(
            {
                "batch": batch,
                "compile": compile_what,
                "head": head,
                "tokens_per_s": {who: spread(rates[kind]) for who, kind in both.items()},
                "ratio": float(np.median(rates[head]) / np.median(rates["reference"])),
                "ratio_95": [float(low), float(high)],
                "peak_bytes": {who: peaks[kind] for who, kind in both.items()},
            }
        )
    return rows


def measure_all(
    world: Any, batches: list[int], compiles: list[str], heads: list[str]
) -> dict[str, Any]:
    rows = []
    for what, batch in itertools.product(compiles, batches):
        torch._dynamo.reset()
        found = measure(world, batch, what, heads)
        rows += found
        for row in found:
            rates, peaks = row["tokens_per_s"], row["peak_bytes"]
            print(
                f"batch {batch:3}  compile {what:6}  head {row['head']:6}  ours "
                f"{rates['ours']['median']:9,.0f} tokens/s [{rates['ours']['p10']:,.0f}, "
                f"{rates['ours']['p90']:,.0f}]  reference {rates['reference']['median']:9,.0f}  "
                f"ratio {row['ratio']:.3f} [{row['ratio_95'][0]:.3f}, {row['ratio_95'][1]:.3f}]  "
                f"peak {peaks['ours'] / 2**30:.1f} / {peaks['reference'] / 2**30:.1f} GiB",
                flush=True,
            )
    return {
        "env": environment.describe(world.device, " ".join(["python", *sys.argv])),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", default="8,32,64")
    parser.add_argument("--compile", default="model,blocks")
    parser.add_argument("--heads", default="plain", help="plain, float8, or both")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    batches = [int(b) for b in arguments.batches.split(",")]
    with Ranks(configs.LaunchConfig(world=1, device="cuda"), 1) as ranks:
        chosen = arguments.compile.split(","), arguments.heads.split(",")
        result = ranks.run(measure_all, batches, *chosen)[0]
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
