# SPDX-License-Identifier: Apache-2.0
"""A registry as its fleet grows: memory, CPU, and the time of a query, from 100 streams to 10,000 of 50 drivers.

A registry in a process of its own receives announces that this process sends for invented drivers: every stream
once a second, with a name and tags. Queries by name, by tag (one stream in a hundred) and for the first thousand are
timed from request to answer over IPC. Memory and CPU are the registry process's own, its Aeron client included.

    python -m benchmarks.discovery [--json FILE] [--seconds S]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tensorpool import aeron
from tensorpool.wire import decode
from tensorpool.wire.control import (
    Attribute,
    ClockDomain,
    DataSourceAnnounce,
    DataSourceMeta,
    PayloadPool,
    ShmPoolAnnounce,
)
from tensorpool.wire.discovery import DiscoveryRequest, DiscoveryResponse, Tag

DRIVERS = 50
LOADS = (100, 1_000, 10_000)
IPC = "aeron:ipc?term-length=4m"
FIRST_STREAM_ID = 3_000
RESPONSES = "aeron:ipc?term-length=16m", 2_999
QUERIES = 200


def stream_messages(driver: int, stream_id: int) -> tuple[bytes, list[bytes]]:
    """An announce, whose timestamp is filled in later, and its metadata messages."""
    path = f"shm:file?path=/dev/shm/tensorpool/tensorpool-bench/default/{stream_id}/1794803188555446106"
    announce = ShmPoolAnnounce(
        stream_id=stream_id,
        producer_id=driver + 1,
        epoch=1_794_803_188_555_446_106,
        announce_timestamp_ns=0,
        announce_clock_domain=ClockDomain.MONOTONIC,
        layout_version=1,
        header_nslots=16,
        header_slot_bytes=256,
        payload_pools=tuple(
            PayloadPool(pool_id=pool, pool_nslots=16, stride_bytes=65_536 << pool, region_uri=f"{path}/{pool}.pool")
            for pool in (1, 2)
        ),
        header_region_uri=f"{path}/header.ring",
    ).encode()
    name = DataSourceAnnounce(
        stream_id=stream_id, producer_id=driver + 1, epoch=2**63, meta_version=1, name=f"host{driver}/camera{stream_id}"
    )
    tags = f"host{driver},shard{stream_id % 100}".encode()
    meta = DataSourceMeta(
        stream_id=stream_id,
        meta_version=1,
        timestamp_ns=0,
        attributes=(Attribute(key="tags", format="text/plain", value=tags),),
    )
    return announce, [name.encode(), meta.encode()]


class Fleet:
    """Announces for all drivers, evenly over each second."""

    def __init__(self, client: aeron.Client, streams: int) -> None:
        self._publications = [
            client.add_publication(IPC, FIRST_STREAM_ID + driver, exclusive=True) for driver in range(DRIVERS)
        ]
        self._streams = [(index % DRIVERS, 10_000 + index) for index in range(streams)]
        self._messages = [stream_messages(*stream) for stream in self._streams]
        self._next = 0
        self._started_s = time.monotonic()

    def turn(self) -> None:
        """Send what is due by now: each stream once a second, its metadata with every announce."""
        due = int((time.monotonic() - self._started_s) * len(self._streams))
        while self._next < due:
            index = self._next % len(self._streams)
            publication = self._publications[self._streams[index][0]]
            announce, metadata = self._messages[index]
            stamp = time.monotonic_ns().to_bytes(8, "little")
            for data in (announce[:24] + stamp + announce[32:], *metadata):
                while not publication.offer(data):
                    time.sleep(0)
            self._next += 1


class Asker:
    """Queries, one after the other, while the fleet goes on."""

    def __init__(self, client: aeron.Client, fleet: Fleet) -> None:
        self._fleet = fleet
        self._publication = client.add_publication("aeron:ipc?term-length=1m", 1000, exclusive=True)
        self._subscription = client.add_subscription(*RESPONSES)
        self._ids = itertools.count(1)
        self._heard: list[bytes] = []

    def ask(self, *tags: str, **filters: Any) -> tuple[float, DiscoveryResponse]:
        request = DiscoveryRequest(
            request_id=next(self._ids),
            client_id=next(self._ids),
            response_stream_id=RESPONSES[1],
            response_channel=RESPONSES[0],
            tags=tuple(Tag(tag=tag) for tag in tags),
            **filters,
        )
        started_s = time.perf_counter()
        while not self._publication.offer(request.encode()):
            time.sleep(0)
        while not self._heard:
            self._subscription.poll(lambda data, info: self._heard.append(data), 1000)
            if not self._heard:
                self._fleet.turn()
        took_s = time.perf_counter() - started_s
        response = decode(self._heard.pop())
        assert isinstance(response, DiscoveryResponse)
        return took_s, response


def measure(streams: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tp-bench-") as folder:
        aeron_dir = f"{folder}/aeron"
        path = Path(folder) / "registry.toml"
        path.write_text(
            "[discovery]\nexpiry_ms = 10000\nrequests_per_s = 100000\n"
            + "".join(
                f'[[discovery.drivers]]\ninstance_id = "host{driver}"\ncontrol_channel = "{IPC}"\n'
                f"control_stream_id = {FIRST_STREAM_ID + driver}\n"
                f'metadata_channel = "{IPC}"\nmetadata_stream_id = {FIRST_STREAM_ID + driver}\n'
                for driver in range(DRIVERS)
            )
        )
        with aeron.MediaDriver(aeron_dir):
            arguments = ["discovery", "--config", str(path), "--aeron-dir", aeron_dir, "--log-level", "error"]
            registry = subprocess.Popen(
                [sys.executable, "-m", "tensorpool", *arguments], stdout=subprocess.PIPE, text=True
            )
            try:
                assert registry.stdout is not None
                registry.stdout.readline()
                return observe(aeron_dir, registry.pid, streams, seconds)
            finally:
                registry.terminate()
                registry.wait()


def observe(aeron_dir: str, pid: int, streams: int, seconds: float) -> dict[str, Any]:
    client = aeron.connect(aeron_dir)
    try:
        empty_kib = resident_kib(pid)
        fleet = Fleet(client, streams)
        asker = Asker(client, fleet)
        last = streams - 1
        name = f"host{last % DRIVERS}/camera{10_000 + last}"
        while not asker.ask(data_source_name=name)[1].results:
            run(fleet, 0.1)
        run(fleet, 2.0)
        cpu_s, began_s = cpu(pid), time.monotonic()
        run(fleet, seconds)
        share = (cpu(pid) - cpu_s) / (time.monotonic() - began_s)
        figures: dict[str, Any] = {
            "streams": streams,
            "registry_mib": round(resident_kib(pid) / 1024, 1),
            "kib_per_stream": round((resident_kib(pid) - empty_kib) / streams, 2),
            "cpu_percent": round(100 * share, 1),
        }
        kinds: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
            "by_name": ((), {"data_source_name": name}),
            "by_tag": (("shard7",), {}),
            "of_a_driver": (("host7",), {}),
        }
        for kind, (tags, filters) in kinds.items():
            times, found = [], 0
            for _ in range(QUERIES):
                took_s, response = asker.ask(*tags, **filters)
                times.append(took_s * 1e3)
                found = len(response.results)
                run(fleet, 0.002)
            cuts = statistics.quantiles(times, n=100)
            figures[kind] = {"found": found, "p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}
        return figures
    finally:
        client.close()


def run(fleet: Fleet, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        fleet.turn()
        time.sleep(0.001)


def resident_kib(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def cpu(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--seconds", type=float, default=5.0, help="of announces without queries")
    options = parser.parse_args()
    rows = [measure(streams, options.seconds) for streams in LOADS]
    print(f"{DRIVERS} drivers, every stream announced and described once a second")
    print(f"{'streams':>8} {'MiB':>7} {'KiB/stream':>11} {'CPU %':>6}   query: found, p50 and p99 in ms")
    for row in rows:
        queries = ", ".join(
            f"{kind} {row[kind]['found']}: {row[kind]['p50_ms']} {row[kind]['p99_ms']}"
            for kind in ("by_name", "by_tag", "of_a_driver")
        )
        figures = f"{row['streams']:>8} {row['registry_mib']:>7} {row['kib_per_stream']:>11} {row['cpu_percent']:>6}"
        print(f"{figures}   {queries}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
