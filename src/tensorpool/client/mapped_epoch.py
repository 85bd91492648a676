# SPDX-License-Identifier: Apache-2.0
"""An epoch in this process: how it is mapped, how a consumer reads it and how a producer writes it.

`EpochMapper` maps for producers and consumers alike, on threads beside the conductor: mapping gigabytes page by page
takes longer than a keepalive may wait. Wire §15.18, §15.22; Driver Model §17.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from tensorpool import aeron
from tensorpool._core import FramePublisher, RingReader, RingWriter, SlotFrame
from tensorpool.client.metadata import NUMPY_DTYPE, Metadata
from tensorpool.client.wall_clock import EpochClock
from tensorpool.driver.config import DriverConfig
from tensorpool.logs import Logger
from tensorpool.shm import AllowedBases, MappedRing, map_ring
from tensorpool.shm.announced import Regions

if TYPE_CHECKING:
    from tensorpool.shm.arrays import Array
    from tensorpool.shm.carried_dtypes import CarriedDtype

THREADS: Final = 4  # a producer that brings gigabytes in does not hold up the others


class MappedEpoch:
    """One epoch as a consumer has it mapped: the reader of its header ring, and views of its payloads."""

    __slots__ = (
        "_described",
        "clock",
        "epoch",
        "find_metadata",
        "pools",
        "reader",
        "ring",
        "stream_id",
        "stream_label",
    )

    def __init__(self, ring: MappedRing) -> None:
        self.ring: Final = ring
        self.stream_id: Final = ring.stream_id
        self.epoch: Final = ring.epoch
        self.reader: Final[RingReader] = ring.reader()
        self.pools: Final = [mapping for _, _, mapping in self.reader.pools]
        self.stream_label = f"stream {ring.stream_id}"
        self.clock: EpochClock | None = None  # set by the conductor when the producer's metadata say it
        self.find_metadata: Callable[[int], Metadata | None] = lambda meta_version: None
        self._described: dict[int, CarriedDtype | None] = {}  # by meta_version

    def view(self, slot: SlotFrame) -> Array:
        """A view of a frame's payload: a new array object each time, so that reshaping one changes no other."""
        kept = self.reader.kept_view(slot)
        if kept is not None:
            return kept
        from tensorpool.shm.arrays import view_of_frame  # imports numpy, which a RingWatch does without

        view = view_of_frame(self.pools[slot.pool], slot)
        carried = self.carried(slot)
        if carried is not None:
            view = carried.restore(view)
        depends = self.depends_on_metadata(slot)
        if slot.layout.extent_bytes <= slot.values_len_bytes and (not depends or slot.meta_version in self._described):
            self.reader.keep_view(slot, view, not depends)
        return view[...]

    def depends_on_metadata(self, slot: SlotFrame) -> bool:
        """Whether the frame's metadata may say that its payload stands for another dtype."""
        from tensorpool.shm.carried_dtypes import is_carrier

        return slot.meta_version != 0 and is_carrier(slot.layout.dtype, slot.layout.shape)

    def is_described(self, slot: SlotFrame) -> bool:
        """Whether `carried` and `view` answer at once."""
        return not self.depends_on_metadata(slot) or slot.meta_version in self._described

    def carried(self, slot: SlotFrame) -> CarriedDtype | None:
        """The dtype that the frame's payload stands for; None: it is the wire's.

        Waits for the frame's metadata where they are not there yet. Where none come in time it warns, once.
        """
        if not self.depends_on_metadata(slot):
            return None
        from tensorpool.shm.carried_dtypes import carried_named

        version = slot.meta_version
        if version not in self._described:
            found = self.find_metadata(version)
            if found is None:
                return None
            self._described[version] = carried_named(found.attributes.get(NUMPY_DTYPE))
        carried = self._described[version]
        return carried if carried is not None and carried.fits(slot.layout.dtype, slot.layout.shape) else None


class EpochWriter(FramePublisher):
    """One epoch as a producer has it mapped: writes frames to its ring and their descriptors to a log.

    `until_ns` is the end of the lease: a thread that stood still past it writes nothing more (§4.7).
    """

    def __init__(
        self, ring: MappedRing, publication: aeron.Publication, until_ns: int, *, with_publish_time: bool
    ) -> None:
        self.ring: Final = ring
        self.ring_writer: Final[RingWriter] = ring.writer()
        super().__init__(self.ring_writer, publication, ring.stream_id, ring.epoch, with_publish_time=with_publish_time)
        self.until_ns = until_ns

    @property
    def epoch(self) -> int:
        return self.ring.epoch

    @property
    def max_frame_bytes(self) -> int:
        return max(pool.stride_bytes for pool in self.ring.spec.pools)


class EpochMapper:
    """Maps the regions of epochs for the sessions of one client."""

    def __init__(self, config: DriverConfig, log: Logger, on_done: Callable[[], object]) -> None:
        self._bases = AllowedBases(config.shm.allowed_base_dirs)
        self._is_locking = config.policies.mlock_shm
        self._log = log
        self._on_done = on_done
        self._threads: ThreadPoolExecutor | None = None

    def submit(self, regions: Regions, *, writable: bool) -> Future[MappedRing]:
        """Map them; `on_done` is called when that is done. The result may be RegionRejected: then nothing is mapped."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "tensorpool-mapping")
        future = self._threads.submit(self._map, regions, writable)
        future.add_done_callback(lambda _: self._on_done())
        return future

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _map(self, regions: Regions, writable: bool) -> MappedRing:
        ring = map_ring(
            regions.ring,
            regions.uris,
            self._bases,
            stream_id=regions.stream_id,
            epoch=regions.epoch,
            layout_version=regions.layout_version,
            writable=writable,
            keep_header_file=not writable,
        )
        if self._is_locking:
            self._lock(ring)
        if writable:
            ring.prefault()
        return ring

    def _lock(self, ring: MappedRing) -> None:
        """mlock is per process: clients lock what they map. A client that may not lock goes on, with a warning."""
        try:
            ring.lock()
        except OSError as error:
            remedy = f"ulimit -l {-(-ring.spec.size_bytes // 1024)} or more, for all that this process maps"
            text = os.strerror(error.errno or 0)
            self._log.warning("mlock_failed", stream_id=ring.stream_id, error=text, remedy=remedy)
