# SPDX-License-Identifier: Apache-2.0
"""Observes for a moment: an observer that is run here, and the streams that were announced meanwhile.

It sends nothing, takes no lease, and is untethered: Aeron skips it when it stalls. Wire §10.1.1, §10.5.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tensorpool._core import MAX_DIMS
from tensorpool.client.discovery_query import DiscoveredPool, DiscoveredStream
from tensorpool.driver.config import DriverConfig
from tensorpool.supervisor.config import SupervisorConfig
from tensorpool.supervisor.observer import Observer
from tensorpool.supervisor.snapshot import StreamStatus

IDLE_S: Final = 0.005


@contextmanager
def observing(config: DriverConfig, aeron_dir: str) -> Iterator[Observer]:
    """An observer for `observe_for`. Raises TransportError where no media driver is alive."""
    observer = Observer(aeron_dir, SupervisorConfig.of(config))
    observer.on_start()
    try:
        yield observer
    finally:
        observer.on_close()


def observe_for(observer: Observer, seconds: float, is_enough: Callable[[], bool] = lambda: False) -> None:
    """Observe for so long, or until it is enough."""
    deadline = time.monotonic() + seconds
    while True:
        work = observer.do_work()
        if time.monotonic() >= deadline or is_enough():
            return
        if work == 0:
            time.sleep(IDLE_S)


def announced_streams(observer: Observer, config: DriverConfig) -> list[DiscoveredStream]:
    """The streams that were announced meanwhile, as discovery would return them."""
    found = (_described(observer, status, config) for status in observer.snapshot().streams)
    return [stream for stream in found if stream is not None]


def _described(observer: Observer, status: StreamStatus, config: DriverConfig) -> DiscoveredStream | None:
    known = observer.view.stream(status.stream_id)
    announce = None if known is None else known.announce
    if announce is None:
        return None
    control = config.driver.control
    return DiscoveredStream(
        driver_instance_id=config.driver.instance_id,
        stream_id=announce.stream_id,
        data_source_name=status.name,
        tags=status.tags,
        data_source_id=None,
        producer_id=announce.producer_id,
        epoch=announce.epoch,
        layout_version=announce.layout_version,
        header_nslots=announce.header_nslots,
        header_slot_bytes=announce.header_slot_bytes,
        max_dims=MAX_DIMS,
        header_region_uri=announce.header_region_uri,
        payload_pools=tuple(map(DiscoveredPool.of, announce.payload_pools)),
        driver_control_channel=control.channel,
        driver_control_stream_id=control.stream_id,
    )
