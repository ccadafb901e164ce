"""The user's own model: the forms it may have, and for each mistake an answer with its line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import commands
from conftest import GetRanks
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.training import builders, loop
from shardlab.world import World
from training import train

ROOT = Path(__file__).parents[2]

GOOD = """\
import torch
from torch import nn
from torch.nn import functional as F
from shardlab.workloads.base import Batch, Workload

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        return self.layer(x)

class Data:
    def __len__(self):
        return 50
    def batch(self, ids):
        x = torch.arange(200.).reshape(50, 4)[ids] / 100
        return Batch(inputs=x, targets=x[:, :3].argmax(1), count=len(ids), samples=len(ids))

def loss(model, batch):
    return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum")

def sums(model, batch):
    return {"loss": loss(model, batch)}

workload = Workload("mine", Model, loss, Data(), held_out=Data(), evaluate=sums)
"""

SHORT = """\
import torch
from torch import nn

def workload():
    data = [(torch.randn(4), i % 3) for i in range(20)]
    return nn.Linear(4, 3), data, nn.CrossEntropyLoss(reduction="sum")
"""


def build(folder: Path, source: str, name: str = "workload", **options: Any) -> Any:
    path = folder / "own.py"
    path.write_text(source)
    overrides = {"model.workload": f"{path}:{name}", "model.options": options}
    return builders.build_workload(configs.load(None, overrides))


class Mistake(NamedTuple):
    source: str  # with the mistake
    message: str
    line: str  # of the source, which is shown


def mistakes(source: str, text: str) -> list[Mistake]:
    """As they are written below: what the source has and what stands there instead, then what is
    said, and after an "@" the line that is shown, where that is not the changed line."""
    found = []
    rows = re.findall(r"(\S.*) → (.+)\n    (.+)\n(    @.*\n)?", text)
    for old, new, message, shown in rows:
        before, after = source.split(old)  # it is there once
        wrong = before + new.replace(r"\n", "\n") + after
        line = shown.strip(" @\n") if shown else wrong.splitlines()[before.count("\n")].strip()
        found.append(Mistake(wrong, message, line))
    assert len(found) == text.count(" → ")
    return found


LONG_FORM = r"""
workload = Workload( → workload = [1]\n_ = Workload(
    neither a Workload nor a function that returns one
workload = Workload( → workload = Model\n_ = Workload(
    is a class; name a Workload
workload = Workload( → def workload():\n    return 'a', 'b'\n_ = Workload(
    returned a tuple, not a Workload, nor the three
    @return 'a', 'b'
, reduction="sum") → , reduction="none")
    the loss is a tensor of shape (2,), not one number
, reduction="sum") → )
    the loss is a mean, and must be a sum
, reduction="sum") → , reduction="sum").item()
    the loss is a float, not a tensor (.item() and float() cut it off
, reduction="sum") → , reduction="sum").detach()
    the loss has no gradient
F.cross_entropy(model(batch.inputs) → F.cross_entropy(torch.zeros(2, 3, requires_grad=True) * 1
    backward reaches none of the model's parameters
F.cross_entropy(model(batch.inputs) → F.cross_entropy(model(batch.input)
    AttributeError: 'Batch' object has no attribute 'input' (in the loss of
return self.layer(x) → return self.layer(x, x)
    (in the model's forward, for the loss of
{"loss": loss(model, batch)} → {"loss": model(None)}
    (in the model's forward, for evaluate of
    @return self.layer(x)
self.layer = nn.Linear(4, 3) → self.layers = [nn.Linear(4, 3)]
    has no parameters (layers in a plain list are not found
    @class Model(nn.Module):
self.layer = nn.Linear(4, 3) → self.layer = nn.Linear(4, 3).requires_grad_(False)
    the model of mine has no parameter that trains
    @class Model(nn.Module):
"mine", Model, → "mine", lambda: Model,
    make_model returned the class Model: call it, Model()
"mine", Model, → "mine", lambda: 5,
    make_model returned a int, not an nn.Module
"mine", Model, → "mine", Model(),
    make_model is a model already
"mine", Model, → "mine", "Model",
    make_model is a str, not a function
super().__init__() → self.size = 1 / 0
    ZeroDivisionError: division by zero (in make_model of
def __len__(self): → def size(self):
    the dataset, a Data, has no __len__
    @class Data:
return 50 → return 0
    the dataset is empty
    @class Data:
def batch( → def fetch(
    the dataset, a Data, has no batch
    @class Data:
Batch(inputs=x, targets=x[:, :3].argmax(1), count=len(ids), samples=len(ids)) → (x, x.argmax(1))
    batch([0, 1]) returned a tuple, not a Batch
samples=len(ids)) → samples=1)
    batch([0, 1]) has 1 samples, not 2
count=len(ids) → count=torch.tensor(2)
    has the count tensor(2): the number of targets must be an int
[ids] / 100 → [ids + 50]
    TypeError: can only concatenate list (not "int") to list (in batch([0, 1]) of
{"loss": loss(model, batch)} → {"loss": 3.0}
    evaluate returned {'loss': 3.0}: a dict of sums
from torch import nn → from no_such_thing import nn
    ModuleNotFoundError: No module named 'no_such_thing' (in importing it of
class Data: → class Data
    SyntaxError: expected ':'
evaluate=sums) → evaluate=sums, blocks=('layr',))
    unknown block 'layr'; did you mean 'layer'?
    @
evaluate=sums) → evaluate=sums, blocks=lambda model: model)
    blocks is a function: a list of names belongs there
    @
"""
SHORT_FORM = r"""
nn.Linear(4, 3), data → nn.Linear, data
    the model is the class Linear
nn.Linear(4, 3), data → None, data
    the model is a NoneType
nn.CrossEntropyLoss(reduction="sum") → 3
    the loss is a int, not a fun
(torch.randn(4), i % 3) → torch.randn(4)
    (in the loss of
    @
"""
MISTAKES = [*mistakes(GOOD, LONG_FORM), *mistakes(SHORT, SHORT_FORM)]


@pytest.mark.parametrize("mistake", [pytest.param(m, id=m.message[:40]) for m in MISTAKES])
def test_a_mistake_is_answered_with_its_line(mistake: Mistake, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        build(tmp_path, mistake.source)
    text = str(caught.value)
    assert mistake.message in text
    assert mistake.line in text
    if mistake.line:
        lines = mistake.source.splitlines()
        number = next(i for i, line in enumerate(lines, 1) if mistake.line in line)
        assert text.startswith(f"{tmp_path / 'own.py'}:{number}: ")
    assert "site-packages" not in text  # the user's lines alone
    assert "shardlab/workloads" not in text


# A loss may not train parameters by hand, nor by an optimizer over the model's own, or over
# those of another model, which stays. Over a tensor that is gone after the call it may.
TRAINS_INSIDE = """\
teacher = nn.Linear(4, 1)
own = torch.optim.SGD(teacher.parameters(), lr=0.1)

def inner(model, batch):
    {first}
    (loss(model, batch) + teacher(batch.inputs).sum()).backward()
    own.step()
    model.zero_grad()
    return loss(model, batch)

def by_hand(model, batch):
    if model.training:
        first = next(model.parameters())
        (gradient,) = torch.autograd.grad(loss(model, batch), first)
        first.data -= 0.01 * gradient
    return loss(model, batch)

def clipped(model, batch):
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)
    return loss(model, batch)

workload = Workload("mine", Model, {loss}, Data())
"""
STEPS = r"own\.py:.* an optimizer, SGD, steps while the loss is"


@pytest.mark.parametrize(
    ("loss", "first", "message"),
    [
        ("by_hand", "", r"own\.py:.* parameter '.*weight' is changed while"),
        ("clipped", "", None),
        ("inner", "own = torch.optim.SGD(model.parameters(), lr=0.1)", STEPS),
        ("inner", "teacher.train()", STEPS),
        ("inner", "own = torch.optim.SGD([torch.zeros(2)], lr=0.1)", None),
    ],
)
def test_a_loss_that_trains(loss: str, first: str, message: str | None, tmp_path: Path) -> None:
    source = GOOD + TRAINS_INSIDE.format(loss=loss, first=first)
    if message is None:
        assert build(tmp_path, source).name == "mine"
        return
    with pytest.raises(UsageError, match=message):
        build(tmp_path, source)


def test_right_forms(tmp_path: Path) -> None:
    assert build(tmp_path, GOOD).name == "mine"
    (tmp_path / "b").mkdir()
    both = (
        GOOD + "\ndef sized(data, *, width: int = 2):\n    assert data.shuffle\n    return workload"
    )
    assert build(tmp_path / "b", both, "sized", width=3).name == "mine"
    with pytest.raises(UsageError, match="did you mean 'width'"):
        build(tmp_path / "b", both, "sized", widht=3)
    (tmp_path / "c").mkdir()
    short = build(tmp_path / "c", SHORT)
    assert short.name == "own"
    example = f"{ROOT / 'examples' / 'short_form.py'}:workload"
    assert builders.build_workload(configs.load(None, {"model.workload": example})).blocks
    torch.manual_seed(0)
    first = short.make_model()
    torch.manual_seed(0)
    again = short.make_model()
    assert torch.equal(first.weight, again.weight)  # from the seed, and a new one
    assert first is not again
    batch = short.dataset.batch([1, 4, 5])
    assert (batch.count, batch.samples) == (3, 3)
    assert batch.inputs.shape == (3, 4)
    assert batch.targets.tolist() == [1, 1, 2]
    empty = short.dataset.batch([])
    assert (empty.count, empty.samples) == (0, 0)
    assert empty.inputs.shape == (0, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.py:workloat", "unknown name in own.py 'workloat'; did you mean"),
        ("nope.py:workload", "no file nope.py"),
        ("no.such.module:workload", "no module named 'no'"),
        ("own.py:workload", "takes no options"),
    ],
)
def test_a_workload_that_is_not_there(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        builders.build_workload(configs.load(None, {"model.workload": name, "model.size": "big"}))


RECURRENT = """\
import torch
from torch import nn

def refuse(_gradient):
    raise RuntimeError("cudnn RNN backward can only be called in training mode")

class OfCudnn(nn.GRU):
    def forward(self, *args):
        output, state = super().forward(*args)
        if not self.training:
            output.register_hook(refuse)
        return output, state

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = OfCudnn(4, 3, batch_first=True)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(3, 2)
    def forward(self, x):
        return self.head(self.drop(self.layer(x)[0][:, -1]))

def workload():
    return Model(), (torch.randn(20, 5, 4), torch.arange(20) % 2), nn.CrossEntropyLoss()
"""


def test_a_recurrent_layer_that_has_a_backward_only_in_training(tmp_path: Path) -> None:
    """That is how cuDNN's are."""
    assert build(tmp_path, RECURRENT).loss is not None


def test_looking_it_over_leaves_no_trace(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build(tmp_path, GOOD)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.long
def test_the_command_says_it_and_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(GOOD.replace(', reduction="sum")', ")"))
    done = commands.here("compare", "--workload", "own.py:workload", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: own.py:21: the loss is a mean")
    assert "\n    return F.cross_entropy(" in done.stderr
    assert "Traceback" not in done.stderr


PAIRS = """\
import torch
from torch import nn
from torch.nn import functional as F
from shardlab.workloads.base import Batch, Workload

class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)
    def forward(self, images, texts):
        return self.image(images), self.text(texts)

class Data:
    def __len__(self):
        return 50
    def batch(self, ids):
        rows = torch.tensor(ids, dtype=torch.float32).reshape(-1, 1)
        inputs = torch.sin(rows + torch.arange(6)), torch.cos(rows * torch.arange(1, 6))
        return Batch(inputs=inputs, targets=None, count=len(ids), samples=len(ids))

"""


FP64 = {"precision.compute": "fp64", "training.global_batch": 8}


def losses_of_pairs(world: World, path: str, strategy: str) -> list[float]:
    sgd = {"training.optimizer": "sgd", "training.learning_rate": 0.1, "training.steps": 3}
    named = {"model.workload": path, "strategy.name": strategy}
    return train(world, {**FP64, **sgd, **named}).losses


def lines_of_the_page(name: str) -> str:
    page = (ROOT / "docs" / "workloads.md").read_text()
    return page.partition(f"<!-- tested: {name} -->\n```python\n")[2].partition("```")[0]


def test_negatives_from_all_ranks_are_those_of_one_process(ranks: GetRanks, tmp_path: Path) -> None:
    """The page's own lines, under a strategy that keeps parameters and one that gathers them."""
    lines = lines_of_the_page("negatives")
    path = tmp_path / "pairs.py"
    path.write_text(PAIRS + lines)
    (alone,) = ranks(1).run(losses_of_pairs, f"{path}:workload", "single")
    for strategy in ("simple_ddp_async", "zero3"):
        for found in ranks(2).run(losses_of_pairs, f"{path}:workload", strategy):
            assert found == pytest.approx(alone, rel=1e-12)
    apart = tmp_path / "apart.py"
    apart.write_text(PAIRS + lines.replace("if not dist.is_initialized()", "if True"))
    first, _ = ranks(2).run(losses_of_pairs, f"{apart}:workload", "simple_ddp_async")
    assert first != pytest.approx(alone, rel=1e-3)


# ------------------------------------------------------------------ a GAN whose parts take turns


TURNS = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.g, self.d = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def losses(self, z, x):
        fake = self.g(z)
        fixed = {n: p.detach() for n, p in self.d.named_parameters()}
        of_d = F.softplus(-self.d(x)).sum() + F.softplus(self.d(fake.detach())).sum()
        return of_d, F.softplus(-functional_call(self.d, fixed, (fake,))).sum()

    def forward(self, z, x):
        return sum(self.losses(z, x))


def workload():
    rows = torch.arange(24.0)[:, None]
    data = {"z": torch.sin(rows * torch.arange(1, 4)), "x": torch.cos(rows + torch.arange(4))}
    return {"model": Gan(), "data": data, "loss": None, "optimizer": optimizer}

"""


def turns(world: World, path: str, strategy: str) -> float:
    """How far the parameters are from those of a plain loop with two optimizers."""
    five = {"training.global_batch": 8, "training.micro_batch": 2, "training.steps": 5}
    named = {"model.workload": path, "strategy.name": strategy}
    config, workload, built, _ = train(world, {**FP64, **five, **named})
    torch.manual_seed(config.training.seed)
    model: Any = workload.make_model().double()
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (model.d, model.g)]
    order = loop.data_order(workload, config)
    for step in range(5):
        ids = [i for micro in order.share(step, 1, 0) for i in micro.ids]
        rows = workload.dataset.batch(ids).inputs
        model.zero_grad()
        own = model.losses(**{name: column.double() for name, column in rows.items()})[step % 2]
        (own / len(ids)).backward()
        optimizers[step % 2].step()
    params = dict(model.named_parameters())
    found = built.full_params()
    return max(float((found[name] - params[name].detach()).abs().max()) for name in params)


@pytest.mark.long
def test_parts_that_take_turns_do_so_in_each_step(ranks: GetRanks, tmp_path: Path) -> None:
    """The page's own lines, with two micro-batches in a step."""
    lines = lines_of_the_page("turns")
    path = tmp_path / "turns.py"
    path.write_text(TURNS + lines)
    for strategy in ("simple_ddp", "zero2", "zero3", "pytorch_zero1"):
        for off in ranks(2).run(turns, f"{path}:workload", strategy):
            assert off < 1e-12
    path = tmp_path / "late.py"
    path.write_text(TURNS + lines.replace('["steps"] += 1', '["steps"] += 2'))
    assert min(ranks(2).run(turns, f"{path}:workload", "simple_ddp")) > 1e-4
