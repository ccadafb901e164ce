"""What the corpus is made of: for each kind of file that we read, valid examples and a reader.

A reader does what the command does, with the same functions, up to where ranks would start. It
may raise UsageError; anything else is a traceback that would have reached a user.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
import yaml

import chrome_trace
import data_files
from data_files import Files, json_lines
from results import cell, explained, proof, result_of
from shardlab import cli, runfolder
from shardlab import config as configs
from shardlab.checkpoint import convert, files, manifest
from shardlab.checkpoint import resume as resumes
from shardlab.cli.flags import Asked
from shardlab.data import bpe, catalog, fetching, images, loader, reviews
from shardlab.data import text as texts
from shardlab.errors import UsageError
from shardlab.faults import inject
from shardlab.measure import gate
from shardlab.measure.cells import Cell
from shardlab.report import console
from shardlab.training import builders, loop
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
    names_code: bool = False  # that a user wants to have run


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


def feed(dataset: Dataset) -> None:
    """The first, middle and last samples, as a run of two ranks would read them."""
    order = loader.Order(len(dataset), 4, 1, 0, True, "continuous")
    for step in (0, len(dataset) // 8, len(dataset) // 4):
        for rank in range(2):
            for part in order.share(step, 2, rank):
                loader.fetch(dataset, part, order, step)


# ------------------------------------------------------------------ configs


def _config_examples() -> tuple[Files, ...]:
    folder = Path(__file__).parents[2] / "examples"
    found = [*folder.glob("*.yaml"), *folder.glob("experiments/*.yaml")]
    real = [path.read_bytes() for path in sorted(found)]
    whole = configs.Config().to_dict()
    whole["data"]["source"] = "synthetic"
    whole["strategy"] = {"name": "pytorch_ddp", "options": {"bucket_mb": 4}}
    whole["model"] = {"workload": "gpt2", "size": "tiny", "options": {"layers": 2, "vocab": 300}}
    cnn = {"model": {"workload": "cnn_mnist"}, "data": {"source": "synthetic"}}
    made = [yaml.safe_dump(value, sort_keys=False).encode() for value in (whole, cnn)]
    return tuple({"config.yaml": content} for content in (*made, *real[:4]))


def read_config(folder: Path, _out: Path) -> None:
    config = configs.load(folder / "config.yaml").with_overrides({"output.dir": None})
    builders.resolve_strategy(config)
    if ":" in config.model.workload:
        return  # the user's own code may do as it likes
    workload = builders.build_workload(config)
    loop.data_order(workload, config)
    builders.make_rule(config)


def read_settings(folder: Path, _out: Path) -> None:
    """Each line as a --set."""
    try:
        content = (folder / "settings.txt").read_bytes().decode("utf-8", "replace")
    except OSError as error:  # not a file that a command reads
        raise UsageError(str(error)) from None
    for line in content.splitlines()[:50]:
        with contextlib.suppress(UsageError):
            Asked(None, [line], {}, quiet=True, as_json=False).config()


SETTINGS = b"""training.steps=5
training.learning_rate=1e-4
model.options.layers=3
strategy.options={bucket_mb: 4}
data.source=synthetic
launch.world=2
"""

# ------------------------------------------------------------------ data


SHARD = data_files.shard(i % 256 for i in range(2000))
DESCRIBED = {"name": "text", "kind": "tokens", "tokenizer": "bytes", "vocab": 256, "tokens": 2000,
             "end_of_text": 0, "documents": 3, "shards": {"a.bin": 2000}}  # fmt: skip


def read_tokens(folder: Path, _out: Path) -> None:
    with contextlib.suppress(UsageError):
        command("data", "show", folder)
    config = configs.from_dict(
        {"model": {"size": "tiny"}, "data": {"source": str(folder), "seq_len": 32}}
    )
    feed(builders.build_workload(config).dataset)


def _image_examples() -> tuple[Files, ...]:
    mnist = data_files.mnist(12, 4)
    lines = [",".join(map(str, [*range(16), *[0] * 48, i % 10])) for i in range(400)]
    digits = {"digits.csv.gz": gzip.compress("\n".join(lines).encode())}
    return mnist, data_files.zipped(mnist), digits


def read_images(folder: Path, _out: Path) -> None:
    name = "digits" if any(folder.glob("*.csv.gz")) else "mnist"
    for split in images.SPLITS:
        loaded = images.load(name, str(folder), split)
        if len(loaded.labels):
            feed(dataclasses.replace(loaded, augment=True))


def _fetched_examples() -> tuple[Files, ...]:
    """MNIST as the hub has it, and as its authors do."""
    hubs = {f"mnist/{s}-00000.parquet": data_files.png_rows(4, 0) for s in images.SPLITS}
    return hubs, data_files.mnist(12, 4)


def fetch_images(folder: Path, out: Path) -> None:
    fetching.fetch(catalog.entry("mnist"), out / "data", str(folder))


def _review_examples() -> tuple[Files, ...]:
    texts, labels = [f'review {i}, "quoted" \n and more' for i in range(30)], [*range(5)] * 6
    both = [data_files.reviews(texts, labels, split) for split in reviews.SPLITS]
    movies = [[text, label % 2, "imdb"] for text, label in zip(texts, labels, strict=True)]
    own = {"movies.csv": data_files.table([["text", "label", "source"], *movies])}
    return *({**both[0][kind], **both[1][kind]} for kind in both[0]), own


def read_reviews(folder: Path, _out: Path) -> None:
    for split in reviews.SPLITS:
        reviews.load(str(folder), split, limit=7)


def read_text(folder: Path, _out: Path) -> None:
    for path in texts.find_documents([folder]):
        for document in texts.read_documents(path) or []:
            for piece in texts.pieces(document, 200):
                texts.encode_bytes(piece)


LINES = {"a.jsonl": json_lines([{"text": "one"}, {"text": "two"}])}
TEXT_EXAMPLES = {"a.txt": b"Some text.\nMore of it.\n" * 20}, LINES, data_files.zipped(LINES)


def _vocabulary_examples() -> tuple[Files, ...]:
    encoder = json.dumps(data_files.vocabulary()).encode()
    lines = [f"{base64.b64encode(bytes([b])).decode()} {b}" for b in range(256)]
    return {"encoder.json": encoder}, {"gpt2.tiktoken": "\n".join(lines).encode()}


def read_vocabulary(folder: Path, _out: Path) -> None:
    vocabulary = bpe.read_vocabulary(folder)
    bpe.encoder(vocabulary)("abc abracadabra")


# ------------------------------------------------------------------ traces


def _gpu_trace(rank: int) -> bytes:
    events = []
    for i in range(3):
        at = 1_712_195_495_519_689.047 + 1000 * i
        events.append(chrome_trace.step(i, at, 990))
        events += chrome_trace.kernel("gemm", at + 20, 300, launched=at + 5, id=10 * i + 1)
        events += chrome_trace.kernel(
            "ncclDevKernel_AllReduce_Sum_f32", at + 200 + 5 * rank, 400, launched=at + 8,
            id=10 * i + 2, stream=20,
            **{"Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024,
               "Group size": 2, "dtype": "Float", "Process Group Name": "0", "Seq": i,
               "Process Group Ranks": "[0, 1]"},
        )  # fmt: skip
        events += chrome_trace.kernel("Memcpy HtoD", at + 700, 20, launched=at + 9, id=10 * i + 3,
                                cat="gpu_memcpy")  # fmt: skip
    about = {"deviceProperties": [{"id": 0, "name": "H200"}]}
    return json.dumps(chrome_trace.document(events, rank, 2, **about)).encode()


def _trace_examples() -> tuple[Files, ...]:
    with tempfile.TemporaryDirectory() as place:
        chrome_trace.a_run(Path(place), operators=2)
        made = [(Path(place) / f"rank{r}.json").read_bytes() for r in (0, 1)]
    ours = {f"traces/rank{r}/window0.json.gz": gzip.compress(made[r], 1) for r in (0, 1)}
    recorded = (chrome_trace.RECORDED / "gloo_two_groups").iterdir()
    plain = {path.stem: gzip.decompress(path.read_bytes()) for path in recorded}
    gpu = {f"rank-{r}.json": _gpu_trace(r) for r in (0, 1)}
    alone = {"trace.json": json.dumps(json.loads(_gpu_trace(0))["traceEvents"]).encode()}
    return ours, plain, gpu, alone


def analyze(*flags: str) -> Callable[[Path, Path], None]:
    return lambda folder, out: command(
        "trace", "analyze", folder, "--out", out / "analysis", "--jobs", 1, *flags
    )


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
    lines = json_lines({"step": i, "loss": 2.0, "step_ms": 3.0} for i in range(5))
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
    base = resumes.settings_of(str(folder))
    with contextlib.suppress(UsageError):
        flags = {"checkpoint.resume": str(folder)}
        Asked(None, [], flags, quiet=True, as_json=False).config(base)
    command("checkpoint", "export", folder, "--out", out / "model.safetensors")


def read_resealed(folder: Path, out: Path) -> None:
    """The same of one whose checksums are right: damaged on purpose, or by whoever wrote it."""
    for path in (path for path in folder.rglob(manifest.NAME) if path.is_file()):
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
    resumes.find_run(config)
    list(files.unfinished(folder.parent))
    for path in files.steps_in(folder).values():
        with contextlib.suppress(UsageError):
            manifest.verify(path, manifest.read(path).files)
    inject.fired(folder)
    runfolder.cut_back(folder, 3)
    command("checkpoint", "show", folder)


ONE, RUN = _checkpoints()
TRACES = _trace_examples()
SUBJECTS = (
    Subject("config", _config_examples(), read_config, 4, is_named=True,
            names_code=True),
    Subject("--set", ({"settings.txt": SETTINGS},), read_settings, forgives=True, is_named=True,
            names_code=True),
    Subject("token shards", ({"a.bin": SHARD, "dataset.json": json.dumps(DESCRIBED).encode()},
                             {"a.bin": SHARD, "b_val_0.bin": SHARD}), read_tokens, 2),
    Subject("images", _image_examples(), read_images, 2),
    Subject("fetched images", _fetched_examples(), fetch_images),
    Subject("reviews", _review_examples(), read_reviews, 2),
    Subject("text", TEXT_EXAMPLES, read_text),
    Subject("vocabulary", _vocabulary_examples(), read_vocabulary),
    Subject("traces", TRACES, analyze(), 4),
    Subject("traces, as HTA", TRACES, analyze("--select", "all", "--hta-compat")),
    Subject("traces, compared", TRACES, diff_traces),
    Subject("compare.json", ({"compare.json": json.dumps(_record()).encode()},), read_record, 2,
            is_named=True),
    Subject("checkpoint", (ONE,), read_checkpoint, 1),
    Subject("checkpoint, resealed", (ONE,), read_resealed, 2),
    Subject("run folder", (RUN,), go_on, 2, forgives=True),
)  # fmt: skip
