# SPDX-License-Identifier: Apache-2.0
"""iceoryx2 (PyPI): publish-subscribe of a byte slice, the sample loaned and filled in place, safe overflow on.

Two modes of one transport. Polling: the reader spins on `receive`, which takes a core for itself. Event: the writer
notifies after every sample and the reader sleeps in its listener, then takes all that is there. Everything it makes
carries a prefix of its own, so that what it leaves behind in /dev/shm can be recognised and removed.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.peer import Frame, Visit, memcpy, new_frame

SETTLE_S = 10.0


class Shared(NamedTuple):
    root: str
    prefix: str
    readers: int  # at most


class Iceoryx2:
    package: str | None = "iceoryx2"
    module = "iceoryx2"

    def __init__(self, *, event: bool) -> None:
        self.event = event
        self.name = "iceoryx2 event" if event else "iceoryx2 poll"
        self.says = "loaned samples; " + ("listener and notifier, the reader sleeps" if event else "the reader spins")

    @contextmanager
    def host(self, size: int, depth: int, folder: Path, readers: int) -> Iterator[Shared]:
        prefix = f"{folder.name}-iox_"
        root = folder / "iceoryx2"
        root.mkdir()
        try:
            yield Shared(f"{root}/", prefix, readers)
        finally:
            for left in Path("/dev/shm").glob(f"{prefix}*"):
                left.unlink(missing_ok=True)

    def writer(self, shared: Shared, size: int, depth: int) -> Iceoryx2Writer:
        return Iceoryx2Writer(_Services(shared, depth), size, event=self.event)

    def reader(self, shared: Shared, size: int, depth: int) -> Iceoryx2Reader:
        return Iceoryx2Reader(_Services(shared, depth), size, event=self.event)


class _Services:
    """The two services, opened or created alike by both sides."""

    def __init__(self, shared: Shared, depth: int) -> None:
        import iceoryx2 as iox2

        iox2.set_log_level(iox2.LogLevel.Error)
        root, prefix, readers = shared
        config = iox2.config.default()
        config.global_cfg.root_path = iox2.Path.new(root)
        config.global_cfg.prefix = iox2.FileName.new(prefix)
        self.node = iox2.NodeBuilder.new().config(config).create(iox2.ServiceType.Ipc)
        name = iox2.ServiceName.new("frames")
        self.frames = (
            self.node.service_builder(name)
            .publish_subscribe(iox2.Slice[ctypes.c_uint8])
            .enable_safe_overflow(True)
            .history_size(0)
            .max_publishers(1)
            .max_subscribers(readers)
            .max_nodes(readers + 2)
            .subscriber_max_buffer_size(depth)
            .subscriber_max_borrowed_samples(2)
            .open_or_create()
        )
        events = self.node.service_builder(name).event().max_listeners(readers).max_nodes(readers + 2)
        self.events = events.open_or_create()


class Iceoryx2Writer:
    def __init__(self, services: _Services, size: int, *, event: bool) -> None:
        self._services = services
        self._size = size
        self._publisher = services.frames.publisher_builder().initial_max_slice_len(size).create()
        self._notifier = services.events.notifier_builder().create() if event else None
        self._addresses: dict[int, int] = {}  # of the writer's own arrays; asking numpy costs more than a small copy
        deadline_s = time.monotonic() + SETTLE_S
        while services.frames.dynamic_config.number_of_subscribers == 0 or (
            event and services.events.dynamic_config.number_of_listeners == 0
        ):
            if time.monotonic() > deadline_s:
                raise TimeoutError("no iceoryx2 subscriber")
            time.sleep(0.01)
        self._publisher.update_connections()

    def source(self, size: int) -> Frame:
        frame = new_frame(size)
        self._addresses[id(frame)] = frame.ctypes.data
        return frame

    def publish(self, frame: Frame) -> None:
        sample = self._publisher.loan_slice_uninit(self._size)
        memcpy(sample.payload_ptr, self._addresses[id(frame)], self._size)
        sample.assume_init().send()
        if self._notifier is not None:
            self._notifier.notify()

    def finish(self) -> None: ...

    def close(self) -> None:
        if self._notifier is not None:
            self._notifier.delete()
        self._publisher.delete()


class Iceoryx2Reader:
    def __init__(self, services: _Services, size: int, *, event: bool) -> None:
        self._services = services
        self._size = size
        self._array_type = ctypes.c_uint64 * (size // 8)
        self._listener = services.events.listener_builder().create() if event else None
        self._subscriber = services.frames.subscriber_builder().create()

    def run(self, visit: Visit, into: Frame | None, deadline_s: float, wait_s: float) -> None:
        import iceoryx2 as iox2

        wait = iox2.Duration.from_secs_f64(wait_s)
        clock = time.monotonic
        while True:
            taken = self._take(visit, into)
            if taken:
                continue
            if clock() >= deadline_s:
                return
            if self._listener is not None:
                self._listener.timed_wait(wait)

    def _take(self, visit: Visit, into: Frame | None) -> int:
        """All that is there."""
        receive, array_type, size = self._subscriber.receive, self._array_type, self._size
        into_at = into.ctypes.data if into is not None else 0
        taken = 0
        while (sample := receive()) is not None:
            if into is None:
                visit(np.frombuffer(array_type.from_address(sample.payload_ptr), np.uint64))
            else:
                memcpy(into_at, sample.payload_ptr, size)
                visit(into)
            taken += 1
        return taken

    def close(self) -> None:
        if self._listener is not None:
            self._listener.delete()
        self._subscriber.delete()
