"""Which schedule suits a machine: bytes by kind of link, memory, balance and a time for each, from stated constants.

Steps, transfers and tiles are those of the schedules that would run. A step takes as long as its kernels or its
transfers, plus what the host needs to start it; constants are assumptions until a calibration file replaces them.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from ringattn.heads import check_heads
from ringattn.layout import shard_sizes
from ringattn.mask import Band
from ringattn.schedule import SCHEDULES, Schedule, Step, make_schedule

LINKS = ("node", "network")
"""Kinds of links: between cards of one node, and between nodes."""

BACKWARD = 2.5
"""The backward pass takes 2.5 times the operations of the forward pass (five products of which two are repeated)."""


@dataclass(frozen=True)
class Constants:
    """What the times rest on, for one H200 node of eight and a 400 Gbit/s network; replace them by measured ones.

    Attributes:
        forward_rate, backward_rate: of the kernels, operations a second.
        node_bandwidth, network_bandwidth: bytes a second and card, in each direction.
        node_latency, network_latency: seconds before the first byte.
        host: seconds of the host for a step, its kernel and its transfers.
    """

    forward_rate: float = 600e12
    backward_rate: float = 480e12
    node_bandwidth: float = 380e9
    network_bandwidth: float = 42e9
    node_latency: float = 10e-6
    network_latency: float = 20e-6
    host: float = 40e-6

    @classmethod
    def read(cls, path: Path) -> "Constants":
        """The constants of a JSON file, which may name some; ValueError for unknown names and values not above 0."""
        given = json.loads(path.read_text())
        names = [one.name for one in fields(cls)]
        for name, value in given.items():
            if name not in names:
                raise ValueError(f"{path.name}: unknown constant {name!r}; choose of {', '.join(names)}")
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{path.name}: {name} must be a positive number, got {value!r}")
        return replace(cls(), **given)


@dataclass(frozen=True)
class Shape:
    """A layer's attention: what is computed, and on what machine.

    Attributes:
        nodes, cards: number of nodes, and of cards in each.
        seq_len: tokens of the whole sequence.
        heads, kv_heads, dim: H, G and D; values have the size of keys.
        itemsize: bytes of an element of keys and values.
        layout, band: how it is sharded and masked.
    """

    nodes: int
    cards: int
    seq_len: int
    heads: int
    kv_heads: int
    dim: int
    itemsize: int
    layout: str
    band: Band

    @property
    def world(self) -> int:
        return self.nodes * self.cards


@dataclass
class Candidate:
    """A schedule with what it costs, of the rank that pays most.

    Attributes:
        schedule: its name.
        heads_degree: neighbours that swap heads for tokens.
        reason: why it cannot run; empty if it can.
        sent: bytes sent over each kind of link, forward and backward together.
        memory: bytes of buffers of a rank.
        steps: forward steps.
        balance: pairs of the busiest rank over the mean.
        forward, backward: seconds.
        lanes: of each forward step, the seconds of kernels and of transfers.
    """

    schedule: str
    heads_degree: int
    reason: str = ""
    sent: Counter[str] = field(default_factory=Counter)
    memory: float = 0.0
    steps: int = 0
    balance: float = 1.0
    forward: float = 0.0
    backward: float = 0.0
    lanes: list[tuple[float, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def candidates(shape: Shape, constants: Constants, memory: float) -> list[Candidate]:
    """Every schedule, alone and with heads swapped within a node, the fastest that can run first."""
    degrees = [degree for degree in range(1, shape.cards + 1) if shape.cards % degree == 0]
    found = [evaluate(shape, constants, name, degree, memory) for name in SCHEDULES for degree in degrees]
    return sorted(found, key=lambda one: (bool(one.reason), one.seconds, one.memory))


def evaluate(shape: Shape, constants: Constants, name: str, degree: int, memory: float) -> Candidate:
    """What one schedule costs."""
    candidate = Candidate(name, degree)
    try:
        check_heads(shape.heads, shape.kv_heads, degree, shape.world)
    except ValueError as error:
        candidate.reason = str(error)
        return candidate
    around, lengths = shape.world // degree, (shape.seq_len,)
    place = (shape.layout, shape.band, lengths, around)
    schedules = [make_schedule(name, *place, rank, degree) for rank in range(around)]
    width = 2 * max(1, shape.kv_heads // degree) * shape.dim
    sizes = shard_sizes(*(shape.layout, lengths, around), degree)
    first = schedules[0]
    tokens = first.stage * max(sizes) * width
    candidate.memory = tokens * (first.slots * shape.itemsize + first.grad_slots * 4)
    candidate.steps = len(first.forward)
    work = [
        sum(tile.pairs for step in one.forward for visit in step.visits for tile in visit.tiles) for one in schedules
    ]
    candidate.balance = max(work) * around / sum(work) if sum(work) else 1.0
    rates = (constants.forward_rate, constants.backward_rate / BACKWARD)
    for direction, rate in zip(("forward", "backward"), rates, strict=True):
        lanes = _lanes(shape, constants, schedules, direction, degree, rate, width, sizes, candidate.sent)
        swap = _swap_seconds(shape, constants, degree, direction, max(sizes), candidate.sent)
        seconds = swap + sum(max(kernels, moves) + constants.host for kernels, moves in lanes)
        setattr(candidate, direction, seconds)
        if direction == "forward":
            candidate.lanes = lanes
    if memory and candidate.memory > memory:
        candidate.reason = f"needs {candidate.memory / 2**30:.1f} GiB of buffers"
    return candidate


def _lanes(
    shape: Shape,
    constants: Constants,
    schedules: Sequence[Schedule],
    direction: str,
    degree: int,
    rate: float,
    width: int,
    sizes: Sequence[int],
    sent: Counter[str],
) -> list[tuple[float, float]]:
    """Seconds of kernels and of transfers of each step, of the rank that takes longest."""
    lanes = []
    total: list[Counter[str]] = [Counter() for _ in schedules]
    for steps in zip(*(getattr(one, direction) for one in schedules), strict=True):
        pairs = max(sum(tile.pairs for visit in step.visits for tile in visit.tiles) for step in steps)
        moves = 0.0
        for rank, step in enumerate(steps):
            by_link = _bytes_by_link(shape, rank, step, degree, width, sizes)
            total[rank].update(by_link)
            moves = max(moves, *(_seconds(constants, link, count) for link, count in by_link.items()), 0.0)
        lanes.append((4 * pairs * shape.dim * shape.heads / degree / rate, moves))
    for link in LINKS:
        sent[link] += max(counts[link] for counts in total)
    return lanes


def _bytes_by_link(shape: Shape, rank: int, step: Step, degree: int, width: int, sizes: Sequence[int]) -> Counter[str]:
    """Bytes that a rank sends in a step, by kind of link; neighbours that swap heads are on one node."""
    count: Counter[str] = Counter()
    for transfers, itemsize in ((step.sends, shape.itemsize), (step.grad_sends, 4)):
        for t in transfers:
            same = rank * degree // shape.cards == t.peer * degree // shape.cards
            count[LINKS[0] if same else LINKS[1]] += t.tokens(sizes) * width * itemsize
    return count


def _swap_seconds(
    shape: Shape, constants: Constants, degree: int, direction: str, tokens: int, sent: Counter[str]
) -> float:
    """Seconds in which heads are swapped for tokens and back; nothing hides them."""
    if degree == 1:
        return 0.0
    share = tokens / degree * (degree - 1) / degree * shape.dim
    kv_heads = max(shape.kv_heads, degree)
    there = share * (shape.heads + 2 * kv_heads) * shape.itemsize
    back = share * shape.heads * 4
    if direction == "backward":
        there += 2 * share * shape.heads * shape.itemsize
        back = share * (shape.heads + 2 * kv_heads) * 4
    sent[LINKS[0]] += round(there + back)
    return _seconds(constants, LINKS[0], there) + _seconds(constants, LINKS[0], back)


def _seconds(constants: Constants, link: str, count: float) -> float:
    if not count:
        return 0.0
    bandwidth, latency = (
        (constants.node_bandwidth, constants.node_latency)
        if link == LINKS[0]
        else (constants.network_bandwidth, constants.network_latency)
    )
    return latency + count / bandwidth


def table(shape: Shape, constants: Constants, found: Sequence[Candidate]) -> Iterator[str]:
    """A line a candidate, the fastest first, and what the times rest on."""
    yield (
        f"{shape.seq_len} tokens, {shape.layout}, {shape.band}, {shape.heads}/{shape.kv_heads} heads of {shape.dim} on "
        f"{shape.nodes} x {shape.cards} cards; one layer, the rank that pays most"
    )
    yield (
        f"{'schedule':<12}{'heads':>6}{'steps':>7}{'balance':>9}{'node':>11}{'network':>11}{'buffers':>11}"
        f"{'forward':>11}{'backward':>11}"
    )
    for one in found:
        head = f"{one.schedule:<12}{one.heads_degree:>6}"
        if one.reason:
            yield f"{head}  cannot run: {one.reason}"
            continue
        sizes = [f"{count / 2**20:.0f} MiB" for count in (one.sent["node"], one.sent["network"], one.memory)]
        times = [f"{seconds * 1e3:.2f} ms" for seconds in (one.forward, one.backward)]
        yield f"{head}{one.steps:>7}{one.balance:>9.2f}" + "".join(f"{cell:>11}" for cell in sizes + times)
    yield "heads: neighbours that swap heads for tokens. Assumed: " + ", ".join(
        f"{name} {value:.3g}" for name, value in asdict(constants).items()
    )


def timeline(candidate: Candidate, width: int = 72) -> Iterator[str]:
    """The forward steps of a candidate: kernels and transfers, to scale."""
    whole = sum(max(lane) for lane in candidate.lanes) or 1.0
    rows = ["", ""]
    for kernels, moves in candidate.lanes:
        cells = max(1, round(max(kernels, moves) / whole * width) - 1)
        for row, seconds in enumerate((kernels, moves)):
            filled = -int(-seconds / max(kernels, moves, 1e-12) * cells // 1)
            rows[row] += ("#", "=")[row] * filled + "." * (cells - filled) + "|"
    yield f"forward steps of {candidate.schedule}, heads {candidate.heads_degree}, to scale"
    yield f"kernels    {rows[0]}"
    yield f"transfers  {rows[1]}"


def draw(found: Sequence[Candidate], path: Path) -> None:
    """The timelines of the candidates that can run as a picture, kernels above transfers."""
    from matplotlib.figure import Figure

    able = [one for one in found if not one.reason][:8]
    figure = Figure(figsize=(10, 1 + 0.7 * len(able)), layout="constrained")
    axes = figure.subplots()
    for row, one in enumerate(able):
        begin = 0.0
        for kernels, moves in one.lanes:
            axes.broken_barh([(begin * 1e3, kernels * 1e3)], (row + 0.05, 0.4), color="tab:blue", edgecolor="white")
            axes.broken_barh([(begin * 1e3, moves * 1e3)], (row + 0.45, 0.4), color="tab:orange", edgecolor="white")
            begin += max(kernels, moves)
    axes.set_yticks(
        [row + 0.45 for row in range(len(able))], [f"{one.schedule}, heads {one.heads_degree}" for one in able]
    )
    axes.set_xlabel("ms, forward; blue: kernels, orange: transfers")
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)
