# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics that every service has, and the two paths that serve them: /metrics and /healthz.

Names, labels and help texts are an interface: dashboards and alerts rest on them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tensorpool import aeron, logs
from tensorpool.errors import Closed, TransportError
from tensorpool.shm import mount_space
from tensorpool.telemetry.http import Answer
from tensorpool.version import __version__

AERON_SYSTEM_COUNTERS: Final = 0  # their type id
_AERON_GAUGES: Final = re.compile(r"max cycle time|max time|currently mapped|software|version|status$")
_VERSIONED: Final = re.compile(r"[:,].*$")


class Endpoints(Collector):
    """/metrics and /healthz of one service.

    >>> Endpoints("driver", "driver-01", lambda: None).routes["/healthz"]().status
    200

    `trouble` is why the service is not well, or None. `collect` gives its own metrics; what it raises is an answer 500.
    """

    def __init__(
        self,
        service: str,
        instance: str,
        trouble: Callable[[], str | None],
        collect: Callable[[], Iterable[Metric]] = tuple,
    ) -> None:
        self._labels = [service, instance]
        self._trouble = trouble
        self._collect = collect
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self.routes: Final[dict[str, Callable[[], Answer]]] = {"/metrics": self._metrics, "/healthz": self._health}

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            "tensorpool_build_info", "1; the labels say what runs.", labels=["service", "instance_id", "version"]
        )
        build.add_metric([*self._labels, __version__], 1)
        yield build
        healthy = GaugeMetricFamily(
            "tensorpool_healthy", "1 while /healthz answers 200.", labels=["service", "instance_id"]
        )
        healthy.add_metric(self._labels, self._trouble() is None)
        yield healthy
        dropped = CounterMetricFamily(
            "tensorpool_log_lines_dropped",
            "Lines that the service did not write because its reader did not read those before.",
            labels=["service", "instance_id"],
        )
        dropped.add_metric(self._labels, logs.lines_dropped())
        yield dropped
        yield from self._collect()

    def _metrics(self) -> Answer:
        return Answer(200, "text/plain; version=0.0.4; charset=utf-8", generate_latest(self._registry))

    def _health(self) -> Answer:
        trouble = self._trouble()
        body = {"status": "ok" if trouble is None else "unwell", "trouble": trouble}
        return Answer(200 if trouble is None else 503, "application/json", msgspec.json.encode(body))


class AeronCounters:
    """The counters of the media driver at a directory, read by a connection of its own; none while it is gone."""

    def __init__(self, aeron_dir: str) -> None:
        self._aeron_dir = aeron_dir
        self._client: aeron.Client | None = None

    def readings(self) -> list[aeron.CounterReading]:
        try:
            if self._client is None or self._client.is_closed:
                self.close()
                self._client = aeron.connect(self._aeron_dir, client_name="tensorpool-metrics")
            return self._client.counters()
        except (TransportError, Closed):
            return []

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def gauge(name: str, text: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    """A counter without labels; its name gets `_total`."""
    return CounterMetricFamily(name, text, value=value)


def space_metrics(**paths: str) -> Iterator[Metric]:
    """Size and room of the mount of each path, by what it is used for; a mount without a limit has no sample."""
    labels = ["use", "mount"]
    total = GaugeMetricFamily("tensorpool_space_total_bytes", "Size of the mount.", labels=labels)
    free = GaugeMetricFamily("tensorpool_space_free_bytes", "Room that the mount has left.", labels=labels)
    for use, path in paths.items():
        mount = mount_space(path)
        if mount.total_bytes is not None and mount.free_bytes is not None:
            total.add_metric([use, mount.mount_point], mount.total_bytes)
            free.add_metric([use, mount.mount_point], mount.free_bytes)
    yield from (total, free)


def aeron_metrics(readings: Iterable[aeron.CounterReading]) -> Iterator[Metric]:
    """The media driver's own counters, and how many publications, subscriptions and clients it has."""
    total = CounterMetricFamily("tensorpool_aeron", "A counter of the media driver.", labels=["counter"])
    level = GaugeMetricFamily("tensorpool_aeron_level", "A level that the media driver keeps.", labels=["counter"])
    resources = GaugeMetricFamily(
        "tensorpool_aeron_resources",
        "Publications, subscribed images and clients of the media driver.",
        labels=["kind"],
    )
    kinds = {"publications": 0, "images": 0, "clients": 0}
    of_type = {12: "publications", 4: "images", 11: "clients"}
    for reading in readings:
        if reading.type_id == AERON_SYSTEM_COUNTERS:
            label = _VERSIONED.sub("", reading.label)
            family = level if _AERON_GAUGES.search(label) else total
            family.add_metric([re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_")], reading.value)
        elif reading.type_id in of_type:
            kinds[of_type[reading.type_id]] += 1
    for kind, count in kinds.items():
        resources.add_metric([kind], count)
    yield from (total, level, resources)
