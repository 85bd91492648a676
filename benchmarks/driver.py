# SPDX-License-Identifier: Apache-2.0
"""The SHM driver under load: how attach latency, announce cadence and CPU grow with streams and leases.

A driver of its own serves N streams; a client that uses only the codec holds M leases on them, keeps them alive, and
attaches and detaches beside that. Medians and tails of the time from request to response, of the gap between announces
of one stream, and the driver's CPU share while nothing but keepalives and announces happens.

    python -m benchmarks.driver [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tensorpool import aeron
from tensorpool.driver import Driver, DriverConfig
from tensorpool.wire import Message, decode
from tensorpool.wire.control import ShmPoolAnnounce
from tensorpool.wire.driver import (
    HugepagesPolicy,
    PublishMode,
    ResponseCode,
    Role,
    ShmAttachRequest,
    ShmAttachResponse,
    ShmDetachRequest,
    ShmDetachResponse,
    ShmLeaseKeepalive,
)

LOADS = [(1, 10), (20, 100), (200, 1000)]
FIRST_STREAM_ID = 10_000
ATTACHES = 300
QUIET_S = 6.0


class CodecClient:
    """Speaks to a driver with the codec alone and keeps every lease alive that it holds."""

    def __init__(self, config: DriverConfig, aeron_dir: str) -> None:
        control = config.driver.control
        self._client = aeron.connect(aeron_dir)
        self._subscription = self._client.add_subscription(control.channel, control.stream_id)
        self._publication = self._client.add_publication(control.channel, control.stream_id)
        self._interval_s = config.policies.lease_keepalive_interval_ms / 1e3 / 2
        self._next_keepalive_s = time.monotonic()
        self._correlation = itertools.count(1)
        self._answers: dict[int, Message] = {}
        self.leases: list[ShmLeaseKeepalive] = []
        self.announces: dict[int, list[float]] = {}

    def turn(self) -> int:
        if time.monotonic() >= self._next_keepalive_s:
            self._next_keepalive_s += self._interval_s
            for lease in self.leases:
                self.offer(lease)
        return self._subscription.poll(self._on_message, 1000)

    def offer(self, message: Message) -> None:
        data = message.encode()
        while not self._publication.offer(data):
            self._subscription.poll(self._on_message, 1000)

    def attach(self, client_id: int, stream_id: int, role: Role) -> ShmAttachResponse:
        correlation_id = next(self._correlation)
        self.offer(
            ShmAttachRequest(
                correlation_id=correlation_id,
                stream_id=stream_id,
                client_id=client_id,
                role=role,
                expected_layout_version=0,
                max_dims=0,
                publish_mode=PublishMode.REQUIRE_EXISTING,
                require_hugepages=HugepagesPolicy.UNSPECIFIED,
            )
        )
        answer = self._await(correlation_id)
        assert isinstance(answer, ShmAttachResponse)
        if answer.code is not ResponseCode.OK:
            raise RuntimeError(answer.error_message)
        return answer

    def detach(self, lease_id: int, client_id: int, stream_id: int, role: Role) -> None:
        correlation_id = next(self._correlation)
        self.offer(
            ShmDetachRequest(
                correlation_id=correlation_id, lease_id=lease_id, stream_id=stream_id, client_id=client_id, role=role
            )
        )
        self._await(correlation_id)

    def close(self) -> None:
        self._client.close()

    def _await(self, correlation_id: int) -> Message:
        deadline = time.monotonic() + 30
        while correlation_id not in self._answers:
            if self.turn() == 0:
                time.sleep(0.0001)
            if time.monotonic() > deadline:
                raise RuntimeError(f"no answer to request {correlation_id}")
        return self._answers.pop(correlation_id)

    def _on_message(self, data: bytes, _: aeron.MessageInfo) -> None:
        message = decode(data)
        if isinstance(message, ShmAttachResponse | ShmDetachResponse):
            self._answers[message.correlation_id] = message
        elif isinstance(message, ShmPoolAnnounce):
            self.announces.setdefault(message.stream_id, []).append(time.monotonic())


def measure(streams: int, leases: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tensorpool-bench-") as folder:
        overrides: dict[str, Any] = {
            "shm.base_dir": f"{folder}/regions",
            "profiles": {"small": {"header_nslots": 8, "payload_pools": [{"pool_id": 1, "stride_bytes": 4096}]}},
            "streams": {f"s{n}": {"stream_id": FIRST_STREAM_ID + n} for n in range(streams)},
        }
        config_file = Path(folder) / "driver.toml"
        config_file.write_text(_toml(overrides))
        config = DriverConfig.load(config_file, environ={})
        with Driver(config, aeron_dir=f"{folder}/aeron") as driver:
            client = CodecClient(config, driver.aeron_dir)
            result = _measure(client, streams, leases)
            client.close()
    return result


def _measure(client: CodecClient, streams: int, leases: int) -> dict[str, float]:
    while len(client.announces) < streams:
        client.turn()
    for n in range(leases):
        stream_id = FIRST_STREAM_ID + n % streams
        answer = client.attach(1000 + n, stream_id, Role.CONSUMER)
        assert answer.lease_id is not None
        client.leases.append(
            ShmLeaseKeepalive(
                lease_id=answer.lease_id,
                stream_id=stream_id,
                client_id=1000 + n,
                role=Role.CONSUMER,
                client_timestamp_ns=0,
            )
        )
    consumer = _latencies(client, streams, Role.CONSUMER, ATTACHES)
    producer = _latencies(client, streams, Role.PRODUCER, ATTACHES // 6)
    client.announces.clear()
    before_s, started_s = _cpu_s(), time.monotonic()
    own_before_s = time.thread_time()
    while time.monotonic() - started_s < QUIET_S:
        if client.turn() == 0:
            time.sleep(0.002)
    own_s = time.thread_time() - own_before_s
    cpu = (_cpu_s() - before_s - own_s) / (time.monotonic() - started_s)
    gaps = [b - a for times in client.announces.values() for a, b in itertools.pairwise(times)]
    return {
        "attach consumer p50, ms": statistics.median(consumer),
        "attach consumer p99, ms": statistics.quantiles(consumer, n=100)[98],
        "attach producer p50, ms": statistics.median(producer),
        "announce gap p50, ms": statistics.median(gaps) * 1e3,
        "announce gap max, ms": max(gaps) * 1e3,
        "driver and media driver CPU, % of a core": cpu * 100,
    }


def _latencies(client: CodecClient, streams: int, role: Role, count: int) -> list[float]:
    times = []
    for n in range(count):
        stream_id = FIRST_STREAM_ID + n % streams
        started = time.perf_counter()
        answer = client.attach(900_000 + n, stream_id, role)
        times.append((time.perf_counter() - started) * 1e3)
        assert answer.lease_id is not None
        client.detach(answer.lease_id, 900_000 + n, stream_id, role)
    return times


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _toml(settings: dict[str, Any]) -> str:
    lines = ["[shm]", f'base_dir = "{settings["shm.base_dir"]}"', ""]
    for name, profile in settings["profiles"].items():
        pools = ", ".join(
            "{" + ", ".join(f"{k} = {v}" for k, v in pool.items()) + "}" for pool in profile["payload_pools"]
        )
        lines += [f"[profiles.{name}]", f"header_nslots = {profile['header_nslots']}", f"payload_pools = [{pools}]", ""]
    for name, stream in settings["streams"].items():
        lines += [f"[streams.{name}]", f"stream_id = {stream['stream_id']}", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    figures = {f"{streams} streams, {leases} leases": measure(streams, leases) for streams, leases in LOADS}
    names = list(next(iter(figures.values())))
    print(f"{'':<42}" + "".join(f"{load:>26}" for load in figures))
    for name in names:
        print(f"{name:<42}" + "".join(f"{row[name]:>26.2f}" for row in figures.values()))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
