"""The data sets that `shardlab data` knows, and where each can be had.

It comes from the hub or its authors' site, or from a file or folder that the user has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from shardlab.errors import UsageError, unknown


@dataclass(frozen=True)
class File:
    url: str
    sha256: str | None = None  # None: dataset.json keeps that of the first download

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name


@dataclass(frozen=True)
class Entry:
    name: str
    about: str
    wanted: tuple[str, ...]  # names of its files, as patterns, in an archive or folder
    files: tuple[File, ...]
    kind: str  # tokens, images, reviews or vocabulary: how it is read, and counted
    instead: str = ""  # what to do without a network


HUB = "https://huggingface.co"
MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist"
FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
IDX = ("train-images*idx3-ubyte*", "train-labels*idx1-ubyte*",
       "t10k-images*idx3-ubyte*", "t10k-labels*idx1-ubyte*")  # fmt: skip
FINEWEB_SHARDS = 103

ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(
            "fineweb",
            "FineWeb, 10 B tokens of web text in GPT-2's vocabulary: 103 shards of 100 M",
            ("fineweb_*.bin",),
            (),  # as many as are asked for
            kind="tokens",
            instead="make shards of text that you have: shardlab data text PATH --out DIR",
        ),
        Entry(
            "yelp",
            "Yelp Review Full: 650,000 reviews with one to five stars, 50,000 held out",
            ("train*.parquet", "test*.parquet", "train.csv", "test.csv", "train*.jsonl",
             "test*.jsonl"),
            tuple(
                File(f"{HUB}/datasets/Yelp/yelp_review_full/resolve/main/yelp_review_full/{split}"
                     "-00000-of-00001.parquet")
                for split in ("train", "test")
            ),
            kind="reviews",
        ),
        Entry(
            "cifar10",
            "CIFAR-10: 50,000 colour images of 32 x 32 in ten classes, 10,000 held out",
            ("data_batch_[1-5].bin", "test_batch.bin"),
            (File("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),),
            kind="images",
        ),
        Entry(
            "mnist",
            "MNIST: 60,000 handwritten digits of 28 x 28, 10,000 held out",
            IDX,
            tuple(
                File(f"{MNIST_URL}/{name}-ubyte.gz", sha256)
                for name, sha256 in (
                    ("train-images-idx3",
                     "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
                    ("train-labels-idx1",
                     "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
                    ("t10k-images-idx3",
                     "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
                    ("t10k-labels-idx1",
                     "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
                )
            ),
            kind="images",
        ),
        Entry(
            "fashion_mnist",
            "Fashion-MNIST: 60,000 pictures of clothes of 28 x 28, 10,000 held out",
            IDX,
            tuple(
                File(f"{FASHION_URL}/{name}-ubyte.gz")
                for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3",
                             "t10k-labels-idx1")
            ),
            kind="images",
        ),
        Entry(
            "gpt2_vocab",
            "GPT-2's vocabulary of 50,257 tokens, for shardlab data text",
            ("vocab.json", "encoder.json"),
            (File(f"{HUB}/openai-community/gpt2/resolve/main/vocab.json",
                "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),),
            kind="vocabulary",
        ),
    )
}  # fmt: skip


def entry(name: str, shards: int = 1) -> Entry:
    """The data set of a name; of fineweb, its first ``shards`` and the held-out one."""
    if name not in ENTRIES:
        raise unknown("data set", name, ENTRIES)
    found = ENTRIES[name]
    if name != "fineweb":
        return found
    if not 1 <= shards <= FINEWEB_SHARDS:
        raise UsageError(f"FineWeb has 1 to {FINEWEB_SHARDS} shards, not {shards}")
    names = ["val_000000", *(f"train_{i:06d}" for i in range(1, shards + 1))]
    base = f"{HUB}/datasets/kjj0/fineweb10B-gpt2/resolve/main"
    return replace(found, files=tuple(File(f"{base}/fineweb_{n}.bin") for n in names))
