# SPDX-License-Identifier: Apache-2.0
"""The view for other programs: JSON at /view, Prometheus at /metrics, the health of the process at /healthz.

Names, labels and help texts of metrics are an interface like any other: dashboards and alerts rest on them. The view is
read at most once in a tenth of a second, however many requests there are. USERS.md 17.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tensorpool import aeron
from tensorpool.supervisor.encoding import to_json
from tensorpool.supervisor.observer import Observer
from tensorpool.supervisor.snapshot import (
    ChangeKind,
    ConsumerState,
    ConsumerStatus,
    Snapshot,
    StreamState,
    StreamStatus,
)
from tensorpool.telemetry.health import standing_still
from tensorpool.telemetry.http import Answer
from tensorpool.telemetry.metrics import Endpoints, aeron_metrics, gauge

FRESH_NS: Final = 100_000_000  # an answer may be so old
STREAM: Final = ("stream_id", "name")
CONSUMER: Final = ("stream_id", "name", "consumer_id")
SERVICE: Final = ("service", "instance")


class Exports:
    """What is served, made of an observer's view."""

    def __init__(self, observer: Observer, extra: Callable[[], Iterable[Metric]] = tuple) -> None:
        self._observer = observer
        self._lock = threading.Lock()
        self._kept: tuple[int, Snapshot] | None = None
        collector = _Collector(self, extra)
        endpoints = Endpoints("supervisor", observer.config.supervisor.instance_id, self._trouble, collector.collect)
        self.routes: Final[dict[str, Callable[[], Answer]]] = {
            "/": self._index,
            "/view": self._view,
            **endpoints.routes,
        }

    def snapshot(self) -> Snapshot:
        """A tenth of a second old at most."""
        now_ns = self._observer.clock.monotonic_ns()
        with self._lock:
            if self._kept is None or now_ns - self._kept[0] > FRESH_NS:
                self._kept = now_ns, self._observer.snapshot()
            return self._kept[1]

    @property
    def observer(self) -> Observer:
        return self._observer

    def _index(self) -> Answer:
        return Answer(200, "text/plain; charset=utf-8", b"tensorpool supervisor: /view /metrics /healthz\n")

    def _view(self) -> Answer:
        snapshot = self.snapshot()
        clock = self._observer.clock
        wall_ns = clock.realtime_ns() - (clock.monotonic_ns() - snapshot.taken_ns)
        return Answer(200, "application/json", to_json(snapshot, wall_ns))

    def _trouble(self) -> str | None:
        observer = self._observer
        stillness = standing_still(observer.clock.monotonic_ns() - observer.turned_ns)
        if stillness is not None or observer.is_connected:
            return stillness
        return f"no media driver is alive at {observer.aeron_dir}"


class _Collector:
    """The view as Prometheus metrics."""

    def __init__(self, exports: Exports, extra: Callable[[], Iterable[Metric]]) -> None:
        self._exports = exports
        self._extra = extra
        self._sample: aeron.Sample | None = None  # of the last time

    def collect(self) -> Iterator[Metric]:
        snapshot = self._exports.snapshot()
        yield from stream_metrics(snapshot)
        yield from consumer_metrics(snapshot)
        yield from other_metrics(snapshot)
        observer = self._exports.observer
        yield gauge("tensorpool_supervisor_connected", "1 while a media driver is listened to.", observer.is_connected)
        readings = observer.counters()
        yield from aeron_metrics(readings)
        yield self._held(readings)
        yield from self._extra()

    def _held(self, readings: list[aeron.CounterReading]) -> Metric:
        """Tethered subscribers of the control stream that have not moved since the last time we were asked."""
        family = GaugeMetricFamily(
            "tensorpool_control_held_bytes",
            "Bytes that a subscriber of the control stream, which does not read on, is behind.",
            labels=["client_id", "client_name", "pid"],
        )
        observer = self._exports.observer
        before, sample = self._sample, aeron.Sample(readings, observer.config.driver.control_stream_id)
        self._sample = sample
        if before is None:
            return family
        behind = sample.behind()
        standing = {key: behind[key] for key in sample.still(before) & behind.keys()}
        for holder in sample.describe(observer.aeron_dir, standing):
            if "tether=false" not in holder.subscriber.channel:
                pid = " or ".join(map(str, holder.pids))
                family.add_metric([str(holder.subscriber.client_id), holder.client_name, pid], holder.behind_bytes)
        return family


def stream_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    """What is known of each stream; what is not known has no sample."""
    yield _states("tensorpool_streams", "Streams by state.", StreamState, (it.state for it in snapshot.streams))
    figures: list[tuple[str, str, Callable[[StreamStatus], float | None]]] = [
        ("rate_hertz", "Frames a second that the producer publishes.", lambda it: it.rate_hz),
        ("bytes_per_second", "Payload bytes a second, by the size of the newest frame.", lambda it: it.bytes_per_s),
        ("frame_bytes", "Payload bytes of the newest frame.", lambda it: it.frame_bytes),
        ("seq", "Seq of the newest frame in the current epoch.", lambda it: it.seq),
        ("slots", "Slots of the ring: how many frames it holds.", lambda it: it.nslots),
        ("consumers", "Consumers that report or hold a lease.", lambda it: it.consumers),
        (
            "up",
            "1 while the stream is announced and its memory refreshed.",
            lambda it: it.state is not StreamState.STALE,
        ),
        ("has_producer", "1 while a producer holds the stream's lease.", lambda it: it.producer_id is not None),
        ("announced_age_seconds", "Since the last announce.", lambda it: _seconds(it.announced_age_ns)),
        ("frame_age_seconds", "Since its seq was seen to move.", lambda it: _seconds(it.frame_age_ns)),
        ("activity_age_seconds", "Since its superblock was stamped.", lambda it: _seconds(it.activity_age_ns)),
    ]
    for name, text, value in figures:
        family = GaugeMetricFamily(f"tensorpool_stream_{name}", text, labels=STREAM)
        for stream in snapshot.streams:
            found = value(stream)
            if found is not None:
                family.add_metric([str(stream.stream_id), stream.name or ""], found)
        yield family

    # Not the epoch itself: it counts nanoseconds, and the 53 bits of a sample cannot distinguish two epochs.
    changes = CounterMetricFamily(
        "tensorpool_stream_epoch_changes",
        "How often consumers had to remap: another epoch was announced.",
        labels=STREAM,
    )
    for stream in snapshot.streams:
        changes.add_metric([str(stream.stream_id), stream.name or ""], stream.epoch_changes)
    yield changes


def consumer_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    """What is known of each consumer."""
    consumers = snapshot.consumers
    yield _states("tensorpool_consumers", "Consumers by state.", ConsumerState, (it.state for it in consumers))
    figures: list[tuple[str, str, Callable[[ConsumerStatus], float | None]]] = [
        ("lag_frames", "Frames behind the producer when it last reported.", lambda it: it.lag),
        ("rate_hertz", "Frames a second that it accepts.", lambda it: it.rate_hz),
        ("age_seconds", "Since its last message.", lambda it: _seconds(it.age_ns)),
        ("up", "1 while it sends messages and holds its lease.", _is_up),
        ("lagging", "1 while it is further behind than it should be.", lambda it: it.is_lagging),
        ("dropping", "1 while it loses frames.", lambda it: it.is_dropping),
        ("rate_limited", "1 in mode RATE_LIMITED.", lambda it: it.mode == "RATE_LIMITED"),
    ]
    for name, text, value in figures:
        family = GaugeMetricFamily(f"tensorpool_consumer_{name}", text, labels=CONSUMER)
        for consumer in consumers:
            found = value(consumer)
            if found is not None:
                family.add_metric(_consumer_labels(consumer), found)
        yield family
    drops = CounterMetricFamily(
        "tensorpool_consumer_drops",
        "Frames that a consumer lost: gap (descriptor never received), late (overwritten before they were read).",
        labels=[*CONSUMER, "reason"],
    )
    for consumer in consumers:
        labels = _consumer_labels(consumer)
        drops.add_metric([*labels, "gap"], consumer.drops_gap)
        drops.add_metric([*labels, "late"], consumer.drops_late)
    yield drops


def other_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    """Leases, services, changes and messages."""
    leases = GaugeMetricFamily("tensorpool_leases", "Leases that are kept alive, by role.", labels=["role"])
    for role in ("PRODUCER", "CONSUMER"):
        leases.add_metric([role.lower()], sum(lease.role == role for lease in snapshot.leases))
    yield leases
    up = GaugeMetricFamily("tensorpool_service_up", "1 while a service's heartbeats come.", labels=SERVICE)
    state = GaugeMetricFamily("tensorpool_service_state", "1 for the state that it is in.", labels=[*SERVICE, "state"])
    age = GaugeMetricFamily("tensorpool_service_age_seconds", "Since its last heartbeat.", labels=SERVICE)
    for service in snapshot.services:
        labels = [service.service, service.instance or ""]
        up.add_metric(labels, not service.is_stale)
        state.add_metric([*labels, service.state], 1)
        age.add_metric(labels, service.age_ns / 1e9)
    yield from (up, state, age)
    changes = CounterMetricFamily("tensorpool_changes", "Changes that were seen, by kind.", labels=["kind"])
    for kind in ChangeKind:
        changes.add_metric([str(kind)], snapshot.change_counts.get(kind, 0))
    yield changes
    messages = CounterMetricFamily(
        "tensorpool_supervisor_messages",
        "Messages received, and those ignored, by kind.",
        labels=["kind"],
    )
    for name, count in sorted(snapshot.message_counts.items()):
        messages.add_metric([name], count)
    yield messages
    overflow = CounterMetricFamily(
        "tensorpool_supervisor_overflow", "Entries that the view had no room for, by kind.", labels=["kind"]
    )
    for name in ("streams", "consumers", "leases", "services"):
        overflow.add_metric([name], snapshot.overflow.get(name, 0))
    yield overflow


def _states(
    name: str, text: str, kinds: type[StreamState] | type[ConsumerState], found: Iterable[StreamState | ConsumerState]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["state"])
    counted = list(found)
    for state in kinds:
        family.add_metric([str(state)], counted.count(state))
    return family


def _consumer_labels(consumer: ConsumerStatus) -> list[str]:
    return [str(consumer.stream_id), consumer.stream_name or "", str(consumer.consumer_id)]


def _is_up(consumer: ConsumerStatus) -> bool:
    return consumer.state not in (ConsumerState.EXPIRED, ConsumerState.STALE)


def _seconds(age_ns: int | None) -> float | None:
    return None if age_ns is None else age_ns / 1e9
