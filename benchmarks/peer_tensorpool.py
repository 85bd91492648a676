# SPDX-License-Identifier: Apache-2.0
"""tensorpool as its users hold it: `publish` of an array, `poll` for a frame, the SHM driver in the parent process.

A frame that was visited in place counts only if it was still intact afterwards, and a copy only if it was verified.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import tensorpool as tp
from benchmarks.peer import Frame, Visit, new_frame
from tensorpool.errors import DISTRIBUTION

STREAM_ID = 10_000
SETTLE_S = 10.0


class Place(NamedTuple):
    config: str
    aeron_dir: str


class Tensorpool:
    name = "tensorpool"
    package: str | None = DISTRIBUTION
    module = "tensorpool"
    says = "publish and poll, every frame checked to be intact after its use"

    @contextmanager
    def host(self, size: int, depth: int, folder: Path, readers: int) -> Iterator[Place]:
        stride_bytes = 1 << (size - 1).bit_length()
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tensorpool-peers-") as memory:
            config = folder / "driver.toml"
            config.write_text(
                f'[shm]\nbase_dir = "{memory}/regions"\n'
                f"[profiles.frames]\nheader_nslots = {depth}\n"
                f"payload_pools = [{{pool_id = 1, stride_bytes = {stride_bytes}}}]\n"
                f"[streams.frames]\nstream_id = {STREAM_ID}\n"
            )
            aeron_dir = f"{memory}/aeron"
            with tp.Driver(tp.DriverConfig.load(config, environ={}), aeron_dir=aeron_dir):
                yield Place(str(config), aeron_dir)

    def writer(self, shared: Place, size: int, depth: int) -> TensorpoolWriter:
        return TensorpoolWriter(shared)

    def reader(self, shared: Place, size: int, depth: int) -> TensorpoolReader:
        return TensorpoolReader(shared, depth)


class TensorpoolWriter:
    def __init__(self, place: Place) -> None:
        self._client = tp.connect(place.aeron_dir, config=place.config)
        self._producer = self._client.producer(STREAM_ID)
        if not self._producer.wait_for_consumers(1, SETTLE_S):
            raise TimeoutError("no tensorpool consumer")
        self.publish = self._producer.publish

    def source(self, size: int) -> Frame:
        return new_frame(size)

    def finish(self) -> None: ...

    def close(self) -> None:
        self._client.close()


class TensorpoolReader:
    def __init__(self, place: Place, depth: int) -> None:
        self._client = tp.connect(place.aeron_dir, config=place.config)
        self._consumer = self._client.consumer(STREAM_ID, max_outstanding_seq_gap=depth // 2)

    def run(self, visit: Visit, into: Frame | None, deadline_s: float, wait_s: float) -> None:
        poll = self._consumer.poll
        while True:
            frame = poll(wait_s)
            if frame is None:
                if time.monotonic() >= deadline_s:
                    return
            elif into is None:
                visit(frame.array)
                if not frame.is_intact():
                    visit.take_back()
            else:
                try:
                    frame.copy_into(into)
                except tp.FrameOverwritten:
                    visit.torn += 1
                else:
                    visit(into)

    def close(self) -> None:
        self._client.close()
