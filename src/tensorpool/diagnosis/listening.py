# SPDX-License-Identifier: Apache-2.0
"""Listening for a moment as a bystander: an observer that is turned here, and the streams it heard announced.

It sends nothing, takes no lease, and lets itself be passed over. Wire §10.1.1, §10.5.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from tensorpool.client.inquiry import DiscoveredPool, DiscoveredStream
from tensorpool.driver.config import DriverConfig
from tensorpool.supervisor.config import SupervisorConfig
from tensorpool.supervisor.observer import Observer
from tensorpool.supervisor.snapshot import StreamStatus

IDLE_S: Final = 0.005
MAX_DIMS: Final = 8


@contextmanager
def listening(config: DriverConfig, aeron_dir: str) -> Iterator[Observer]:
    """An observer for `listen_for`. Raises TransportError where no media driver is alive."""
    observer = Observer(aeron_dir, SupervisorConfig.of(config))
    observer.on_start()
    try:
        yield observer
    finally:
        observer.on_close()


def listen_for(observer: Observer, seconds: float, is_enough: Callable[[], bool] = lambda: False) -> None:
    """Listen for so long, or until it is enough."""
    deadline = time.monotonic() + seconds
    while True:
        work = observer.do_work()
        if time.monotonic() >= deadline or is_enough():
            return
        if work == 0:
            time.sleep(IDLE_S)


def announced_streams(observer: Observer, config: DriverConfig) -> list[DiscoveredStream]:
    """What was announced while we listened, as discovery would say it."""
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
