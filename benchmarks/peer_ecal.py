# SPDX-License-Identifier: Apache-2.0
"""eCAL (PyPI: eclipse-ecal): publish-subscribe of bytes over its shared memory layer, which also has registrations.

Its Python interface takes and gives `bytes`, so that a frame is copied on both sides beside eCAL's own copy, and calls
back on a thread of eCAL's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer import Frame, Visit, new_frame

TOPIC = "frames"
SETTLE_S = 15.0
REGISTRATION_MS = 200
PUBLISHERS, SUBSCRIBERS = 1, 2  # the components that are started; not its clock, which has a library of its own


class Ecal:
    name = "eCAL SHM"
    package: str | None = "eclipse-ecal"
    module = "ecal.nanobind_core"
    says = "shared memory layer; takes and gives bytes; callback"

    @contextmanager
    def host(self, size: int, depth: int, folder: Path, readers: int) -> Iterator[str]:
        domain = f"{folder.name}-ecal"
        try:
            yield domain
        finally:
            for left in Path("/dev/shm").glob(f"*{domain}*"):
                left.unlink(missing_ok=True)

    def writer(self, shared: str, size: int, depth: int) -> EcalWriter:
        return EcalWriter(shared, depth)

    def reader(self, shared: str, size: int, depth: int) -> EcalReader:
        return EcalReader(shared)


def _initialize(domain: str, buffers: int) -> Any:
    import ecal.nanobind_core as ecal

    config = ecal.get_configuration()
    config.registration.local.transport_type = ecal.LocalTransportType.SHM
    config.registration.local.shm.domain = domain
    config.registration.shm_transport_domain = domain
    config.registration.registration_refresh = REGISTRATION_MS
    config.publisher.layer.shm.memfile_buffer_count = buffers
    config.publisher.layer.udp.enable = config.publisher.layer.tcp.enable = False
    config.logging.provider.console.enable = False
    ecal.initialize(config, "tensorpool-peers", PUBLISHERS | SUBSCRIBERS)
    return ecal


class EcalWriter:
    def __init__(self, domain: str, depth: int) -> None:
        self._ecal = _initialize(domain, min(depth, 8))
        self._publisher = self._ecal.Publisher(TOPIC, config=self._ecal.get_publisher_configuration())
        deadline_s = time.monotonic() + SETTLE_S
        while self._publisher.get_subscriber_count() == 0:
            if time.monotonic() > deadline_s:
                raise TimeoutError("no eCAL subscriber")
            time.sleep(0.01)

    def source(self, size: int) -> Frame:
        return new_frame(size)

    def publish(self, frame: Frame) -> None:
        self._publisher.send(frame.tobytes())

    def finish(self) -> None: ...

    def close(self) -> None:
        self._ecal.finalize()


class EcalReader:
    def __init__(self, domain: str) -> None:
        self._visit: Visit | None = None
        self._into: Frame | None = None
        self._ecal = _initialize(domain, 1)
        self._subscriber = self._ecal.Subscriber(TOPIC, config=self._ecal.get_subscriber_configuration())
        self._subscriber.set_receive_callback(self._on_sample)

    def run(self, visit: Visit, into: Frame | None, deadline_s: float, wait_s: float) -> None:
        self._into, self._visit = into, visit
        time.sleep(max(0.0, deadline_s - time.monotonic()))
        self._visit = None

    def _on_sample(self, publisher: Any, data_type: Any, sample: Any) -> None:
        visit, into = self._visit, self._into
        if visit is None:
            return
        frame = np.frombuffer(sample.buffer, np.uint64)
        if into is None:
            visit(frame)
        else:
            into[:] = frame
            visit(into)

    def close(self) -> None:
        self._subscriber.remove_receive_callback()
        self._ecal.finalize()
