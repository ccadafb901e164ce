"""How fast the ranks' network is: each collective by size, each link, and lines fitted to them.

``on_rank`` runs on every rank and takes the times. All else here is pure: times to numbers and
words.

A collective's time is modelled as α + β·bytes, where bytes are those that a link must carry
(``wire.bus_bytes``): α is what even an empty call costs, 1/β the rate of large tensors, which is
nccl-tests' bus bandwidth. A link is measured by itself, with messages between two ranks: half a
round trip of a small one is its latency, and the arrival of a stream of large ones its bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from shardlab import stats, wire
from shardlab import text as fmt

if TYPE_CHECKING:
    from torch import Tensor

    from shardlab.world import World

SCHEMA = 1
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
SMALLEST = 1024
GROWTH = 4  # from one size to the next
LEAST = SMALLEST * GROWTH**2  # of the largest size: a line needs three points
MOST_CALLS = 20  # of one collective and size in a round
ELEMENT = 4  # bytes: float32

TRIPS = 20  # round trips of a small message in a round
CHUNK = 2**20  # bytes of each message of a stream
STREAM_S = 0.3  # how long a stream should last
LEAST_CHUNKS, MOST_CHUNKS = 8, 256
LEAST_ROUNDS = 2  # without a second one nobody knows how far they differ
MOST_PAIRS = 28  # all pairs of 8 nodes; with more nodes, each with its next

SLOW_RATE = 0.6  # of the best link's bandwidth: what is below is clearly slower
SLOW_LATENCY = 1.7  # times the best link's latency
LEAST_LATENCY_S = 100e-6  # by which a clearly slower link is also slower


@dataclass(frozen=True)
class Plan:
    max_size: int = 256 * 2**20
    rounds: int = 5  # fewer where the time is short, but two
    time_limit_s: float = 60.0  # for everything
    begun: float = field(default_factory=time.time)  # on this host, whose ranks go by it

    def sizes(self) -> list[int]:
        """1 KiB, and four times as much each time."""
        sizes = [SMALLEST]
        while sizes[-1] * GROWTH <= self.max_size:
            sizes.append(sizes[-1] * GROWTH)
        return sizes


class Place(TypedDict):
    """Where a rank is."""

    rank: int
    node: int
    host: str


class Fit(TypedDict):
    """time = alpha_s + beta_s_per_byte * (bytes that a link carries)"""

    op: str
    alpha_s: float
    alpha_95: tuple[float, float]
    beta_s_per_byte: float
    beta_95: tuple[float, float]
    half_bytes: float | None  # the tensor for which α is half of the time
    worst: float  # how far a measured point is from the line, as a part of its time


# ------------------------------------------------------------------ on the ranks


def on_rank(world: World, plan: Plan) -> dict[str, Any]:
    """Every point and link, measured by all ranks together. The same on every rank."""
    from shardlab.launch import environment
    from shardlab.ledger import LEDGER

    nodes = environment.nodes_of(world)
    places = [
        Place(rank=rank, node=number, host=node["host"])
        for number, node in enumerate(nodes)
        for rank in node["ranks"]
    ]
    places.sort(key=lambda place: place["rank"])
    LEDGER.reset(full_steps=0)
    LEDGER.step = 0  # a step of which no entry is kept
    try:
        pairs = pairs_of(places)
        most_s = max(0.0, _left(world, plan)) / 2 / len(pairs)  # the rest is the collectives'
        links = [_measure_link(world, plan, pair, most_s) for pair in _told(world, pairs)]
        points, skipped = _measure_collectives(world, plan)
    finally:
        LEDGER.reset()
    return {
        "world": world.size,
        "backend": world.backend,
        "device": world.device.type,
        "env": environment.describe(world.device, ""),
        "places": places,
        "points": points,
        "skipped": skipped,
        "links": links,
    }


def _told(world: World, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The pairs, one after another, with word of it."""
    for i, pair in enumerate(pairs):
        if world.rank == 0:
            what = f"ranks {pair[0]} and {pair[1]}"
            world.tell({"what": what, "done": i, "total": len(pairs) + 1})
        yield pair


def _finish(world: World) -> None:
    if world.device.type == "cuda":
        import torch

        torch.cuda.synchronize()


def _slowest(world: World, seconds: Sequence[float]) -> list[float]:
    """Of each time, that of the rank which took longest."""
    import torch

    from shardlab import comm

    times = torch.tensor(seconds, dtype=torch.float64, device=world.device)
    comm.all_reduce(times, world.group, op="max")
    found: list[float] = times.tolist()
    return found


def _left(world: World, plan: Plan) -> float:
    """Seconds of the time limit that are left, below 0 if it is over: the same on all ranks, which
    decide by it."""
    return plan.time_limit_s - _slowest(world, [time.time() - plan.begun])[0]


def _timed(world: World, call: Callable[[], Any], calls: int) -> list[float]:
    """Seconds of each call, of the slowest rank. All ranks begin together, after a barrier: called
    back to back, the source of a broadcast would run ahead of those that receive."""
    from shardlab import comm

    seconds = []
    for _ in range(calls):
        comm.barrier(world.group)
        _finish(world)
        begin = time.perf_counter()
        call()
        _finish(world)
        seconds.append(time.perf_counter() - begin)
    return _slowest(world, seconds)


def _call_of(op: str, tensor: Tensor, shard: Tensor, world: World) -> Callable[[], Any]:
    from shardlab import comm

    group = world.group
    return {
        "all_reduce": lambda: comm.all_reduce(tensor, group),
        "broadcast": lambda: comm.broadcast(tensor, group),
        "all_gather": lambda: comm.all_gather(tensor, shard, group),
        "reduce_scatter": lambda: comm.reduce_scatter(shard, tensor, group),
    }[op]


def _measure_collectives(
    world: World, plan: Plan
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Each collective at each size, in rounds; and those for which the time would not do.

    Small sizes come first, so that what is left out is what is dear. What the chosen ones leave of
    the time makes more calls of each.
    """
    import torch

    from shardlab import comm

    counts = {size: -(-size // ELEMENT // world.size) * world.size for size in plan.sizes()}
    buffer = torch.zeros(max(counts.values()), device=world.device)
    spare = torch.zeros(max(counts.values()) // world.size, device=world.device)

    def call_of(op: str, size: int) -> Callable[[], Any]:
        count = counts[size]
        return _call_of(op, buffer[:count], spare[: count // world.size], world)

    took: dict[tuple[str, int], float] = {}  # one call, with the barrier before it
    skipped = []
    for size in plan.sizes():
        for op in COLLECTIVES:
            # To be tried twice, and called once in each round, as all that were chosen before.
            expected = GROWTH * took.get((op, size // GROWTH), 0.0)
            rounds_s = plan.rounds * (expected + sum(took.values()))
            is_least = size == SMALLEST
            if not is_least and (
                (op, size // GROWTH) not in took or 2 * expected + rounds_s > _left(world, plan)
            ):
                skipped.append({"op": op, "bytes": counts[size] * ELEMENT})
                continue
            _timed(world, call_of(op, size), 1)  # opens connections and touches memory
            begin = time.perf_counter()
            _timed(world, call_of(op, size), 1)
            took[op, size] = _slowest(world, [time.perf_counter() - begin])[0]
    share = max(0.0, _left(world, plan) / plan.rounds - sum(took.values())) / len(took)
    calls = {key: min(MOST_CALLS, 1 + int(share / one)) for key, one in took.items()}
    times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    barriers: list[float] = []
    before = _left(world, plan)
    for i in range(plan.rounds):
        left = _left(world, plan)
        if i >= LEAST_ROUNDS and (before - left) / i > left:  # another would take too long
            break
        if world.rank == 0:
            what = f"collectives, round {i + 1}"
            world.tell({"what": what, "done": i, "total": plan.rounds})
        for (op, size), n in calls.items():
            times[op, size].append(float(np.median(_timed(world, call_of(op, size), n))))
        begin = time.perf_counter()
        for _ in range(MOST_CALLS):
            comm.barrier(world.group)
        _finish(world)
        barriers += _slowest(world, [(time.perf_counter() - begin) / MOST_CALLS])
    points = [
        {"op": op, "bytes": counts[size] * ELEMENT, "calls": calls[op, size], "seconds": seconds}
        for (op, size), seconds in times.items()
    ]
    return [
        *points,
        {"op": "barrier", "bytes": 0, "calls": MOST_CALLS, "seconds": barriers},
    ], skipped


def _measure_link(world: World, plan: Plan, pair: tuple[int, int], most_s: float) -> dict[str, Any]:
    """Latency and bandwidth between two ranks, in rounds, for some seconds; the others wait."""
    from shardlab import comm

    found: dict[str, list[float]] = {}
    comm.barrier(world.group)
    if world.rank in pair:
        line = _Line(world, pair)
        line.latency(TRIPS)  # opens the connection
        stream_s = min(STREAM_S, most_s / (2 * plan.rounds + 1))
        chunks = _chunks(line.bandwidth(LEAST_CHUNKS, source=pair[0]), stream_s)
        rate = line.bandwidth(chunks, source=pair[0])  # one that is kept for a while
        chunks = _chunks(rate, stream_s)
        found = {"latency_s": [], "there_bytes_per_s": [], "back_bytes_per_s": []}
        affordable = int(most_s / (2 * chunks * CHUNK / rate))
        for _ in range(max(LEAST_ROUNDS, min(plan.rounds, affordable))):
            found["latency_s"].append(line.latency(TRIPS))
            found["there_bytes_per_s"].append(line.bandwidth(chunks, source=pair[0]))
            found["back_bytes_per_s"].append(line.bandwidth(chunks, source=pair[1]))
    return {"ranks": list(pair), **world.gather(found)[pair[0]]}


def _chunks(bytes_per_s: float, seconds: float) -> int:
    """Messages of a stream that lasts so long."""
    return max(LEAST_CHUNKS, min(int(seconds * bytes_per_s / CHUNK), MOST_CHUNKS))


class _Line:
    """Messages between two ranks. Both call the same methods, and get the same answers."""

    def __init__(self, world: World, pair: tuple[int, int]) -> None:
        import torch

        self.world = world
        self.is_first = world.rank == pair[0]
        self.other = pair[1] if self.is_first else pair[0]
        self.small = torch.zeros(1, dtype=torch.float64, device=world.device)
        self.chunk = torch.zeros(CHUNK // ELEMENT, device=world.device)

    def _send(self, tensor: Tensor, tag: int) -> Any:
        import torch.distributed as dist

        return dist.isend(tensor, group=self.world.group, group_dst=self.other, tag=tag)

    def _receive(self, tensor: Tensor, tag: int, count: int) -> Iterator[None]:
        """So many messages, one at each step of the iterator.

        Gloo sends a message when the receiver has said that it waits for it. So it is told of all
        of them in advance; else the link's latency would count more than once. (By the time of the
        first ``_word`` the other rank knows, as messages arrive in order.) NCCL's calls run one
        after another on a stream, and each is made in its turn.
        """
        import torch.distributed as dist

        group, works = self.world.group, []
        if group.name() == "gloo":
            works = [
                dist.irecv(tensor, group=group, group_src=self.other, tag=tag) for _ in range(count)
            ]

        def arrivals() -> Iterator[None]:
            for i in range(count):
                if works:
                    works[i].wait()  # type: ignore[union-attr]  # we are in the group
                else:
                    dist.recv(tensor, group=group, group_src=self.other, tag=tag)
                _finish(self.world)
                yield

        return arrivals()

    def _word(self, value: float, mine: bool) -> float:
        """One number from the rank that has it (``mine``) to the other."""
        if mine:
            self.small.fill_(value)
            self._send(self.small, tag=3).wait()
        else:
            next(self._receive(self.small, 3, 1))
        return float(self.small.item())

    def latency(self, trips: int) -> float:
        """Half the round trip of a small message, in seconds: the fastest of some, as the link is
        not to blame for what else the hosts do."""
        pongs = self._receive(self.small, 1, trips)
        self._word(0.0, self.is_first)
        self._word(0.0, not self.is_first)
        seconds = []
        for _ in range(trips):
            begin = time.perf_counter()
            if self.is_first:
                self._send(self.small, tag=1).wait()
            next(pongs)
            if not self.is_first:
                self._send(self.small, tag=1).wait()
            seconds.append(time.perf_counter() - begin)
        return self._word(min(seconds) / 2, self.is_first)

    def bandwidth(self, chunks: int, source: int) -> float:
        """Bytes per second of a stream, as it arrives. Its first quarter fills the queues between
        the two ranks, and does not count."""
        if self.world.rank == source:
            self._word(0.0, mine=False)
            for work in [self._send(self.chunk, tag=2) for _ in range(chunks)]:
                work.wait()
            return self._word(0.0, mine=False)
        arrivals = self._receive(self.chunk, 2, chunks)
        self._word(0.0, mine=True)
        times = [time.perf_counter() for _ in arrivals]
        first = chunks // 4
        rate = (chunks - 1 - first) * CHUNK / (times[-1] - times[first])
        return self._word(rate, mine=True)


# ------------------------------------------------------------------ places


def pairs_of(places: Sequence[Place]) -> list[tuple[int, int]]:
    """Which ranks are measured with each other: the first of each node with that of every other
    node, and with the second of its own. On one node, every rank with every other."""
    nodes: dict[int, list[int]] = {}
    for place in places:
        nodes.setdefault(place["node"], []).append(place["rank"])
    if len(nodes) == 1:
        return _paired(next(iter(nodes.values())))
    return _paired([ranks[0] for ranks in nodes.values()]) + [
        (ranks[0], ranks[1]) for ranks in nodes.values() if len(ranks) > 1
    ]


def _paired(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Each with each; if those are too many, each with the next."""
    pairs = list(combinations(ranks, 2))
    if len(pairs) <= MOST_PAIRS:
        return pairs
    return list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))


# ------------------------------------------------------------------ from times to numbers


def result_of(raw: Mapping[str, Any], plan: Plan, command: str) -> dict[str, Any]:
    """The content of ``network.json``, from what the ranks measured."""
    world, places = raw["world"], raw["places"]
    points = [
        {
            **point,
            "wire_bytes": wire.wire_bytes(point["op"], point["bytes"], world),
            "bus_bytes": wire.bus_bytes(point["op"], point["bytes"], world),
            "ms": stats.spread([1e3 * s for s in point["seconds"]]),
        }
        for point in raw["points"]
    ]
    links = [link_of(link, places) for link in raw["links"]]
    fits = [fit_of(op, points) for op in COLLECTIVES]
    result = {
        "schema": SCHEMA,
        **raw,
        "env": {**raw["env"], "command": command},
        "command": command,
        "rounds_asked": plan.rounds,
        "rounds": min(len(point["seconds"]) for point in points),
        "time_limit_s": plan.time_limit_s,
        "points": points,
        "links": links,
        "fits": [found for found in fits if found is not None],
        "slow": slow_of(links),
    }
    return {**result, "verdict": list(verdict(result))}


def link_of(link: Mapping[str, Any], places: Sequence[Place]) -> dict[str, Any]:
    """A link with its numbers: latency, and the bandwidth of its slower direction."""
    first, second = (places[rank] for rank in link["ranks"])
    there, back = (stats.spread(link[f"{way}_bytes_per_s"]) for way in ("there", "back"))
    return {
        **link,
        "nodes": [first["node"], second["node"]],
        "is_between_nodes": first["node"] != second["node"],
        "latency": stats.spread(link["latency_s"]),
        "bandwidth": min(there, back, key=lambda way: way["median"]),
        "there": there,
        "back": back,
    }


def fit_of(op: str, points: Sequence[Mapping[str, Any]]) -> Fit | None:
    """The line through a collective's points; None for fewer than three."""
    mine = [point for point in points if point["op"] == op]
    if len(mine) < 3:
        return None
    sent = np.array([point["bus_bytes"] for point in mine])
    times = np.array([point["seconds"] for point in mine])  # (sizes, rounds)
    alpha, beta = (float(value) for value in line_through(sent, np.median(times, axis=1)))
    alpha_95, beta_95 = intervals(sent, times)
    factor = sent[-1] / mine[-1]["bytes"]  # bytes on a link for one byte of the tensor
    measured = np.median(times, axis=1)
    return {
        "op": op,
        "alpha_s": alpha,
        "alpha_95": alpha_95,
        "beta_s_per_byte": beta,
        "beta_95": beta_95,
        "half_bytes": alpha / beta / factor if beta > 0 else None,
        "worst": float(np.max(np.abs(alpha + beta * sent - measured) / measured)),
    }


def line_through(x: Any, y: Any, weights: Any = 1.0) -> tuple[Any, Any]:
    """α and β, both at least 0, of y = α + β·x, with the least relative errors.

    Relative: a microsecond counts as much in ten as a millisecond does in ten thousand. Points far
    from the line count less (Huber's weights, in ten turns). ``y`` and ``weights`` may have more
    axes before the last one: one line for each row.
    """
    y = np.asarray(y, float)
    base = np.broadcast_to(weights, y.shape) / y**2
    use = base
    alpha = beta = np.zeros(y.shape[:-1])
    for _ in range(10):
        total, sum_x, sum_y = (np.sum(use * part, axis=-1) for part in (np.ones_like(y), x, y))
        sum_xx, sum_xy = np.sum(use * x * x, axis=-1), np.sum(use * x * y, axis=-1)
        spread = total * sum_xx - sum_x**2
        flat = spread <= 1e-12 * total * sum_xx  # one size alone has no slope
        slope = (total * sum_xy - sum_x * sum_y) / np.where(flat, 1.0, spread)
        beta = np.where(flat, 0.0, np.maximum(slope, 0.0))
        alpha = (sum_y - beta * sum_x) / total
        beta = np.where(alpha < 0, sum_xy / sum_xx, beta)
        alpha = np.maximum(alpha, 0.0)
        beta = np.where(beta * np.max(x) < 1e-9 * alpha, 0.0, beta)  # rounding
        residual = np.abs(alpha[..., None] + beta[..., None] * x - y) / y
        usual = 1.345 * 1.4826 * np.median(residual, axis=-1, keepdims=True) + 1e-12
        use = base * np.minimum(1.0, usual / np.maximum(residual, 1e-300))
    return alpha, beta


def intervals(
    sent: Any, times: Any, seed: int = 0
) -> tuple[tuple[float, float], tuple[float, float]]:
    """The 95% intervals of α and β, by a bootstrap over rounds and over sizes.

    What happened in a round happened to all sizes, so whole rounds are drawn. Sizes are drawn as
    well: where the points do not lie on a line, the answer depends on which were measured.
    """
    draw = np.random.default_rng(seed)
    sizes, rounds = times.shape
    chosen = draw.integers(rounds, size=(stats.DRAWS, rounds))
    medians = np.median(times[:, chosen], axis=-1).T  # (draws, sizes)
    counts = draw.multinomial(sizes, [1 / sizes] * sizes, size=stats.DRAWS)
    counts = counts[np.count_nonzero(counts, axis=1) > 1]
    alphas, betas = line_through(sent, medians[: len(counts)], counts)
    (low, high), (slow, fast) = (np.percentile(drawn, [2.5, 97.5]) for drawn in (alphas, betas))
    return (float(low), float(high)), (float(slow), float(fast))


# ------------------------------------------------------------------ in words


def slow_of(links: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The node or link that is clearly slower than the best of its kind, or None.

    A node is to blame if all its links are slow and it has at least two; else a link is.
    """
    for kind in (True, False):
        alike = [link for link in links if link["is_between_nodes"] is kind]
        if len(alike) < 2:
            continue
        fast = max(alike, key=lambda link: link["bandwidth"]["median"])
        near = min(alike, key=lambda link: link["latency"]["median"])
        narrow = [
            link
            for link in alike
            if link["bandwidth"]["median"] < SLOW_RATE * fast["bandwidth"]["median"]
            and link["bandwidth"]["p90"] < fast["bandwidth"]["p10"]
        ]
        far = [
            link
            for link in alike
            if link["latency"]["median"]
            > max(
                SLOW_LATENCY * near["latency"]["median"],
                near["latency"]["median"] + LEAST_LATENCY_S,
            )
            and link["latency"]["p10"] > near["latency"]["p90"]
        ]
        for what, slow, best in (("bandwidth", narrow, fast), ("latency", far, near)):
            if slow:
                return {"what": what, **_blamed(slow, alike, what), "best": best["ranks"]}
    return None


def _blamed(
    slow: Sequence[Mapping[str, Any]], alike: Sequence[Mapping[str, Any]], what: str
) -> dict[str, Any]:
    ends = "nodes" if slow[0]["is_between_nodes"] else "ranks"
    worst = (min if what == "bandwidth" else max)(slow, key=lambda link: link[what]["median"])
    for end in sorted(set.intersection(*(set(link[ends]) for link in slow))):
        if len(slow) > 1 and all(link in slow for link in alike if end in link[ends]):
            return {"node" if ends == "nodes" else "rank": end, "link": worst["ranks"]}
    return {"link": worst["ranks"], "others": len(slow) - 1}


def name_of(result: Mapping[str, Any], link: Mapping[str, Any]) -> str:
    """``node 0 – node 1``, or by ranks inside a node."""
    if link["is_between_nodes"]:
        return " – ".join(f"node {node}" for node in link["nodes"])
    ranks = " – ".join(f"rank {rank}" for rank in link["ranks"])
    several = len({place["node"] for place in result["places"]}) > 1
    return f"{ranks} (node {link['nodes'][0]})" if several else ranks


def rate(bytes_per_s: float) -> str:
    """In bits, as links are sold: 0.982 Gbit/s."""
    unit, one = fmt.unit_of(8 * bytes_per_s, {"Gbit/s": 1e8, "Mbit/s": 1e6})
    one = 1e9 if unit == "Gbit/s" else one
    return f"{fmt.number(8 * bytes_per_s / one)} {unit}"


def _range(values: Sequence[float], text: Callable[[float], str]) -> str:
    return " to ".join(dict.fromkeys([text(min(values)), text(max(values))]))


def verdict(result: Mapping[str, Any]) -> Iterator[str]:
    """What was found, a sentence each."""
    links = {tuple(link["ranks"]): link for link in result["links"]}
    between = [link for link in links.values() if link["is_between_nodes"]]
    alike = between or list(links.values())
    worst = min(alike, key=lambda link: link["bandwidth"]["median"])
    latencies = [link["latency"]["median"] for link in alike]
    rates = [link["bandwidth"]["median"] for link in alike]
    what = "nodes" if between else "ranks"
    if len(alike) == 1:
        yield (
            f"{name_of(result, worst)}: {rate(rates[0])}, and {fmt.time(latencies[0])} one way for "
            "a small message"
        )
    else:
        yield f"between {what}: {_range(rates, rate)}, and {_range(latencies, fmt.time)} one way"
    if (slow := result["slow"]) is not None:
        yield _slow_words(result, slow, links)
    elif len(alike) > 1:
        yield f"no link between {what} is clearly slower than the others"
    apart = [found["op"] for found in result["fits"] if found["worst"] > 0.5]
    for found in result["fits"]:
        if (
            found["op"] == "all_reduce"
            and found["half_bytes"] is not None
            and "all_reduce" not in apart
        ):
            low, high = found["alpha_95"]
            yield (
                f"an all-reduce takes {fmt.time(found['alpha_s'])} even if it is empty "
                f"({_range((low, high), fmt.time)}); below {fmt.size(found['half_bytes'])} "
                "that is most of its time, so smaller tensors should go together"
            )
    if apart:
        yield (
            f"{fmt.names(apart)}: the times do not lie on a line (one is more than half off "
            "it); read the table rather than the fit"
        )
    limit = f"within {result['time_limit_s']:g} s (--total-time)"
    if result["skipped"]:
        yield f"{fmt.count(len(result['skipped']), 'point')} left out: no time for more {limit}"
    if result["rounds"] < result["rounds_asked"]:
        yield f"{result['rounds']} of {result['rounds_asked']} rounds: no time for more {limit}"


def _slow_words(
    result: Mapping[str, Any], slow: Mapping[str, Any], links: Mapping[tuple[int, ...], Any]
) -> str:
    link, best = links[tuple(slow["link"])], links[tuple(slow["best"])]
    if slow["what"] == "bandwidth":
        found = f"{rate(link['bandwidth']['median'])}, the best {rate(best['bandwidth']['median'])}"
    else:
        found = (
            f"{fmt.time(link['latency']['median'])} one way, the best "
            f"{fmt.time(best['latency']['median'])}"
        )
    for end in ("node", "rank"):
        if end in slow:
            host = next(p["host"] for p in result["places"] if p[end] == slow[end])
            return f"{end} {slow[end]} ({host}) is slow: every link to it is; {found}"
    others = f", and {fmt.count(slow['others'], 'other link')}" if slow["others"] else ""
    return f"the link {name_of(result, link)} is slow{others}: {found}"
