# SPDX-License-Identifier: Apache-2.0
"""The native core next to memcpy: bandwidth of the write and the read path per frame size, and nanoseconds per call.
Then a pair of processes: the CPU of a reader of many streams next to one of a fast one, and small frames in batches.

Everything is measured in one run, in short rounds that alternate between memcpy and us, so that a slow moment of the
machine hits both; a ratio is the median over the rounds, with its interval, which decides about targets. The region is
prefaulted and larger than the last-level cache, as a real ring would be. memcpy is libc's, called through ctypes with
the GIL held, as our own copies are.

    python -m benchmarks.core [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import tensorpool as tp
from benchmarks.estimate import Target, Verdict, estimate
from tensorpool import _core, aeron
from tensorpool.shm.copies import choose_copies
from tensorpool.shm.space import reserve

SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "640 KiB": 640 << 10, "4 MiB": 4 << 20, "16 MiB": 16 << 20}
RING_BYTES = 256 << 20
ROUNDS = 61
ROUND_BYTES = 16 << 20

COPY_TARGETS = {  # x memcpy
    "write": {"4 KiB": 0.97, "64 KiB": 0.97, "640 KiB": 0.97, "4 MiB": 1.2, "16 MiB": 1.2},
    "read": dict.fromkeys(SIZES, 0.97),
}
TARGETS = {
    "write of 64 B, ns": (500, "at most"),
    "validated read, ns": (500, "at most"),
    "CPU per frame, 64 streams at 60 Hz / one at 3840 Hz": (1.5, "at most"),
    "frames of 256 B in batches, million/s": (3.0, "at least"),
}
STREAMS, STREAM_HZ = 64, 60
PAIR_ROUNDS, PAIR_S = 3, 2.0
BATCH, BATCH_SLOTS = 1024, 65_536

memcpy = ctypes.PyDLL(None).memcpy  # PyDLL: without giving up the GIL around the call
memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memcpy.restype = None


def mapped(size: int) -> _core.Mapping:
    """A region in /dev/shm as the driver makes one, whose name is already gone."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="tensorpool-bench-") as file:
        reserve(file.fileno(), size, in_huge_pages=True)
        mapping = _core.Mapping(file.fileno(), size, writable=True)
    mapping.prefault()
    return mapping


def make_ring(stride: int, nslots: int) -> tuple[_core.RingWriter, _core.RingReader, _core.Mapping]:
    header, pool = mapped(64 + nslots * 256), mapped(64 + nslots * stride)
    pools = [(1, stride, pool)]
    return _core.RingWriter(header, pools, nslots), _core.RingReader(header, pools, nslots), pool


def seconds(work: Callable[[], None]) -> float:
    """Of this thread's CPU time: the work never waits, and what others get of the core meanwhile is not its cost."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


def bandwidth(size: int) -> dict[str, Any]:
    """GiB/s of memcpy into the region, of our write, of memcpy out of it and of our verified copy; and the ratios."""
    stride = 1 << (size - 1).bit_length()
    nslots = 1 << (max(4, RING_BYTES // stride).bit_length() - 1)
    writer, reader, pool = make_ring(stride, nslots)
    source = np.random.default_rng(1).integers(0, 255, size, dtype=np.uint8)
    target = np.empty(size, np.uint8)
    layout = _core.TensorLayout(1, 1, [size])
    base = np.frombuffer(pool, np.uint8).ctypes.data + 64
    slots = [base + index * stride for index in range(nslots)]
    frames = max(2, ROUND_BYTES // size)
    source_at, target_at = source.ctypes.data, target.ctypes.data
    for seq in range(nslots):
        writer.write(seq, layout, source)

    def memcpy_in(at: int) -> None:
        for n in range(at, at + frames):
            memcpy(slots[n % nslots], source_at, size)

    def write(at: int) -> None:
        seq = writer.next_seq
        for n in range(seq, seq + frames):
            writer.write(n, layout, source)

    def memcpy_out(at: int) -> None:
        for n in range(at, at + frames):
            memcpy(target_at, slots[n % nslots], size)

    def read(at: int) -> None:
        oldest = writer.next_seq - nslots
        for n in range(at, at + frames):
            frame = reader.read(oldest + n % nslots)
            assert isinstance(frame, _core.SlotFrame)
            assert reader.copy_into(frame, target)

    # All four go on round the ring, so that each finds slots that left the cache long ago.
    rounds: dict[str, list[float]] = {}
    at = 0
    for turn in range(ROUNDS + 1):
        for work in (memcpy_in, write, memcpy_out, read)[:: 1 if turn % 2 else -1]:
            took = seconds(functools.partial(work, at))
            at += frames
            if turn > 0:  # the first round warms up
                rounds.setdefault(work.__name__, []).append(took)
    gib = frames * size / (1 << 30)
    result: dict[str, Any] = {f"{name} GiB/s": gib / statistics.median(times) for name, times in rounds.items()}
    for ours, theirs in (("write", "memcpy_in"), ("read", "memcpy_out")):
        pairs = zip(rounds[theirs], rounds[ours], strict=True)
        result[f"{ours} ratio"] = estimate(their / our for their, our in pairs)
    return result


def nanoseconds(call: Callable[[int], object], count: int = 100_000) -> float:
    """The cost of one call from Python, loop included, median of five loops."""

    def loop() -> None:
        for n in range(count):
            call(n)

    loop()
    return statistics.median(seconds(loop) for _ in range(5)) / count * 1e9


def call_costs() -> dict[str, float]:
    writer, reader, _ = make_ring(64, 1024)
    layout = _core.TensorLayout(1, 1, [64])
    data, target = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    costs = {"an empty Python call, ns": nanoseconds(lambda n: None)}
    costs["write of 64 B, ns"] = nanoseconds(lambda n: writer.write(writer.next_seq, layout, data))
    newest = writer.next_seq - 1
    costs["validated read, ns"] = nanoseconds(lambda n: reader.read(newest))
    frame = reader.read(newest)
    assert isinstance(frame, _core.SlotFrame)
    costs["intact check, ns"] = nanoseconds(lambda n: reader.intact(frame))
    costs["verified copy of 64 B, ns"] = nanoseconds(lambda n: reader.copy_into(frame, target))
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tensorpool-bench-") as folder,
        aeron.MediaDriver(str(Path(folder) / "aeron")) as driver,
    ):
        client = aeron.connect(driver.aeron_dir)
        subscription = client.add_subscription("aeron:ipc?term-length=16m", 1100)
        publication = client.add_publication("aeron:ipc?term-length=16m", 1100)
        while not publication.is_connected:
            time.sleep(0.001)

        def offer() -> None:
            for n in range(20_000):
                if not publication.offer_descriptor(1, 1, n):
                    raise RuntimeError("back pressure in the benchmark")

        def drain() -> None:
            while subscription.poll(lambda data, info: None, 100_000):
                pass

        offers, polls = [], []
        for _ in range(7):
            offers.append(seconds(offer) / 20_000 * 1e9)
            polls.append(seconds(drain) / 20_000 * 1e9)
            time.sleep(0.02)  # the media driver moves the publisher's limit
        costs["offer of a descriptor, ns"] = statistics.median(offers)
        costs["poll of a message by a Python handler, ns"] = statistics.median(polls)
        client.close()
    return costs


def pair(publish: Callable[..., None], read: Callable[..., None], streams: int) -> dict[str, float]:
    """What a reader in a process of its own reports about the streams of a publisher in another."""
    spawn = multiprocessing.get_context("spawn")
    with tp.local() as pool:
        ends = [spawn.Pipe() for _ in range(2)]
        processes = [
            spawn.Process(target=work, args=(pool.aeron_dir, pool.config, streams, end[1]))
            for work, end in zip((publish, read), ends, strict=True)
        ]
        for process, (mine, _) in zip(processes, ends, strict=True):
            process.start()
            mine.recv()  # the producers are there before the consumers
        ends[0][0].send("go")
        report: dict[str, float] = ends[1][0].recv()
        ends[0][0].send("end")
        for process in processes:
            process.join()
    return report


def publish_steadily(aeron_dir: str, config: tp.DriverConfig, streams: int, parent: Connection) -> None:
    with tp.connect(aeron_dir, config=config) as client:
        frame, interval = np.zeros(4096, np.uint8), 1 / (STREAMS * STREAM_HZ)
        producers = [client.producer(f"s{n}", create=True, max_frame_bytes=4096, slots=64) for n in range(streams)]
        parent.send("ready")
        parent.recv()
        started = time.perf_counter()
        for number in itertools.count():
            time.sleep(max(0.0, started + number * interval - time.perf_counter()))
            producers[number % streams].publish(frame)
            if number % 100 == 0 and parent.poll():
                return


def read_any(aeron_dir: str, config: tp.DriverConfig, streams: int, parent: Connection) -> None:
    with tp.connect(aeron_dir, config=config) as client:
        consumers = [client.consumer(f"s{n}") for n in range(streams)]
        parent.send("ready")
        tp.wait_any(consumers)
        frames, cpu, end = 0, time.process_time(), time.perf_counter() + PAIR_S
        while time.perf_counter() < end:
            for consumer in tp.wait_any(consumers, 0.1):
                frames += consumer.poll() is not None
        parent.send({"us per frame": (time.process_time() - cpu) / max(frames, 1) * 1e6})


def publish_batches(aeron_dir: str, config: tp.DriverConfig, streams: int, parent: Connection) -> None:
    with (
        tp.connect(aeron_dir, config=config) as client,
        client.producer("b", create=True, max_frame_bytes=256, slots=BATCH_SLOTS) as producer,
    ):
        parent.send("ready")
        parent.recv()
        rows = np.zeros((BATCH, 256), np.uint8)
        while not parent.poll():
            producer.publish_many(rows)


def read_batches(aeron_dir: str, config: tp.DriverConfig, streams: int, parent: Connection) -> None:
    with tp.connect(aeron_dir, config=config) as client:
        consumer = client.consumer("b", max_outstanding_seq_gap=BATCH_SLOTS // 2)
        parent.send("ready")
        consumer.wait()
        frames, cpu, started = 0, time.thread_time(), time.perf_counter()
        while time.perf_counter() < started + PAIR_S:
            frames += len(consumer.poll_many(BATCH, 0.1))
        used, took = time.thread_time() - cpu, time.perf_counter() - started
        stats = consumer.stats
        share = stats.received / (stats.received + stats.lost)
        parent.send({"million/s": frames / took / 1e6, "million/s of CPU": frames / used / 1e6, "received": share})


def pairs() -> dict[str, float]:
    """Alternating, so that a slow moment of the machine hits both; medians over the rounds."""
    rounds = [
        (
            pair(publish_steadily, read_any, STREAMS)["us per frame"],
            pair(publish_steadily, read_any, 1)["us per frame"],
            pair(publish_batches, read_batches, 1),
        )
        for _ in range(PAIR_ROUNDS)
    ]
    many, one, batches = zip(*rounds, strict=True)
    ratios = [ours / single for ours, single in zip(many, one, strict=True)]
    figures = {
        "CPU per frame, 64 streams at 60 Hz, us": statistics.median(many),
        "CPU per frame, one stream at 3840 Hz, us": statistics.median(one),
        "CPU per frame, 64 streams at 60 Hz / one at 3840 Hz": statistics.median(ratios),
        "the same, lowest": min(ratios),
        "the same, highest": max(ratios),
    }
    for name in batches[0]:
        figures[f"frames of 256 B in batches, {name}"] = statistics.median(batch[name] for batch in batches)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    figures: dict[str, Any] = {"bandwidth": {}, "calls": {}}

    print(f"copies: {choose_copies()}: {', '.join(f'{use} {kind}' for use, kind in _core.copy_kinds().items())}")
    columns = ("memcpy in", "our write", "ratio", "memcpy out", "our read", "ratio")
    print(f"{'frame, GiB/s':>12}" + "".join(f"{column:>20}" for column in columns))
    verdicts = []
    for name, size in SIZES.items():
        row = bandwidth(size)
        figures["bandwidth"][name] = {key: msgspec.to_builtins(value) for key, value in row.items()}
        cells = []
        for ours, theirs in (("write", "memcpy_in"), ("read", "memcpy_out")):
            ratio = row[f"{ours} ratio"]
            cells += [f"{row[f'{theirs} GiB/s']:.2f}", f"{row[f'{ours} GiB/s']:.2f}", ratio.text()]
            bound = COPY_TARGETS[ours][name]
            verdicts.append(Target(name=f"{ours} {name} / memcpy", value=ratio, bound=bound, at_least=True))
        print(f"{name:>12}" + "".join(f"{cell:>20}" for cell in cells))
    print()
    figures["calls"] = call_costs()
    measured: dict[str, float] = dict(figures["calls"])
    for name, value in figures["calls"].items():
        print(f"{name:<36} {value:8.0f}")
    print()
    figures["pairs"] = pairs()
    measured |= figures["pairs"]
    for name, value in figures["pairs"].items():
        print(f"{name:<52} {value:8.2f}")
    print()
    missed = sum(target.verdict is Verdict.MISSED for target in verdicts)
    for target in verdicts:
        print(target)
    for name, (bound, sense) in TARGETS.items():
        holds = measured[name] >= bound if sense == "at least" else measured[name] <= bound
        missed += not holds
        print(f"{'met' if holds else 'MISSED':<12} {name}: {measured[name]:.2f}, target {sense} {bound}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
