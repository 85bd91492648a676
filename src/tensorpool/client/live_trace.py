# SPDX-License-Identifier: Apache-2.0
"""Where a frame came from, while its pipeline runs: ids are found in the rings, links are asked of the producers.

A producer sends its last links again to a consumer that comes. Nothing older than the rings and those links is found.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from tensorpool import aeron
from tensorpool._core import SlotFrame
from tensorpool.aeron.adapter import MessageAdapter
from tensorpool.client.lineage import MAX_DEPTH, FramePlace, TraceStep, trace_steps, with_frames
from tensorpool.client.wall_clock import ClockPair, utc_ns
from tensorpool.errors import TensorPoolError
from tensorpool.wire.trace import TraceLinkSet

if TYPE_CHECKING:
    from tensorpool.client.client import Client
    from tensorpool.client.mapped_epoch import MappedEpoch

ATTACH_S: Final = 2.0
LOOK_EVERY_S: Final = 0.02
SETTLE_S: Final = 1.0  # without a further link
_1970: Final = datetime(1970, 1, 1, tzinfo=UTC)


def trace_live(client: Client, trace_id: int, *, timeout: float = 2.0, max_depth: int = MAX_DEPTH) -> list[TraceStep]:
    """The ancestors of a frame that are in the rings of running streams, or are linked by their producers.

    >>> for step in trace_live(client, frame.trace_id):                                      # doctest: +SKIP
    ...     print(step.depth, step.trace_id, step.frames)

    Returns when every ancestor is found and no further link comes for a second, or after `timeout` seconds. Reads each
    stream of this host for that time.
    Raises DriverUnreachable where no driver answers.
    """
    parents: dict[int, tuple[int, ...]] = {}
    places: dict[int, set[FramePlace]] = defaultdict(set)

    def on_link(message: TraceLinkSet, _: aeron.MessageInfo) -> None:
        if message.trace_id is not None:
            parents[message.trace_id] = tuple(parent.trace_id for parent in message.parents)
            places[message.trace_id].add(FramePlace(message.stream_id, message.epoch, message.seq))

    adapter = MessageAdapter(on_malformed=lambda data, error: None)
    adapter.add(TraceLinkSet, on_link)
    with ExitStack() as stack:
        transport = aeron.connect(client.aeron_dir)
        stack.callback(transport.close)
        subscription = aeron.subscribe(transport, client.config.driver.metadata)
        deadline_s = time.monotonic() + timeout
        found: dict[int, dict[FramePlace, FramePlace]] = defaultdict(dict)
        for stream in client.discover():
            try:
                consumer = stack.enter_context(client.consumer(stream.stream_id, timeout=ATTACH_S))
            except TensorPoolError:
                continue  # of another host, or gone since
            mapped = consumer._reader.mapped
            for one, place in () if mapped is None else _traced(mapped):
                found[one][FramePlace(place.stream_id, place.epoch, place.seq)] = place
        known_links, settled_s = 0, time.monotonic() + SETTLE_S
        while True:
            while subscription.poll(adapter.on_message, 256):
                pass
            steps = trace_steps(trace_id, parents.get, max_depth)
            now_s = time.monotonic()
            if len(parents) > known_links:
                known_links, settled_s = len(parents), now_s + SETTLE_S
            # A frame in a ring may have links that have not come yet.
            is_complete = now_s >= settled_s and all(step.is_known or step.trace_id in found for step in steps)
            if is_complete or now_s >= deadline_s:
                break
            time.sleep(LOOK_EVERY_S)
    known = {
        step.trace_id: sorted(
            ({place: place for place in places.get(step.trace_id, ())} | found.get(step.trace_id, {})).values(),
            key=lambda place: (place.stream_id, place.epoch, place.seq),
        )
        for step in steps
    }
    return with_frames(steps, known)


def _traced(mapped: MappedEpoch) -> Iterator[tuple[int, FramePlace]]:
    """The ids that a ring holds."""
    newest, now = mapped.reader.newest(), ClockPair(time.monotonic_ns(), time.time_ns())
    end = 0 if newest is None else newest + 1
    for seq in range(max(0, end - mapped.reader.nslots), end):
        slot = mapped.reader.read(seq)
        if isinstance(slot, SlotFrame) and slot.trace_id:
            at_ns = utc_ns(slot.timestamp_ns, mapped.clock, now) if slot.timestamp_ns else None
            taken = None if at_ns is None else _1970 + timedelta(microseconds=at_ns // 1000)
            yield slot.trace_id, FramePlace(mapped.stream_id, mapped.epoch, seq, taken)
