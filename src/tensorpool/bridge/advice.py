# SPDX-License-Identifier: Apache-2.0
"""What a receiver tells its operator about a mapping that cannot work well as it is configured: each once, in the log.

Decisions G15, G20, G22.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from tensorpool.bridge.config import BridgeSection, MappingConfig
from tensorpool.bridge.metrics import Key
from tensorpool.control.provisioning import describe
from tensorpool.driver.config import DriverConfig
from tensorpool.logs import Logger
from tensorpool.shm.layout import RingSpec

SLOW_LINK_BYTES_PER_S: Final = 125_000_000  # 1 Gb/s


class Advice:
    """Logs each event once for one mapping."""

    def __init__(self, mapping: MappingConfig, section: BridgeSection, driver: DriverConfig, log: Logger) -> None:
        self._mapping = mapping
        self._section = section
        self._profiles = driver.profiles
        self._log = log
        self._given: set[str] = set()

    def warn(self, event: str, **fields: object) -> None:
        if event not in self._given:
            self._given.add(event)
            self._log.warning(event, **fields)

    def on_sizes(self, ring: RingSpec, source_stride_bytes: int) -> None:
        """G15, G20: whether the destination holds what the source may send, and whether it can arrive in time.

        A source that is not known yet has a stride of 0.
        """
        self._warn_of_profile(ring)
        local = max(pool.stride_bytes for pool in ring.pools)
        if local < source_stride_bytes:
            self.warn(
                "destination_is_smaller",
                profile=self._mapping.profile,
                local_stride_bytes=local,
                source_stride_bytes=source_stride_bytes,
                advice="larger frames are dropped; give the destination stream a profile with a larger pool",
            )
        needed_ms = min(local, source_stride_bytes) * 1000 // SLOW_LINK_BYTES_PER_S
        if needed_ms > self._section.assembly_timeout_ms:
            self.warn(
                "assembly_timeout_is_short",
                assembly_timeout_ms=self._section.assembly_timeout_ms,
                needed_ms_at_1_gbit=needed_ms,
                advice="raise bridge.assembly_timeout_ms if the link is that slow",
            )

    def on_counts(self, counts: Container[Key]) -> None:
        """G22: the two ends have to agree on sizes; else nothing gets through."""
        if ("chunks_dropped", "chunk_size") in counts:
            self.warn(
                "chunks_too_large",
                accepted_bytes=self._section.effective_chunk_bytes,
                advice="give mtu_bytes, chunk_bytes and max_chunk_bytes of [bridge] as the sender does, or not at all",
            )

    def _warn_of_profile(self, ring: RingSpec) -> None:
        """G15: an attach names no profile; the driver chose one, which need not be the mapping's."""
        profile = self._profiles.get(self._mapping.profile)
        if profile is not None and ring != profile.ring:
            self.warn(
                "destination_has_another_profile",
                profile=self._mapping.profile,
                expected=describe(profile.ring),
                found=describe(ring),
                advice="give the destination stream this profile in the driver's [streams.<name>]",
            )
