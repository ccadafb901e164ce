"""Tensors of every kind go through checkpoints, exports and imports; malformed files do not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import commands
import toys
from conformance import OPTIONS, make_optimizer
from conftest import GetRanks
from resuming import run
from shardlab import config as configs
from shardlab import naming
from shardlab.checkpoint import convert, files, storage
from shardlab.checkpoint import load as loading
from shardlab.checkpoint import manifest as manifests
from shardlab.checkpoint.resume import Start
from shardlab.checkpoint.save import About, Checkpoints
from shardlab.config import CheckpointConfig
from shardlab.errors import UsageError
from shardlab.naming import STRATEGIES
from shardlab.strategies.base import Setup
from shardlab.workloads import huggingface
from shardlab.world import World

# ------------------------------------------------------------------ every kind of tensor


class Layouts(nn.Module):
    """What people register: counters, masks, rotations, views of other tensors, nothing at all."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        weight = torch.randn(3, 6).t()  # (6, 3), not contiguous
        self.weight = nn.Parameter(weight.contiguous() if kind == "plain" else weight)
        self.layer = nn.Linear(3, 3)
        self.again = self.layer  # a module under two names
        if kind == "complex":
            self.spin = nn.Parameter(torch.randn(3, dtype=torch.complex128))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
        wide = torch.rand(1).expand(4096)
        rows = torch.rand(1, 3).expand(5, 3)
        self.register_buffer("expanded", wide.clone() if kind == "plain" else wide)  # DDP refuses
        self.register_buffer("rows", rows.clone() if kind == "plain" else rows)
        self.register_buffer("columns", torch.rand(5, 4).t())
        self.register_buffer("slice", torch.rand(9)[::2])
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("count", torch.tensor(0))  # 0-dim, int64: counts the forwards
        self.register_buffer("scale", torch.rand((), dtype=torch.float32))
        self.register_buffer("mask", torch.rand(3, 7) > 0.5)
        self.register_buffer("codes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("short", torch.randn(5).to(torch.bfloat16))
        angles = torch.rand(4, 3)
        turn = torch.polar(torch.ones(4, 3), angles)
        self.register_buffer("freqs_cis", turn.to(torch.complex64), persistent=False)
        self.register_buffer("freqs", turn.to(torch.complex128))

    def forward(self, x: Tensor) -> Tensor:  # (rows, 6)
        if torch.is_grad_enabled():
            self.count += 1
        turn = self.freqs.sum(0).abs() + self.freqs_cis.sum(0).imag  # (3,)
        out = x @ self.weight * turn * self.expanded[0]
        if hasattr(self, "spin"):
            out = out * self.spin.abs() + self.spin.imag + self.nothing.sum()
        out = self.again(self.layer(out))
        return out * self.mask.sum() * 0.1


def build(world: World, strategy: str, kind: str, seed: int) -> Any:
    make = naming.resolve(strategy, STRATEGIES, "strategy")
    options: dict[str, Any] = dict(OPTIONS.get(strategy, {}))
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    model = Layouts(kind)
    torch.set_default_dtype(torch.float32)
    return make(Setup(model, make_optimizer("adamw"), toys.loss, world.mesh), **options)


def saved_state(
    world: World, strategy: str, kind: str, folder: str, asynchronous: bool
) -> dict[str, Tensor]:
    """Two steps and a checkpoint; what the model held then."""
    instance = build(world, strategy, kind, 0)
    settings = CheckpointConfig(every=1, asynchronous=asynchronous)
    about = About({}, strategy, None)
    saver = Checkpoints(Path(folder), settings, world, instance, about)
    run(instance, world, range(2), world.size)
    saver.save(2, {})
    saver.wait()
    return instance.full_tensors()


def loaded_state(world: World, strategy: str, kind: str, folder: str) -> dict[str, Tensor]:
    """From another model's beginning; and it trains on."""
    instance = build(world, strategy, kind, 1 + world.rank)
    path = Path(folder)
    if not files.is_checkpoint(path):
        path = next(iter(files.steps_in(path).values()))
    loading.load(Start(None, path, manifests.read(path)), instance, world, configs.Config())
    found: dict[str, Tensor] = instance.full_tensors()
    run(instance, world, range(2, 3), world.size)
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "size", "then", "other", "kind"),
    [
        ("single", 1, "simple_ddp", 2, "complex"),
        ("simple_ddp", 2, "single", 1, "complex"),
        ("pytorch_ddp", 2, "bucket_ddp_async", 3, "plain"),
        ("bucket_ddp_async", 3, "zero3", 2, "buffers"),
        ("zero3", 3, "pytorch_zero3", 2, "plain"),
        ("pytorch_zero3", 2, "zero1", 1, "plain"),
        ("zero1", 2, "pytorch_ddp", 2, "plain"),
    ],
)
def test_every_kind_of_tensor_comes_back(
    strategy: str, size: int, then: str, other: int, kind: str, ranks: GetRanks, tmp_path: Path
) -> None:
    """Expanded, strided, empty, without dimensions; bool, whole, half, complex; a strategy of each
    mechanism, by its checkpoint and by an export with all names of a tied tensor."""
    args = (strategy, kind, str(tmp_path), size == 2)
    held = ranks(size).run(saved_state, *args, deadline_s=100)[0]
    assert held["count"] > 0
    assert held["freqs_cis"].imag.abs().min() > 0
    newest = files.steps_in(tmp_path)[2]
    manifest = manifests.read(newest)
    manifests.verify(newest, manifest.files)
    assert_same(storage.whole_tensors(newest, manifest, "model/"), held)
    for found in ranks(other).run(loaded_state, then, kind, str(tmp_path), deadline_s=100):
        assert_same(found, held)

    # Out as a state_dict, in as another's beginning: what is not persistent stays as it was made.
    out, back = tmp_path / "model.safetensors", tmp_path / "back"
    convert.export(newest, out, "safetensors")
    torch.set_default_dtype(torch.float64)
    model = Layouts(kind)
    torch.set_default_dtype(torch.float32)
    model.expanded, model.rows = model.expanded.clone(), model.rows.clone()  # PyTorch refuses
    state = huggingface.load_safetensors(out)
    model.load_state_dict(state, strict=True)
    assert "freqs_cis" not in state
    assert_same({n: state[n] for n in held if n != "freqs_cis"},
                {n: held[n] for n in held if n != "freqs_cis"})  # fmt: skip
    convert.import_(out, back, "safetensors")
    for rank, found in enumerate(
        ranks(other).run(loaded_state, then, kind, str(back), deadline_s=100)
    ):
        assert rank == 0 or not torch.equal(found["freqs_cis"], held["freqs_cis"])
        del found["freqs_cis"]
        assert_same(found, {n: held[n] for n in held if n != "freqs_cis"})


def test_a_kind_that_cannot_be_kept_is_refused(ranks: GetRanks, tmp_path: Path) -> None:
    """A complex tensor into a real one would lose its imaginary part."""
    ranks(1).run(saved_state, "single", "buffers", str(tmp_path), False)
    weights, newest = tmp_path / "w.safetensors", files.steps_in(tmp_path)[2]
    convert.export(newest, weights, "safetensors")
    whole = dict(huggingface.load_safetensors(weights))
    for number, (changes, message) in enumerate(
        [
            ({"columns": whole["columns"].to(torch.complex64)},
             "'columns' is complex there and floating point here"),
            ({"count": torch.tensor(3.5)}, "'count' is floating point there and whole numbers"),
            ({"mask": whole["mask"].to(torch.uint8)}, "'mask' is whole numbers there and bool"),
            ({"rows": torch.rand(5, 3)}, "'rows' is an expanded tensor here"),
            ({"again.weight": torch.rand(3, 3).double()},
             "'again.weight' and 'layer.weight' are one tensor here, and differ there"),
        ]
    ):  # fmt: skip
        source, made = tmp_path / f"{number}.safetensors", tmp_path / f"made{number}"
        huggingface.save_safetensors(source, {**whole, **changes})
        convert.import_(source, made, "safetensors")
        with pytest.raises(UsageError, match=message):
            ranks(1).run(loaded_state, "single", "buffers", str(made))


def test_files_of_every_dtype_are_the_librarys(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    draw = torch.Generator().manual_seed(random.randrange(2**32))
    values = torch.randn(4, 3, generator=draw, dtype=torch.complex128)
    dtypes = [d for d in huggingface._DTYPES.values() if not d.is_complex]
    tensors = {str(d): values.real.abs().mul(50).to(d) for d in dtypes}
    tensors |= {"c64": values.to(torch.complex64).conj(), "empty": torch.zeros(0, 2)}
    huggingface.save_safetensors(tmp_path / "ours", {**tensors, "c128": values.t()})
    library.save_file({n: t.resolve_conj() for n, t in tensors.items()}, tmp_path / "theirs")
    read = library.load_file(tmp_path / "ours")
    assert torch.equal(torch.view_as_complex(read.pop("c128")), values.t())
    ours = huggingface.load_safetensors(tmp_path / "ours")
    assert torch.equal(ours.pop("c128"), values.t())
    theirs = huggingface.load_safetensors(tmp_path / "theirs")
    for found in (read, ours, theirs):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert huggingface.raw(found[name]) == huggingface.raw(tensor), name


# ------------------------------------------------------------------ malformed files


def file_of(table: Any, data: bytes = bytes(24), length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (6,), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


TWICE = b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2)
MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": bytes(7),
    "nothing but zeros": bytes(64),
    "truncated data": file_of({"a": entry()}, bytes(20)),
    "truncated table": file_of({"a": entry()})[:20],
    "a huge table": file_of({"a": entry()}, length=2**63 - 1),
    "more than a huge table": file_of({"a": entry()}, length=2**64 - 1),
    "bad JSON": file_of(b"{oops"),
    "not UTF-8": file_of(b'{"\xff\xfe":1}'),
    "UTF-16": file_of(json.dumps({"a": entry()}).encode("utf-16")),
    "a list": file_of([1, 2]),
    "a number": file_of(b"12345678"),
    "null": file_of(b"null"),
    "very deep": file_of(b"[" * 200_000),
    "entry is no table": file_of({"a": 3}),
    "entry is a list": file_of({"a": ["F32", [6], [0, 24]]}),
    "no dtype": file_of({"a": {"shape": [6], "data_offsets": [0, 24]}}),
    "no shape": file_of({"a": {"dtype": "F32", "data_offsets": [0, 24]}}),
    "no place": file_of({"a": {"dtype": "F32", "shape": [6]}}),
    "unknown dtype": file_of({"a": entry("F33")}),
    "dtype is a list": file_of({"a": entry(["F32"])}),
    "dtype is null": file_of({"a": entry(None)}),
    "wrong dtype": file_of({"a": entry("F64")}),
    "wrong shape": file_of({"a": entry(shape=[7])}),
    "negative shape": file_of({"a": entry(shape=[-2, -3])}),
    "shape of fractions": file_of({"a": entry(shape=[1.5, 4])}),
    "shape of bools": file_of({"a": entry("F32", [True, 6])}),
    "shape is a number": file_of({"a": entry(shape=6)}),
    "huge shape": file_of({"a": entry(shape=[2**62, 2**62])}),
    "zeros times too many": file_of({"a": entry(shape=[0, 2**70], offsets=[0, 0])}, b""),
    "offsets overlap": file_of({"a": entry(), "b": entry(shape=[2], offsets=[16, 24])}),
    "offsets leave a gap": file_of({"a": entry(shape=[2], offsets=[16, 24])}),
    "offsets beyond": file_of({"a": entry(offsets=[24, 48])}),
    "offsets reversed": file_of({"a": entry(offsets=[24, 0])}),
    "offsets negative": file_of({"a": entry(offsets=[-24, 0])}),
    "one offset": file_of({"a": entry(offsets=[24])}),
    "three offsets": file_of({"a": entry(offsets=[0, 12, 24])}),
    "offsets are text": file_of({"a": entry(offsets=["0", "24"])}),
    "more data than tensors": file_of({"a": entry()}, bytes(32)),
    "the same name twice": file_of(TWICE),
    "no tensors": file_of({}, b""),
    "metadata is a list": file_of({"__metadata__": [], "a": entry()}),
    "metadata of numbers": file_of({"__metadata__": {"x": 1}, "a": entry()}),
    "complex that is not": file_of(
        {"__metadata__": {"shardlab.complex128": '["a"]'}, "a": entry()}
    ),
    "complex of nothing": file_of({"__metadata__": {"shardlab.complex128": "{"}, "a": entry()}),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_in_a_line(case: str, tmp_path: Path) -> None:
    (tmp_path / "in.safetensors").write_bytes(MALFORMED[case])
    with pytest.raises(UsageError) as refused:
        convert.import_(tmp_path / "in.safetensors", tmp_path / "out", "safetensors")
    assert "\n" not in str(refused.value)
    assert str(tmp_path / "in.safetensors") in str(refused.value)
    assert [p.name for p in tmp_path.iterdir()] == ["in.safetensors"]


def test_a_file_changed_at_random_is_read_or_refused(tmp_path: Path) -> None:
    draw = random.Random()
    whole = file_of({"__metadata__": {"format": "pt"}, "a": entry(shape=[2, 2], offsets=[0, 16]),
                     "b": entry("BF16", [4], [16, 24])})  # fmt: skip
    path = tmp_path / "in.safetensors"
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data) - 24)] = draw.randrange(256)
        path.write_bytes(bytes(data)[: draw.choice([len(data), draw.randrange(len(data))])])
        try:
            found = huggingface.load_safetensors(path)
        except UsageError:
            continue
        assert sum(t.numel() * t.element_size() for t in found.values()) == 24


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("bad.safetensors", "is damaged: 'a' of shape [7] has not the bytes"),
        ("folder", "folder is a folder; name a .safetensors file in it"),
        ("nowhere", "no file nowhere"),
    ],
)
def test_the_command_refuses_in_a_line(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.safetensors").write_bytes(MALFORMED["wrong shape"])
    done = commands.here("checkpoint", "import", source, "-o", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "it is not a table of settings"),
        ({"model_type": "gpt2", "n_layer": 10**9}, "its config has 1000000000 layers"),
        (
            {"model_type": "gpt2", "n_layer": 1, "n_embd": 10**6, "n_head": 1},
            "belongs by its config",
        ),
        ({"model_type": "gpt2", "n_layer": "2"}, "must be a whole number"),
        ({"model_type": "bert"}, "holds a 'bert', not a gpt2"),
    ],
)
def test_a_malformed_gpt2_folder_is_refused(config: Any, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    huggingface.save_safetensors(folder / "m.safetensors", {"wte.weight": torch.zeros(2, 2)})
    with pytest.raises(UsageError, match=message):
        convert.import_(folder, tmp_path / "out", "hf-gpt2")
