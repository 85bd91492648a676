# SPDX-License-Identifier: Apache-2.0
"""The regions of one epoch, mapped together: a header ring and all its pools, or nothing.

Bound once to the native reader or writer, which hold the mappings from then on.
Wire §15.1, §15.5, §15.22; Driver Model §3; decisions C9, C10, C16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tensorpool._core import Mapping, RingReader, RingWriter
from tensorpool.shm.containment import AllowedBases
from tensorpool.shm.headers import HeaderFile
from tensorpool.shm.layout import LAYOUT_VERSION, RingSpec
from tensorpool.shm.region import Region, map_region
from tensorpool.shm.space import bring_in


class MappedRing:
    """A header ring with its pools, in the order of `spec.pools`."""

    __slots__ = ("header", "header_file", "pools", "spec")

    def __init__(
        self, spec: RingSpec, header: Region, pools: tuple[Region, ...], header_file: HeaderFile | None = None
    ) -> None:
        self.spec: Final = spec
        self.header: Final = header
        self.pools: Final = pools
        self.header_file: Final = header_file

    @property
    def stream_id(self) -> int:
        return self.header.spec.stream_id

    @property
    def epoch(self) -> int:
        return self.header.spec.epoch

    @property
    def layout_version(self) -> int:
        return self.header.spec.layout_version

    @property
    def regions(self) -> tuple[Region, ...]:
        """The header ring, then the pools."""
        return (self.header, *self.pools)

    @property
    def activity_timestamp_ns(self) -> int:
        """The oldest activity stamp of the regions: one that is not refreshed makes the whole ring stale."""
        return min(region.activity_timestamp_ns for region in self.regions)

    def refresh_activity(self, now_ns: int) -> None:
        """Give a sign of life in every region; the driver's duty at announce cadence (C9)."""
        for region in self.regions:
            region.refresh_activity(now_ns)

    def revalidate(self) -> None:
        """See `Region.revalidate`. Raises RegionRejected for the first region that is not what it was."""
        for region in self.regions:
            region.revalidate()

    def prefault(self) -> None:
        """Bring every page into this process: the first lap around the ring then costs no page faults."""
        for region in self.regions:
            bring_in(region.mapping)

    def lock(self) -> None:
        """Keep in memory what this process has touched or will touch of the ring, holes excepted. Raises OSError."""
        for region in self.regions:
            region.mapping.lock(on_fault=True)

    def reader(self) -> RingReader:
        """The consumer's side."""
        return RingReader(self.header.mapping, self._pool_mappings(), self.spec.nslots)

    def writer(self) -> RingWriter:
        """The producer's side. Raises ValueError for regions that were mapped read-only."""
        return RingWriter(self.header.mapping, self._pool_mappings(), self.spec.nslots)

    def _pool_mappings(self) -> list[tuple[int, int, Mapping]]:
        return [(pool.spec.pool_id, pool.spec.stride_bytes, pool.mapping) for pool in self.pools]


def map_ring(
    spec: RingSpec,
    uris: Sequence[str],
    bases: AllowedBases,
    *,
    stream_id: int,
    epoch: int,
    layout_version: int = LAYOUT_VERSION,
    writable: bool = False,
    keep_header_file: bool = False,
) -> MappedRing:
    """Map what an announce or attach response names: `uris` are the header ring's, then the pools' in order.

        spec = RingSpec.announced(answer.header_nslots, answer.header_slot_bytes, answer.payload_pools)
        uris = [answer.header_region_uri, *(pool.region_uri for pool in answer.payload_pools)]
        ring = map_ring(spec, uris, bases, stream_id=answer.stream_id, epoch=answer.epoch)

    Raises RegionRejected, with nothing mapped, when one of them fails a check (§15.22: never a part).
    """
    regions: list[Region] = []
    files: list[HeaderFile] = []

    def keep(fd: int) -> None:
        files.append(HeaderFile(fd, spec.nslots))

    try:
        for uri, region in zip(uris, spec.regions(stream_id, epoch, layout_version), strict=True):
            on_open = keep if keep_header_file and not regions else None
            regions.append(map_region(uri, region, bases, writable=writable, on_open=on_open))
    except BaseException:
        regions.clear()  # unmapped now: a kept traceback keeps this frame
        files.clear()
        raise
    return MappedRing(spec, regions[0], tuple(regions[1:]), files[0] if files else None)
