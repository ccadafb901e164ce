"""The user's data and loss in whatever form: every row of the table in docs/workloads.md, shared
out unevenly among ranks, gives loss and gradient of the plain loss on the whole batch."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import commands
from shardlab import config as configs
from shardlab import runfolder
from shardlab.data.loader import cast
from shardlab.errors import UsageError
from shardlab.files import read_jsonl
from shardlab.training import builders
from shardlab.workloads.base import Workload
from shardlab.workloads.blocks import check_blocks, guess_blocks

ROOT = Path(__file__).parents[2]

HAVE = """\
import copy
import dataclasses
import random
from collections import namedtuple
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.nn.utils.rnn import pad_sequence
from shardlab.workloads.base import Batch, Workload

torch.manual_seed(0)  # how small a penalty is noticed depends on the weights
g = torch.Generator().manual_seed(0)
inputs = torch.randn(24, 4, generator=g)
labels = torch.randint(0, 3, (24,), generator=g)
pairs = list(zip(inputs, labels.tolist()))
model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
autoencoder = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4))
triples = [(a, b, torch.stack([a.sum(), b.sum()])) for a, b in zip(inputs, inputs.flip(0))]
nested = [((a, b), y) for a, b, y in triples]
dicts = [{"x": x, "label": y} for x, y in pairs]
two_targets = [(x, (y, x[:2])) for x, y in pairs]
ids = torch.randint(0, 11, (24, 6), generator=g)
lengths = [1 + i % 6 for i in range(24)]
tokens = [
    {"input_ids": row.tolist(), "attention_mask": [1] * n + [0] * (6 - n),
     "labels": row[:n].tolist() + [-100] * (6 - n)}
    for row, n in zip(ids, lengths)
]
sentences = [(row[:n], row[:n] % 3) for row, n in zip(ids, lengths)]
ignoring = [(row, torch.where(torch.arange(6) < n, row % 3, -100)) for row, n in zip(ids, lengths)]

def pad(rows):
    x, y = zip(*rows)
    return pad_sequence(x, batch_first=True), pad_sequence(y, batch_first=True, padding_value=-100)

padded = DataLoader(sentences, collate_fn=pad)

class Stream(IterableDataset):
    def __iter__(self):
        return iter(pairs)
stream = Stream()

class Named(nn.Linear):
    def forward(self, x):
        return super().forward(x)
named_model = Named(4, 3)

class TwoInputs(nn.Linear):
    def forward(self, a, b):
        return super().forward(torch.cat([a, b], -1))
two_inputs = TwoInputs(8, 2)

class TwoHeads(nn.ModuleList):
    def forward(self, x):
        return tuple(head(x) for head in self)
two_outputs = two_heads = TwoHeads([nn.Linear(4, 3), nn.Linear(4, 2)])

class Tagger(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(11, 6), nn.Linear(6, 3))
    def forward(self, x):
        return super().forward(x).transpose(1, 2)  # (batch, classes, tokens)
tagger = Tagger()

class WithLoss(nn.Linear):
    def forward(self, x, y):
        return F.cross_entropy(super().forward(x), y)
with_loss = WithLoss(4, 3)

class CausalLM(nn.Module):
    '''As Hugging Face's: labels are shifted in here, and the loss is a mean over what counts.'''
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 11)
    def forward(self, input_ids, attention_mask=None, labels=None):
        x = self.table(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}
causal_lm = CausalLM()
"""


def build(folder: Path, source: str, name: str = "workload", **overrides: Any) -> Workload:
    path = folder / "own.py"
    path.write_text(HAVE + source)
    values = {"model.workload": f"{path}:{name}", **overrides}
    return builders.build_workload(configs.load(None, values))


def returns(three: str) -> str:
    """The short form with the models of above, a new one each time."""
    lines = ("def workload():", f"    made, data, loss = {three}",
             "    return copy.deepcopy(made), data, loss")  # fmt: skip
    return "\n" + "\n".join(lines) + "\n"


def refused(folder: Path, source: str, **overrides: Any) -> str:
    with pytest.raises(UsageError) as caught:
        build(folder, source, **overrides)
    assert "site-packages" not in str(caught.value)
    return str(caught.value)


def known(workload: Workload) -> nn.Module:
    """The model with the same weights each time: the short form's may be one and the same."""
    torch.manual_seed(3)
    model = workload.make_model().double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape).cos() * 0.3)
    model.zero_grad()
    return model


def shared(workload: Workload, parts: Sequence[Sequence[int]]) -> tuple[float, list[Any]]:
    """Loss and gradient of a global batch that is shared out so, as the strategies compute them."""
    model = known(workload)
    batches = [cast(workload.dataset.batch(ids), torch.float64) for ids in parts]
    count = sum(batch.count for batch in batches)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        loss = workload.loss(model, batch) / count
        loss.backward()
        total += loss.detach()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return float(total), grads


EVENLY: list[list[int]] = [[0, 1, 2, 3, 4, 5, 6, 7]]
UNEVENLY = [[0], [], [6, 2, 3], [4, 5, 1, 7]]


def assert_same(workload: Workload, *parts: list[list[int]]) -> list[Any]:
    """The first parts and the others give the same; the gradients."""
    whole, *others = parts or (EVENLY, UNEVENLY)
    loss, grads = shared(workload, whole)
    for part in others:
        other_loss, other_grads = shared(workload, part)
        assert other_loss == pytest.approx(loss, rel=1e-12)
        for a, b in zip(grads, other_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    assert any(g is not None and g.abs().max() > 0 for g in grads)
    return grads


# ------------------------------------------------------------------ the table


def table() -> list[tuple[str, str]]:
    text = (ROOT / "docs" / "workloads.md").read_text()
    rows = text.partition("| what you have | what you write |")[2].partition("\n\n")[0]
    found = re.findall(r"^\| (.+) \| `(.+)` \|$", rows, re.MULTILINE)
    assert len(found) == rows.count("\n") - 1
    return found


@pytest.mark.parametrize("row", table(), ids=lambda row: row[0][:40])
def test_every_row_of_the_table(row: tuple[str, str], tmp_path: Path) -> None:
    have, write = row
    shuffle = "data.shuffle=false" not in have
    workload = build(tmp_path, returns(write), **{"data.shuffle": shuffle})
    assert_same(workload)


WHOLE = {  # what one process computes on the whole batch, in plain PyTorch
    "model, pairs, nn.CrossEntropyLoss()": lambda m, o: nn.functional.cross_entropy(
        m(o.inputs[:8].double()), o.labels[:8]
    ),
    "tagger, DataLoader(sentences, collate_fn=pad), nn.CrossEntropyLoss()": lambda m, o: (
        nn.functional.cross_entropy(m(o.pad(o.sentences[:8])[0]), o.pad(o.sentences[:8])[1])
    ),
    "causal_lm, tokens, None": lambda m, o: m(
        o.ids[:8], labels=torch.tensor([t["labels"] for t in o.tokens[:8]])
    )["loss"],
    "autoencoder, inputs, nn.MSELoss()": lambda m, o: nn.functional.mse_loss(
        m(o.inputs[:8].double()), o.inputs[:8].double()
    ),
    # Not the same: a sum is divided by the number of its targets.
    'model, pairs, nn.CrossEntropyLoss(reduction="sum")': lambda m, o: nn.functional.cross_entropy(
        m(o.inputs[:8].double()), o.labels[:8]
    ),
}


@pytest.mark.parametrize("three", WHOLE)
def test_it_is_the_loss_of_one_process(three: str, tmp_path: Path) -> None:
    workload = build(tmp_path, returns(three))
    exec(HAVE, own_names := {})  # the names of the user's file
    own = SimpleNamespace(**own_names)
    loss, grads = shared(workload, UNEVENLY)
    model = known(workload)
    expected = WHOLE[three](model, own)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for p, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------ odd samples


ODD = {
    "numpy": "model, [(x.double().numpy(), np.int64(y)) for x, y in pairs], F.cross_entropy",
    "numbers": "nn.Linear(1, 1), [([0.5 * i], [float(i)]) for i in range(12)], nn.MSELoss()",
    "named tuples": "model, [namedtuple('S', 'x y')(x, y) for x, y in pairs], F.cross_entropy",
    "dataclasses": "named_model, [dataclasses.make_dataclass('S', ['x', 'y'])(x, y) for x, y in "
    "pairs], F.cross_entropy",
    "None for a target": "autoencoder, [(x, None) for x in inputs], nn.MSELoss()",
    "one tensor each": "autoencoder, TensorDataset(inputs), nn.MSELoss()",
    "probabilities": "model, [(x, x[:3].softmax(0)) for x, y in pairs], nn.CrossEntropyLoss()",
    "mean over samples": "autoencoder, inputs, lambda o, t: ((o - t) ** 2).sum(1).mean()",
    "batchmean": "nn.Sequential(model, nn.LogSoftmax(1)), [(x, x[:3].softmax(0)) for x, y in "
    "pairs], nn.KLDivLoss(reduction='batchmean')",
    "another ignored label": "tagger, [(x, y.clamp(min=-1)) for x, y in ignoring], "
    "nn.CrossEntropyLoss(ignore_index=-1)",
    "ignored as zeros": "tagger, ignoring, lambda o, t: F.cross_entropy(o, t, reduction='sum')",
    "smoothed": "model, pairs, nn.CrossEntropyLoss(label_smoothing=0.1)",
    "weighted sum": "model, pairs, nn.CrossEntropyLoss(torch.arange(3.), reduction='sum')",
    "a dict from the collate function": "tagger, DataLoader(sentences, collate_fn=lambda rows: "
    "{'x': pad(rows)[0], 'y': pad(rows)[1]}), nn.CrossEntropyLoss()",
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_odd_samples_and_losses(odd: str, tmp_path: Path) -> None:
    assert_same(build(tmp_path, returns(ODD[odd])))


TRANSPOSED = """
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(11, 4), nn.GRU(4, 4), nn.Linear(4, 3)
    def forward(self, x, lengths):
        y, _ = self.rnn(self.table(x))  # (tokens, batch, 4)
        return self.head(y.transpose(0, 1))[torch.arange(len(lengths)), lengths - 1]

def transposed(rows):
    x, y = zip(*rows)
    return {"x": pad_sequence(x), "lengths": torch.tensor([len(v) for v in x]),
            "y": torch.stack([v[-1] for v in y])}

def workload():
    return Recurrent(), DataLoader(sentences, collate_fn=transposed), nn.CrossEntropyLoss()
"""


def test_no_rows_are_cut_from_the_dimension_that_the_rows_are_along(tmp_path: Path) -> None:
    workload = build(tmp_path, TRANSPOSED)
    empty = workload.dataset.batch([])
    assert empty.inputs["x"].shape == (1, 0)
    assert (empty.count, empty.samples) == (0, 0)
    # (A GRU itself refuses a batch of no rows.)
    assert_same(workload, EVENLY, [[0], [6, 2, 3], [4, 5, 1, 7]])


# What is wrong, and below it what is said; ce is nn.CrossEntropyLoss().
WRONG = """
model, Broken(), ce
    KeyError: 'no such file' (in sample 13 of
tagger, sentences, ce
    samples of different shapes, [(1,), (1,)] and [(2,), (2,)], make no batch
model, [(object(), y) for x, y in pairs], ce
    TypeError: default_collate: batch must contain tensors
model, [('text', y) for x, y in pairs], ce
    (in the model's forward, for the loss of
model, {'x': inputs, 'y': labels[:5]}, ce
    columns of different lengths: x 24, y 5
model, (inputs, labels[:5]), ce
    a tuple of columns of different lengths: 0 24, 1 5
model, (p for p in pairs), ce
    a generator, can be read only once
model, stream, ce
    so it is read in its own order: --set data.shuffle=false
model, 5, ce
    can be neither indexed nor iterated
model, DataLoader(pairs, sampler=torch.utils.data.WeightedRandomSampler([1.] * 24, 24)), ce
    the DataLoader's WeightedRandomSampler cannot be kept
model, DataLoader(pairs, batch_sampler=[[0, 1], [2, 3]]), ce
    the DataLoader's list cannot be kept
model, DataLoader(pairs, batch_size=None), ce
    has batch_size=None, so its samples are batches already
model, pairs, nn.CrossEntropyLoss(torch.ones(3))
    CrossEntropyLoss with class weights is divided by the weights
model, pairs, nn.Sequential(nn.Linear(3, 1))
    has parameters, which would not be trained
model, pairs, nn.CrossEntropyLoss
    the loss is the class CrossEntropyLoss, not a function
named_model, [{'x': x} for x in inputs], None
    the loss is a tensor of shape (2, 3), not one number
two_outputs, pairs, ce
    must be Tensor, not tuple (in the loss of
autoencoder, inputs, lambda o, t: 1 - 2 * (o * t).sum() / (o * o + t * t).sum()
    the loss is neither a sum nor a mean over targets (of 6 samples together it is
autoencoder, inputs, lambda o, t: F.cross_entropy(o @ t.T, torch.arange(len(o)))
    the loss is neither a sum nor a mean over targets
autoencoder, inputs, lambda o, t: F.mse_loss(o, t).sqrt()
    the loss is neither a sum nor a mean over targets
autoencoder, inputs, lambda o, t: F.mse_loss(o, t) + 1e-3 * o.mean(0).square().sum()
    the loss is neither a sum nor a mean over targets
model, pairs, lambda o, t: F.cross_entropy(o, t, torch.tensor([1., 2., 3.]).to(o))
    the loss is neither a sum nor a mean over targets
tagger, padded, lambda o, t: F.cross_entropy(o, t, reduction='none').mean()
    the loss is neither a sum nor a mean over targets
"""

BROKEN = """
class Broken(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        if i > 10:
            raise KeyError("no such file")
        return pairs[i]
"""


@pytest.mark.parametrize(("three", "message"), re.findall(r"(\S.*)\n    (.+)\n", WRONG))
def test_what_is_wrong_is_said_in_a_line(three: str, message: str, tmp_path: Path) -> None:
    text = refused(tmp_path, BROKEN + "ce = nn.CrossEntropyLoss()\n" + returns(three))
    assert message in text.partition("\n")[0], text


def test_a_sample_that_raises_in_mid_run_is_named(tmp_path: Path) -> None:
    source = BROKEN.replace("i > 10", "i == 11") + returns("model, Broken(), nn.CrossEntropyLoss()")
    workload = build(tmp_path, source)
    with pytest.raises(UsageError, match=r"own.py:\d+: KeyError: 'no such file' \(in sample 11 of"):
        workload.dataset.batch([3, 11])


@pytest.mark.parametrize("length", [1, 2, 3])
def test_few_samples(length: int, tmp_path: Path) -> None:
    workload = build(tmp_path, returns(f"model, pairs[:{length}], F.cross_entropy"))
    assert "the loss is a mean over targets, and is taken times their number" in workload.notes


def test_a_model_that_is_made_outside_of_the_function(tmp_path: Path) -> None:
    source = "\ndef workload():\n    return model, pairs, nn.CrossEntropyLoss()\n"
    assert "returns the same model each time" in refused(tmp_path, source)


def test_all_labels_ignored_and_no_rows_add_nothing(tmp_path: Path) -> None:
    """Also to a mean that the user wrote himself, 0/0, and to no parameter that has no gradient."""
    source = """
def masked(output, target):
    losses = F.cross_entropy(output, target, reduction="none")
    return losses.sum() / (target != -100).sum()

class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.tagger, self.spare = Tagger(), nn.Embedding(11, 2)
    def forward(self, x):
        return self.tagger(x), self.spare(x)

rows = list(ignoring)
rows[3] = (rows[3][0], torch.full((6,), -100))

def workload():
    return Spare(), rows, lambda output, target: masked(output[0], target)
"""
    workload = build(tmp_path, source)
    assert workload.dataset.batch([3]).count == 0
    uneven = [[3], [0, 1, 2, 4]], [[], [0, 1, 3], [2, 4]]
    grads = assert_same(workload, [[0, 1, 2, 3, 4]], *uneven)
    assert grads[-1] is None  # the spare layer's


# ------------------------------------------------------------------ no false alarms


SUMS = """
class Data:
    def __len__(self):
        return 24
    def batch(self, numbers):
        x = inputs[list(numbers)]
        return Batch(inputs=x, targets=labels[list(numbers)], count=len(x), samples=len(x))

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)
        )

class Noisy(Net):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5))

class Aux(Net):
    def forward(self, x):
        return (super().forward(x), x) if self.training else super().forward(x)

class Single(Net):  # computes in float32, whatever its precision
    def forward(self, x):
        x = (x.float() + 1e3).to(x.dtype)
        return super().forward(x)

def loss(model, batch):
    return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum")

def large(model, batch):
    return 1e6 * loss(model, batch)

def aux(model, batch):
    output, _ = model(batch.inputs)
    return F.cross_entropy(output, batch.targets, reduction="sum")

def diffusion(model, batch):
    x = batch.inputs
    noise = torch.randn_like(x[:, :3])
    return (model(x + torch.randn_like(x)) - noise).square().sum()

def diffusion_mean(model, batch):
    return diffusion(model, batch) / len(batch.inputs)

def gradient_penalty(model, batch):
    x = batch.inputs.detach().requires_grad_()
    grad, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (grad.norm(dim=1) - 1).square().sum() + loss(model, batch)

def penalty(model, batch):
    return loss(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())

def penalty_per_target(model, batch):
    return loss(model, batch) + batch.count * sum(p.square().sum() for p in model.parameters())

def zero(model, batch):
    return loss(model, batch) * 0

def contrastive(model, batch):
    return F.cross_entropy(model(batch.inputs) @ batch.inputs[:, :3].T, torch.arange(batch.count))

class Warm(Net):  # half of it in its first five calls
    calls = 0
    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (0.5 if self.calls <= 5 else 1)

class Skips(Net):  # what it draws, it draws seldom, and not from torch's generator
    draw = random.Random(3)
    def forward(self, x):
        return super().forward(x) * (self.draw.random() > 0.15)

class Batchwise(Net):  # statistics of the batch in eval mode, too
    def forward(self, x):
        return super().forward((x - x.mean(0)) / (1 + x.var(0)))
"""

RIGHT = {
    "Net, loss": "",
    "Noisy, loss": "",
    "Aux, aux": "",
    "Single, loss": "",
    "Net, large": "",
    "Net, diffusion": "",
    "Net, gradient_penalty": "",
    "Net, penalty_per_target": "",
    "Net, penalty": "the loss has a term that is the same whatever the samples are",
    "Warm, loss": "the loss of the same samples is not the same each time",
    "Skips, loss": "the loss of the same samples is not the same each time",
    "Net, zero": "the loss of the samples that were tried is 0",
    "Batchwise, loss": "a sample's output depends on the samples beside it, also in eval mode",
}


@pytest.mark.parametrize("made_of", RIGHT)
def test_no_false_alarm(made_of: str, tmp_path: Path) -> None:
    """A right loss is not refused, and only what is worth a note has one."""
    made, loss = made_of.split(", ")
    source = f"\nworkload = Workload('net', {made}, {loss}, Data(), blocks=())\n"
    notes = build(tmp_path, SUMS + source).notes
    assert len(notes) == (RIGHT[made_of] != ""), notes
    assert all(RIGHT[made_of] in note for note in notes)


@pytest.mark.parametrize(
    ("loss", "is_mean"),
    [
        ("nn.CrossEntropyLoss()", True),
        ("lambda o, t: F.cross_entropy(o, t)", True),
        ("lambda o, t: F.cross_entropy(o, t, reduction='sum')", False),
    ],
)
def test_a_random_mean_is_told_from_a_random_sum(loss: str, is_mean: bool, tmp_path: Path) -> None:
    notes = build(tmp_path, SUMS + returns(f"Noisy(), pairs, {loss}")).notes
    assert ("the loss is a mean over targets" in " ".join(notes)) == is_mean, notes


def test_wrong_losses_of_a_workload(tmp_path: Path) -> None:
    source = SUMS + "\nworkload = Workload('net', Net, LOSS, Data())\n"
    for loss, message in (
        ("contrastive", "neither a sum nor a mean over targets"),
        ("diffusion_mean", "the loss is a mean, and must be a sum"),
    ):
        (tmp_path / loss).mkdir()
        assert message in refused(tmp_path / loss, source.replace("LOSS", loss))
    meant = source.replace("LOSS, Data()", "contrastive, Data(), couples_samples=True")
    (tmp_path / "meant").mkdir()
    workload = build(tmp_path / "meant", meant)
    assert workload.couples_samples
    for world, batch, said in ((2, 32, "beside 7 others"), (2, 30, "beside 6 or 7"), (1, 32, "")):
        values = {"launch.world": world, "training.global_batch": batch,
                  "strategy.name": "simple_ddp"}  # fmt: skip
        notes = builders.notes(configs.load(None, values).in_parts(2), workload)
        found = [n for n in notes if "the loss looks at the samples of a micro-batch" in n]
        assert len(found) == (world > 1), notes
        assert all(f"{said}" in n and f"would be {batch // 2 - 1}, " in n for n in found)


def test_a_count_that_includes_padding(tmp_path: Path) -> None:
    source = """
class Padded:
    def __len__(self):
        return 24
    def batch(self, numbers):
        x, y = pad([sentences[i] for i in numbers]) if len(numbers) else (ids[:0], ids[:0])
        return Batch(inputs=x, targets=y, count=x.numel(), samples=len(numbers))

def loss(model, batch):
    return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum")

workload = Workload("padded", Tagger, loss, Padded())
"""
    text = refused(tmp_path, source)
    assert "the counts do not add up" in text
    right = source.replace("count=x.numel()", "count=int((y != -100).sum())")
    (tmp_path / "right").mkdir()
    assert_same(build(tmp_path / "right", right))


# ------------------------------------------------------------------ Hugging Face's


HUGGING_FACE = """
import transformers

transformers.logging.set_verbosity_error()
SMALL = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 8, "num_key_value_heads": 2}

def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)), tokens, None

def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)), tokens, None
"""


@pytest.mark.parametrize(("name", "count"), [("llama", "next tokens"), ("bert", "targets")])
def test_a_loss_inside_a_model_of_hugging_faces(name: str, count: str, tmp_path: Path) -> None:
    """The labels count that are not -100, and a causal model's are shifted by one: measured."""
    pytest.importorskip("transformers")
    workload = build(tmp_path, HUGGING_FACE, name)
    assert f"the loss is a mean over {count}, and is taken times their number" in workload.notes
    assert len(workload.blocks or ()) == 2
    labels = workload.dataset.batch(range(8)).targets
    expected = int((labels[:, 1 if name == "llama" else 0 :] != -100).sum())
    assert workload.dataset.batch(range(8)).count == expected


def test_the_example_of_hugging_faces() -> None:
    pytest.importorskip("transformers")
    path = ROOT / "examples" / "hugging_face.py"
    workload = builders.build_workload(configs.load(None, {"model.workload": f"{path}:workload"}))
    assert workload.dataset.batch([0, 1]).count == 2 * 31  # the next tokens
    assert workload.blocks == ("transformer.h.0", "transformer.h.1")


# ------------------------------------------------------------------ blocks


class Layered(nn.Module):
    def __init__(self, **named: nn.Module) -> None:
        super().__init__()
        for name, module in named.items():
            self.add_module(name, module)


def linears(n: int) -> list[nn.Module]:
    return [nn.Linear(3, 3) for _ in range(n)]


def test_blocks_are_guessed() -> None:
    def conv(width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, width, 3), nn.BatchNorm2d(width))

    stack = Layered(inlet=nn.Linear(3, 3), layers=nn.ModuleList(linears(2)), outlet=nn.Linear(3, 3))
    assert guess_blocks(stack) == ("layers.0", "layers.1")
    assert guess_blocks(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))) == ("0", "2")
    assert guess_blocks(nn.Linear(3, 3)) == ()
    # Side by side, both; inside each other, the outermost.
    two = Layered(encoder=nn.Sequential(*linears(2)), decoder=nn.Sequential(*linears(2)))
    assert guess_blocks(two) == ("encoder.0", "encoder.1", "decoder.0", "decoder.1")
    stages = nn.ModuleList(nn.Sequential(*linears(3)) for _ in range(2))
    assert guess_blocks(Layered(stages=stages)) == ("stages.0", "stages.1")
    # A list of lists, which cannot be called, is one list; tiny modules between are left out.
    lists = nn.ModuleList(nn.ModuleList([nn.Linear(3, 3), nn.Bilinear(3, 3, 3)]) for _ in range(2))
    assert guess_blocks(Layered(layers=lists)) == ("layers.0.0", "layers.0.1", "layers.1.0",
                                                   "layers.1.1")  # fmt: skip
    flat = nn.Sequential(*conv(8), nn.ReLU(), *conv(8), nn.Flatten(), nn.Linear(8, 2))
    assert guess_blocks(flat) == ("0", "3")
    # What shares a parameter with something else, or is one and the same module.
    shared_layer = nn.Linear(3, 3)
    assert guess_blocks(nn.Sequential(shared_layer, shared_layer)) == ()
    tied = nn.Sequential(*linears(3))
    tied[2].weight = tied[0].weight
    assert guess_blocks(tied) == ("1",)
    assert guess_blocks(nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(3))) == ()


def test_named_blocks_are_looked_over() -> None:
    model = Layered(layers=nn.ModuleList(nn.Sequential(*linears(2)) for _ in range(2)))
    check_blocks(model, ["layers.0", "layers.1"])
    with pytest.raises(UsageError, match=r"unknown block 'layer.0'; did you mean 'layers.0'\?"):
        check_blocks(model, ["layer.0"])
    with pytest.raises(UsageError, match=r"'layers.0.1' lies inside the block 'layers.0'"):
        check_blocks(model, ["layers.0", "layers.0.1"])
    with pytest.raises(UsageError, match=r"'layers' is a ModuleList, which is never called"):
        check_blocks(model, ["layers"])


def test_a_block_that_is_not_called_is_no_block(tmp_path: Path) -> None:
    source = """
class Uncalled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    def forward(self, x):
        x = F.linear(x, self.layers[0].weight)
        return self.layers[2](self.layers[1](x))
"""
    workload = build(tmp_path, source + returns("Uncalled(), pairs, nn.CrossEntropyLoss()"))
    assert workload.blocks == ("layers.1", "layers.2")
    assert "the blocks are guessed from the model: layers.1, layers.2" in workload.notes


@pytest.mark.parametrize(("made", "said"), [("half", "half precision"), ("double", "float64")])
def test_another_precision_trains_in_float32_and_that_is_noted(
    made: str, said: str, tmp_path: Path
) -> None:
    source = f"""
class Mixed(nn.Sequential):
    def forward(self, x):
        return self[1](self[0](x).to(self[1].weight.dtype)).float()

mixed = Mixed(nn.Linear(4, 4), nn.Linear(4, 4).{made}())
"""
    notes = build(tmp_path, source + returns("mixed, pairs, nn.CrossEntropyLoss()")).notes
    (note,) = (n for n in notes if said in n)
    assert f"'1.weight' in {said}; parameters are kept and updated in float32" in note


def test_a_parameter_that_forward_replaces_is_refused_before_any_strategy(tmp_path: Path) -> None:
    """FSDP puts its own parameters in place, so a look during its forward would see nothing."""
    source = """
class Replaces(nn.Linear):
    def forward(self, x):
        self.weight = nn.Parameter(self.weight.detach().clone())
        return super().forward(x)
"""
    text = refused(tmp_path, source + returns("Replaces(4, 4), pairs, nn.CrossEntropyLoss()"))
    assert "a new parameter in the place of 'weight' in forward" in text


# ------------------------------------------------------------------ streams


COUNTED = """
class Counted:
    begun = 0
    def __iter__(self):
        Counted.begun += 1
        return iter(pairs[:10])
counted = Counted()
"""


def test_a_stream_by_number(tmp_path: Path) -> None:
    """The i-th that it yields, over and over; interleaved micro-batches do not begin it again."""
    source = COUNTED + returns("model, counted, nn.CrossEntropyLoss()")
    dataset: Any = build(tmp_path, source, **{"data.shuffle": False}).dataset
    rows = dataset.batch(range(10)).inputs
    for start in (0, 4, 8, 12, 96):
        for ids in ([start, start + 2], [start + 1, start + 3]):
            assert torch.equal(dataset.batch(ids).inputs, rows[[i % 10 for i in ids]])
    begun = type(dataset.data).begun
    for start in range(100, 140, 4):
        dataset.batch([start, start + 2])
        dataset.batch([start + 1, start + 3])
    assert type(dataset.data).begun - begun == 4  # one pass after another: 40 samples of 10
    assert torch.equal(dataset.batch([0, 1]).inputs, rows[:2])  # as another run would


@pytest.mark.parametrize(("source", "overrides", "message"), [
    ("iter(sorted(pairs, key=lambda _: torch.rand(1)))", {},
     "yield other samples each time they are iterated"),
    ("iter([])", {}, "yield no samples"),
    ("iter(pairs)", {"data.epoch": "exact"}, "data.epoch exact is not possible"),
])  # fmt: skip
def test_what_a_stream_cannot_do(
    source: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    stream = f"\nclass Other:\n    def __iter__(self):\n        return {source}\n"
    text = refused(tmp_path, stream + returns("model, Other(), nn.CrossEntropyLoss()"),
                   **{"data.shuffle": False, **overrides})  # fmt: skip
    assert message in text


# ------------------------------------------------------------------ on ranks


OWN = """
from my_helpers import WIDTH  # beside this file

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

def loader():
    return Deep(), DataLoader(pairs, batch_size=4), nn.CrossEntropyLoss()

def streamed():
    return Deep(), stream, nn.CrossEntropyLoss()

def whole():
    return nn.Linear(4, 3), pairs, nn.CrossEntropyLoss()

def complete():
    return {
        "model": Deep(), "data": pairs[:20], "loss": nn.CrossEntropyLoss(), "held_out": pairs[20:],
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
        "schedule": lambda step: 1 / (1 + step),
    }

def unmoved():
    return {**complete(), "schedule": lambda step: 0.0}

def sharded():
    import os
    class Own(IterableDataset):
        def __iter__(self):
            return iter(pairs[int(os.environ["RANK"])::2])
    return Deep(), Own(), nn.CrossEntropyLoss()
"""


def run(ranks: Any, size: int, folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    (folder / "my_helpers.py").write_text("WIDTH = 4\n")
    (folder / "own.py").write_text(HAVE + OWN)
    overrides = {
        "model.workload": f"{folder / 'own.py'}:{name}", "strategy.name": "zero3",
        "training.steps": 4, "training.global_batch": 7,
        "precision.compute": "fp64", "output.root": str(folder / "runs"), **changes,
    }  # fmt: skip
    config = configs.load(None, overrides)
    result: dict[str, Any] = ranks(size).run(
        "shardlab.training.run:train_rank", config, "a test", deadline_s=100
    )[0]
    return result


@pytest.mark.long
def test_a_loader_on_ranks_is_one_process(ranks: Any, tmp_path: Path) -> None:
    """A mean, uneven shares, a helper module beside the file; and what is said about it."""
    three = run(ranks, 3, tmp_path, "loader", **{"training.global_batch": 4,
                                                 "training.micro_batch": 1})  # fmt: skip
    one = run(ranks, 1, tmp_path, "loader", **{"training.global_batch": 4})
    assert three["loss"] == pytest.approx(one["loss"], rel=1e-9)
    notes = json.loads((Path(three["folder"]) / "env.json").read_text())["notes"]
    assert [note.partition(":")[0] for note in notes] == [
        "of the DataLoader, the samples and the collate function are used; its batch size (4), "
        "order and workers are not",
        "the blocks are guessed from the model",
        "the loss is a mean over targets, and is taken times their number",
        "a step takes 4 samples",
        "4 samples are no multiple of 3 x 2 micro-batches",
    ]


@pytest.mark.long
def test_optimizer_schedule_and_held_out_samples_are_those_of_a_plain_loop(
    ranks: Any, tmp_path: Path
) -> None:
    """Under sharded and whole parameters, with uneven shares; one of them from a checkpoint on."""
    changes = {"data.shuffle": False, "training.evaluate_every": 2, "checkpoint.every": 2}
    found = {
        name: run(ranks, 2, tmp_path, "complete", **changes, **{"strategy.name": name})
        for name in ("zero3", "pytorch_zero3", "bucket_ddp_async")
    }
    resumed = run(ranks, 2, tmp_path, "complete", **changes, **{
        "strategy.name": "zero1",
        "checkpoint.resume": str(Path(found["zero3"]["folder"]) / "checkpoints" / "step-000002"),
    })  # fmt: skip
    own = builders.build_workload(
        configs.load(None, {"model.workload": f"{tmp_path / 'own.py'}:complete"})
    )
    torch.manual_seed(0)
    model = own.make_model().double()
    exec(HAVE, names := {})
    x, y = names["inputs"].double(), names["labels"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    held_out, losses = [], []
    for step in range(4):
        ids = [(7 * step + i) % 20 for i in range(7)]
        optimizer.param_groups[0]["lr"] = 0.3 / (1 + step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[ids]), y[ids])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        held_out.append(nn.functional.cross_entropy(model(x[20:]), y[20:]).item())
    for name, result in found.items():
        rows = read_jsonl(Path(result["folder"]) / "rank0.jsonl")
        assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-10), name
        told = [row["loss"] for row in result["evaluations"]]
        assert told == pytest.approx(held_out[1::2], abs=1e-10), name
    assert resumed["loss"] == pytest.approx(losses[-1], abs=1e-10)
    assert resumed["evaluations"][-1]["loss"] == pytest.approx(held_out[-1], abs=1e-10)


DICT = "'model': copy.deepcopy(model), 'data': pairs, 'loss': F.cross_entropy"


@pytest.mark.parametrize(("parts", "message"), [
    (f"{DICT}, 'held_outt': pairs", "unknown part of a workload 'held_outt'; did you mean 'held_o"),
    ("'model': model, 'data': pairs", "the dict has no 'loss'"),
    (f"{DICT}, 'held_out': stream", "so it cannot be held out: give a list of its samples"),
    (f"{DICT}, 'held_out': [(1, 2)]", "(in the loss of held-out sample 0 of"),
], ids=["unknown", "missing", "stream", "another form"])  # fmt: skip
def test_the_parts_of_a_dict_are_looked_over(parts: str, message: str, tmp_path: Path) -> None:
    assert message in refused(tmp_path, f"def workload():\n    return {{{parts}}}\n")


def test_an_optimizer_is_given_by_what_makes_it_and_not_twice(tmp_path: Path) -> None:
    parts = f"{DICT}, 'optimizer': torch.optim.AdamW, 'schedule': lambda step: 1.0"
    workload = build(tmp_path, f"def workload():\n    return {{{parts}}}\n")
    model = workload.make_model()
    builders.make_optimizer(configs.TrainingConfig(), workload, model)
    asked = configs.TrainingConfig(learning_rate=0.1, schedule="cosine")
    with pytest.raises(UsageError, match="learning_rate is for an optimizer of the config"):
        builders.make_optimizer(asked, workload, model)
    with pytest.raises(UsageError, match=r"leave out training\.schedule"):
        builders.make_schedule(asked, workload)
    made: Any = torch.optim.AdamW(model.parameters())
    with pytest.raises(UsageError, match="the optimizer is a AdamW, not a function that makes one"):
        builders.make_optimizer(configs.TrainingConfig(), replace(workload, optimizer=made), model)


PATIENT = {"training.steps": 9, "training.evaluate_every": 1, "training.patience": 2,
           "checkpoint.every": 2}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), [
    ("zero3", {}), ("local_sgd", {"every": 2}), ("simple_ddp", {"pipeline": 2}),
])  # fmt: skip
def test_a_run_ends_when_its_held_out_loss_does_not_fall(
    name: str, options: dict[str, Any], ranks: Any, tmp_path: Path
) -> None:
    """Nothing moves, so it ends after three evaluations; and one that was cut counts on."""
    changes = {**PATIENT, "strategy.name": name, "strategy.options": options}
    if "pipeline" in options:
        changes |= {"training.micro_batch": 4, "training.global_batch": 8}
    result = run(ranks, 2, tmp_path, "unmoved", **changes)
    folder = Path(result["folder"])
    assert result["steps"] == result["checkpoint"]["step"] == 3
    status = runfolder.state_of(folder)
    assert (status["state"], status["reason"]) == ("finished", result["ended_early"])
    assert status["reason"].startswith("2 evaluations in a row have not lowered the held-out loss")
    if name != "zero3":
        return
    changes["checkpoint.resume"] = str(folder / "checkpoints" / "step-000002")
    assert run(ranks, 2, tmp_path, "unmoved", **changes)["steps"] == 1
    changes["checkpoint.resume"] = str(folder / "checkpoints" / "step-000003")
    with pytest.raises(UsageError, match="to go on, raise training"):
        run(ranks, 2, tmp_path, "unmoved", **changes)
    changes |= {"checkpoint.resume": str(folder), "training.patience": 6, "training.steps": 7}
    last = run(ranks, 2, tmp_path, "unmoved", **changes)
    assert (last["steps"], last["ended_early"]) == (7, None)  # it had no step left to leave out
    assert "reason" not in runfolder.state_of(folder)


@pytest.mark.long
def test_a_stream_goes_on_where_it_stopped(ranks: Any, tmp_path: Path) -> None:
    """5 steps of 7 are more than its 24 samples; another world reads on at the next sample."""
    changes = {"data.shuffle": False, "training.steps": 5, "checkpoint.every": 3}
    at_once = run(ranks, 1, tmp_path, "streamed", **changes)
    begun = run(ranks, 2, tmp_path, "streamed", **changes)
    assert begun["loss"] == pytest.approx(at_once["loss"], rel=1e-9)
    resumed = run(ranks, 3, tmp_path, "streamed", **changes, **{
        "checkpoint.resume": str(Path(begun["folder"]) / "checkpoints" / "step-000003"),
    })  # fmt: skip
    assert resumed["loss"] == pytest.approx(at_once["loss"], rel=1e-9)


def test_a_stream_that_shards_itself_is_refused(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the ranks' data or losses differ"):
        run(ranks, 2, tmp_path, "sharded", **{"data.shuffle": False})


def test_without_blocks_zero3_says_so(ranks: Any, tmp_path: Path) -> None:
    result = run(ranks, 2, tmp_path, "whole")
    notes = json.loads((Path(result["folder"]) / "env.json").read_text())["notes"]
    assert any(note.startswith("zero3 has nothing to shard by") for note in notes)


PROGRAM = "import sys; sys.path.remove(''); from shardlab.cli import main; main()"  # as installed
TORCHRUN = ["torchrun", "--nproc-per-node=2", "--no-python", sys.executable, "-m", "shardlab"]


@pytest.mark.long
@pytest.mark.parametrize(("command", "workload", "where"), [
    ([sys.executable, "-c", PROGRAM], "inner/own.py:loader", "."),
    ([sys.executable, "-c", PROGRAM], "own:loader", "inner"),
    pytest.param(TORCHRUN, "inner/own.py:loader", ".", marks=pytest.mark.deep),
], ids=["a file", "a module", "torchrun"])  # fmt: skip
def test_the_folders_are_importable_by_the_command(
    command: list[str], workload: str, where: str, tmp_path: Path
) -> None:
    """The file's own folder, and the current one for a module path; on every rank."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "my_helpers.py").write_text("WIDTH = 4\n")
    (tmp_path / "inner" / "own.py").write_text(HAVE + OWN)
    done = commands.run(
        *command, "train", "--workload", workload, "--strategy", "simple_ddp", "--steps", "2",
        cwd=tmp_path / where,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("note: the loss is a mean over targets") == 1, done.stderr
