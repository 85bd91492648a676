# SPDX-License-Identifier: Apache-2.0
"""Subscribers that a log waits for: which client and process they belong to, and where they are.

Read from the media driver's counters. They name a subscriber by its registration and its client's id; a client's
heartbeat counter carries the client's name, which holds the process id where our `connect` made it. Another client's
process is one that maps the log's file and is not accounted for by such a name; /proc shows those of our own user.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from tensorpool._core import CounterReading

_SUBSCRIBER_POSITION, _HEARTBEAT, _PUBLISHER_POSITION = 4, 11, 12  # Aeron's counter types
_KEY: Final = struct.Struct("<qiii")  # registration id, session id, stream id, length of the channel
_NAME: Final = re.compile(r"name=(.*?)(?: version=|$)")
_PID: Final = re.compile(r"pid=(\d+)")


class Subscriber(msgspec.Struct, frozen=True):
    """One subscription's place in the log of one session."""

    registration_id: int
    session_id: int
    stream_id: int
    client_id: int  # Aeron's; -1 where it does not say
    channel: str
    position: int


class Holder(msgspec.Struct, frozen=True):
    """A subscriber that does not read on, short of the end of a log. `pids`: the processes that it can be."""

    subscriber: Subscriber
    client_name: str
    pids: tuple[int, ...]
    behind_bytes: int

    def __str__(self) -> str:
        seen = self.subscriber
        pid = " or ".join(map(str, self.pids)) or "unknown"
        name = f" ({self.client_name})" if self.client_name else ""
        place = f"stream {seen.stream_id}, position {seen.position}, {self.behind_bytes} bytes behind"
        return f"Aeron client {seen.client_id}{name}, pid {pid}: {place}"


class Sample:
    """The subscribers of one stream at one moment."""

    def __init__(self, readings: Iterable[CounterReading], stream_id: int) -> None:
        self.readings = list(readings)
        self.stream_id = stream_id
        self.subscribers: dict[tuple[int, int], Subscriber] = {}  # by registration and session
        self._ends: dict[int, int] = {}  # of each session: how far its publisher is
        self._logs: dict[int, int] = {}  # of each session: the registration that its log is named by
        for reading in self.readings:
            if reading.type_id not in (_SUBSCRIBER_POSITION, _PUBLISHER_POSITION):
                continue
            key = reading.key
            registration_id, session_id, stream, length = _KEY.unpack_from(key)
            if stream != stream_id:
                continue
            if reading.type_id == _PUBLISHER_POSITION:
                self._ends[session_id], self._logs[session_id] = reading.value, registration_id
                continue
            channel = key[_KEY.size : _KEY.size + length].decode("ascii", "replace")
            subscriber = Subscriber(registration_id, session_id, stream_id, reading.owner_id, channel, reading.value)
            self.subscribers[registration_id, session_id] = subscriber

    def behind(self, session_id: int | None = None, end: int | None = None) -> dict[tuple[int, int], int]:
        """By how many bytes each subscriber that has not read everything is behind, in one session or in all.

        `end` is how far the session's publisher is, where the caller knows better than the sampled counter.
        """
        found = {}
        for key, subscriber in self.subscribers.items():
            if session_id is None or subscriber.session_id == session_id:
                behind = (self._ends.get(subscriber.session_id, 0) if end is None else end) - subscriber.position
                if behind > 0:
                    found[key] = behind
        return found

    def still(self, before: Sample) -> set[tuple[int, int]]:
        """The subscribers that are where they were in an earlier sample."""
        return {key for key, seen in self.subscribers.items() if before.subscribers.get(key) == seen}

    def describe(
        self, aeron_dir: str, behind: Mapping[tuple[int, int], int], known: Iterable[Holder] = ()
    ) -> tuple[Holder, ...]:
        """These subscribers with the names and processes of their clients.

        A process that was found before is not looked for again: that takes long, and a client maps a new log late.
        """
        found = {holder.subscriber.registration_id: holder.pids for holder in known}
        names = client_names(self.readings)
        holders = []
        for key, behind_bytes in behind.items():
            subscriber = self.subscribers[key]
            name = names.get(subscriber.client_id, "")
            pid = _PID.search(name)
            pids = (int(pid[1]),) if pid else found.get(subscriber.registration_id, ())
            if len(pids) != 1:
                pids = self._unnamed_pids(aeron_dir, subscriber.session_id, names) or pids
            holders.append(Holder(subscriber, name, pids, behind_bytes))
        return tuple(holders)

    def _unnamed_pids(self, aeron_dir: str, session_id: int, names: Mapping[int, str]) -> tuple[int, ...]:
        """The processes that map the session's log, without ours and those that a client's name accounts for."""
        log = f"/publications/{self._logs.get(session_id)}.logbuffer"
        path = os.path.realpath(aeron_dir) + log
        named = {os.getpid()} | {int(match[1]) for match in map(_PID.search, names.values()) if match}
        return tuple(pid for pid in _mapping_pids(path) if pid not in named)


def client_names(readings: Iterable[CounterReading]) -> dict[int, str]:
    """Of all clients, by Aeron's id; those of foreign clients may be empty."""
    names = {}
    for reading in readings:
        if reading.type_id == _HEARTBEAT:
            match = _NAME.search(reading.label)
            names[reading.owner_id] = match[1] if match else ""
    return names


def publishers(readings: Iterable[CounterReading], stream_id: int) -> dict[int, str]:
    """Who publishes on a stream, by session: the client's name, or its id at the media driver where it has none."""
    readings = list(readings)
    names, found = client_names(readings), {}
    for reading in readings:
        if reading.type_id == _PUBLISHER_POSITION:
            _, session_id, stream, _ = _KEY.unpack_from(reading.key)
            if stream == stream_id:
                found[session_id] = names.get(reading.owner_id) or f"Aeron client {reading.owner_id}"
    return found


def _mapping_pids(path: str) -> list[int]:
    """The processes that map a file, as far as we may look."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/maps") as maps:
                if path in maps.read():
                    found.append(int(name))
        except OSError:
            continue  # it ended, or is another user's
    return sorted(found)
