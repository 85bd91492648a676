# SPDX-License-Identifier: Apache-2.0
"""pyzmq over ipc: PUSH to PULL, so that the writer waits for the reader instead of losing frames.

From 1 MiB on a message is sent from the array itself (copy=False), so that only the kernel's socket copies, in and out;
below that libzmq copies it once more, which measures faster. The high-water mark is then small enough that no array is
filled anew while it still waits to be sent. The reader takes a message where libzmq put it, or right into its array.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer import Frame, Visit, new_frame

SEND_TIMEOUT_MS = 200
SOCKET_BUFFER_BYTES = 4 << 20
ZERO_COPY_FROM_BYTES = 1 << 20


class Zmq:
    name = "pyzmq ipc"
    package: str | None = "pyzmq"
    module = "zmq"
    says = "PUSH to PULL, copy=False from 1 MiB on; the copying reader receives into its array"

    @contextmanager
    def host(self, size: int, depth: int, folder: Path, readers: int) -> Iterator[str]:
        yield f"ipc://{folder}/zmq.sock"

    def writer(self, shared: str, size: int, depth: int) -> ZmqWriter:
        return ZmqWriter(shared, size)

    def reader(self, shared: str, size: int, depth: int) -> ZmqReader:
        return ZmqReader(shared, size, depth)


class ZmqWriter:
    def __init__(self, endpoint: str, size: int) -> None:
        import zmq

        self._zmq = zmq
        self._copy = size < ZERO_COPY_FROM_BYTES
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, max(16, SOCKET_BUFFER_BYTES // size) if self._copy else 1)
        self._socket.set(zmq.SNDBUF, SOCKET_BUFFER_BYTES)
        self._socket.set(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def source(self, size: int) -> Frame:
        return new_frame(size)

    def publish(self, frame: Frame) -> None:
        try:
            self._socket.send(frame, copy=self._copy)
        except self._zmq.Again:
            return

    def finish(self) -> None: ...

    def close(self) -> None:
        self._context.destroy(linger=0)


class ZmqReader:
    def __init__(self, endpoint: str, size: int, depth: int) -> None:
        import zmq

        self._zmq = zmq
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, depth)
        self._socket.set(zmq.RCVBUF, SOCKET_BUFFER_BYTES)
        self._socket.bind(endpoint)

    def run(self, visit: Visit, into: Frame | None, deadline_s: float, wait_s: float) -> None:
        self._socket.set(self._zmq.RCVTIMEO, int(wait_s * 1e3))
        receive, receive_into = self._socket.recv, self._socket.recv_into
        while True:
            try:
                if into is None:
                    visit(np.frombuffer(receive(copy=False).buffer, np.uint64))
                else:
                    receive_into(into)
                    visit(into)
            except self._zmq.Again:
                if time.monotonic() >= deadline_s:
                    return

    def close(self) -> None:
        self._context.destroy(linger=0)
