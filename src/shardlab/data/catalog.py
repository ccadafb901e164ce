"""The data sets that `shardlab data fetch` knows, and where they are on the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardlab.errors import UsageError, unknown


@dataclass(frozen=True)
class Entry:
    name: str
    about: str
    repo: str
    files: tuple[str, ...]  # their paths in the repository
    kind: str  # tokens, images, reviews or vocabulary: how it is read, and counted
    wanted: tuple[str, ...]  # names of its files, as patterns, in a folder that a user has
    repo_type: str = "dataset"
    instead: str = ""  # what to do without a network


FINEWEB = "fineweb"
FINEWEB_SHARDS = 103
PARQUET = ("train*.parquet", "test*.parquet")
IMAGES = (*PARQUET, "train-*-idx?-ubyte*", "t10k-*-idx?-ubyte*")


def _splits(folder: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{split}-00000-of-00001.parquet" for split in ("train", "test"))


ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(
            FINEWEB,
            "FineWeb, 10 B tokens of web text in GPT-2's vocabulary: 103 shards of 100 M",
            "kjj0/fineweb10B-gpt2",
            (),  # the number of shards that the user asks for
            kind="tokens",
            wanted=("fineweb_*.bin",),
            instead="make shards of text that you have: shardlab data text PATH --out DIR",
        ),
        Entry(
            "yelp",
            "Yelp Review Full: 650,000 reviews with one to five stars, 50,000 held out",
            "Yelp/yelp_review_full",
            _splits("yelp_review_full"),
            kind="reviews",
            wanted=(*PARQUET, "train.csv", "test.csv"),
        ),
        Entry(
            "cifar10",
            "CIFAR-10: 50,000 colour images of 32 x 32 in ten classes, 10,000 held out",
            "uoft-cs/cifar10",
            _splits("plain_text"),
            kind="images",
            wanted=IMAGES,
        ),
        Entry(
            "mnist",
            "MNIST: 60,000 handwritten digits of 28 x 28, 10,000 held out",
            "ylecun/mnist",
            _splits("mnist"),
            kind="images",
            wanted=IMAGES,
        ),
        Entry(
            "fashion_mnist",
            "Fashion-MNIST: 60,000 pictures of clothes of 28 x 28, 10,000 held out",
            "zalando-datasets/fashion_mnist",
            _splits("fashion_mnist"),
            kind="images",
            wanted=IMAGES,
        ),
        Entry(
            "gpt2_vocab",
            "GPT-2's vocabulary of 50,257 tokens, for shardlab data text",
            "openai-community/gpt2",
            ("vocab.json",),
            kind="vocabulary",
            wanted=("vocab.json", "encoder.json"),
            repo_type="model",
        ),
    )
}


def entry(name: str, shards: int = 1) -> Entry:
    """The data set of a name; of fineweb, its first ``shards`` and the held-out one."""
    if name not in ENTRIES:
        raise unknown("data set", name, ENTRIES)
    found = ENTRIES[name]
    if name != FINEWEB:
        if shards != 1:
            raise UsageError(f"--shards is for {FINEWEB}; {name} is fetched whole")
        return found
    if not 1 <= shards <= FINEWEB_SHARDS:
        raise UsageError(f"FineWeb has 1 to {FINEWEB_SHARDS} shards, not {shards}")
    names = ["val_000000", *(f"train_{i:06d}" for i in range(1, shards + 1))]
    return replace(found, files=tuple(f"fineweb_{name}.bin" for name in names))
