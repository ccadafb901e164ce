"""The user's own model: the forms it may have, and for each mistake an answer with its line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import commands
from shardlab import config as configs
from shardlab.errors import UsageError
from shardlab.run import assemble

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
    return assemble.build_workload(configs.load(None, overrides))


@dataclass(frozen=True)
class Mistake:
    old: str
    new: str
    message: str
    line: str  # the source line that is shown

    @property
    def id(self) -> str:
        return self.message[:40]


MISTAKES = [
    Mistake(
        "workload = Workload(",
        "workload = [1]\n_ = Workload(",
        "neither a Workload nor a function that returns one",
        "workload = [1]",
    ),
    Mistake(
        "workload = Workload(",
        "workload = Model\n_ = Workload(",
        "is a class; name a Workload",
        "workload = Model",
    ),
    Mistake(
        "workload = Workload(",
        "def workload():\n    return 'a', 'b'\n_ = Workload(",
        "returned a tuple, not a Workload, nor the three",
        "return 'a', 'b'",
    ),
    Mistake(
        'return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum")',
        'return F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")',
        "the loss is a tensor of shape (2,), not one number",
        'return F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")',
    ),
    Mistake(
        ', reduction="sum")',
        ")",
        "the loss is a mean, and must be a sum",
        "return F.cross_entropy(model(batch.inputs), batch.targets)",
    ),
    Mistake(
        ', reduction="sum")',
        ', reduction="sum").item()',
        "the loss is a float, not a tensor (.item() and float() cut it off",
        'return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum").item()',
    ),
    Mistake(
        ', reduction="sum")',
        ', reduction="sum").detach()',
        "the loss has no gradient",
        'return F.cross_entropy(model(batch.inputs), batch.targets, reduction="sum").detach()',
    ),
    Mistake(
        "return F.cross_entropy(model(batch.inputs)",
        "return F.cross_entropy(torch.zeros(2, 3, requires_grad=True) * 1",
        "backward reaches none of the model's parameters",
        "return F.cross_entropy(torch.zeros(2, 3, requires_grad=True) * 1",
    ),
    Mistake(
        "return F.cross_entropy(model(batch.inputs)",
        "return F.cross_entropy(model(batch.input)",
        "AttributeError: 'Batch' object has no attribute 'input' (in the loss of",
        'return F.cross_entropy(model(batch.input), batch.targets, reduction="sum")',
    ),
    Mistake(
        "self.layer = nn.Linear(4, 3)",
        "self.layers = [nn.Linear(4, 3)]",
        "has no parameters (layers in a plain list are not found",
        "class Model(nn.Module):",
    ),
    Mistake(
        "self.layer = nn.Linear(4, 3)",
        "self.layer = nn.Linear(4, 3).requires_grad_(False)",
        "the model of mine has no parameter that trains",
        "class Model(nn.Module):",
    ),
    Mistake(
        '"mine", Model,',
        '"mine", lambda: Model,',
        "make_model returned the class Model: call it, Model()",
        "workload = Workload(",
    ),
    Mistake(
        '"mine", Model,',
        '"mine", lambda: 5,',
        "make_model returned a int, not an nn.Module",
        "workload = Workload(",
    ),
    Mistake(
        '"mine", Model,',
        '"mine", Model(),',
        "make_model is a model already",
        "workload = Workload(",
    ),
    Mistake(
        '"mine", Model,',
        '"mine", "Model",',
        "make_model is a str, not a function",
        "workload = Workload(",
    ),
    Mistake(
        "super().__init__()",
        "self.size = 1 / 0",
        "ZeroDivisionError: division by zero (in make_model of",
        "self.size = 1 / 0",
    ),
    Mistake(
        "def __len__(self):\n        return 50",
        "size = 50",
        "the dataset, a Data, has no __len__",
        "class Data:",
    ),
    Mistake("return 50", "return 0", "the dataset is empty", "class Data:"),
    Mistake("def batch(", "def fetch(", "the dataset, a Data, has no batch", "class Data:"),
    Mistake(
        "return Batch(inputs=x, targets=x[:, :3].argmax(1), count=len(ids), samples=len(ids))",
        "return x, x.argmax(1)",
        "batch([0, 1]) returned a tuple, not a Batch",
        "return x, x.argmax(1)",
    ),
    Mistake(
        "samples=len(ids))", "samples=1)", "batch([0, 1]) has 1 samples, not 2", "return Batch("
    ),
    Mistake(
        "count=len(ids)",
        "count=torch.tensor(2)",
        "has the count tensor(2): a whole number",
        "return Batch(",
    ),
    Mistake(
        "[ids] / 100",
        "[ids + 50]",
        'TypeError: can only concatenate list (not "int") to list (in batch([0, 1]) of',
        "[ids + 50]",
    ),
    Mistake(
        '{"loss": loss(model, batch)}',
        '{"loss": 3.0}',
        "evaluate returned {'loss': 3.0}: a dict of sums",
        'return {"loss": 3.0}',
    ),
    Mistake(
        "import torch\n",
        "import torch\nimport no_such_thing\n",
        "ModuleNotFoundError: No module named 'no_such_thing' (in importing it of",
        "import no_such_thing",
    ),
    Mistake("class Data:", "class Data", "SyntaxError: expected ':'", "class Data"),
    Mistake(
        "evaluate=sums)",
        "evaluate=sums, blocks=('layr',))",
        "unknown block 'layr'; did you mean 'layer'?",
        "",
    ),
    Mistake(
        "evaluate=sums)",
        "evaluate=sums, blocks=lambda model: model)",
        "blocks is a function: a list of names belongs there",
        "",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.id)
def test_a_mistake_is_answered_with_its_line(mistake: Mistake, tmp_path: Path) -> None:
    source = GOOD.replace(mistake.old, mistake.new, 1)
    assert source != GOOD
    with pytest.raises(UsageError) as caught:
        build(tmp_path, source)
    text = str(caught.value)
    assert mistake.message in text
    assert mistake.line in text
    if mistake.line:
        number = next(i for i, li in enumerate(source.splitlines(), 1) if mistake.line in li)
        assert text.startswith(f"{tmp_path / 'own.py'}:{number}: ")
    assert "site-packages" not in text  # the user's lines alone
    assert "shardlab/workloads" not in text


SHORT_MISTAKES = [
    Mistake("nn.Linear(4, 3), data", "nn.Linear, data", "the model is the class Linear", "return"),
    Mistake("nn.Linear(4, 3), data", "None, data", "the model is a NoneType", "return"),
    Mistake("data, nn", "iter(data), nn", "can be read only once", "return"),
    Mistake('nn.CrossEntropyLoss(reduction="sum")', "3", "the loss is a int, not a fun", "return"),
    Mistake("(torch.randn(4), i % 3)", "torch.randn(4)", "(in the loss of", ""),
]


@pytest.mark.parametrize("mistake", SHORT_MISTAKES, ids=lambda m: m.id)
def test_a_mistake_in_the_short_form(mistake: Mistake, tmp_path: Path) -> None:
    source = SHORT.replace(mistake.old, mistake.new, 1)
    assert source != SHORT
    with pytest.raises(UsageError) as caught:
        build(tmp_path, source)
    assert mistake.message in str(caught.value)
    assert mistake.line in str(caught.value)


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
    torch.manual_seed(0)
    first = short.make_model()
    torch.manual_seed(0)
    again = short.make_model()
    assert torch.equal(first.weight, again.weight)  # from the seed, and a new one
    assert first is not again


def test_the_short_form_makes_batches(tmp_path: Path) -> None:
    dataset = build(tmp_path, SHORT).dataset
    batch = dataset.batch([1, 4, 5])
    assert (batch.count, batch.samples) == (3, 3)
    assert batch.inputs.shape == (3, 4)
    assert batch.targets.tolist() == [1, 1, 2]
    empty = dataset.batch([])
    assert (empty.count, empty.samples) == (0, 0)
    assert empty.inputs.shape == (0, 4)


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


@pytest.mark.long
def test_the_example_runs_through_compare(tmp_path: Path) -> None:
    """(And through prove, in test_prove.)"""
    path = ROOT / "examples" / "your_model.py"
    done = commands.here(
        "compare", "--workload", f"{path}:workload", "--strategies", "single,zero3,pytorch_zero3",
        "--repeats", "1", "--warmup", "1", "--steps", "1", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert [cell["status"] for cell in cells] == ["ok"] * 3
    assert all(cell["loss_difference_max"] < 1e-5 for cell in cells)


@pytest.mark.long
def test_the_short_form_is_proved(tmp_path: Path) -> None:
    path = ROOT / "examples" / "short_form.py"
    done = commands.here(
        "prove", "--workload", f"{path}:workload", "--strategies", "zero2", "--quiet", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_the_example_is_short() -> None:
    assert len((ROOT / "examples" / "your_model.py").read_text().splitlines()) < 40
