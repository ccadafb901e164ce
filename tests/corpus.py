"""What the corpus is made of: for each kind of file that we read, valid examples and a reader.

A reader does what the command does, with the same functions, up to where ranks would start. It
may raise UsageError; anything else is a traceback that would have reached a user.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import dataclasses
import gzip
import hashlib
import io
import json
import pickle
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
import yaml

import chrome
from mutations import Files
from results import cell, explained, proof, result_of
from shardlab import cli, runfolder
from shardlab import config as configs
from shardlab.checkpoint import convert, files, manifest
from shardlab.checkpoint import start as starts
from shardlab.cli.flags import config_of
from shardlab.data import bpe, catalog, images, loader, obtaining, reviews, tokens
from shardlab.data import text as texts
from shardlab.errors import UsageError
from shardlab.faults import inject
from shardlab.measure import gate
from shardlab.measure import resume as resuming
from shardlab.measure.cells import Cell, Plan
from shardlab.report import console
from shardlab.run import assemble, loop
from shardlab.workloads import gpt2, huggingface
from shardlab.workloads.base import Dataset


@dataclass(frozen=True)
class Subject:
    """A kind of input: its valid examples, and what a command does with a folder of it."""

    name: str
    examples: tuple[Files, ...]
    read: Callable[[Path, Path], None]  # from the first folder; writes, if at all, to the second
    weight: int = 1  # of the cases: more for what has more to say
    forgives: bool = False  # what is damaged is passed over, not refused
    is_named: bool = False  # the user names the file: if it is a pipe, somebody will write to it


@contextlib.contextmanager
def silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


SHARDLAB = typer.main.get_command(cli.app)


def command(*args: object) -> None:
    """A command of ours in this process, without its output. Exit code 1 is an answer, too."""
    try:
        with silent():
            SHARDLAB.main([str(arg) for arg in args], standalone_mode=False)
    except SystemExit as left:
        if left.code not in (0, 1, None):
            raise


def feed(dataset: Dataset, accumulate: int = 1) -> None:
    """The first, middle and last samples, as a run of two ranks would read them."""
    order = loader.Order(len(dataset), 4, accumulate, 0, True, "continuous")
    for step in (0, len(dataset) // 8, len(dataset) // 4):
        for rank in range(2):
            for part in order.share(step, 2, rank):
                loader.fetch(dataset, part)


# ------------------------------------------------------------------ configs


def _config_examples() -> tuple[Files, ...]:
    folder = Path(__file__).parents[1] / "examples"
    real = [path.read_bytes() for path in sorted(folder.rglob("*.yaml"))]
    whole = configs.Config().to_dict()
    whole["data"]["source"] = "synthetic"
    whole["strategy"] = {"name": "pytorch_ddp", "options": {"bucket_mb": 4}}
    whole["model"] = {"workload": "gpt2", "size": "tiny", "options": {"layers": 2, "vocab": 300}}
    cnn = {"model": {"workload": "cnn_mnist"}, "data": {"source": "synthetic"}}
    made = [yaml.safe_dump(value, sort_keys=False).encode() for value in (whole, cnn)]
    return tuple({"config.yaml": content} for content in (*made, *real[:4]))


MOST_WEIGHTS = 10**8  # of a model that is built here to see whether it can be: less than a second


def read_config(folder: Path, _out: Path) -> None:
    config = configs.load(folder / "config.yaml").with_overrides({"output.dir": None})
    assemble.resolve_strategy(config)
    if ":" in config.model.workload:
        return  # the user's own code may do as it likes
    workload = assemble.build_workload(config)
    order = loop.data_order(workload, config)
    loader.sampler.check_epoch(order.length, order.global_batch, order.mode)
    assemble.make_rule(config)


def read_settings(folder: Path, _out: Path) -> None:
    """Each line as a --set."""
    try:
        content = (folder / "settings.txt").read_bytes().decode("utf-8", "replace")
    except OSError as error:  # not a file that a command reads
        raise UsageError(str(error)) from None
    for line in content.splitlines()[:50]:
        with contextlib.suppress(UsageError):
            config_of(None, [line], {})


SETTINGS = b"""training.steps=5
training.learning_rate=1e-4
model.options.layers=3
strategy.options={bucket_mb: 4}
data.source=synthetic
launch.world=2
"""

# ------------------------------------------------------------------ data


def shard(count: int = 2000, vocab: int = 256) -> bytes:
    header = np.zeros(256, dtype="<i4")
    header[:3] = tokens.MAGIC, tokens.VERSION, count
    return header.tobytes() + (np.arange(count) % vocab).astype("<u2").tobytes()


DESCRIBED = {"name": "text", "kind": "tokens", "tokenizer": "bytes", "vocab": 256, "tokens": 2000,
             "end_of_text": 0, "documents": 3, "shards": {"a.bin": 2000}}  # fmt: skip


def read_tokens(folder: Path, _out: Path) -> None:
    with contextlib.suppress(UsageError):
        command("data", "show", folder)
    config = configs.from_dict(
        {"model": {"size": "tiny"}, "data": {"source": str(folder), "seq_len": 32}}
    )
    feed(assemble.build_workload(config).dataset)


def _idx(array: Any) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def _image_examples() -> tuple[Files, ...]:
    pixels = np.arange(12 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(12, 28, 28)
    labels = np.arange(12, dtype=np.uint8) % 10
    mnist = {
        "train-images-idx3-ubyte": _idx(pixels), "train-labels-idx1-ubyte": _idx(labels),
        "t10k-images-idx3-ubyte": _idx(pixels[:4]), "t10k-labels-idx1-ubyte": _idx(labels[:4]),
    }  # fmt: skip
    packed = {f"{name}.gz": gzip.compress(content) for name, content in mnist.items()}
    colour = np.arange(4 * 3072, dtype=np.uint32).astype(np.uint8).reshape(4, 3072)
    batches = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    rows = np.concatenate([np.arange(4, dtype=np.uint8)[:, None], colour], 1)
    binary = {f"cifar/{name}.bin": rows.tobytes() for name in batches}
    pickled = pickle.dumps({b"data": colour, b"labels": [0, 1, 2, 9]}, protocol=2)
    pickles = {f"cifar/{name}": pickled for name in batches}
    sheets = {f"cifar/{name}.png": _png(colour) for name in batches}
    sheets["cifar/train_lables.json"] = json.dumps([1] * 20).encode()
    sheets["cifar/test_lables.json"] = json.dumps([1] * 4).encode()
    lines = [",".join(map(str, [*range(16), *[0] * 48, i % 10])) for i in range(400)]
    digits = {"digits.csv.gz": gzip.compress("\n".join(lines).encode())}
    return mnist, packed, binary, pickles, sheets, digits


def _png(rows: Any) -> bytes:
    """A sheet: a row of 1,024 pixels for each image, under each of PNG's filters."""
    lines = b"".join(
        bytes([i % 5]) + row.reshape(3, 1024).T.tobytes() for i, row in enumerate(rows)
    )

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", 1024, len(rows), 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines))
        + chunk(b"IEND", b"")
    )  # fmt: skip


def read_images(folder: Path, _out: Path) -> None:
    name = "cifar10" if (folder / "cifar").is_dir() else "mnist"
    name = "digits" if any(folder.glob("*.csv.gz")) else name
    for split in images.SPLITS:
        loaded = images.load(name, str(folder), split)
        if len(loaded.labels):
            feed(dataclasses.replace(loaded, augment=True))


def _archive_examples() -> tuple[Files, ...]:
    """Archives of MNIST, with members that want to be written elsewhere."""
    mnist = _image_examples()[0]
    found = []
    for prefix in ("mnist/", "../../", "/"):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for name, content in mnist.items():
                info = tarfile.TarInfo(prefix + name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            link = tarfile.TarInfo("train-images-idx3-ubyte-link")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
        found.append({"mnist.tar.gz": packed.getvalue()})
    return tuple(found)


def read_archive(folder: Path, out: Path) -> None:
    source = next(iter(folder.iterdir()), folder)
    obtaining.obtain(catalog.entry("mnist", 1), out / "data", str(source))


def _review_examples() -> tuple[Files, ...]:
    rows = [(f'review {i}, "quoted" \\n and more', i % 5) for i in range(30)]
    lines = [json.dumps({"text": text, "label": label}) for text, label in rows]
    yelp = io.StringIO()
    csv.writer(yelp).writerows([label + 1, text] for text, label in rows)
    movies = io.StringIO()
    csv.writer(movies).writerows(
        [["text", "label", "source"], *([text, label % 2, "imdb"] for text, label in rows)]
    )
    found: list[Files] = [
        {"train.jsonl": "\n".join(lines).encode(), "test.jsonl": "\n".join(lines[:5]).encode()},
        {"train.csv": yelp.getvalue().encode(), "test.csv": yelp.getvalue().encode()},
        {"movies.csv": movies.getvalue().encode()},
    ]
    with contextlib.suppress(ImportError):
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({"text": [t for t, _ in rows], "label": [n for _, n in rows]})
        sink = io.BytesIO()
        parquet.write_table(table, sink)
        found.append({"train-0.parquet": sink.getvalue(), "test-0.parquet": sink.getvalue()})
    return tuple(found)


def read_reviews(folder: Path, _out: Path) -> None:
    for split in reviews.SPLITS:
        reviews.load(str(folder), split, limit=7)


def read_text(folder: Path, _out: Path) -> None:
    for path in texts.find_documents([folder]):
        for document in texts.read_documents(path) or []:
            for piece in texts.pieces(document, 200):
                texts.encode_bytes(piece)


TEXT_EXAMPLES: tuple[Files, ...] = (
    {"a.txt": b"Some text.\nMore of it.\n" * 20},
    {"a.jsonl": b'{"text": "one"}\n{"text": "two"}\n'},
    {"a.jsonl.gz": gzip.compress(b'{"text": "one"}\n{"text": "two"}\n')},
)


def _vocabulary_examples() -> tuple[Files, ...]:
    letters = bpe._printable_bytes()
    encoder = {letters[b]: b for b in range(256)} | {"ab": 256, bpe.GPT2_END: 257}
    lines = [f"{base64.b64encode(bytes([b])).decode()} {b}" for b in range(256)]
    return {"encoder.json": json.dumps(encoder).encode()}, {
        "gpt2.tiktoken": "\n".join(lines).encode()
    }


def read_vocabulary(folder: Path, _out: Path) -> None:
    vocabulary = bpe.read_vocabulary(folder)
    bpe.encoder(vocabulary)("abc abracadabra")


# ------------------------------------------------------------------ traces


def _gloo_trace(rank: int) -> bytes:
    events = []
    for i in range(3):
        at = 1000.0 * i + 0.125
        events += [
            chrome.step(i, at, 990),
            chrome.span("forward", at + 10, 300),
            chrome.operator("aten::linear", at + 20, 200),
            chrome.operator("aten::addmm", at + 30, 100),
            chrome.span(f"shardlab::all_reduce #{i} bucket 0", at + 400, 20),
            chrome.span("gloo:all_reduce", at + 420 + 10 * rank, 100, chrome.GLOO,
                        **{"Input Dims": [[128]], "Input type": ["float"]}),
            chrome.span(f"shardlab::wait:all_reduce #{i} bucket 0", at + 430, 100),
            {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 7,
             "tid": chrome.MAIN, "ts": at + 50, "args": {"Total Allocated": 1000 + i, "Bytes": 64,
             "Total Reserved": 4096, "Device Type": 0, "Device Id": -1, "Addr": 1}},
        ]  # fmt: skip
    stamp = {"rank": rank, "world": 2, "strategy": "simple_ddp", "run": "a", "steps": [0, 1, 2]}
    return json.dumps(
        chrome.document(events, rank, 2, shardlab=stamp, baseTimeNanoseconds=1_700_000_000)
    ).encode()


def _gpu_trace(rank: int) -> bytes:
    events = []
    for i in range(3):
        at = 1_712_195_495_519_689.047 + 1000 * i
        events.append(chrome.step(i, at, 990))
        events += chrome.kernel("gemm", at + 20, 300, launched=at + 5, id=10 * i + 1)
        events += chrome.kernel(
            "ncclDevKernel_AllReduce_Sum_f32", at + 200 + 5 * rank, 400, launched=at + 8,
            id=10 * i + 2, stream=20,
            **{"Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024,
               "Group size": 2, "dtype": "Float", "Process Group Name": "0", "Seq": i,
               "Process Group Ranks": "[0, 1]"},
        )  # fmt: skip
        events += chrome.kernel("Memcpy HtoD", at + 700, 20, launched=at + 9, id=10 * i + 3,
                                cat="gpu_memcpy")  # fmt: skip
    about = {"deviceProperties": [{"id": 0, "name": "H200"}]}
    return json.dumps(chrome.document(events, rank, 2, **about)).encode()


def _trace_examples() -> tuple[Files, ...]:
    ours = {f"traces/rank{r}/window0.json.gz": gzip.compress(_gloo_trace(r), 1) for r in (0, 1)}
    plain = {f"rank{r}.json": _gloo_trace(r) for r in (0, 1)}
    gpu = {f"rank-{r}.json": _gpu_trace(r) for r in (0, 1)}
    alone = {"trace.json": json.dumps(json.loads(_gpu_trace(0))["traceEvents"]).encode()}
    return ours, plain, gpu, alone


def read_traces(folder: Path, out: Path) -> None:
    command("trace", "analyze", folder, "--out", out / "analysis", "--jobs", 1)


def read_traces_as_hta(folder: Path, out: Path) -> None:
    command("trace", "analyze", folder, "--out", out / "analysis", "--jobs", 1, "--select", "all",
            "--hta-compat")  # fmt: skip


def diff_traces(folder: Path, out: Path) -> None:
    command("trace", "diff", folder, folder, "--out", out / "diff", "--jobs", 1)


# ------------------------------------------------------------------ what runs leave behind


def _record() -> dict[str, Any]:
    cells = [
        cell("single", 200.0),
        cell("zero3", 150.0, profile=explained(150.0), proof=proof(True), sent={"bytes": 1000}),
    ]
    return result_of(*cells) | {"config": configs.Config().to_dict()}


def read_record(folder: Path, _out: Path) -> None:
    """As ``compare --against``: before the ranks start, and after they have measured."""
    old = gate.read(folder)
    config = configs.Config().with_overrides({"launch.world": 2, "strategy.name": "zero3"})
    gate.refuse_others(old, [Cell(config, "zero3")])
    found = gate.check(_record(), old, {"slower": 0.05, "memory": 0.1})
    with silent():
        console.print_gate(found)


def _begun() -> Files:
    """An interrupted comparison: what ``compare --resume`` reads."""
    config = configs.Config().with_overrides({"launch.world": 2, "strategy.name": "zero3"})
    cells = [Cell(config, "zero3"), Cell(config, "pytorch_ddp")]
    plan = {"command": "shardlab compare", **resuming.settings(cells, Plan())}
    cells[0].times_ms = [[10.0, 11.0], [10.0, 12.0]]
    cells[0].losses, cells[0].samples = [3.0, 2.0], 8
    kept = {"label": "zero3", **cells[0].measured()}
    return {"cells/plan.json": json.dumps(plan).encode(), "cells/0.json": json.dumps(kept).encode()}


def read_begun(folder: Path, _out: Path) -> None:
    cells, plan, _command = resuming.Store(folder).planned()
    resuming.refuse_others((cells, plan), (cells, plan), folder)
    assert all(isinstance(value, float) for c in cells for row in c.times_ms for value in row)


def _checkpoints() -> tuple[Files, Files]:
    """A checkpoint, and a run folder that holds two and did not finish."""
    torch.manual_seed(0)
    model = gpt2.GPT2(gpt2.Shape(layers=1, heads=2, dim=8, context=8, vocab=11))
    state = {name: tensor.detach() for name, tensor in model.named_parameters()}
    with tempfile.TemporaryDirectory() as place:
        weights, made = Path(place) / "model.safetensors", Path(place) / "made"
        huggingface.save_safetensors(weights, state)
        convert.import_(weights, made, convert.SAFETENSORS)
        one = {path.name: path.read_bytes() for path in made.iterdir()}
    rows = [{"step": i, "loss": 2.0, "step_ms": 3.0} for i in range(5)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    config = configs.Config().with_overrides({"model.size": "tiny", "launch.world": 2})
    run = {
        "config.yaml": config.to_yaml().encode(),
        "status.json": json.dumps({"state": "crashed", "pids": [1, 2], "host": "x"}).encode(),
        "rank0.jsonl": lines,
        "rank1.jsonl": lines,
        "ledger.rank0.jsonl": lines,
        "checkpoints.jsonl": b'{"step": 2, "error": null}\n{"step": 4, "error": null}\n',
        "faults.rank0.jsonl": b'{"fault": "kill:rank=0,step=1", "rank": 0, "step": 1}\n',
    }
    for step in ("step-000002", "step-000004"):
        run |= {f"checkpoints/{step}/{name}": content for name, content in one.items()}
    return one, run


def read_checkpoint(folder: Path, out: Path) -> None:
    """As ``checkpoint show``, ``train --resume PATH`` before ranks, and ``checkpoint export``."""
    command("checkpoint", "show", folder)
    base = starts.settings_of(str(folder))
    with contextlib.suppress(UsageError):
        config_of(None, None, {"checkpoint.resume": str(folder)}, base)
    command("checkpoint", "export", folder, "--to", out / "model.safetensors")


def read_resealed(folder: Path, out: Path) -> None:
    """The same of one whose checksums are right: damaged on purpose, or by whoever wrote it."""
    for path in folder.rglob(manifest.NAME):
        with contextlib.suppress(Exception):
            content = json.loads(path.read_bytes())
            for name, entry in content["checkpoint"]["files"].items():
                assert (path.parent / name).is_file()
                data = (path.parent / name).read_bytes()
                entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            content["sha256"] = manifest._sum_of(content["checkpoint"])
            path.write_text(json.dumps(content))
    read_checkpoint(folder, out)


def go_on(folder: Path, _out: Path) -> None:
    """As ``train --resume auto``, before its ranks load anything."""
    config = configs.Config().with_overrides(
        {"output.dir": str(folder), "checkpoint.resume": "auto"}
    )
    starts.find_run(config)
    list(files.unfinished(folder.parent))
    for path in files.steps_in(folder).values():
        with contextlib.suppress(UsageError):
            manifest.verify(path, manifest.read(path).files)
    inject.fired(folder)
    runfolder.cut_back(folder, 3)
    command("checkpoint", "show", folder)


ONE, RUN = _checkpoints()
SUBJECTS = (
    Subject("config", _config_examples(), read_config, 4, is_named=True),
    Subject("--set", ({"settings.txt": SETTINGS},), read_settings, forgives=True, is_named=True),
    Subject("token shards", ({"a.bin": shard(), "dataset.json": json.dumps(DESCRIBED).encode()},
                             {"a.bin": shard(), "b_val_0.bin": shard(600)}), read_tokens, 2),
    Subject("images", _image_examples(), read_images, 2),
    Subject("archive", _archive_examples(), read_archive, is_named=True),
    Subject("reviews", _review_examples(), read_reviews, 2),
    Subject("text", TEXT_EXAMPLES, read_text),
    Subject("vocabulary", _vocabulary_examples(), read_vocabulary),
    Subject("traces", _trace_examples(), read_traces, 4),
    Subject("traces, as HTA", _trace_examples(), read_traces_as_hta),
    Subject("traces, compared", _trace_examples(), diff_traces),
    Subject("compare.json", ({"compare.json": json.dumps(_record()).encode()},), read_record, 2,
            is_named=True),
    Subject("compare, interrupted", (_begun(),), read_begun, 2),
    Subject("checkpoint", (ONE,), read_checkpoint, 1),
    Subject("checkpoint, resealed", (ONE,), read_resealed, 2),
    Subject("run folder", (RUN,), go_on, 2, forgives=True),
)  # fmt: skip
