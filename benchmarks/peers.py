# SPDX-License-Identifier: Apache-2.0
"""tensorpool next to its peers, everything interleaved in one run of about ten minutes.

    throughput   frames that a reader received whole, the writer publishing as fast as it goes; the reader touches every
                 page in place, or copies the frame into an array of its own
    latency      from just before publish to the array in the reader's hands, at 200 Hz
    cpu          share of a core, at 200 Hz and when nothing is published, of the reader and of all processes
    goodput      4 KiB as fast as it goes into a ring of 16, which laps the reader; alone and beside a busy process
    fanout       one writer, 1 to 32 readers, at 100 Hz and as fast as it goes; and what idle readers cost the writer
    native       the C++ headers of native/ without Python, both sides spinning

The processes of all peers stay while a size is measured, and take short turns in an order that shifts from round to
round; a ratio is the median of the rounds' ratios with its interval of 95 %, and a target is met or missed when the
whole interval is on one side of it. Frames may be lost: only what arrived counts, and every frame that arrived is
checked. memcpy is one process copying from the same arrays into a ring of the same depth.

    python -m benchmarks.peers [--only throughput,latency] [--quick] [--peers a,b] [--sizes 4,640] [--rounds N]
                               [--page docs/benchmarks.md] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import native_pair, peer_fanout
from benchmarks.estimate import Target, Verdict
from benchmarks.machine import Conditions
from benchmarks.peer import SOURCES, Peer, Phase, memcpy, new_frame, version
from benchmarks.peer_ecal import Ecal
from benchmarks.peer_group import Group, Outcome, busy_neighbour
from benchmarks.peer_iceoryx2 import Iceoryx2
from benchmarks.peer_report import (
    CPU_SIZE,
    EVENT,
    FANS,
    LAPPED,
    MEMCPY,
    OURS,
    POLL,
    RATE_HZ,
    Figures,
    tables,
    targets,
)
from benchmarks.peer_shared_memory import SharedMemory
from benchmarks.peer_tensorpool import Tensorpool
from benchmarks.peer_zenoh import Zenoh
from benchmarks.peer_zmq import Zmq

SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "640 KiB": 640 << 10, "4 MiB": 4 << 20, "16 MiB": 16 << 20}
PARTS = ("throughput", "latency", "cpu", "goodput", "fanout", "native")
LAPPED_SIZE, LAPPED_SLOTS = 4 << 10, 16
RIVALS = (OURS, POLL, EVENT)  # in every round; the others in every fourth
OTHERS_EVERY = 4
BEGIN, END = "<!-- benchmarks.peers: begin -->", "<!-- benchmarks.peers: end -->"


def depth_of(size: int) -> int:
    """Slots of a ring, or frames of a queue: the same for every peer, but for zenoh's pool, which needs more.

    About 2 MiB, so that small frames stay in a cache that other machines share, and at least 8 frames.
    """
    return 1 << (min(256, max(8, (2 << 20) // size)).bit_length() - 1)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    rounds: int  # of throughput and goodput
    slow_rounds: int  # of latency and of CPU
    throughput_s: float
    latency_s: float
    idle_s: float
    fans: tuple[int, ...]
    cycles: int  # in which a peer's readers are started anew, for fan-out
    fan_rounds: int  # in each cycle


FULL = Plan(
    rounds=13,
    slow_rounds=7,
    throughput_s=0.15,
    latency_s=0.6,
    idle_s=1.0,
    fans=(1, 2, 4, 8, 16, 32),
    cycles=2,
    fan_rounds=4,
)
QUICK = Plan(rounds=3, slow_rounds=2, throughput_s=0.1, latency_s=0.4, idle_s=0.5, fans=(1, 4), cycles=1, fan_rounds=2)


class Run:
    """Everything that is measured, part by part."""

    def __init__(self, peers: list[Peer], sizes: dict[str, int], plan: Plan, folder: Path) -> None:
        self.figures = Figures()
        self.conditions = Conditions()
        self._peers, self._sizes, self._plan, self._folder = peers, sizes, plan, folder

    def measure(self, parts: list[str]) -> None:
        alternating = set(parts) & {"throughput", "latency", "cpu"}
        for name, size in self._sizes.items():
            if alternating and not (alternating == {"cpu"} and name != CPU_SIZE):
                self._visit(name, size, alternating)
        if "goodput" in parts:
            self._goodput()
        if "fanout" in parts:
            fanning = [peer for peer in self._peers if peer.name in FANS]
            for cycle in range(self._plan.cycles):
                for peer in fanning:
                    _say(f"fan-out of {peer.name}, cycle {cycle + 1}")
                    with self._failing(peer, "fan-out"), self._own_folder() as own:
                        plan = self._plan
                        peer_fanout.measure(self.figures, self.conditions, peer, own, plan.fans, plan.fan_rounds, cycle)
        if "native" in parts:
            self._native()

    def _visit(self, name: str, size: int, parts: set[str]) -> None:
        plan = self._plan
        with self._groups(size, depth_of(size), name) as groups:
            if "throughput" in parts:
                for turn in self._turns(f"throughput, {name}", plan.rounds):
                    rate = _memcpy_rate(size, plan.throughput_s / 2)
                    for copying in (False, True):
                        metric = "throughput copying" if copying else "throughput touching"
                        self.figures.add(metric, name, MEMCPY, rate)
                        phase = Phase(seconds=plan.throughput_s, copying=copying)
                        for peer, outcome in self._round(groups, turn, name, phase):
                            self.figures.add(metric, name, peer, outcome.sight.per_second)
            if "latency" in parts or (name == CPU_SIZE and "cpu" in parts):
                for turn in self._turns(f"latency, {name}", plan.slow_rounds):
                    phase = Phase(seconds=plan.latency_s, rate_hz=RATE_HZ)
                    for peer, outcome in self._round(groups, turn, name, phase):
                        percentiles = np.percentile(np.array(outcome.sight.latencies_ns), (50, 99)) / 1e3
                        self.figures.add("latency p50", name, peer, float(percentiles[0]))
                        self.figures.add("latency p99", name, peer, float(percentiles[1]))
                        if name == CPU_SIZE:
                            self.figures.add("CPU at 200 Hz, reader", name, peer, outcome.sight.cpu)
                            self.figures.add("CPU at 200 Hz, all", name, peer, outcome.cpu)
        if name == CPU_SIZE and "cpu" in parts:
            self._idle(name, size)

    def _idle(self, name: str, size: int) -> None:
        """Alone: what a peer's processes do when idle is what is measured, so that no other's may be there."""
        for turn in self._turns("idle", self._plan.slow_rounds):
            for peer in _shifted(self._peers, turn):
                if peer.name not in (OURS, EVENT) and turn % OTHERS_EVERY:
                    continue
                with self._failing(peer, "idle"), self._own_folder() as own:
                    group = Group(peer, size, depth_of(size), own, self.conditions)
                    with contextlib.closing(group):
                        time.sleep(0.5)  # what starting left to do
                        outcome = group.run(Phase(seconds=self._plan.idle_s, rate_hz=0))
                    self.figures.add("CPU idle, reader", name, peer.name, outcome.sight.cpu)
                    self.figures.add("CPU idle, writer", name, peer.name, outcome.work.cpu)
                    self.figures.add("CPU idle, all", name, peer.name, outcome.cpu)

    def _goodput(self) -> None:
        phase = Phase(seconds=2 * self._plan.throughput_s)
        with self._groups(LAPPED_SIZE, LAPPED_SLOTS, "goodput") as every:
            groups = [group for group in every if group.peer.name in RIVALS]
            for turn in self._turns("goodput", self._plan.rounds):
                for metric in LAPPED:
                    with busy_neighbour() if metric == LAPPED[1] else contextlib.nullcontext():
                        for peer, outcome in self._round(groups, turn, "goodput", phase):
                            self.figures.add(metric, "4 KiB", peer, outcome.sight.per_second)

    def _native(self) -> None:
        if native_pair.binary() is None:
            self.figures.failed.append("native: no C++ compiler (g++, or CXX)")
            return
        seconds = self._plan.throughput_s
        for turn in self._turns("native", self._plan.rounds):
            self.figures.turn = turn
            for name, size in {"64 B": 64, **self._sizes}.items():
                found = native_pair.run("latency", size, seconds) or {}
                self.figures.add("native latency p50", name, OURS, found["p50_ns"] / 1e3)
                self.figures.add("native latency p99", name, OURS, found["p99_ns"] / 1e3)
                for metric, more in (("native touching", ()), ("native copying", ("copy",))):
                    report = native_pair.run("throughput", size, depth_of(size), seconds, *more) or {}
                    self.figures.add(metric, name, OURS, report["per_second"])

    @contextlib.contextmanager
    def _groups(self, size: int, depth: int, name: str) -> Iterator[list[Group]]:
        """The processes of every peer, of those that start."""
        with contextlib.ExitStack() as stack:
            groups = []
            for peer in self._peers:
                _say(f"{name}: {peer.name} starts")
                with self._failing(peer, name):
                    group = Group(peer, size, depth, stack.enter_context(self._own_folder()), self.conditions)
                    stack.callback(group.close)
                    groups.append(group)
            yield groups
        for group in groups:
            self.figures.wrong[group.peer.name] = self.figures.wrong.get(group.peer.name, 0) + group.wrong

    def _round(self, groups: list[Group], turn: int, name: str, phase: Phase) -> Iterator[tuple[str, Outcome]]:
        """One measurement of each peer, in an order of this round."""
        for group in _shifted(groups, turn):
            if group.peer.name in RIVALS or turn % OTHERS_EVERY == 0:
                with self._failing(group.peer, name), self.figures.starving(group.peer.name):
                    yield group.peer.name, group.run(phase)

    def _turns(self, what: str, count: int) -> Iterator[int]:
        for turn in range(count):
            _say(f"{what}, round {turn + 1} of {count}")
            self.figures.turn = turn
            self.conditions.look()
            yield turn

    @contextlib.contextmanager
    def _failing(self, peer: Peer, what: str) -> Iterator[None]:
        """One peer that fails does not end the others."""
        try:
            yield
        except Exception as error:
            words = f"{peer.name}, {what}, round {self.figures.turn + 1}: {type(error).__name__}: {error}"
            self.figures.failed.append(words)

    @contextlib.contextmanager
    def _own_folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="p") as own:
            yield Path(own)


def _shifted[T](entries: list[T], turn: int) -> list[T]:
    return entries[turn % len(entries) :] + entries[: turn % len(entries)] if entries else []


def _say(words: str) -> None:
    print(f"\r{words:<70}", end="", file=sys.stderr, flush=True)


def _memcpy_rate(size: int, seconds: float) -> float:
    """Copies per second within this process."""
    depth = depth_of(size)
    sources = [new_frame(size) for _ in range(SOURCES)]
    ring = new_frame(depth * size).reshape(depth, size // 8)
    for array in (*sources, ring):
        array[:] = 1  # numpy hands out pages that are not there yet
    addresses = [(ring[n].ctypes.data, sources[n % SOURCES].ctypes.data) for n in range(depth)]
    copies, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < seconds:
        for target, source in addresses:
            memcpy(target, source, size)
        copies += depth
    return copies / took


def _report(
    run: Run, names: list[str], sizes: dict[str, int], verdicts: list[Target], took_s: float, *, as_markdown: bool
) -> Iterator[str]:
    """Everything that is printed, line by line."""
    bullet = "- " if as_markdown else ""
    for table in tables(run.figures, names, sizes):
        yield f"{table.markdown() if as_markdown else table.text()}\n"
    if as_markdown:
        yield "| target | measured | verdict |\n|---|---|---|"
        for target in verdicts:
            value = "-" if target.value is None else target.value.text()
            yield f"| {target.name} {target.bound_text} | {value} | {target.verdict.lower()} |"
    else:
        yield from map(str, verdicts)
    yield ""
    for line in [*run.conditions.lines(), f"took {took_s:.0f} s"]:
        yield f"{bullet}{line}"
    for words in run.figures.failed:
        yield f"{bullet}FAILED  {words}"
    for name, count in run.figures.starved.items():
        yield f"{bullet}{name}: in {count} measurements a reader received nothing"
    for name, count in run.figures.wrong.items():
        if count:
            yield f"{bullet}WRONG   {name}: {count} frames with stamps that disagree or out of order"


def paste(page: str, text: str) -> str:
    """The page with `text` between its two marks. Raises ValueError where it has none."""
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return f"{page[:begin]}\n\n{text.strip()}\n\n{page[end:]}"


def main() -> int:
    known: dict[str, Peer] = {
        peer.name: peer
        for peer in (Tensorpool(), Iceoryx2(event=False), Iceoryx2(event=True), Zmq(), Zenoh(), Ecal(), SharedMemory())
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"only these parts of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="few short rounds")
    parser.add_argument("--rounds", type=int, help=f"rounds of throughput, by default {FULL.rounds}; others about half")
    parser.add_argument("--peers", help=f"only those whose names begin so, of: {', '.join(known)}")
    parser.add_argument("--sizes", help="only frames of so many KiB, such as 4,640")
    parser.add_argument("--markdown", action="store_true", help="print tables as docs/benchmarks.md shows them")
    parser.add_argument("--page", type=Path, help="put what is printed, as Markdown, between the marks of this file")
    parser.add_argument("--json", type=Path, help="also write every round's figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw them, as .png or .svg")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    if options.rounds:
        plan = msgspec.structs.replace(plan, rounds=options.rounds, slow_rounds=max(1, options.rounds // 2))
    parts = options.only.split(",") if options.only else list(PARTS)
    wanted = options.peers.split(",") if options.peers else [""]
    chosen = [peer for peer in known.values() if any(peer.name.startswith(start) for start in wanted)]
    kib = {int(part) << 10 for part in options.sizes.split(",")} if options.sizes else set(SIZES.values())
    sizes = {name: size for name, size in SIZES.items() if size in kib}
    if not chosen or not sizes or not set(parts) <= set(PARTS):
        parser.error(
            f"nothing to measure; parts are {', '.join(PARTS)}, peers {', '.join(known)}, sizes {', '.join(SIZES)}"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an end that cleans up, and reports what there is
    versions = {peer.name: version(peer) for peer in chosen}
    for peer in chosen:
        release = versions[peer.name]
        status = f"MISSING: pip install {peer.package}" if release is None else f"{release:<8} {peer.says}"
        print(f"{peer.name:<22}{status}", file=sys.stderr)
    present = [peer for peer in chosen if versions[peer.name] is not None]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tensorpool-peers-") as folder:
        run = Run(present, sizes, plan, Path(folder))
        try:
            run.measure(parts)
        except (KeyboardInterrupt, SystemExit):
            run.figures.failed.append("ended by a signal: what was measured until then")
    print("\r" + " " * 70 + "\r", end="", file=sys.stderr)
    figures, names = run.figures, [peer.name for peer in present]
    verdicts = targets(figures, list(sizes)) if OURS in names else []
    as_markdown = options.markdown or options.page is not None
    text = "\n".join(_report(run, names, sizes, verdicts, time.monotonic() - began_s, as_markdown=as_markdown))
    print(text)
    if options.page:
        options.page.write_text(paste(options.page.read_text(), text))
    if options.json:
        document: dict[str, Any] = {
            "machine": run.conditions.document,
            "versions": versions,
            "plan": msgspec.structs.asdict(plan),
            "sizes": sizes,
            "rounds": figures.rounds,
            "wrong": figures.wrong,
            "failed": figures.failed,
            "starved": figures.starved,
            "targets": [{**msgspec.to_builtins(target), "verdict": target.verdict} for target in verdicts],
        }
        options.json.write_text(json.dumps(document, indent=2))
    if options.plot:
        from benchmarks.peer_plot import draw

        draw(figures, names, sizes, options.plot)
    is_missed = any(target.verdict is Verdict.MISSED for target in verdicts)
    return 1 if figures.failed or any(figures.wrong.values()) or is_missed else 0


if __name__ == "__main__":
    sys.exit(main())
