# SPDX-License-Identifier: Apache-2.0
"""What the control plane costs a service: traffic to others in CPU and garbage, and a command's round trip.

    python -m benchmarks.control [--seconds 10] [--rate 1000]

The service turns as those of ours do: every 2 ms while it has nothing to do. Its CPU time is that of its process, with
the thread of Aeron's client in it, compared with the same process on a stream where nothing is said. Media driver and
sender are other processes.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import threading
import time
import tracemalloc

import click
import msgspec

from tensorpool import aeron
from tensorpool.control import Commander, Service, add_common_commands, make_event
from tests.support.processes import Process, private_directory, wait_until

TAG = "service:bench:1"
TURN_S = 0.002

SENDER = """
import sys, time
from tensorpool import aeron
from tensorpool.control import ControlConfig, make_event

client, config = aeron.connect(sys.argv[1]), ControlConfig()
rate = float(sys.argv[2])
publication = client.add_publication(config.control_channel, config.control_stream_id)
data = make_event("service:bench:2", "gain", "x" * 64, correlation_id=1, timestamp_ns=0).encode()
begun, sent = time.monotonic(), 0
while True:
    while sent < (time.monotonic() - begun) * rate:
        sent += bool(publication.offer(data))
    time.sleep(0.01)
"""


class Share(msgspec.Struct):
    """Of a core, in percent: the whole process, and the service's turns in it; and what it read of others a second."""

    process: float
    turns: float
    heard_hz: float


def turned(service: Service, seconds: float) -> Share:
    before = service.counts["other_tag"]
    inside_ns = 0
    cpu, begun = time.process_time(), time.monotonic()
    while time.monotonic() - begun < seconds:
        entered_ns = time.thread_time_ns()
        service.invoke()
        inside_ns += time.thread_time_ns() - entered_ns
        time.sleep(TURN_S)
    elapsed = time.monotonic() - begun
    received = service.counts["other_tag"] - before
    return Share((time.process_time() - cpu) / elapsed * 100, inside_ns / 1e7 / elapsed, received / elapsed)


def garbage(service: Service, seconds: float) -> tuple[int, int, int, float]:
    """Runs of the collector, bytes that grew, peak above the start, and messages that were read meanwhile."""
    tracemalloc.start()
    service.invoke()
    gc.collect()
    runs = sum(generation["collections"] for generation in gc.get_stats())
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    share = turned(service, seconds)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (
        sum(generation["collections"] for generation in gc.get_stats()) - runs,
        after - before,
        peak - before,
        share.heard_hz * seconds,
    )


def round_trips(aeron_dir: str, count: int) -> list[float]:
    """Milliseconds from a command to its result, with a service on a thread of its own."""
    client = aeron.connect(aeron_dir)
    commander = Commander(client)
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        commander.send(TAG, "ping", timeout=10)
        taken.append((time.perf_counter() - begun) * 1e3)
        time.sleep(0.02)  # below the rate that a service accepts
    client.close()
    return taken


@click.command()
@click.option("--seconds", default=10.0, show_default=True)
@click.option("--rate", default=1000.0, show_default=True, help="Messages to other tags a second.")
def main(seconds: float, rate: float) -> None:
    """Print the figures."""
    with private_directory("tp-bench-") as folder:
        aeron_dir = str(folder / "aeron")
        with Process("-m", "tensorpool", "media-driver", "--aeron-dir", aeron_dir):
            wait_until(lambda: aeron.is_driver_active(aeron_dir), "the media driver is there")
            measure(aeron_dir, seconds, rate)


def measure(aeron_dir: str, seconds: float, rate: float) -> None:
    """All of it, at one media driver."""
    client = aeron.connect(aeron_dir)
    service = Service("bench", "1")
    add_common_commands(service, status=dict, drain=lambda: None)
    service.bind(client)
    idle = turned(service, seconds)
    arguments = [sys.executable, "-c", SENDER, aeron_dir, str(rate)]
    with subprocess.Popen(arguments) as sender:
        try:
            while not service.counts["other_tag"]:
                service.invoke()
                time.sleep(TURN_S)
            busy = turned(service, seconds)
            runs, grown, peak, read = garbage(service, seconds)
        finally:
            sender.terminate()
    for words, share in (("nothing said", idle), (f"{busy.heard_hz:.0f}/s to other tags", busy)):
        click.echo(f"{words + ':':<26} {share.turns:.2f} % of a core in its turns, {share.process:.2f} % in all")
    click.echo(f"{read:.0f} such messages:      {runs} collections, {grown} bytes grown, {peak} bytes at the peak")
    data = make_event("service:bench:2", "gain", "x" * 64, correlation_id=1, timestamp_ns=0).encode()
    publication = client.add_publication(service.config.control_channel, service.config.control_stream_id)
    spent = 0.0
    for _ in range(200):
        for _ in range(50):
            publication.offer(data)
        begun = time.perf_counter()
        service.invoke()
        spent += time.perf_counter() - begun
    click.echo(f"one such message:          {spent / 10_000 * 1e9:.0f} ns")
    ended = threading.Event()

    def turn() -> None:
        while not ended.is_set():
            if not service.invoke():
                time.sleep(TURN_S)

    thread = threading.Thread(target=turn)
    thread.start()
    taken = round_trips(aeron_dir, 200)
    ended.set()
    thread.join()
    p99 = statistics.quantiles(taken, n=100)[98]
    click.echo(f"a command to its result:   {statistics.median(taken):.1f} ms median, {p99:.1f} ms p99")
    service.unbind()
    client.close()


if __name__ == "__main__":
    main()
