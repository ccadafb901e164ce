"""GPT-2's fused head and GELU: equal to PyTorch's own operations, under every strategy too."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conformance import Trajectory, first_difference, one_process
from conftest import GetRanks, deep_unless
from shardlab import config as configs
from shardlab.axes import axes_of
from shardlab.errors import UsageError
from shardlab.naming import STRATEGIES
from shardlab.proof import prove
from shardlab.training import builders
from shardlab.workloads import kernels
from shardlab.workloads.base import Batch
from shardlab.workloads.gpt2 import GPT2, SIZES, next_token_loss
from shardlab.world import World

# What a relative error may be; the products of bf16 are rounded to 8 bits.
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
IGNORED = kernels.IGNORED


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows of logits at a time, so that small inputs are cut into several parts."""
    monkeypatch.setattr(kernels, "ROWS", 5)
    monkeypatch.setattr(kernels, "FLOAT8_ROWS", 16)


def error(actual: Tensor | None, expected: Tensor | None) -> float:
    assert actual is not None
    assert expected is not None
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def head_by(loss: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    """The loss, divided as a strategy divides it, and its two gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    value = loss(*leaves, targets)
    (value / torch.tensor(7.0, dtype=torch.float64, device=value.device)).backward()
    return [value.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def plain_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")


def a_head(
    rows: int, vocab: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Every third target is ignored. The hidden states are in ``dtype``; the weight is wide."""
    make = torch.Generator().manual_seed(rows * vocab)
    wide = torch.promote_types(dtype, torch.float32)
    hidden = torch.randn(rows, 24, generator=make, dtype=torch.float64)
    weight = torch.randn(vocab, 24, generator=make, dtype=torch.float64)
    targets = torch.randint(0, vocab, (rows,), generator=make)
    targets[1::3] = IGNORED
    return hidden.to(device, dtype), weight.to(device, wide), targets.to(device)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("vocab", [37, 64, 129])  # with padding and without
@pytest.mark.parametrize("rows", [1, 5, 13])  # less than a part, one, and a ragged last one
def test_the_head_equals_cross_entropy(rows: int, vocab: int, dtype: torch.dtype) -> None:
    hidden, weight, targets = a_head(rows, vocab, dtype)
    ours = head_by(kernels.head_loss, hidden, weight, targets)
    rounded = weight.to(dtype).double()  # the products see it so
    theirs = head_by(plain_head, hidden.double(), rounded, targets)
    assert [t.dtype for t in ours] == [weight.dtype, dtype, weight.dtype]
    assert max(map(error, ours, theirs)) < EXACT[dtype]


@pytest.mark.usefixtures("few_rows")
def test_large_logits_overflow_nothing() -> None:
    hidden, weight, targets = a_head(13, 37, torch.float32)
    ours = head_by(kernels.head_loss, hidden * 100, weight * 10, targets)
    theirs = head_by(plain_head, hidden.double() * 100, weight.double() * 10, targets)
    assert max(map(error, ours, theirs)) < 1e-5


def float8_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return kernels.head_loss(hidden, weight, targets, float8=True)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("vocab", [37, 64, 1000])
@pytest.mark.parametrize("rows", [1, 16, 45])
def test_a_head_of_float8_computes_what_its_operands_say(rows: int, vocab: int) -> None:
    """Only the operands are rounded, and they once: in double precision their products are the
    same."""
    hidden, weight, targets = a_head(rows, vocab, torch.bfloat16)

    def rounded(x: Tensor) -> Tensor:
        scale = x.double().abs().max() / 448
        return (x.double() / scale).float().to(torch.float8_e4m3fn).double() * scale

    x, w = rounded(hidden), rounded(weight)
    y = (x @ w.t()).bfloat16().double()  # the logits are kept in bf16
    loss = F.cross_entropy(y, targets, reduction="sum")
    chosen = F.one_hot(targets.clamp(min=0), vocab)
    gradient = (y.softmax(1) - chosen) * (targets != IGNORED)[:, None]
    gradient = (gradient * 2**15).float().to(torch.float8_e5m2).double() / 2**15
    theirs = [loss, gradient @ w / 7, gradient.t() @ x / 7]
    ours = head_by(float8_head, hidden, weight, targets)
    assert [t.dtype for t in ours] == [weight.dtype, hidden.dtype, weight.dtype]
    assert max(map(error, ours, theirs)) < 5e-3  # the gradient by hidden is given in bf16


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("head", [kernels.head_loss, float8_head], ids=["plain", "float8"])
def test_no_targets_and_wrong_ones(head: Any) -> None:
    """Nothing to learn from; and, since a kernel cannot raise, a loss that is not a number."""
    dtype = torch.bfloat16 if head is float8_head else torch.float64
    hidden, weight, targets = a_head(20, 37, dtype)
    for rows in (0, 20):
        none = torch.full_like(targets[:rows], IGNORED)
        loss, *gradients = head_by(head, hidden[:rows], weight, none)
        assert loss == 0
        assert [bool(g.any()) for g in gradients] == [False, False]
    zeros = head_by(head, 0 * hidden, weight, targets)
    assert zeros[0] == pytest.approx(float((targets != IGNORED).sum()) * np.log(37), rel=1e-4)
    for wrong in (37, 50, -1):  # 37 would be the padding's first column
        targets[6] = wrong
        loss, of_hidden, _ = head_by(head, hidden, weight, targets)
        assert loss.isnan()
        assert of_hidden.isnan().any(1).nonzero().tolist() == [[6]]


def test_tiny_gradients_are_not_lost_in_float8() -> None:
    """A token of probability 3e-7 is still pushed down. Where 1 is e4m3's largest, it is zero."""
    logits = torch.tensor([[0.0, -12.0, 0.0, 3.0]])
    out = torch.empty(1, 4, dtype=torch.float8_e5m2)
    kernels.loss_to_gradient(logits, torch.tensor([3]), torch.empty(1), 4, out, kernels.LIFT)
    expected = float(logits.softmax(1)[0, 1])
    assert float(out[0, 1].float() / kernels.LIFT) == pytest.approx(expected, rel=0.125)
    assert torch.tensor(448 * expected).to(torch.float8_e4m3fn).float() == 0


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_gelu_equals_pytorchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, gradient = (3 * torch.randn(2, 9, 20, dtype=torch.float64).to(dtype) for _ in range(2))
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    bias = torch.zeros(20, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    out = kernels._GELU.apply(ours, bias)
    out.backward(gradient)
    expected = F.gelu(theirs, approximate="tanh")
    expected.backward(gradient.double())
    assert theirs.grad is not None
    assert out.dtype == dtype
    assert error(out, expected) < EXACT[dtype]
    assert error(ours.grad, theirs.grad) < EXACT[dtype]
    assert error(bias.grad, theirs.grad.sum((0, 1))) < EXACT[dtype]


@pytest.mark.long
@pytest.mark.usefixtures("few_rows")
def test_pytorch_finds_no_fault_with_the_operations() -> None:
    """Shapes without content, autograd, and what compiling makes of them."""
    hidden, weight, targets = a_head(13, 37, torch.float32)
    of_head = hidden.requires_grad_(), weight.requires_grad_(), targets
    torch.library.opcheck(torch.ops.shardlab.head_loss.default, of_head)
    torch.library.opcheck(torch.ops.shardlab.float8_head_loss.default, of_head)
    of_gelu = torch.randn(2, 9, 20), torch.randn(2, 9, 20)
    torch.library.opcheck(torch.ops.shardlab.gelu_backward.default, of_gelu)


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, targets = a_head(5, 37, torch.float64)
    losses = (
        kernels.head_loss(hidden.requires_grad_(), weight, targets),
        kernels.head_loss(hidden, weight, targets, float8=True),
        kernels._GELU.apply(hidden, weight[0]).sum(),
    )
    for loss in losses:
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(loss, hidden, create_graph=True)


# ------------------------------------------------------------------ where they serve


def test_where_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled model on a GPU that computes in bf16 or fp32, with gradients, and with Triton."""
    gpu = SimpleNamespace(type="cuda")

    def asks(dtype: torch.dtype = torch.float32, weights: torch.dtype = torch.float32) -> bool:
        x: Any = SimpleNamespace(is_cuda=True, device=gpu, dtype=dtype)
        return kernels.is_fused(x, torch.empty(1, dtype=weights))

    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    assert not asks(), "not compiled"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert asks()
    assert not asks(torch.float64, torch.float64)
    assert not kernels.is_fused(torch.empty(1), torch.empty(1)), "on a CPU"
    with torch.no_grad():
        assert not asks(), "evaluation"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _device: True)
    for dtype, serves in ((torch.bfloat16, True), (torch.float16, False)):
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda _device, dtype=dtype: dtype)
        assert asks() == serves
    monkeypatch.undo()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    assert not asks()


BF16, WHOLE = {"precision.compute": "bf16"}, {"training.compile": "model"}
HOPPER = torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "device", "message"),
    [
        (WHOLE, HOPPER, "precision.compute: bf16, not fp32"),
        (WHOLE | {"precision.compute": "fp16"}, HOPPER, "precision.compute: bf16, not fp16"),
        (WHOLE | {"precision.compute": "fp64"}, HOPPER, "precision.compute: bf16, not fp64"),
        (BF16, HOPPER, "a compiled model: set training.compile to model or blocks"),
        (BF16 | WHOLE, torch.device("cpu"), "Hopper generation or newer, and this run is on a CPU"),
        (BF16 | WHOLE | {"model.options.dim": 72, "model.options.heads": 2}, HOPPER, "not 72"),
        (BF16 | WHOLE | {"strategy.options.tensor": 2}, HOPPER, "the whole vocabulary"),
        (BF16 | WHOLE, HOPPER, None),
        (BF16 | {"training.compile": "blocks"}, HOPPER, None),
    ],
)
def test_where_a_head_of_float8_is_refused(
    asked: dict[str, Any], device: torch.device, message: str | None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    overrides = {"model.size": "tiny", "model.options.head": "float8", "launch.world": 2, **asked}
    config = configs.load(None, overrides)
    refuse = builders.build_workload(config).refuse
    assert refuse is not None
    axes = axes_of(config.strategy.name, config.strategy.options, 2)[0]
    if message is None:
        refuse(config, axes, device)
        return
    with pytest.raises(UsageError, match=r"^model\.options\.head: float8 needs .*" + message):
        refuse(config, axes, device)


def test_what_a_gpu_may_lack_for_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "A100")
    assert kernels.no_float8(HOPPER) == "the A100 is older"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (10, 0))
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    assert kernels.no_float8(HOPPER) == "Triton is not installed"
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    assert kernels.no_float8(HOPPER) is None
    monkeypatch.delattr(torch, "_scaled_mm")
    assert kernels.no_float8(HOPPER) == "this PyTorch cannot multiply float8"


def test_a_proof_has_no_head_of_float8() -> None:
    config = configs.load(None, {"model.size": "tiny", "model.options.head": "float8"})
    with pytest.raises(UsageError, match=r"made in float64: leave model\.options\.head out"):
        prove.cases_of(config, ["zero1"], [2])
    assert prove.cases_of(config.with_overrides({"model.options.head": "plain"}), ["zero1"], [2])


def test_a_step_that_is_not_compiled_refuses_float8_and_evaluation_does_without() -> None:
    model, batch = GPT2(SIZES["tiny"]), ragged(0, 1)
    with torch.no_grad():
        plain = next_token_loss(model, batch)
        model.head.float8 = True
        assert next_token_loss(model, batch) == plain
    with pytest.raises(UsageError, match="is for compiled training steps"):
        next_token_loss(model, batch)
    with everywhere():
        trained = next_token_loss(model, batch)
    assert trained != plain
    assert float(trained.detach()) == pytest.approx(float(plain), rel=1e-3)


# ------------------------------------------------------------------ in the model


@contextmanager
def everywhere() -> Any:
    """The operations serve every call, also on a CPU, with few rows of logits at a time."""
    calls = []
    was, rows = kernels.is_fused, kernels.ROWS
    kernels.is_fused = lambda x, _weight: calls.append(x.shape) or True  # type: ignore[func-returns-value]
    kernels.ROWS = 50
    try:
        yield calls
    finally:
        kernels.is_fused, kernels.ROWS = was, rows


def ragged(rank: int, micro: int) -> Batch:
    """One to three sequences, of whose targets some are ignored; or nothing at all."""
    make = torch.Generator().manual_seed(10 * rank + micro)
    samples = 0 if (rank, micro) == (1, 1) else 1 + (rank + micro) % 3
    tokens, targets = (torch.randint(0, 256, (samples, 24), generator=make) for _ in range(2))
    targets[torch.rand(targets.shape, generator=make) < 0.3 + 0.2 * rank] = IGNORED
    return Batch(tokens, targets, int((targets != IGNORED).sum()), samples)


STANDING = {"training.optimizer": "sgd", "training.learning_rate": 1e-30}


def standing(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named.values(), lr=1e-30)


def trained(world: World, name: str) -> tuple[Trajectory, int]:
    """Two steps of two micro-batches, with the fused operations; and how often they served."""
    named = {"model.size": "tiny", "strategy.name": name, "precision.compute": "fp64"}
    config = configs.load(None, {**named, **STANDING})
    strategy = builders.build_strategy(config, builders.build_workload(config), world)
    found = Trajectory()
    with everywhere() as calls:
        for _ in range(2):  # the first step lays out buckets
            found.take_step(strategy, [ragged(world.rank, micro) for micro in range(2)])
    return found, len(calls)


# One of each mechanism is fast: replicated, overlapped, sharded flat and by block, FSDP2.
FAST = ("simple_ddp", "bucket_ddp_async", "zero1", "zero3", "pytorch_zero3")
CASES = [(name, 1 if name == "single" else 2) for name in STRATEGIES]


@pytest.mark.parametrize(("name", "world"), deep_unless(lambda name, _: name in FAST, CASES))
def test_under_every_strategy(name: str, world: int, ranks: GetRanks) -> None:
    """Of a plain process with PyTorch's own operations: the tied head's gradient is the sum of two,
    and ranks and micro-batches count differently."""
    found, calls = ranks(world).run(trained, name)[0]
    config = configs.load(None, {"model.size": "tiny"})
    torch.manual_seed(config.training.seed)
    model = builders.build_workload(config).make_model().double()
    batches = [[ragged(rank, micro) for micro in range(2)] for rank in range(world)]
    plain = one_process(model, standing, next_token_loss, lambda _step: batches, steps=2)
    assert calls == 2 * 2 * (SIZES["tiny"].layers + 1)
    assert first_difference(found, plain, 1e-12) is None


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function'> should not be instantiated")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method. is deprecated")  # torch 2.11's own
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_compiled_as_one_graph(dtype: torch.dtype) -> None:
    """On a CPU, by PyTorch's tracer alone: no code is generated. In fp32 and fp64, torch 2.11
    would drop the MLP's gradients if GELU ended with a cast."""
    torch.manual_seed(0)
    model, batch = GPT2(SIZES["tiny"]), ragged(0, 1)
    model.to(torch.promote_types(dtype, torch.float32))
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = builders.in_precision(next_token_loss, "bf16" if dtype == torch.bfloat16 else "")

    def of(run: nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        loss(run, batch).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected = of(model)
    with everywhere() as calls:
        found = of(compiled)
    torch._dynamo.reset()
    assert calls
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert error(found[name], gradient) < 5 * EXACT[dtype], name


# ------------------------------------------------------------------ on a GPU

needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and kernels.HAS_TRITON), reason="needs a GPU and Triton"
)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [37, 1024, 50257])
def test_the_loss_kernel_equals_its_reference(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = 5 * torch.randn(9, vocab + -vocab % kernels.TILE, device="cuda", dtype=dtype)
    targets = torch.randint(0, vocab, (9,), device="cuda")
    targets[1], targets[2], targets[3], targets[4] = IGNORED, vocab, 0, vocab - 1
    results = []
    for function in (kernels.loss_to_gradient, kernels._triton_loss_to_gradient):
        written, losses = logits.clone(), torch.full((9,), 7.0, device="cuda")
        function(written, targets, losses, vocab)
        results.append((losses, written))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours[2].isnan().any(), theirs[2].isnan().any())
        kept = [i for i in range(9) if i != 2]  # a wrong target: not a number
        torch.testing.assert_close(ours[kept], theirs[kept], atol=1e-5, rtol=1e-2)


needs_float8 = pytest.mark.skipif(
    not torch.cuda.is_available() or kernels.no_float8(torch.device("cuda")) is not None,
    reason="needs a GPU that multiplies float8, and Triton",
)


@needs_float8
@pytest.mark.parametrize("vocab", [37, 1024, 50257])
def test_the_loss_kernel_writes_float8(vocab: int) -> None:
    torch.manual_seed(0)
    logits = 5 * torch.randn(9, vocab + -vocab % kernels.TILE, device="cuda").bfloat16()
    targets = torch.randint(0, vocab, (9,), device="cuda")
    targets[1], targets[2], targets[3], targets[4] = IGNORED, vocab, 0, vocab - 1
    results = []
    for function in (kernels.loss_to_gradient, kernels._triton_loss_to_gradient):
        out, losses = torch.empty_like(logits, dtype=kernels.E5M2), torch.ones(9, device="cuda")
        function(logits, targets, losses, vocab, out, kernels.LIFT)
        assert out[2].float().isnan().any()
        results.append((losses, out.float()))
    kept = [i for i in range(9) if i != 2]
    (their_losses, theirs), (our_losses, ours) = results
    torch.testing.assert_close(our_losses[kept], their_losses[kept], atol=1e-5, rtol=1e-4)
    differ = ours[kept] != theirs[kept]  # where exp2 and exp lie on two sides of a rounding
    assert differ.float().mean() < 1e-3
    torch.testing.assert_close(ours[kept], theirs[kept], atol=2**-16, rtol=0.26)


@needs_gpu
@pytest.mark.parametrize("shape", [(16, 64), (50304, 48), (48, 50304), (400, 784)], ids=str)
def test_the_turning_kernel_equals_its_reference(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).to(kernels.E5M2)
    out = torch.full((shape[1], shape[0]), 7.0).to(kernels.E5M2)
    turned = kernels.turn(x.cuda(), out.cuda())
    assert torch.equal(turned.cpu().float(), kernels.turn(x, out).float())


@needs_float8
@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("shape", [(16, 768, 64), (512, 768, 50304), (512, 50304, 768)], ids=str)
def test_the_products_of_float8_equal_their_reference(
    shape: tuple[int, int, int], is_fast: bool
) -> None:
    torch.manual_seed(0)
    rows, inner, columns = shape
    a, b = torch.randn(rows, inner).to(kernels.E5M2), torch.randn(columns, inner).to(kernels.E4M3)
    scales = torch.tensor(0.5), torch.tensor(3.0)
    ours, theirs = torch.empty(rows, columns, device="cuda"), torch.empty(rows, columns)
    on_gpu = (t.cuda() for t in (a, b.t(), *scales))
    kernels._float8_product(*on_gpu, ours, is_fast)
    kernels._float8_product(a, b.t(), *scales, theirs)
    assert error(ours.cpu(), theirs) < (1e-2 if is_fast else 1e-3)


@needs_float8
@pytest.mark.parametrize("rows", [0, 16, 45, 2000])
def test_the_float8_head_on_a_gpu_equals_that_on_a_cpu(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for logits that are rounded to bf16 otherwise, and their gradient to e5m2 then, too."""
    monkeypatch.setattr(kernels, "FLOAT8_ROWS", 512)
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, 768).bfloat16(), torch.randn(3001, 768) / 30
    targets = torch.randint(0, 3001, (rows,))
    targets[1::3] = IGNORED
    theirs = head_by(float8_head, hidden, weight, targets)
    ours = head_by(float8_head, hidden.cuda(), weight.cuda(), targets.cuda())
    errors = [error(a.cpu(), b) for a, b in zip(ours, theirs, strict=True)]
    assert all(e < most for e, most in zip(errors, (1e-3, 2e-2, 2e-2), strict=True)), errors


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 700, 100), (1, 1, 3072), (0, 5, 64)], ids=str)
def test_the_gelu_kernel_equals_its_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gradient, x = (3 * torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    of_x, of_bias = torch.ops.shardlab.gelu_backward(gradient, x)
    columns = shape[-1]
    expected = kernels.gelu_gradient(gradient.view(-1, columns), x.view(-1, columns))
    torch.testing.assert_close(of_x.view(-1, columns), expected[0], atol=1e-5, rtol=1e-2)
    torch.testing.assert_close(of_bias, expected[1], atol=1e-3, rtol=1e-4)


@pytest.mark.usefixtures("few_rows")
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 4, 13])
def test_the_head_on_a_gpu(rows: int, dtype: torch.dtype) -> None:
    hidden, weight, targets = a_head(rows, 37, dtype, "cuda")
    ours = head_by(kernels.head_loss, hidden, weight, targets)
    theirs = head_by(plain_head, hidden.double(), weight.to(dtype).double(), targets)
    assert max(map(error, ours, theirs)) < EXACT[dtype]


@needs_gpu
@pytest.mark.filterwarnings("ignore")  # what a compiler says of its own making
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_compiled_model_on_a_gpu(compute: str) -> None:
    """The gradients of bf16 are as near to those of fp64 as an uncompiled model's are."""
    torch.manual_seed(0)
    model = GPT2(SIZES["tiny"]).cuda()
    batch = ragged(0, 1).to(torch.device("cuda"))
    loss = builders.in_precision(next_token_loss, compute)

    def of(run: nn.Module, loss: Any = next_token_loss) -> dict[str, Tensor]:
        run.zero_grad()
        loss(run, batch).backward()
        return {n.removeprefix("_orig_mod."): p.grad.double() for n, p in run.named_parameters()}

    eager, compiled = of(model, loss), of(torch.compile(model), loss)  # type: ignore[arg-type]
    exact = of(model.double())
    for name, gradient in exact.items():
        allowed = 1e-5 if compute == "fp32" else 1.5 * error(eager[name], gradient) + 1e-3
        assert error(compiled[name], gradient) < allowed, name


@needs_float8
@pytest.mark.filterwarnings("ignore")  # what a compiler says of its own making
def test_a_compiled_model_with_a_head_of_float8() -> None:
    """Its gradients are near the plain head's, and not the same; evaluation computes in bf16."""
    torch.manual_seed(0)
    model: Any = GPT2(SIZES["tiny"]).cuda()
    batch = ragged(0, 1).to(torch.device("cuda"))
    loss = builders.in_precision(next_token_loss, "bf16")

    def of(float8: bool) -> tuple[float, float, Tensor]:
        torch._dynamo.reset()
        model.zero_grad()
        model.head.float8 = float8
        compiled: Any = torch.compile(model)
        trained = loss(compiled, batch)
        trained.backward()
        with torch.no_grad():
            evaluated = float(loss(compiled, batch))
        return float(trained.detach()), evaluated, model.wte.weight.grad.clone()

    (plain, of_plain, their_gradient), (ours, of_ours, gradient) = of(False), of(True)
    assert ours == pytest.approx(plain, rel=1e-3)
    assert of_ours == of_plain
    assert 5e-3 < error(gradient, their_gradient) < 0.1
