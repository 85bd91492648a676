# SPDX-License-Identifier: Apache-2.0
"""The figures of `benchmarks.peers`: medians and ratios, the tables, and which targets hold."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import msgspec

CPU_SIZE = "640 KiB"
RATE_HZ = 200.0
CPU_METRICS = {
    "CPU idle, reader": "idle reader",
    "CPU idle, all": "idle, all processes",
    "CPU at 200 Hz, reader": "200 Hz reader",
    "CPU at 200 Hz, all": "200 Hz, all processes",
}
OURS, POLL, EVENT, MEMCPY = "tensorpool", "iceoryx2 poll", "iceoryx2 event", "memcpy"

THROUGHPUT_TARGETS = {"4 KiB": 2.0, "64 KiB": 2.0, "640 KiB": 1.0, "4 MiB": 1.3, "16 MiB": 1.3}  # x iceoryx2
IDLE_TARGET = 0.01  # of a core
TAIL_US = 1000.0  # p99 may be twice p50 and this much more

type Rivals = dict[str, dict[str, str | None]]  # what to compare with, and who that is at each size


class Figures:
    """What was measured: metric, size, peer, and a value for each round."""

    def __init__(self) -> None:
        self.rounds: dict[str, dict[str, dict[str, dict[int, float]]]] = {}
        self.turn = 0  # the round that is being measured
        self.others: list[float] = []  # share of a core of what else ran, for each measurement
        self.wrong: dict[str, int] = {}
        self.failed: list[str] = []

    def add(self, metric: str, size: str, peer: str, value: float) -> None:
        self.rounds.setdefault(metric, {}).setdefault(size, {}).setdefault(peer, {})[self.turn] = value

    def median(self, metric: str, size: str, peer: str) -> float | None:
        values = self.rounds.get(metric, {}).get(size, {}).get(peer)
        return statistics.median(values.values()) if values else None

    def ratio(self, metric: str, size: str, ours: str, theirs: str | None) -> float | None:
        """Median of the rounds' ratios; None where one of them is missing."""
        if theirs is None:
            return None
        peers = self.rounds.get(metric, {}).get(size, {})
        our, their = peers.get(ours, {}), peers.get(theirs, {})
        ratios = [our[turn] / their[turn] for turn in our.keys() & their.keys() if their[turn]]
        return statistics.median(ratios) if ratios else None

    def best(self, metric: str, size: str, among: list[str], better: Callable[..., str]) -> str | None:
        values = {peer: value for peer in among if (value := self.median(metric, size, peer)) is not None}
        return better(values, key=values.__getitem__) if values else None


class Target(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    value: float | None
    bound: float
    at_least: bool

    @property
    def holds(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        verdict = {True: "holds ", False: "MISSED", None: "absent"}[self.holds]
        value = "not measured" if self.value is None else f"{self.value:.2f}"
        return f"{verdict}  {self.name}: {value}, target at {'least' if self.at_least else 'most'} {self.bound:.2f}"


def targets(figures: Figures, sizes: list[str]) -> list[Target]:
    found = []
    for reader in ("touching", "copying"):
        metric = f"throughput {reader}"
        for size in sizes:
            theirs = figures.best(metric, size, [POLL, EVENT], max)
            value = figures.ratio(metric, size, OURS, theirs)
            name = f"{metric}, {size}, / {theirs or 'iceoryx2'}"
            found.append(Target(name=name, value=value, bound=THROUGHPUT_TARGETS[size], at_least=True))
    for size in sizes:
        value = figures.ratio("latency p50", size, OURS, EVENT)
        found.append(Target(name=f"latency p50, {size}, / {EVENT}", value=value, bound=1.0, at_least=False))
    for size in sizes:
        half, tail = figures.median("latency p50", size, OURS), figures.median("latency p99", size, OURS)
        bound = 2 * (half or 0.0) + TAIL_US
        found.append(Target(name=f"latency p99, {size}, µs", value=tail, bound=bound, at_least=False))
    if CPU_SIZE in sizes:
        idle = figures.median("CPU idle, reader", CPU_SIZE, OURS)
        percent = None if idle is None else idle * 100
        found.append(Target(name="idle reader, % of a core", value=percent, bound=IDLE_TARGET * 100, at_least=False))
    return found


def report(figures: Figures, peers: list[str], sizes: dict[str, int]) -> Iterator[str]:
    """The tables, line by line."""
    others = [peer for peer in peers if peer != OURS]
    for reader in ("touching", "copying"):
        metric = f"throughput {reader}"
        yield _row(f"{metric}, frames/s", list(sizes))
        for peer in [*peers, MEMCPY]:
            yield _row(peer, [_cell(figures.median(metric, size, peer), "{:,.0f}") for size in sizes])
        yield ""
        yield _row(f"{metric}, GiB/s", list(sizes))
        for peer in [*peers, MEMCPY]:
            rates = [figures.median(metric, size, peer) for size in sizes]
            gib = [
                None if rate is None else rate * size / (1 << 30)
                for rate, size in zip(rates, sizes.values(), strict=True)
            ]
            yield _row(peer, [_cell(value, "{:.2f}") for value in gib])
        rivals: Rivals = {
            "iceoryx2": {size: figures.best(metric, size, [POLL, EVENT], max) for size in sizes},
            "best peer": {size: figures.best(metric, size, others, max) for size in sizes},
            MEMCPY: dict.fromkeys(sizes, MEMCPY),
        }
        yield from _ratios(figures, metric, rivals)
        yield ""
    sleepers = [peer for peer in others if peer != POLL]
    for metric in ("latency p50", "latency p99"):
        yield _row(f"{metric} at {RATE_HZ:.0f} Hz, µs", list(sizes))
        for peer in peers:
            yield _row(peer, [_cell(figures.median(metric, size, peer), "{:,.0f}") for size in sizes])
        rivals = {
            EVENT: dict.fromkeys(sizes, EVENT),
            "best that sleeps": {size: figures.best(metric, size, sleepers, min) for size in sizes},
        }
        yield from _ratios(figures, metric, rivals)
        yield ""
    if CPU_SIZE in sizes:
        yield _row(f"% of a core, {CPU_SIZE}", list(CPU_METRICS.values()))
        for peer in peers:
            shares = [figures.median(metric, CPU_SIZE, peer) for metric in CPU_METRICS]
            yield _row(peer, [_cell(share, "{:.1f}", 100) for share in shares])
        yield ""


def _ratios(figures: Figures, metric: str, rivals: Rivals) -> Iterator[str]:
    """Our figure as a multiple of a rival's; the rival is named where it differs from size to size."""
    for title, per_size in rivals.items():
        values = [figures.ratio(metric, size, OURS, rival) for size, rival in per_size.items()]
        if all(value is None for value in values):
            continue
        yield _row(f"  {OURS} / {title}", [_cell(value, "{:.2f}") for value in values])
        if title not in per_size.values():
            yield _row("", [rival or "" for rival in per_size.values()])


def _row(title: str, cells: list[str]) -> str:
    return f"{title:<32}" + "".join(f"{cell:>22}" for cell in cells)


def _cell(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(value * scale)
