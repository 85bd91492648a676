# SPDX-License-Identifier: Apache-2.0
"""What a bridge counted, per mapping and reason, for people and for Prometheus.

Counts that live in native objects are read on demand. Prometheus calls them
`tensorpool_bridge_<what>_total{mapping=…,reason=…}`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PREFIX: Final = "tensorpool_bridge_"

type Key = tuple[str, str]  # what, reason
type Read = Callable[[], Mapping[Key, int]]


class Counters:
    """Everything that one mapping counts. For any thread.

    >>> counters = Counters("1000->2000")
    >>> counters.add("frames_dropped", reason="timeout")
    >>> counters["frames_dropped", "timeout"]
    1
    """

    def __init__(self, mapping: str) -> None:
        self.mapping = mapping
        self._counts: Counter[Key] = Counter()
        self._sources: list[Read] = []
        self._lock = threading.Lock()

    def add(self, what: str, amount: int = 1, *, reason: str = "") -> None:
        """Count."""
        with self._lock:
            self._counts[what, reason] += amount

    def include(self, read: Read) -> None:
        """Also count what `read` returns, from now on: totals of an object that counts by itself."""
        with self._lock:
            self._sources.append(read)

    def keep(self, read: Read) -> None:
        """The end of an object that counted by itself: its last totals stay."""
        with self._lock:
            self._sources.remove(read)
            self._counts.update(read())

    def snapshot(self) -> dict[Key, int]:
        """Everything that is not zero."""
        with self._lock:
            total = Counter(self._counts)
            for read in self._sources:
                total.update(read())
        return {key: count for key, count in total.items() if count}

    def total(self, what: str) -> int:
        """Of all reasons together."""
        return sum(count for (name, _), count in self.snapshot().items() if name == what)

    def __getitem__(self, key: Key) -> int:
        return self.snapshot().get(key, 0)

    def as_dict(self) -> dict[str, int]:
        """With texts as keys: `frames_dropped.timeout`."""
        return {f"{what}.{reason}" if reason else what: n for (what, reason), n in sorted(self.snapshot().items())}


class Collector:
    """Hands the counters of a bridge to prometheus_client."""

    def __init__(self, counters: Callable[[], Iterable[Counters]], gauges: Callable[[], Mapping[str, float]]) -> None:
        self._counters = counters
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, CounterMetricFamily] = {}
        for counters in self._counters():
            for (what, reason), count in counters.snapshot().items():
                is_seconds = what.endswith("_ns")
                name = PREFIX + (what.removesuffix("_ns") + "_seconds" if is_seconds else what)
                text = what.removesuffix("_ns").replace("_", " ")
                family = families.setdefault(name, CounterMetricFamily(name, text, labels=("mapping", "reason")))
                family.add_metric((counters.mapping, reason), count / 1e9 if is_seconds else count)
        yield from families.values()
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(PREFIX + name, name.replace("_", " "), value=value)
