"""A training script as people write them, in one process: AdamW, a cosine, clipped gradients, a
moving average of the weights (EMA), checkpoints.

python examples/plain_script.py

examples/parallel_script.py is the same under any strategy; docs/own-script.md shows what changed.
"""

import math
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS, BATCH, SAVE_EVERY = 60, 32, 20
RUN = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/script")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 10))


def make_data():
    x = torch.randn(2048, 64, generator=torch.Generator().manual_seed(1))
    return x, x[:, :10].argmax(1)


def samples_of(step):
    """The numbers of the samples of a step: they follow from the step alone."""
    order = torch.Generator().manual_seed(step)
    return torch.randperm(2048, generator=order)[:BATCH]


def cosine(step):
    return 0.5 * (1 + math.cos(math.pi * step / STEPS))


def workload():
    """For `shardlab compare --workload examples/plain_script.py:workload`."""
    return make_model(), make_data(), nn.CrossEntropyLoss()


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, y = (tensor.to(device) for tensor in make_data())
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    first = 0
    if (RUN / "checkpoint.pt").exists():
        saved = torch.load(RUN / "checkpoint.pt", map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        average.load_state_dict(saved["average"])
        first = saved["step"]
    for step in range(first, STEPS):
        ids = samples_of(step)
        loss = F.cross_entropy(model(x[ids]), y[ids])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        if (step + 1) % SAVE_EVERY == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}")
            RUN.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"schedule": schedule.state_dict(), "average": average.state_dict()}
            torch.save({**state, "step": step + 1}, RUN / "checkpoint.pt")
    torch.save(average.module.state_dict(), RUN / "average.pt")


if __name__ == "__main__":
    main()
