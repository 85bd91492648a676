# SPDX-License-Identifier: Apache-2.0
"""The driver's own metrics: leases, streams, reserved memory, what it counted, and the room that its mounts have."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tensorpool.driver.driver import Driver
from tensorpool.telemetry.metrics import gauge, space_metrics
from tensorpool.wire.driver import Role


def driver_metrics(driver: Driver) -> Iterator[Metric]:
    """For any thread: tables are copied before they are counted."""
    lifecycle, policies = driver.conductor.lifecycle, driver.config.policies
    held = [lease.role for lease in lifecycle.leases]
    leases = GaugeMetricFamily("tensorpool_driver_leases", "Leases that the driver has granted.", labels=["role"])
    for role in Role:
        leases.add_metric([role.name.lower()], held.count(role))
    yield leases
    streams = list(lifecycle.streams)
    yield gauge("tensorpool_driver_streams", "Streams, those of the configuration and those of clients.", len(streams))
    epochs = policies.epoch_gc_keep if policies.epoch_gc_enabled else 1
    reserved = epochs * sum(each.ring.size_bytes for each in streams if each.producer and each.ring)
    yield gauge("tensorpool_driver_reserved_bytes", "Memory of streams that have a producer, in all epochs.", reserved)
    if policies.max_bytes:
        yield gauge("tensorpool_driver_max_bytes", "policies.max_bytes: the most that is reserved.", policies.max_bytes)
    events = CounterMetricFamily("tensorpool_driver_events", "What the driver counted, by kind.", labels=["kind"])
    for kind, count in sorted(lifecycle.counts.copy().items()):
        events.add_metric([kind], count)
    yield events
    yield from space_metrics(regions=driver.config.shm.base_dir, aeron=driver.aeron_dir)
