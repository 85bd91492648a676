# SPDX-License-Identifier: Apache-2.0
"""Streams: which exist, what memory they have, who writes them, and which ids are still free.

    absent ──create──► CREATING ──epoch ready──► READY ──producer gone, new epoch──► CREATING
                          │ failed: a later turn tries again

A stream is announced while it is READY. Holds no clock and does no IO.
Driver Model §4.2, §5, §6, §8, §11; decisions C4, E13, E14, E21-E25.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import msgspec

from tensorpool.driver.config import DriverConfig
from tensorpool.driver.epoch_messages import Epoch
from tensorpool.driver.leases import Lease
from tensorpool.settings import Range
from tensorpool.shm.layout import RingSpec


class Stream(msgspec.Struct):
    """A stream that this driver is the authority of."""

    stream_id: int
    name: str
    ring: RingSpec | None  # None: a profile without pools, which no client can attach to (§4.3)
    current: Epoch | None = None  # None: no epoch is ready, nothing is announced
    producer: Lease | None = None
    is_dynamic: bool = False
    is_creating: bool = False
    was_ready: bool = False
    retry_ns: int = 0  # after a failed creation: not before this
    unused_since_ns: int | None = None  # a dynamic stream without leases


class NoStream(Exception):
    """There is no such stream and none can be made; `invalid` is a bad parameter, not a policy (§4.6)."""

    def __init__(self, text: str, *, invalid: bool) -> None:
        super().__init__(text)
        self.invalid = invalid


class StreamTable:
    """The streams of the configuration, and those made on demand."""

    def __init__(self, config: DriverConfig) -> None:
        self._config = config
        self._streams: dict[int, Stream] = {}
        for name, entry in config.streams.items():
            ring = config.profiles[entry.profile].ring
            self._streams[entry.stream_id] = Stream(entry.stream_id, name, ring)

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._streams.values()))

    def get(self, stream_id: int) -> Stream | None:
        return self._streams.get(stream_id)

    def create(self, stream_id: int) -> Stream:
        """A dynamic stream with the default profile; id 0 takes the lowest free one (E14).

        Raises NoStream.
        """
        policies, ids = self._config.policies, self._config.driver.stream_id_range
        if not policies.allow_dynamic_streams:
            raise NoStream(
                f"stream {stream_id} is not configured and policies.allow_dynamic_streams is false; configure it, or "
                "set that to true",
                invalid=False,
            )
        if not ids:
            raise NoStream("driver.stream_id_range is empty: no stream can be created", invalid=True)
        if stream_id == 0:
            free = next((number for number in ids if number not in self._streams), None)
            if free is None:
                raise NoStream(f"all stream ids of {ids} are taken; enlarge driver.stream_id_range", invalid=False)
            stream_id = free
        elif stream_id not in ids:
            raise NoStream(f"stream {stream_id} is outside driver.stream_id_range {ids}", invalid=True)
        if len(self._streams) >= policies.max_streams:
            text = f"there are already {len(self._streams)} streams (policies.max_streams); raise it, or end some"
            raise NoStream(text, invalid=False)
        ring = self._config.default_ring
        stream = Stream(stream_id, f"dynamic-{stream_id}", ring, is_dynamic=True)
        self._streams[stream_id] = stream
        return stream

    def forget(self, stream_id: int) -> None:
        """A dynamic stream that no client uses, or whose memory could not be made: its id is free again."""
        self._streams.pop(stream_id, None)


class IdPool:
    """Aeron stream ids of a range, lent to consumers that ask for streams of their own (§11); the lowest free first."""

    def __init__(self, ids: Range) -> None:
        self._never_lent = iter(ids)
        self._returned: list[int] = []  # a heap
        self._owners: dict[tuple[int, int], int] = {}

    def lend(self, owner: tuple[int, int]) -> int | None:
        """The owner's id, the same at every call until it is given back; None when there is none to give."""
        if owner in self._owners:
            return self._owners[owner]
        free = heapq.heappop(self._returned) if self._returned else next(self._never_lent, None)
        if free is not None:
            self._owners[owner] = free
        return free

    def give_back(self, owner: tuple[int, int]) -> None:
        number = self._owners.pop(owner, None)
        if number is not None:
            heapq.heappush(self._returned, number)

    def __len__(self) -> int:
        return len(self._owners)
