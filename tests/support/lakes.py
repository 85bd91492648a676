# SPDX-License-Identifier: Apache-2.0
"""A ring without a driver, a camera that paints what can be checked, and a lake held against what was published."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

import tensorpool as tp
from tensorpool._core import TensorLayout
from tensorpool.cli.test_pattern import Checked
from tensorpool.lake import Lake, maintenance
from tensorpool.lake.offsets import SeqRange
from tensorpool.lake.ring_reader import RingPart, this_host
from tensorpool.shm import AllowedBases, PoolSpec, RingSpec, map_ring
from tensorpool.shm.announced import Regions
from tests.support.delta_readers import check_readers

UINT8 = 1


class Ring:
    """One epoch of a stream in a directory, with its writer."""

    def __init__(
        self, folder: Path, *, stream_id: int = 10_000, epoch: int = 1, nslots: int = 8, nbytes: int = 96
    ) -> None:
        self.stream_id, self.epoch, self.nbytes = stream_id, epoch, nbytes
        self._spec = RingSpec(nslots, (PoolSpec(1, 1 << (nbytes - 1).bit_length()),))
        self._bases = (str(folder),)
        self._paths = []
        home = folder / f"{stream_id}-{epoch}"
        home.mkdir()
        for region in self._spec.regions(stream_id, epoch):
            path = home / f"{region.region_type.name}-{region.pool_id}"
            path.write_bytes(region.superblock(1, 1).encode_body())
            with path.open("r+b") as file:
                file.truncate(region.size_bytes)
            self._paths.append(path)
        mapped = map_ring(
            self._spec, self.uris, AllowedBases(self._bases), stream_id=stream_id, epoch=epoch, writable=True
        )
        self._writer = mapped.writer()
        self._pattern = Checked()

    @property
    def uris(self) -> tuple[str, ...]:
        return tuple(f"shm:file?path={path}" for path in self._paths)

    @property
    def next_seq(self) -> int:
        return self._writer.next_seq

    def write(self, count: int, skip: int = 0) -> None:
        """Commit frames, the first of them `skip` seqs later than it would be."""
        pixels = np.empty(self.nbytes, np.uint8)
        for index in range(count):
            seq = self._writer.next_seq + (skip if index == 0 else 0)
            self._pattern.paint(pixels, seq)
            assert self._writer.write(seq, TensorLayout(UINT8, 1, [self.nbytes]), pixels, timestamp_ns=1 + seq)

    def part(self, lo: int, hi: int) -> RingPart:
        regions = Regions(self.stream_id, self.epoch, 1, self._spec, self.uris)
        return RingPart(SeqRange(self.stream_id, self.epoch, lo, hi), regions, self._bases, this_host())

    def span(self, lo: int, hi: int) -> SeqRange:
        return SeqRange(self.stream_id, self.epoch, lo, hi)


class Camera:
    """Publishes checkable frames on a thread of its own, until it is left."""

    def __init__(self, client: tp.Client, *streams: int | str, hz: float = 200.0, nbytes: int = 1000) -> None:
        self._client = client
        self._streams = streams
        self._period_s = 1 / hz
        self._nbytes = nbytes
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="camera", daemon=True)
        self.producers = {stream: client.producer(stream, create=True, timeout=20) for stream in streams}

    def stop(self) -> dict[int, int]:
        """End; the seq after the last frame of every stream."""
        self._is_over.set()
        self._thread.join()
        return {producer.stream_id: producer.next_seq for producer in self.producers.values()}

    def _run(self) -> None:
        pattern, pixels = Checked(), np.empty(self._nbytes, np.uint8)
        while not self._is_over.wait(self._period_s):
            for producer in self.producers.values():
                pattern.paint(pixels, producer.next_seq)
                producer.publish(pixels)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        for producer in self.producers.values():
            producer.close()


def recorded(lake: Lake) -> dict[tuple[int, int], list[int]]:
    """The seqs of every epoch, in order; fails at a frame that is there twice or has a wrong byte."""
    found: dict[tuple[int, int], list[int]] = {}
    pattern = Checked()
    for file in lake.files():
        seqs = found.setdefault((file.stream_id, file.epoch), [])
        count = 0
        for batch in lake.read_frames(file.path):
            for row in batch.to_pylist():
                assert (row["stream_id"], row["epoch"]) == (file.stream_id, file.epoch)
                assert file.lo <= row["seq"] < file.hi
                assert pattern.find(np.frombuffer(row["payload"], np.uint8), row["seq"]) is None
                seqs.append(row["seq"])
                count += 1
        assert count == file.frames
    for key, seqs in found.items():
        assert seqs == sorted(set(seqs)), f"frames of {key} are there twice, or not in order"
    return found


def check(lake: Lake, ends: Mapping[int, int] | None = None) -> dict[tuple[int, int], list[int]]:
    """Everything that was published in the recorded span is there once, byte for byte, or in a gap with a reason.

    Other readers of Delta tables find the same frames.
    """
    assert maintenance.verify(lake) == []
    check_readers(lake)
    found = recorded(lake)
    for (stream_id, epoch), seqs in found.items():
        missing = {seq for gap in lake.gaps(stream_id, epoch) for seq in range(gap.lo, gap.hi)}
        assert not missing & set(seqs)
        lo, hi = min([*seqs, *missing]), max([*seqs, *missing]) + 1
        assert sorted([*seqs, *missing]) == list(range(lo, hi))
        assert all(gap.reason for gap in lake.gaps(stream_id, epoch))
    for stream_id, end in (ends or {}).items():
        newest = max(epoch for stream, epoch in found if stream == stream_id)
        files = lake.files(stream_id, newest)
        assert max([file.hi for file in files] + [gap.hi for gap in lake.gaps(stream_id, newest)]) == end
    return found


def options_of(pool: tp.Local) -> dict[str, Any]:
    """Settings with which a recorder finds a deployment."""
    return {
        "aeron_dir": pool.aeron_dir,
        "overrides": {
            "shm.base_dir": pool.config.shm.base_dir,
            "policies.announce_period_ms": str(pool.config.policies.announce_period_ms),
        },
    }
