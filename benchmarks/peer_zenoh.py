# SPDX-License-Identifier: Apache-2.0
"""eclipse-zenoh between two peers on this machine, payloads in zenoh's shared memory, no scouting.

Its Python binding writes a shared buffer only from bytes or a bytearray, and hands a received one out only as a copy
in bytes. To spare it a copy that is not its own, the writer's arrays lie on bytearrays; the copy on the reading side
offers no alternative.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer import Frame, Visit

KEY = "frames"
SETTLE_S = 10.0
POOL_HEADROOM_BYTES = 1 << 20


class Zenoh:
    name = "zenoh SHM"
    package: str | None = "eclipse-zenoh"
    module = "zenoh"
    says = "peer to peer over a unix socket, SHM provider, blocking congestion control, callback"

    @contextmanager
    def host(self, size: int, depth: int, folder: Path, readers: int) -> Iterator[str]:
        yield f"unixsock-stream/{folder}/zenoh.sock"

    def writer(self, shared: str, size: int, depth: int) -> ZenohWriter:
        return ZenohWriter(shared, size, depth)

    def reader(self, shared: str, size: int, depth: int) -> ZenohReader:
        return ZenohReader(shared)


def _session(*, listen: list[str], connect: list[str]) -> Any:
    import zenoh

    zenoh.init_log_from_env_or("error")
    config = zenoh.Config()
    for key, value in {
        "mode": "peer",
        "listen/endpoints": listen,
        "connect/endpoints": connect,
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "transport/shared_memory/enabled": True,
        "transport/shared_memory/mode": "init",
    }.items():
        config.insert_json5(key, json.dumps(value))
    return zenoh.open(config)


class ZenohWriter:
    def __init__(self, endpoint: str, size: int, depth: int) -> None:
        import zenoh
        import zenoh.shm

        self._size = size
        self._session = _session(listen=[], connect=[endpoint])
        self._publisher = self._session.declare_publisher(KEY, congestion_control=zenoh.CongestionControl.BLOCK)
        frames = max(depth, min(32, (32 << 20) // size))  # it needs more of them in flight than others do
        self._provider = zenoh.shm.ShmProvider.default_backend(frames * size + POOL_HEADROOM_BYTES)
        self._policy = zenoh.shm.BlockOn(zenoh.shm.Defragment(zenoh.shm.GarbageCollect()))
        self._buffers: dict[int, bytearray] = {}
        deadline_s = time.monotonic() + SETTLE_S
        while not self._publisher.matching_status:
            if time.monotonic() > deadline_s:
                raise TimeoutError("no zenoh subscriber")
            time.sleep(0.01)

    def source(self, size: int) -> Frame:
        buffer = bytearray(size)
        frame = np.frombuffer(buffer, np.uint64)
        self._buffers[id(frame)] = buffer
        return frame

    def publish(self, frame: Frame) -> None:
        buffer = self._provider.alloc(self._size, self._policy)
        buffer[:] = self._buffers[id(frame)]
        self._publisher.put(buffer)

    def finish(self) -> None: ...

    def close(self) -> None:
        self._session.close()


class ZenohReader:
    def __init__(self, endpoint: str) -> None:
        self._visit: Visit | None = None
        self._into: Frame | None = None
        self._is_shared = True
        self._session = _session(listen=[endpoint], connect=[])
        self._subscriber = self._session.declare_subscriber(KEY, self._on_sample)

    def run(self, visit: Visit, into: Frame | None, deadline_s: float, wait_s: float) -> None:
        self._into, self._visit = into, visit
        time.sleep(max(0.0, deadline_s - time.monotonic()))
        seen = -1
        while seen != (seen := len(visit.stamps)):
            time.sleep(wait_s)
        self._visit = None
        if not self._is_shared:
            raise RuntimeError("zenoh delivered a payload outside shared memory")

    def _on_sample(self, sample: Any) -> None:
        visit, into = self._visit, self._into
        if visit is None:
            return
        if not visit.stamps:
            self._is_shared = sample.payload.as_shm() is not None
        frame = np.frombuffer(sample.payload.to_bytes(), np.uint64)
        if into is None:
            visit(frame)
        else:
            into[:] = frame
            visit(into)

    def close(self) -> None:
        self._session.close()
