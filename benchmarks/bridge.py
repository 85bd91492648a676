# SPDX-License-Identifier: Apache-2.0
"""The UDP bridge on loopback next to bare Aeron, which is its limit, and to TCP as people use it instead.

    tensorpool        a producer, two drivers, two bridges, a consumer: a frame counts when the consumer has it whole
    eight mappings    the same with eight streams;  both directions: one there and one back; the sum of all
    stock Aeron       one publication and one subscription, native, chunks of the bridge's size; media drivers as Aeron
                      ships them (default transport, vectors of 4), with the bridge's windows and buffers
    offloaded Aeron   the same with media drivers as we configure them: UDP offload, vectors of 16
    pyzmq TCP         PUSH to PULL;  zenoh TCP: a publisher and a callback

Each measurement runs in fresh processes, alone, for a window after a warm-up. A round visits every size, MTU and
transport, in an order that shifts from round to round; a figure is the median over the rounds, a ratio the median of
the rounds' ratios, with the least and the greatest of them. CPU is that of all processes of the transport, media
drivers included, in seconds per GiB delivered.

    python -m benchmarks.bridge [--quick] [--rounds N] [--sizes 640,4096] [--mtus 1408] [--transports stock,tensorpool]
                                [--json FILE] [--sweep] [--veth]

`--sweep` measures bare Aeron alone under several settings of channels and media driver. `--veth` puts the two hosts
into network namespaces of their own, joined by veth pairs and a switch of MTU 9000 (needs root), where datagrams of
64 KiB travel in fragments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.bridge_transports import (
    Job,
    Settings,
    Shared,
    build_bare_aeron,
    run_bare,
    run_bridge,
    run_consumer,
    run_host,
    run_producer,
    run_zenoh,
    run_zmq,
)
from tests.support.hosts import Network
from tests.support.transfers import free_ports

SIZES = {"640 KiB": 640 << 10, "4 MiB": 4 << 20}
MTUS = {"1408": 1408, "8 KiB": 8192, "64 KiB": 65_504}
OURS, STOCK, OFFLOADED = "tensorpool", "stock Aeron", "offloaded Aeron"
EIGHT, BOTH = "eight mappings", "both directions"
ZMQ, ZENOH = "pyzmq TCP", "zenoh TCP"
READY_S = 30.0
TICKS = os.sysconf("SC_CLK_TCK")

type Start = tuple[Callable[..., None], str]

BARE: list[Start] = [(run_host, "a"), (run_host, "b"), (run_bare, "b"), (run_bare, "a")]
BRIDGED: list[Start] = [
    (run_host, "a"),
    (run_host, "b"),
    (run_bridge, "b"),
    (run_bridge, "a"),
    (run_consumer, "b"),
    (run_producer, "a"),
]
TRANSPORTS: dict[str, list[Start]] = {  # what is started, in this order, and on which host
    OURS: BRIDGED,
    EIGHT: BRIDGED,
    BOTH: [*BRIDGED[:-1], (run_consumer, "a"), BRIDGED[-1], (run_producer, "b")],
    STOCK: BARE,
    OFFLOADED: BARE,
    ZMQ: [(run_zmq, "b"), (run_zmq, "a")],
    ZENOH: [(run_zenoh, "b"), (run_zenoh, "a")],
}
OVER_UDP = (OURS, EIGHT, BOTH, STOCK, OFFLOADED)
LANES = {EIGHT: "aaaaaaaa", BOTH: "ab"}

BUFFERS = "|so-rcvbuf=4m|rcv-wnd=2m"  # what the bridge adds to its receiving channels
AS_AERON_SHIPS: dict[str, int | str] = {
    "udp_offload": "off",
    "receiver_io_vector_capacity": 4,
    "sender_io_vector_capacity": 4,
    "network_publication_max_messages_per_send": 4,
    "socket_so_sndbuf": 0,
}
SETTINGS = {
    OURS: Settings(),
    STOCK: Settings(sending="|so-sndbuf=2m", receiving=BUFFERS, media_driver=AS_AERON_SHIPS),
    OFFLOADED: Settings(receiving=BUFFERS),
}
SWEEP: dict[str, Settings] = {
    "as Aeron ships": Settings(media_driver=AS_AERON_SHIPS),
    "so-rcvbuf=4m rcv-wnd=2m": Settings(receiving=BUFFERS, media_driver=AS_AERON_SHIPS),
    "+ so-sndbuf=2m": SETTINGS[STOCK],
    "+ vectors of 16": Settings(receiving=BUFFERS, media_driver={"udp_offload": "off"}),
    "+ UDP offload: our default": SETTINGS[OFFLOADED],
    "default, vectors of 4": Settings(
        receiving=BUFFERS, media_driver={name: 4 for name in AS_AERON_SHIPS if name.endswith(("capacity", "send"))}
    ),
    "default, no so-sndbuf": Settings(receiving=BUFFERS, media_driver={"socket_so_sndbuf": 0}),
    "default, 1m and rcv-wnd=512k": Settings(receiving="|so-rcvbuf=1m|rcv-wnd=512k"),
    "default, 2m and rcv-wnd=1m": Settings(receiving="|so-rcvbuf=2m|rcv-wnd=1m"),
    "default, 4m and rcv-wnd=4m": Settings(receiving="|so-rcvbuf=4m|rcv-wnd=4m"),
    "default, 8m and rcv-wnd=4m": Settings(receiving="|so-rcvbuf=8m|rcv-wnd=4m"),  # needs net.core.rmem_max=8388608
    "default, 16m and rcv-wnd=8m": Settings(receiving="|so-rcvbuf=16m|rcv-wnd=8m"),  # and 16777216
    "default, term-length=4m": Settings(sending="|term-length=4m", receiving=BUFFERS),
    "default, term-length=64m": Settings(sending="|term-length=64m", receiving=BUFFERS),
    "default, yielding": Settings(receiving=BUFFERS, media_driver={"shared_idle_strategy": "yield"}),
    "default, backoff to 100us": Settings(
        receiving=BUFFERS, media_driver={"shared_idle_strategy_init_args": "10-20-1us-100us"}
    ),
    "default, threads for all": Settings(
        receiving=BUFFERS,
        media_driver={
            "threading_mode": 0,
            **{f"{name}_idle_strategy": "backoff" for name in ("sender", "receiver", "conductor")},
            **{f"{name}_idle_strategy_init_args": "10-20-1us-2ms" for name in ("sender", "receiver", "conductor")},
        },
    ),
}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Ours as a multiple of a rival's, for every size."""

    transport: str = OURS
    rival: str
    mtus: tuple[str, ...]
    field: str = "mib_per_s"
    at_least: float = 0.0
    at_most: float = float("inf")


TARGETS = (
    Target(rival=STOCK, mtus=("1408",), at_least=3.0),
    Target(rival=STOCK, mtus=("1408",), field="cpu_s_per_gib", at_most=0.35),
    Target(rival=STOCK, mtus=("8 KiB",), at_least=1.3),
    Target(rival=OFFLOADED, mtus=tuple(MTUS), at_least=0.9),
    Target(rival=ZENOH, mtus=("64 KiB",), at_least=2.0),
    Target(rival=ZMQ, mtus=("64 KiB",), at_least=0.8),
    Target(transport=EIGHT, rival=OURS, mtus=tuple(MTUS), at_least=0.9),
    Target(transport=BOTH, rival=OURS, mtus=tuple(MTUS), at_least=0.9),
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    rounds: int
    warm_up_s: float
    window_s: float


FULL = Plan(rounds=5, warm_up_s=0.5, window_s=1.2)
QUICK = Plan(rounds=1, warm_up_s=0.3, window_s=0.6)


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    frames_per_s: float
    mib_per_s: float
    cpu_s_per_gib: float
    parts: dict[str, float]  # of that, by process


class Figures:
    """What was measured: a reading for transport, size, MTU and round."""

    def __init__(self) -> None:
        self.readings: dict[tuple[str, str, str], dict[int, Reading]] = {}
        self.failed: list[str] = []
        self.wrong = 0

    def add(self, transport: str, size: str, mtu: str, turn: int, reading: Reading) -> None:
        self.readings.setdefault((transport, size, mtu), {})[turn] = reading

    def median(self, field: str, transport: str, size: str, mtu: str) -> float | None:
        rounds = self.readings.get((transport, size, mtu))
        return statistics.median(getattr(reading, field) for reading in rounds.values()) if rounds else None

    def ratio(self, size: str, mtu: str, rival: str, field: str = "mib_per_s", transport: str = OURS) -> Ratio | None:
        """Ours as a multiple of the rival's, where both were measured in the same round."""
        ours = self.readings.get((transport, size, mtu), {})
        theirs = self.readings.get((rival, size, mtu if rival in OVER_UDP else ""), {})
        ratios = [
            getattr(ours[turn], field) / getattr(theirs[turn], field)
            for turn in ours.keys() & theirs.keys()
            if getattr(theirs[turn], field)
        ]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


class Ratio(NamedTuple):
    median: float
    least: float
    greatest: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f}-{self.greatest:.2f})"


class Processes:
    """The processes of one measurement; ended with it."""

    def __init__(self, starts: list[Start], job: Job, network: Network | None) -> None:
        self._network = network
        self._context = multiprocessing.get_context("spawn")
        self.shared = Shared(self._context, len(job.lanes))
        self._processes: list[BaseProcess] = []
        self._ends: list[Connection] = []
        try:
            for run, host in starts:
                self._start(run, job, host)
        except BaseException:
            self.close()
            raise

    def measure(self, plan: Plan, size: int) -> Reading:
        frames = self.shared.frames
        deadline_s = time.monotonic() + READY_S
        while min(frames) == 0:
            if time.monotonic() > deadline_s or not all(process.is_alive() for process in self._processes):
                raise TimeoutError("no frame has come")
            time.sleep(0.01)
        time.sleep(plan.warm_up_s)
        began_s, seen, before = time.monotonic(), sum(frames), self._cpu_s()
        time.sleep(plan.window_s)
        took_s, came, after = time.monotonic() - began_s, sum(frames) - seen, self._cpu_s()
        gib = came * size / (1 << 30)
        if came == 0:
            raise TimeoutError("no frame came within the window")
        per_gib = {name: (after[name] - before[name]) / gib for name in after}
        return Reading(
            frames_per_s=came / took_s,
            mib_per_s=gib * 1024 / took_s,
            cpu_s_per_gib=sum(per_gib.values()),
            parts=per_gib,
        )

    def close(self) -> list[Any]:
        """What the processes said at the end."""
        self.shared.stop.value = 1
        said: list[Any] = []
        for process, end in zip(self._processes, self._ends, strict=True):
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            with contextlib.suppress(EOFError, OSError):
                while end.poll():
                    said.append(end.recv())
        return said

    def _start(self, run: Callable[..., None], job: Job, host: str) -> None:
        ours, theirs = self._context.Pipe()
        name = f"{run.__name__.removeprefix('run_')} {host}"
        process = self._context.Process(target=run, args=(job, host, self.shared, theirs), name=name, daemon=True)
        with self._network.inside(host) if self._network else contextlib.nullcontext():
            process.start()
        theirs.close()
        self._processes.append(process)
        self._ends.append(ours)
        try:
            if ours.poll(READY_S) and ours.recv() == "ready":
                return
        except EOFError:
            pass
        raise RuntimeError(f"{run.__name__} on host {host} did not start")

    def _cpu_s(self) -> dict[str, float]:
        return {process.name: _cpu_s(process.pid) for process in self._processes}


def _cpu_s(pid: int | None) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextlib.contextmanager
def _folder(bare_aeron: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tensorpool-bridge-bench-") as folder:
        Path(folder, bare_aeron.name).symlink_to(bare_aeron)
        yield folder


def visit(
    figures: Figures,
    transport: str,
    size: str,
    mtu: str,
    turn: int,
    plan: Plan,
    bare_aeron: Path,
    settings: Settings,
    with_counters: bool,
    network: Network | None,
) -> None:
    try:
        with _folder(bare_aeron) as folder:
            mtu_bytes = MTUS.get(mtu, 1408)
            job = Job(
                size=SIZES[size],
                mtu=mtu_bytes,
                addresses=network.addresses if network else dict.fromkeys("ab", "127.0.0.1"),
                ports=free_ports(4),
                folder=folder,
                settings=settings,
                lanes=LANES.get(transport, "a"),
            )
            processes = Processes(TRANSPORTS.get(transport, BARE), job, network)
            try:
                reading = processes.measure(plan, job.size)
                figures.add(transport, size, mtu, turn, reading)
            finally:
                figures.wrong += sum(processes.shared.wrong)
                said = processes.close()
                if with_counters:
                    parts = {name: round(cpu_s, 2) for name, cpu_s in reading.parts.items()}
                    print(f"\n{transport}, {size}, {mtu}:", parts, *said, sep="\n  ", file=sys.stderr)
    except Exception as error:
        figures.failed.append(f"{transport}, {size}, {mtu}, round {turn + 1}: {type(error).__name__}: {error}")


def is_over_udp(transport: str) -> bool:
    """Whether the MTU matters to it; settings of the sweep are bare Aeron's."""
    return transport not in TRANSPORTS or transport in OVER_UDP


def measure(
    transports: list[str],
    sizes: list[str],
    mtus: list[str],
    plan: Plan,
    with_counters: bool,
    network: Network | None,
) -> Figures:
    figures = Figures()
    jobs = [
        (transport, size, mtu) for size in sizes for mtu in mtus for transport in transports if is_over_udp(transport)
    ]
    jobs += [(transport, size, "") for size in sizes for transport in transports if not is_over_udp(transport)]
    with tempfile.TemporaryDirectory(prefix="tensorpool-bridge-bench-") as folder:
        bare_aeron = build_bare_aeron(Path(folder))
        for turn in range(plan.rounds):
            shifted = [*jobs[turn % len(jobs) :], *jobs[: turn % len(jobs)]]
            for number, (transport, size, mtu) in enumerate(shifted):
                text = f"round {turn + 1}, {number + 1}/{len(jobs)}: {transport}, {size} {mtu}"
                print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)
                visit(
                    figures,
                    transport,
                    size,
                    mtu,
                    turn,
                    plan,
                    bare_aeron,
                    SWEEP.get(transport) or SETTINGS.get(transport, Settings()),
                    with_counters,
                    network,
                )
    print("\r" + " " * 78 + "\r", end="", file=sys.stderr)
    return figures


FIELDS = {
    "mib_per_s": ("MiB/s", "{:,.0f}"),
    "frames_per_s": ("frames/s", "{:,.1f}"),
    "cpu_s_per_gib": ("CPU s/GiB", "{:.2f}"),
}


def report(figures: Figures, transports: list[str], sizes: list[str], mtus: list[str]) -> Iterator[str]:
    for size in sizes:
        for field, (unit, form) in FIELDS.items():
            yield _row(f"{size}, {unit}", [f"MTU {mtu}" for mtu in mtus])
            for transport in transports:
                columns = mtus if is_over_udp(transport) else [""]
                values = [figures.median(field, transport, size, mtu) for mtu in columns]
                yield _row(f"  {transport}", ["-" if value is None else form.format(value) for value in values])
        rivals = (STOCK, OFFLOADED, ZMQ, ZENOH)
        for rival in (transport for transport in transports if transport in rivals and OURS in transports):
            for field, of in (("mib_per_s", ""), ("cpu_s_per_gib", ", CPU")):
                ratios = [figures.ratio(size, mtu, rival, field) for mtu in mtus]
                yield _row(f"  {OURS} / {rival}{of}", ["-" if ratio is None else str(ratio) for ratio in ratios])
        yield ""


def verdicts(figures: Figures, sizes: list[str], mtus: list[str]) -> Iterator[tuple[str, bool]]:
    """Of every target that was measured."""
    for target in TARGETS:
        for size in sizes:
            for mtu in (mtu for mtu in mtus if mtu in target.mtus):
                ratio = figures.ratio(size, mtu, target.rival, target.field, target.transport)
                if ratio is None:
                    continue
                is_met = target.at_least <= ratio.median <= target.at_most
                bound = f"at least {target.at_least}" if target.at_least else f"at most {target.at_most}"
                what = f"{target.transport} / {target.rival}, {FIELDS[target.field][0]}, {size}, MTU {mtu}"
                yield f"{'holds ' if is_met else 'MISSED'}  {what}: {ratio}, target {bound}", is_met


def _row(title: str, cells: list[str]) -> str:
    return f"{title:<40}" + "".join(f"{cell:>20}" for cell in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, help=f"by default {FULL.rounds}")
    parser.add_argument("--sizes", help="only frames of so many KiB, such as 640")
    parser.add_argument("--mtus", help="only these MTUs, such as 1408,65504")
    parser.add_argument("--transports", help=f"only those whose names begin so, of: {', '.join(TRANSPORTS)}")
    parser.add_argument("--sweep", action="store_true", help="bare Aeron under several settings")
    parser.add_argument("--veth", action="store_true", help="between network namespaces instead of on loopback")
    parser.add_argument("--counters", action="store_true", help="print what the bridges counted")
    parser.add_argument("--json", type=Path, help="also write every round's figures to this file")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    if options.rounds:
        plan = msgspec.structs.replace(plan, rounds=options.rounds)
    kib = {int(part) << 10 for part in options.sizes.split(",")} if options.sizes else set(SIZES.values())
    sizes = [name for name, size in SIZES.items() if size in kib]
    wanted = {int(part) for part in options.mtus.split(",")} if options.mtus else set(MTUS.values())
    mtus = [name for name, mtu in MTUS.items() if mtu in wanted]
    starts = options.transports.split(",") if options.transports else [""]
    transports = [
        transport
        for transport in (SWEEP if options.sweep else TRANSPORTS)
        if any(transport.startswith(start) for start in starts)
    ]
    if not (sizes and mtus and transports):
        parser.error(f"nothing to measure; sizes are {', '.join(SIZES)}, MTUs {', '.join(map(str, MTUS.values()))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an end that cleans up
    with Network("a", "b") if options.veth else contextlib.nullcontext() as network:
        figures = measure(transports, sizes, mtus, plan, options.counters, network)
    for line in report(figures, transports, sizes, mtus):
        print(line)
    misses = 0
    for line, is_met in verdicts(figures, sizes, mtus):
        misses += not is_met
        print(line)
    for words in figures.failed:
        print(f"FAILED  {words}")
    if figures.wrong:
        print(f"WRONG   {figures.wrong} frames whose stamps disagree")
    if options.json:
        rounds = [
            {"transport": transport, "size": size, "mtu": mtu, "round": turn, **msgspec.structs.asdict(reading)}
            for (transport, size, mtu), readings in figures.readings.items()
            for turn, reading in readings.items()
        ]
        document = {"plan": msgspec.structs.asdict(plan), "rounds": rounds, "failed": figures.failed}
        options.json.write_text(json.dumps(document, indent=2))
    return 1 if figures.failed or figures.wrong or misses else 0


if __name__ == "__main__":
    sys.exit(main())
