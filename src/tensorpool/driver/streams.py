# SPDX-License-Identifier: Apache-2.0
"""Streams: which exist, what memory they have, who writes them, and which ids are still free.

    absent ──create──► CREATING ──epoch ready──► READY ──producer gone, new epoch──► CREATING
                          │ failed: a later turn tries again

A stream is announced while it is READY. Holds no clock and does no IO.
Driver Model §4.2, §5, §6, §8, §11; decisions C4, E13, E14, E21-E25.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import msgspec

from tensorpool.control.provisioning import ProvisionRequest, describe
from tensorpool.driver.config import DriverConfig, StreamConfig
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
    creator: str = ""  # the user whose client created it
    is_provisioned: bool = False  # its ring is one that a client asked for
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
        self.config = config
        self._streams: dict[int, Stream] = {}
        for name, entry in config.streams.items():
            self.configure(name, entry)

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._streams.values()))

    def get(self, stream_id: int) -> Stream | None:
        return self._streams.get(stream_id)

    def configure(self, name: str, entry: StreamConfig) -> Stream:
        """The stream of `[streams.<name>]`, new or as it is with that name and that ring for its next epoch."""
        ring = self.config.profiles[entry.profile].ring
        stream = self._streams.setdefault(entry.stream_id, Stream(entry.stream_id, name, ring))
        stream.name, stream.ring = name, ring
        stream.is_dynamic = stream.is_provisioned = False
        return stream

    def create(self, stream_id: int) -> Stream:
        """A dynamic stream with the default profile; id 0 takes the lowest free one (E14).

        Raises NoStream.
        """
        policies, ids = self.config.policies, self.config.driver.stream_id_range
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
        ring = self.config.default_ring
        stream = Stream(stream_id, f"dynamic-{stream_id}", ring, is_dynamic=True)
        self._streams[stream_id] = stream
        return stream

    def provision(self, asked: ProvisionRequest, is_produced: Callable[[Stream], bool]) -> Stream:
        """A stream whose ring is at least what is asked for: as it is, or else a dynamic one whose next epoch is.

        The present epoch stays as it is until then: a producer that attaches gets a new one. Raises NoStream, and
        LocalProtocolError for a ring that no stream may have.
        """
        stream = self._streams.get(asked.stream_id)
        if stream is not None:
            if asked.is_met_by(stream.ring):
                return stream
            less = f"stream {asked.stream_id} has {describe(stream.ring)}, less than the {asked} asked for"
            if not stream.is_dynamic:
                raise NoStream(
                    f"{less}; it is configured: give [streams.{stream.name}] a larger profile", invalid=False
                )
            if is_produced(stream):
                raise NoStream(f"{less}, and a producer; close that one first, or use another stream", invalid=False)
        ring = asked.ring
        self._check_budget(ring, stream)
        if stream is None:
            stream = self.create(asked.stream_id)
        stream.ring, stream.is_provisioned = ring, True
        return stream

    def _check_budget(self, ring: RingSpec, stream: Stream | None) -> None:
        policies = self.config.policies
        size, most = ring.size_bytes, policies.max_provisioned_stream_bytes
        wanted = f"a ring of {describe(ring)} takes {size} bytes"
        if size > most:
            raise NoStream(f"{wanted}; policies.max_provisioned_stream_bytes is {most}", invalid=False)
        others = [one for one in self._streams.values() if one.is_provisioned and one is not stream]
        epochs = policies.epoch_gc_keep if policies.epoch_gc_enabled else 1
        taken = epochs * sum(0 if one.ring is None else one.ring.size_bytes for one in others)
        if taken + epochs * size > policies.max_provisioned_bytes:
            raise NoStream(
                f"{wanted} in each of {epochs} epochs, and such rings take {taken} already; "
                f"policies.max_provisioned_bytes is {policies.max_provisioned_bytes}",
                invalid=False,
            )

    def forget(self, stream_id: int) -> None:
        """A dynamic stream that no client uses, or whose memory could not be made: its id is free again."""
        self._streams.pop(stream_id, None)


class IdPool:
    """Aeron stream ids of a range, lent to consumers that ask for streams of their own (§11); the lowest free first."""

    def __init__(self, ids: Range) -> None:
        self._owners: dict[tuple[int, int], int] = {}
        self.replace(ids)

    def replace(self, ids: Range) -> None:
        """Lend from another range from now on; ids that are lent stay so, and come back if the range holds them."""
        self._ids = ids
        lent = self.lent
        self._never_lent = (number for number in ids if number not in lent)
        self._returned: list[int] = []  # a heap

    @property
    def lent(self) -> frozenset[int]:
        return frozenset(self._owners.values())

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
        if number is not None and number in self._ids:
            heapq.heappush(self._returned, number)

    def __len__(self) -> int:
        return len(self._owners)
