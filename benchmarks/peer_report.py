# SPDX-License-Identifier: Apache-2.0
"""The figures of `benchmarks.peers`: medians and ratios with their intervals, the tables, and which targets are met."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator

import msgspec

from benchmarks.estimate import Estimate, Target, estimate

CPU_SIZE = "640 KiB"
RATE_HZ = 200.0
CPU_METRICS = {
    "CPU idle, reader": "idle reader",
    "CPU idle, all": "idle, all processes",
    "CPU at 200 Hz, reader": "200 Hz reader",
    "CPU at 200 Hz, all": "200 Hz, all processes",
}
LAPPED = ("lapped reader", "lapped reader beside a busy process")
FAN_METRICS = {
    "fan-out latency p50": "p50 at 100 Hz, µs",
    "fan-out latency p99": "p99 of the slowest reader, µs",
    "fan-out CPU": "cores of all processes at 100 Hz",
    "fan-out goodput": "frames/s of all readers, unlimited",
    "fan-out publish": "µs of CPU per publish, the others idle",
}
OURS, POLL, EVENT, MEMCPY = "tensorpool", "iceoryx2 poll", "iceoryx2 event", "memcpy"
FANS = (OURS, EVENT, "eCAL SHM")  # those that carry one frame to many

IN_PLACE_TARGETS = {"4 KiB": 2.0, "64 KiB": 2.0, "640 KiB": 1.3, "4 MiB": 1.5, "16 MiB": 1.5}  # x iceoryx2's better
COPIED_TARGETS = {"4 KiB": 2.0, "64 KiB": 2.0, "640 KiB": 1.3, "4 MiB": 1.0, "16 MiB": 1.0}
IDLE_CLIENT, IDLE_ALL = 0.2, 1.0  # % of a core
BUSY_CPU = 1.2  # x iceoryx2 event, all processes
IDLE_READER_COST = 1.05  # CPU of a publish with the most idle readers / with none

type Rivals = dict[str, dict[str, str | None]]  # what to compare with, and who that is at each size


class Starved(Exception):
    """A reader received nothing in a measurement, as happens beside others who take both cores."""


class Figures:
    """What was measured: metric, size, peer, and a value for each round."""

    def __init__(self) -> None:
        self.rounds: dict[str, dict[str, dict[str, dict[int, float]]]] = {}
        self.turn = 0  # the round that is being measured
        self.wrong: dict[str, int] = {}
        self.failed: list[str] = []
        self.starved: dict[str, int] = {}  # measurements without a frame

    @contextlib.contextmanager
    def starving(self, peer: str) -> Iterator[None]:
        """Counts a measurement that starved, instead of failing."""
        try:
            yield
        except Starved:
            self.starved[peer] = self.starved.get(peer, 0) + 1

    def add(self, metric: str, size: str, peer: str, value: float) -> None:
        self.rounds.setdefault(metric, {}).setdefault(size, {}).setdefault(peer, {})[self.turn] = value

    def of(self, metric: str, size: str, peer: str) -> dict[int, float]:
        return self.rounds.get(metric, {}).get(size, {}).get(peer, {})

    def median(self, metric: str, size: str, peer: str) -> float | None:
        values = self.of(metric, size, peer)
        return statistics.median(values.values()) if values else None

    def estimate(self, metric: str, size: str, peer: str) -> Estimate | None:
        return estimate(self.of(metric, size, peer).values())

    def ratio(self, metric: str, size: str, ours: str, theirs: str | None) -> Estimate | None:
        """Of the rounds in which both were measured."""
        return None if theirs is None else _paired(self.of(metric, size, ours), self.of(metric, size, theirs))

    def best(self, metric: str, size: str, among: list[str], better: Callable[..., str]) -> str | None:
        values = {peer: value for peer in among if (value := self.median(metric, size, peer)) is not None}
        return better(values, key=values.__getitem__) if values else None


def _paired(our: dict[int, float], their: dict[int, float]) -> Estimate | None:
    return estimate(our[turn] / their[turn] for turn in our.keys() & their.keys() if their[turn])


def targets(figures: Figures, sizes: list[str]) -> list[Target]:
    """Of what was measured: a part that did not run has none."""
    found: list[Target] = []

    def add(metric: str, name: str, value: Estimate | None, bound: float, *, at_least: bool) -> None:
        if metric in figures.rounds:
            found.append(Target(name=name, value=value, bound=bound, at_least=at_least))

    for reader, bounds in (("touching", IN_PLACE_TARGETS), ("copying", COPIED_TARGETS)):
        metric = f"throughput {reader}"
        for size in sizes:
            theirs = figures.best(metric, size, [POLL, EVENT], max)
            value = figures.ratio(metric, size, OURS, theirs)
            add(metric, f"{metric}, {size}, / {theirs or 'iceoryx2'}", value, bounds[size], at_least=True)
    for metric in ("latency p50", "latency p99"):
        for size in sizes:
            value = figures.ratio(metric, size, OURS, EVENT)
            add(metric, f"{metric}, {size}, / {EVENT}", value, 1.0, at_least=False)
    for metric in LAPPED:
        theirs = figures.best(metric, "4 KiB", [POLL, EVENT], max)
        add(metric, f"{metric}, / {theirs}", figures.ratio(metric, "4 KiB", OURS, theirs), 1.0, at_least=True)
    idle_bounds = {"CPU idle, reader": IDLE_CLIENT, "CPU idle, writer": IDLE_CLIENT, "CPU idle, all": IDLE_ALL}
    for metric, bound in idle_bounds.items():
        share = figures.estimate(metric, CPU_SIZE, OURS)
        add(metric, f"{metric}, % of a core", share and share.scaled(100), bound, at_least=False)
    busy = "CPU at 200 Hz, all"
    add(busy, f"{busy}, / {EVENT}", figures.ratio(busy, CPU_SIZE, OURS, EVENT), BUSY_CPU, at_least=False)
    publish = figures.rounds.get("fan-out publish", {})
    if len(publish) > 1:
        first, *_, last = publish
        cost = _paired(publish[last].get(OURS, {}), publish[first].get(OURS, {}))
        name = f"CPU of a publish, {last}, all but one idle, / {first}"
        add("fan-out publish", name, cost, IDLE_READER_COST, at_least=False)
    return found


class Table(msgspec.Struct, frozen=True):
    title: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]

    def text(self) -> str:
        width = max(len(cell) for cells in (self.columns, *(cells for _, cells in self.rows)) for cell in cells) + 2
        first = max(len(name) for name in (self.title, *(name for name, _ in self.rows))) + 2
        lines = [(self.title, self.columns), *self.rows]
        return "\n".join(f"{name:<{first}}" + "".join(f"{cell:>{width}}" for cell in cells) for name, cells in lines)

    def markdown(self) -> str:
        rows = [(f"**{name}**" if name == OURS else name.strip(), cells) for name, cells in self.rows]
        lines = [(self.title, self.columns), *rows]
        header, *body = [f"| {name} | {' | '.join(cells)} |" for name, cells in lines]
        return "\n".join([header, "|---" * (len(self.columns) + 1) + "|", *body])


def tables(figures: Figures, peers: list[str], sizes: dict[str, int]) -> Iterator[Table]:
    """Those of the parts that were measured."""
    for reader, said in (("touching", "read in place"), ("copying", "copied by the reader")):
        if (metric := f"throughput {reader}") in figures.rounds:
            yield _throughput(figures, metric, said, peers, sizes)
    sleepers = [peer for peer in peers if peer not in (OURS, POLL)]
    for metric in ("latency p50", "latency p99"):
        if metric in figures.rounds:
            rows = [(peer, [_cell(figures.median(metric, size, peer)) for size in sizes]) for peer in peers]
            rivals: Rivals = {
                EVENT: dict.fromkeys(sizes, EVENT),
                "best that sleeps": {size: figures.best(metric, size, sleepers, min) for size in sizes},
            }
            rows += _ratios(figures, metric, rivals)
            yield Table(f"{metric} at {RATE_HZ:.0f} Hz, µs", list(sizes), rows)
    shown = {metric: title for metric, title in CPU_METRICS.items() if metric in figures.rounds}
    if shown:
        rows = []
        for peer in peers:
            shares = [figures.estimate(metric, CPU_SIZE, peer) for metric in shown]
            rows.append((peer, ["-" if share is None else share.scaled(100).text("{:.1f}") for share in shares]))
        yield Table(f"% of a core, {CPU_SIZE}", list(shown.values()), rows)
    if LAPPED[0] in figures.rounds:
        rows = []
        for peer in [peer for peer in (OURS, POLL, EVENT) if peer in peers]:
            rates = [figures.estimate(metric, "4 KiB", peer) for metric in LAPPED]
            rows.append((peer, ["-" if rate is None else rate.text("{:,.0f}") for rate in rates]))
        yield Table("frames/s of 4 KiB, ring of 16", list(LAPPED), rows)
    for metric, title in FAN_METRICS.items():
        if metric in figures.rounds:
            columns = list(figures.rounds[metric])
            form = "{:,.2f}" if metric in ("fan-out CPU", "fan-out publish") else "{:,.0f}"
            rows = [
                (peer, [_cell(figures.median(metric, n, peer), form) for n in columns])
                for peer in FANS
                if peer in peers
            ]
            rows += _ratios(figures, metric, {EVENT: dict.fromkeys(columns, EVENT)})
            yield Table(title, columns, rows)
    if "native latency p50" in figures.rounds:
        yield _native(figures, sizes)


def _throughput(figures: Figures, metric: str, said: str, peers: list[str], sizes: dict[str, int]) -> Table:
    rows = []
    for peer in [*peers, MEMCPY]:
        rates = {size: figures.median(metric, size, peer) for size in sizes}
        gib = [None if rate is None else rate * sizes[size] / (1 << 30) for size, rate in rates.items()]
        rows.append((peer, [_cell(value, "{:.2f}") for value in gib]))
    rivals: Rivals = {
        "iceoryx2's better mode": {size: figures.best(metric, size, [POLL, EVENT], max) for size in sizes},
        MEMCPY: dict.fromkeys(sizes, MEMCPY),
    }
    return Table(f"GiB/s, {said}", list(sizes), rows + _ratios(figures, metric, rivals))


def _native(figures: Figures, sizes: dict[str, int]) -> Table:
    columns = list(figures.rounds["native latency p50"])
    rows = []
    for metric, title in (("native latency p50", "ping-pong p50, µs"), ("native latency p99", "ping-pong p99, µs")):
        values = [figures.estimate(metric, size, OURS) for size in columns]
        rows.append((title, ["-" if value is None else value.text() for value in values]))
    for metric, title in (("native touching", "in place, GiB/s"), ("native copying", "copied, GiB/s")):
        cells = []
        for name in columns:
            rate = figures.estimate(metric, name, OURS)
            cells.append("-" if rate is None else rate.scaled((sizes.get(name) or 64) / (1 << 30)).text())
        rows.append((title, cells))
    return Table("C++, both sides spin", columns, rows)


def _ratios(figures: Figures, metric: str, rivals: Rivals) -> list[tuple[str, list[str]]]:
    """Our figure as a multiple of a rival's, with its interval."""
    rows = []
    for title, per_size in rivals.items():
        values = [figures.ratio(metric, size, OURS, rival) for size, rival in per_size.items()]
        if any(value is not None for value in values):
            rows.append((f"  {OURS} / {title}", ["-" if value is None else value.text() for value in values]))
    return rows


def _cell(value: float | None, form: str = "{:,.0f}") -> str:
    return "-" if value is None else form.format(value)
