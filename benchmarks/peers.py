# SPDX-License-Identifier: Apache-2.0
"""tensorpool next to its peers: two processes, frames of 4 KiB to 16 MiB, everything interleaved in one run.

    throughput   frames that a reader received whole, the writer publishing as fast as it goes; the reader touches every
                 page in place, or copies the frame into an array of its own
    latency      from just before publish to the array in the reader's hands, at 200 Hz
    CPU          share of a core, at 200 Hz and when nothing is published

A round visits every size and every peer, each in two fresh processes and alone on the machine, in an order that
shifts from round to round; a figure is the median over the rounds, a ratio the median of the rounds' ratios. Frames
may be lost: only what arrived counts, and every frame that arrived is checked. memcpy is one process copying from the
same arrays into a ring of the same depth.

    python -m benchmarks.peers [--quick] [--peers a,b] [--sizes 4,640] [--rounds N] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.peer import (
    SOURCES,
    Cpu,
    Failure,
    Peer,
    Phase,
    Sight,
    memcpy,
    new_frame,
    run_reader,
    run_writer,
    version,
)
from benchmarks.peer_iceoryx2 import Iceoryx2
from benchmarks.peer_report import CPU_SIZE, MEMCPY, OURS, RATE_HZ, Figures, report, targets
from benchmarks.peer_shared_memory import SharedMemory
from benchmarks.peer_tensorpool import Tensorpool
from benchmarks.peer_zenoh import Zenoh
from benchmarks.peer_zmq import Zmq

SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "640 KiB": 640 << 10, "4 MiB": 4 << 20, "16 MiB": 16 << 20}

READY_S = 30.0
QUIET = 0.2  # of a core: what else may run on a machine that is measured


def depth_of(size: int) -> int:
    """Slots of a ring, or frames of a queue: the same for every peer, but for zenoh's pool, which needs more.

    About 2 MiB, so that small frames stay in a cache that other machines share, and at least 8 frames.
    """
    return 1 << (min(256, max(8, (2 << 20) // size)).bit_length() - 1)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    rounds: int
    throughput_s: float
    latency_s: float
    idle_s: float


FULL = Plan(rounds=5, throughput_s=0.5, latency_s=1.5, idle_s=5.0)
QUICK = Plan(rounds=1, throughput_s=0.25, latency_s=1.0, idle_s=2.0)


class Pair:
    """The two processes of one peer, and their share of a core; ends with them."""

    def __init__(self, peer: Peer, size: int, folder: Path) -> None:
        self._host = peer.host(size, depth_of(size), folder)
        self._processes: list[BaseProcess] = []
        self._segments: set[Path] = set()
        shared = self._host.__enter__()
        try:
            self._reader = self._start(run_reader, peer, shared, size)
            self._expect(self._reader, READY_S)
            self._writer = self._start(run_writer, peer, shared, size)
            self._expect(self._writer, READY_S)
        except BaseException:
            self.close()
            raise

    def run(self, phase: Phase) -> tuple[Sight, float, float]:
        """What the reader saw, the share of a core of all its processes, and that of everything else meanwhile."""
        busy_s, started_s = _busy_s(), time.monotonic()
        with Cpu() as host:
            self._reader.send(phase)
            self._writer.send(phase)
            writer_share = self._expect(self._writer, phase.total_s + READY_S)
            sight = self._expect(self._reader, phase.total_s + READY_S)
        total_cpu = sight.cpu + writer_share + host.share
        return sight, total_cpu, (_busy_s() - busy_s) / (time.monotonic() - started_s) - total_cpu

    def close(self) -> None:
        for process in self._processes:
            self._segments |= _segments(process.pid)
        for end in (getattr(self, "_writer", None), getattr(self, "_reader", None)):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._host.__exit__(None, None, None)
        for segment in self._segments:
            segment.unlink(missing_ok=True)

    def _start(self, target: Callable[..., None], peer: Peer, shared: Any, size: int) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(peer, shared, size, depth_of(size), theirs), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        return ours

    def _expect(self, end: Connection, seconds: float) -> Any:
        if not end.poll(seconds):
            raise TimeoutError(f"no answer within {seconds:.0f} s")
        answer = end.recv()
        if isinstance(answer, Failure):
            raise RuntimeError(answer.words)
        return answer


def _segments(pid: int | None) -> set[Path]:
    """Files in /dev/shm that the process has mapped: what is left of them afterwards is ours to remove."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {Path(path) for path in re.findall(r"(/dev/shm/(?!sem\.)\S+)$", maps, re.MULTILINE)}


def _busy_s() -> float:
    """Seconds of all cores that were not idle so far."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def measure(peers: list[Peer], sizes: dict[str, int], plan: Plan) -> Figures:
    figures = Figures()
    jobs = [(name, size, turn) for turn in range(plan.rounds) for name, size in sizes.items()]
    with tempfile.TemporaryDirectory(prefix="tensorpool-peers-") as folder:
        for number, (name, size, turn) in enumerate(jobs):
            print(f"\r{number}/{len(jobs)}: {name}, round {turn + 1}   ", end="", file=sys.stderr, flush=True)
            figures.turn = turn
            rate = _memcpy_rate(size, plan.throughput_s)
            figures.add("throughput touching", name, MEMCPY, rate)
            figures.add("throughput copying", name, MEMCPY, rate)
            for peer in peers[turn % len(peers) :] + peers[: turn % len(peers)]:
                with tempfile.TemporaryDirectory(dir=folder, prefix="p") as own:
                    _visit(figures, peer, name, size, plan, Path(own))
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    return figures


def _visit(figures: Figures, peer: Peer, name: str, size: int, plan: Plan, folder: Path) -> None:
    try:
        pair = Pair(peer, size, folder)
        try:
            for copying in (False, True):
                sight, _ = _run(figures, peer, pair, Phase(seconds=plan.throughput_s, copying=copying))
                metric = "throughput copying" if copying else "throughput touching"
                figures.add(metric, name, peer.name, sight.per_second)
            sight, total_cpu = _run(figures, peer, pair, Phase(seconds=plan.latency_s, rate_hz=RATE_HZ))
            percentiles = np.percentile(np.array(sight.latencies_ns), (50, 99)) / 1e3
            figures.add("latency p50", name, peer.name, float(percentiles[0]))
            figures.add("latency p99", name, peer.name, float(percentiles[1]))
            if name == CPU_SIZE:
                figures.add("CPU at 200 Hz, reader", name, peer.name, sight.cpu)
                figures.add("CPU at 200 Hz, all", name, peer.name, total_cpu)
                sight, total_cpu = _run(figures, peer, pair, Phase(seconds=plan.idle_s, rate_hz=0))
                figures.add("CPU idle, reader", name, peer.name, sight.cpu)
                figures.add("CPU idle, all", name, peer.name, total_cpu)
        finally:
            pair.close()
    except Exception as error:
        figures.failed.append(f"{peer.name}, {name}, round {figures.turn + 1}: {type(error).__name__}: {error}")


def _run(figures: Figures, peer: Peer, pair: Pair, phase: Phase) -> tuple[Sight, float]:
    sight, total_cpu, others = pair.run(phase)
    figures.others.append(others)
    figures.wrong[peer.name] = figures.wrong.get(peer.name, 0) + sight.wrong
    if sight.frames == 0 and phase.rate_hz != 0:
        raise RuntimeError("the reader received nothing")
    return sight, total_cpu


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


def _machine() -> dict[str, Any]:
    models = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def main() -> int:
    known: dict[str, Peer] = {
        peer.name: peer
        for peer in (Tensorpool(), Iceoryx2(event=False), Iceoryx2(event=True), Zmq(), Zenoh(), SharedMemory())
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, help=f"rounds of a full run, by default {FULL.rounds}")
    parser.add_argument("--peers", help=f"only those whose names begin so, of: {', '.join(known)}")
    parser.add_argument("--sizes", help="only frames of so many KiB, such as 4,640")
    parser.add_argument("--json", type=Path, help="also write every round's figures to this file")
    parser.add_argument("--plot", type=Path, help="also draw them, as .png or .svg")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    if options.rounds:
        plan = msgspec.structs.replace(plan, rounds=options.rounds)
    wanted = options.peers.split(",") if options.peers else [""]
    chosen = [peer for peer in known.values() if any(peer.name.startswith(start) for start in wanted)]
    kib = {int(part) << 10 for part in options.sizes.split(",")} if options.sizes else set(SIZES.values())
    sizes = {name: size for name, size in SIZES.items() if size in kib}
    if not chosen or not sizes:
        parser.error(f"nothing to measure; peers are {', '.join(known)}, sizes {', '.join(SIZES)}")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an end that cleans up
    versions = {peer.name: version(peer) for peer in chosen}
    for peer in chosen:
        release = versions[peer.name]
        status = f"MISSING: pip install {peer.package}" if release is None else f"{release:<8} {peer.says}"
        print(f"{peer.name:<22}{status}")
    print()
    present = [peer for peer in chosen if versions[peer.name] is not None]
    figures = measure(present, sizes, plan)
    names = [peer.name for peer in present]
    for line in report(figures, names, sizes):
        print(line)
    verdicts = targets(figures, list(sizes)) if OURS in names else []
    for target in verdicts:
        print(target)
    busy = sum(share > QUIET for share in figures.others)
    if busy:
        print(f"NOISY   during {busy} of {len(figures.others)} measurements others took over {QUIET:.0%} of a core")
    for words in figures.failed:
        print(f"FAILED  {words}")
    for name, count in figures.wrong.items():
        if count:
            print(f"WRONG   {name}: {count} frames with stamps that disagree or out of order")
    if options.json:
        document = {
            "machine": _machine(),
            "versions": versions,
            "plan": msgspec.structs.asdict(plan),
            "sizes": sizes,
            "rounds": figures.rounds,
            "others": figures.others,
            "wrong": figures.wrong,
            "failed": figures.failed,
            "targets": [{**msgspec.structs.asdict(target), "holds": target.holds} for target in verdicts],
        }
        options.json.write_text(json.dumps(document, indent=2))
    if options.plot:
        from benchmarks.peer_plot import draw

        draw(figures, names, sizes, options.plot)
    bad = figures.failed or any(figures.wrong.values()) or any(target.holds is False for target in verdicts)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
