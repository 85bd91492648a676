# SPDX-License-Identifier: Apache-2.0
"""What it costs to join two streams of 640 KiB frames at 200 Hz, next to reading both.

    python -m benchmarks.join [--rounds N] [--seconds S] [--json]

A camera in a process of its own fills both streams. Each round reads both with `wait_any` and `poll`, then joins them
by seq (every second round the other way round), and copies every payload out of the ring; it compares the processor
time of the reading thread per pair of frames. Also: what `publish` costs with and without trace ids and parents.
Prints medians with an interval of 95 % from resampled rounds; exit code 1 when the join costs more than 10 % more,
beyond the interval.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any, Final

import numpy as np

from benchmarks.console import interval
from benchmarks.live_camera import STREAM_ID, Site, camera
from tensorpool.client import Client, Consumer, FrameCopy, Producer, join, wait_any

SHAPE: Final = (640, 1024)
HZ: Final = 200.0
NSLOTS: Final = 64
MOST: Final = 1.10
PUBLISHES: Final = 2000


def read_both(consumers: list[Consumer], seconds: float) -> float:
    """Processor time per pair of frames, in microseconds."""
    out = np.empty(SHAPE, np.uint8)
    frames, begun_s, end_s = 0, time.thread_time(), time.monotonic() + seconds
    while time.monotonic() < end_s:
        for consumer in wait_any(consumers, 0.1):
            frame = consumer.poll()
            if frame is not None:
                frame.copy_into(out)
                frames += 1
    return 2e6 * (time.thread_time() - begun_s) / frames


def join_both(consumers: list[Consumer], seconds: float) -> float:
    out = np.empty(SHAPE, np.uint8)
    joined = join(consumers, by="seq")
    begun_s, end_s = time.thread_time(), time.monotonic() + seconds
    while time.monotonic() < end_s:
        found = joined.poll(0.1)
        for frame in found or ():
            np.copyto(out, frame.array) if isinstance(frame, FrameCopy) else frame.copy_into(out)
    return 1e6 * (time.thread_time() - begun_s) / joined.stats.joined


def compare(rounds: int, seconds: float) -> dict[str, Any]:
    ways = {"read": read_both, "join": join_both}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    with Site(SHAPE, NSLOTS) as site, camera(site, SHAPE, HZ, streams=2), site.pool.connect() as client:
        consumers = [client.consumer(STREAM_ID + index) for index in range(2)]
        for number in range(rounds + 1):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                cost = ways[name](consumers, seconds)
                if number:  # the first warms up
                    costs[name].append(cost)
    ratios = [together / apart for together, apart in zip(costs["join"], costs["read"], strict=True)]
    return {name: figures(values) for name, values in (*costs.items(), ("ratio", ratios))}


def publish_costs(rounds: int) -> dict[str, Any]:
    """Of 4 KiB frames, in microseconds: without ids, with ids, with two parents."""
    frame = np.zeros(4096, np.uint8)
    found: dict[str, list[float]] = {"plain": [], "trace_ids": [], "parents": []}
    with Site((4096,), 1024) as site, site.pool.connect() as client:
        plain, traced = (_attached(client, name, name == "traced") for name in ("plain", "traced"))
        cases = ("plain", plain, ()), ("trace_ids", traced, ()), ("parents", plain, (1, 2))
        for _ in range(rounds):
            for name, producer, parents in cases:
                begun_s = time.perf_counter()
                if parents:
                    for _ in range(PUBLISHES):
                        producer.publish(frame, parents=parents)
                else:
                    for _ in range(PUBLISHES):
                        producer.publish(frame)
                found[name].append(1e6 * (time.perf_counter() - begun_s) / PUBLISHES)
    return {name: figures(values) for name, values in found.items()}


def _attached(client: Client, name: str, trace_ids: bool) -> Producer:
    return client.producer(name, create=True, trace_ids=trace_ids)


def figures(values: list[float]) -> dict[str, Any]:
    return {"median": round(statistics.median(values), 3), "interval": [round(end, 3) for end in interval(values)]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    joins, publishes = compare(given.rounds, given.seconds), publish_costs(given.rounds)
    if given.json:
        print(json.dumps({"join_us_per_pair": joins, "publish_us": publishes, "load": load}))
    else:
        for title, rows in (("CPU of the reader, us per pair", joins), ("publish of 4 KiB, us", publishes)):
            print(title)
            for name, one in rows.items():
                low, high = one["interval"]
                print(f"  {name:10} {one['median']:8.3f}  ({low:.3f} to {high:.3f})")
        print(f"load {load:.2f} at the start")
    return 0 if joins["ratio"]["interval"][0] <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
