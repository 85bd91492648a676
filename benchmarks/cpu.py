# SPDX-License-Identifier: Apache-2.0
"""What processes cost while little happens: the CPU of each process and thread, next to iceoryx2's event mode.

    idle deployment   driver with its media driver, one producer, one consumer that waits; nothing is published
    200 Hz            640 KiB frames, one reader
    16 readers        640 KiB frames at 100 Hz

A share is the time that the kernel charged to the threads (/proc/PID/task/*/schedstat) by the time that passed, in
percent of one core; wakes are the times per second that a thread went to sleep by itself. Rounds alternate between the
two, and a figure is the median. The writer copies its frames in, readers touch every page.

    python -m benchmarks.cpu [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import tensorpool as tp

SIZE = 640 << 10
DEPTH = 16
PAGE_WORDS = 4096 // 8
MANY = 16
PREFIX = "tpcpu-"  # short: iceoryx2 makes sockets below it
SETTLE_S = 1.5  # until attaching and its hurry are over

type Role = Callable[[str, Connection], None]
type Place = str


class Phase(msgspec.Struct, frozen=True):
    name: str
    readers: int
    rate_hz: float


PHASES = (Phase("idle deployment", 1, 0), Phase("200 Hz", 1, 200), Phase("16 readers", MANY, 100))

TARGETS = {  # of the figures that `summary` makes
    "idle client, %": 0.2,
    "idle deployment, %": 1.0,
    "200 Hz, all processes / iceoryx2 event": 1.2,
    "16 readers, all processes / iceoryx2 event": 1.2,
    "200 Hz, p50 / iceoryx2 event": 1.0,
    "200 Hz, p99 / iceoryx2 event": 1.0,
}


class Thread(msgspec.Struct, frozen=True):
    """What one thread took in a phase."""

    process: str
    name: str
    percent: float
    wakes: float  # a second


# --- the processes: each says that it is ready, then the writer is told rates


def _ready(parent: Connection) -> None:
    parent.send({thread.native_id: thread.name for thread in threading.enumerate()})


def _write(publish: Callable[[np.ndarray], object], parent: Connection) -> None:
    """Publish at the rate that the parent asked for last, until it sends None. A frame carries its time."""
    frame = np.zeros(SIZE // 8, np.uint64)
    for rate_hz in iter(parent.recv, None):
        due_ns = time.monotonic_ns()
        while rate_hz and not (parent.poll()):
            due_ns += int(1e9 / rate_hz)
            time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            frame[0] = frame[-1] = time.monotonic_ns()
            publish(frame)


class _Latencies:
    """When frames arrived after they were published; sent to the parent whenever it asks."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def add(self, frame: np.ndarray) -> None:
        frame[::PAGE_WORDS].tobytes()
        stamp = frame.item(0)
        if stamp == frame.item(-1):
            self.seen.append(time.monotonic_ns() - stamp)

    def answer(self, parent: Connection) -> bool:
        """False when the process has to end."""
        while parent.poll():
            if parent.recv() is None:
                return False
            parent.send(self.seen)
            self.seen = []
        return True


def drive(place: Place, parent: Connection) -> None:
    config = tp.DriverConfig.load(f"{place}/driver.toml", environ={})
    with tp.Driver(config, aeron_dir=f"{place}/aeron"):
        _ready(parent)
        parent.recv()


def idle_client(place: Place, parent: Connection) -> None:
    with tp.connect(f"{place}/aeron", config=f"{place}/driver.toml"):
        _ready(parent)
        parent.recv()


def write_tensorpool(place: Place, parent: Connection) -> None:
    with (
        tp.connect(f"{place}/aeron", config=f"{place}/driver.toml") as client,
        client.producer(10000) as producer,
    ):
        _ready(parent)
        _write(producer.publish, parent)


def read_tensorpool(place: Place, parent: Connection) -> None:
    with tp.connect(f"{place}/aeron", config=f"{place}/driver.toml") as client, client.consumer(10000) as consumer:
        _ready(parent)
        latencies, frames = _Latencies(), 0
        while frames % 16 or latencies.answer(parent):
            frame = consumer.poll(0.5)
            frames += 1 if frame is not None else -frames
            if frame is not None:
                latencies.add(frame.array)


def _services(place: Place) -> Any:
    import iceoryx2 as iox2

    iox2.set_log_level(iox2.LogLevel.Error)
    config = iox2.config.default()
    config.global_cfg.root_path = iox2.Path.new(f"{place}/")
    config.global_cfg.prefix = iox2.FileName.new(f"{Path(place).name}_")
    node = iox2.NodeBuilder.new().config(config).create(iox2.ServiceType.Ipc)
    name = iox2.ServiceName.new("frames")
    frames = (
        node.service_builder(name)
        .publish_subscribe(iox2.Slice[ctypes.c_uint8])
        .enable_safe_overflow(True)
        .history_size(0)
        .max_publishers(1)
        .max_subscribers(MANY)
        .subscriber_max_buffer_size(DEPTH)
        .subscriber_max_borrowed_samples(2)
        .open_or_create()
    )
    events = node.service_builder(name).event().max_listeners(MANY).open_or_create()
    return node, frames, events


def write_iceoryx2(place: Place, parent: Connection) -> None:
    node, frames, events = _services(place)
    publisher = frames.publisher_builder().initial_max_slice_len(SIZE).create()
    notifier = events.notifier_builder().create()

    def publish(frame: np.ndarray) -> None:
        sample = publisher.loan_slice_uninit(SIZE)
        ctypes.memmove(sample.payload_ptr, frame.ctypes.data, SIZE)
        sample.assume_init().send()
        notifier.notify()

    _ready(parent)
    _write(publish, parent)
    del node


def read_iceoryx2(place: Place, parent: Connection) -> None:
    import iceoryx2 as iox2

    node, frames, events = _services(place)
    listener, subscriber = events.listener_builder().create(), frames.subscriber_builder().create()
    _ready(parent)
    wait, array_type = iox2.Duration.from_millis(500), ctypes.c_uint64 * (SIZE // 8)
    latencies, taken = _Latencies(), 0
    while taken % 16 or latencies.answer(parent):
        taken += 1 if listener.timed_wait(wait) else -taken
        while (sample := subscriber.receive()) is not None:
            latencies.add(np.frombuffer(array_type.from_address(sample.payload_ptr), np.uint64))
    del node


# --- the parent


class Process:
    """A process of a system, and what its threads have taken so far."""

    def __init__(self, name: str, role: Role, place: Place) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.name = name
        self.commands, theirs = spawn.Pipe()
        self._process = spawn.Process(target=role, args=(place, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._names: dict[int, str] = self.commands.recv()

    def taken(self) -> dict[int, tuple[int, int]]:
        """Nanoseconds of CPU and voluntary switches, by thread."""
        threads = {}
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            status = (task / "status").read_text()
            switches = int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
            threads[int(task.name)] = int((task / "schedstat").read_text().split()[0]), switches
        return threads

    def shares(self, before: dict[int, tuple[int, int]], seconds: float) -> list[Thread]:
        threads = []
        for tid, (cpu_ns, switches) in self.taken().items():
            cpu_before, switches_before = before.get(tid, (0, 0))
            name = self._names.get(tid) or Path(f"/proc/{self._process.pid}/task/{tid}/comm").read_text().strip()
            percent = (cpu_ns - cpu_before) / seconds / 1e7
            threads.append(Thread(self.name, name, percent, (switches - switches_before) / seconds))
        return threads

    def end(self) -> None:
        self.commands.send(None)
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()


@contextmanager
def tensorpool_place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=PREFIX) as place:
        Path(place, "driver.toml").write_text(
            f'[shm]\nbase_dir = "{place}/regions"\n[profiles.frames]\nheader_nslots = {DEPTH}\n'
            f"payload_pools = [{{pool_id = 1, stride_bytes = {1 << (SIZE - 1).bit_length()}}}]\n"
            "[streams.frames]\nstream_id = 10000\n"
        )
        yield place


@contextmanager
def iceoryx2_place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=PREFIX) as place:
        try:
            yield place
        finally:
            for left in Path("/dev/shm").glob(f"{Path(place).name}_*"):
                left.unlink(missing_ok=True)


SYSTEMS: dict[str, tuple[Callable[[], Any], tuple[tuple[str, Role], ...], Role, Role]] = {
    "tensorpool": (
        tensorpool_place,
        (("driver", drive), ("idle client", idle_client)),
        write_tensorpool,
        read_tensorpool,
    ),
    "iceoryx2 event": (iceoryx2_place, (), write_iceoryx2, read_iceoryx2),
}


def measure(system: str, phase: Phase, seconds: float) -> tuple[list[Thread], list[int]]:
    """What every thread took, and the latencies that the readers saw."""
    make_place, services, write, read = SYSTEMS[system]
    with make_place() as place:
        processes: list[Process] = []
        try:
            for name, role in services:
                if name != "idle client" or phase.rate_hz == 0:
                    processes.append(Process(name, role, place))
            writer = Process("writer", write, place)
            processes.append(writer)
            readers = []
            for number in range(phase.readers):  # one after the other: iceoryx2 fails where many open at once
                readers.append(Process("reader" if phase.readers == 1 else f"reader {number}", read, place))
                processes.append(readers[-1])
            writer.commands.send(phase.rate_hz)
            time.sleep(SETTLE_S)
            _latencies(readers)
            before, started = [process.taken() for process in processes], time.monotonic()
            time.sleep(seconds)
            took = time.monotonic() - started
            shares = [process.shares(taken, took) for process, taken in zip(processes, before, strict=True)]
            return [thread for threads in shares for thread in threads], _latencies(readers)
        finally:
            for process in reversed(processes):
                process.end()


def _latencies(readers: list[Process]) -> list[int]:
    for reader in readers:
        reader.commands.send("latencies")
    return [latency for reader in readers for latency in reader.commands.recv()]


class Round(msgspec.Struct, frozen=True):
    """One measurement: percent of a core by process, and the latencies in us."""

    threads: list[Thread]
    p50_us: float | None
    p99_us: float | None

    @classmethod
    def of(cls, threads: list[Thread], latencies_ns: list[int]) -> Round:
        if not latencies_ns:
            return cls(threads, None, None)
        p50_us, p99_us = (float(us) for us in np.percentile(latencies_ns, (50, 99)) / 1e3)
        return cls(threads, p50_us, p99_us)

    def of_process(self, name: str) -> float:
        return sum(thread.percent for thread in self.threads if thread.process == name)

    @property
    def deployment(self) -> float:
        """All processes but the client that does nothing."""
        return sum(thread.percent for thread in self.threads if thread.process != "idle client")


type Rounds = dict[str, dict[str, list[Round]]]  # by phase and system


def summary(rounds: Rounds) -> dict[str, float]:
    """The figures, medians over the rounds; ratios are of the same round."""
    figures = {}
    idle = rounds["idle deployment"]["tensorpool"]
    for name in ("idle client", "writer", "reader", "driver"):
        figures[f"idle: {name}, %"] = statistics.median(one.of_process(name) for one in idle)
    figures["idle client, %"] = max(figures[f"idle: {name}, %"] for name in ("idle client", "writer", "reader"))
    figures["idle deployment, %"] = statistics.median(one.deployment for one in idle)
    for phase, systems in rounds.items():
        for system, measured in systems.items():
            figures[f"{phase}, {system}, %"] = statistics.median(one.deployment for one in measured)
            for name in ("p50_us", "p99_us"):
                values = [value for one in measured if (value := getattr(one, name)) is not None]
                if values:
                    figures[f"{phase}, {system}, {name}"] = statistics.median(values)
        pairs = list(zip(*systems.values(), strict=True)) if len(systems) == 2 and phase != "idle deployment" else []
        if pairs:
            figures[f"{phase}, all processes / iceoryx2 event"] = statistics.median(
                ours.deployment / theirs.deployment for ours, theirs in pairs
            )
            for name in ("p50", "p99"):
                ratios = [getattr(ours, f"{name}_us") / getattr(theirs, f"{name}_us") for ours, theirs in pairs]
                figures[f"{phase}, {name} / iceoryx2 event"] = statistics.median(ratios)
    return figures


def print_threads(rounds: Rounds) -> None:
    for phase, systems in rounds.items():
        for system, measured in systems.items():
            print(f"\n{phase}, {system}: {statistics.median(one.deployment for one in measured):.2f} %")
            for thread in measured[-1].threads:
                if not thread.process.startswith("reader ") or thread.process == "reader 0":
                    print(
                        f"  {thread.process:<12} {thread.name:<28} {thread.percent:7.3f} % {thread.wakes:8.1f} wakes/s"
                    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, short")
    parser.add_argument("--phase", help="only the phase whose name begins so")
    parser.add_argument("--alone", action="store_true", help="without iceoryx2")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    count, seconds = (1, 3.0) if options.quick else (3, 8.0)
    systems = list(SYSTEMS)
    if options.alone or importlib.util.find_spec("iceoryx2") is None:
        systems.remove("iceoryx2 event")
    print(f"{len(systems)} systems; load before: {os.getloadavg()[0]:.2f}")
    rounds: Rounds = {
        phase.name: {system: [] for system in systems}
        for phase in PHASES
        if options.phase is None or phase.name.startswith(options.phase)
    }
    for _ in range(count):
        for phase in PHASES:
            for system, measured in rounds.get(phase.name, {}).items():
                measured.append(Round.of(*measure(system, phase, seconds)))
    print_threads(rounds)
    if "idle deployment" not in rounds:
        return 0
    figures = summary(rounds)
    print()
    for name, value in figures.items():
        print(f"{name:<48} {value:8.3f}")
    print(f"load after: {os.getloadavg()[0]:.2f}\n")
    missed = 0
    for name, bound in TARGETS.items():
        if name not in figures:
            print(f"not measured  {name}: iceoryx2 is not installed (make .venv/.bench)")
            continue
        holds = figures[name] <= bound
        missed += not holds
        print(f"{'holds ' if holds else 'MISSED'}  {name}: {figures[name]:.2f}, target at most {bound}")
    if options.json:
        options.json.write_text(json.dumps({"figures": figures, "rounds": msgspec.to_builtins(rounds)}, indent=2))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
