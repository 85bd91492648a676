# SPDX-License-Identifier: Apache-2.0
"""Streams read together: tuples of frames with the same seq, of the same time, or the newest of each.

Frames are views of their rings while they wait for partners. One whose ring is about to come round is copied, so that
a slow partner costs memory, not frames. Every frame that is not joined is counted with a reason.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final, Literal, Self

import msgspec

from tensorpool import _core
from tensorpool.client.arguments import seconds, whole_number
from tensorpool.client.arguments import timeout as arguments_timeout
from tensorpool.client.consumer import Consumer
from tensorpool.client.frame import Frame
from tensorpool.client.join_barrier import KeyBarrier, LatestBarrier, Unjoined
from tensorpool.client.merge_maps import MergeMap, MergeMapQuery, MergeRule
from tensorpool.client.producer import Producer
from tensorpool.errors import FrameOverwritten, LocalProtocolError, TensorPoolError
from tensorpool.shm.arrays import Array, Order
from tensorpool.wire.control import Dtype
from tensorpool.wire.merge import ClockDomain, TimestampSource

MAX_WAITING: Final = 256  # frames of one stream
MOST_REPLACED: Final = 64  # frames of each stream, by newer ones, before the next tuple
SLICE_S: Final = 0.1
NS: Final = 1_000_000_000
MAX_OFFSET: Final = 2**62  # seqs or nanoseconds

type By = Literal["seq", "time", "latest"]


class FrameCopy(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A frame with memory of its own, where its ring has no room for it any more."""

    array: Array
    stream_id: int
    epoch: int
    seq: int
    time: datetime | None
    timestamp_ns: int | None
    meta_version: int
    trace_id: int
    wire_dtype: Dtype
    order: Order
    dropped_before: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def is_intact(self) -> bool:
        """Always."""
        return True

    def copy(self) -> Array:
        return self.array.copy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        import numpy as np

        return np.array(self.array, dtype, copy=copy)


type Joinable = Frame | FrameCopy


class JoinStats(msgspec.Struct, frozen=True):
    """Of every input: received = joined + unjoined + waiting. With by="latest" a frame is joined at least once."""

    joined: int  # tuples
    received: tuple[int, ...]
    unjoined: tuple[dict[Unjoined, int], ...]
    waiting: tuple[int, ...]
    copied: int


class Join:
    """The frames of several consumers that belong together. Made by `tensorpool.join`; one thread at a time uses it."""

    def __init__(
        self,
        consumers: Iterable[Consumer],
        by: By,
        tolerance: float | None,
        timeout: float | None,
        offsets: Sequence[float],
        merge_map: MergeMap | None = None,
    ) -> None:
        self._consumers: Final = list(consumers)
        count = len(self._consumers)
        if len({id(one) for one in self._consumers}) < count:
            raise LocalProtocolError("join: expected each consumer once")
        if offsets and len(offsets) != count:
            raise LocalProtocolError(f"offsets = {offsets!r}: expected one for each of the {count} consumers")
        if by not in ("seq", "time", "latest"):
            raise LocalProtocolError(f"by = {by!r}: expected 'seq', 'time' or 'latest'")
        if (tolerance is not None) != (by == "time"):
            expected = "seconds, such as 0.005" if by == "time" else "none"
            raise LocalProtocolError(f"tolerance = {tolerance!r}: by = {by!r} expects {expected}")
        if by == "latest" and (offsets or timeout is not None):
            raise LocalProtocolError("by = 'latest' waits for nothing: it takes neither offsets nor a timeout")
        self._by: Final = by
        self._barrier: KeyBarrier[Joinable] | LatestBarrier[Joinable]
        self.merge_map: MergeMap | None = None  # its rules; None: it takes the newest
        self._rules: tuple[MergeRule, ...] = ()
        if by == "latest":
            self._barrier = LatestBarrier(count)
        else:
            self.merge_map = merge_map or self._make_rules(by, tolerance, timeout, offsets)
            self._rules = self.merge_map.rules
            if merge_map is not None:
                self._rules = merge_map.for_streams([one.stream_id for one in self._consumers])
            self._barrier = KeyBarrier(
                count,
                windows=[rule.window for rule in self._rules],
                offsets=[rule.offset for rule in self._rules],
                timeout_ns=self.merge_map.timeout_ns,
                limits=[MAX_WAITING] * count,
            )
        self._epochs: list[int | None] = [None] * count
        self._open = [one for one in self._consumers if not one.is_closed]
        self._received = [0] * count
        self._unjoined: list[Counter[Unjoined]] = [Counter() for _ in self._consumers]
        self._joined = self._copied = 0
        self._has_offered = False  # frames that the barrier may make a tuple of
        self._has_timeout: Final = self.merge_map is not None and self.merge_map.timeout_ns is not None
        self._complete: tuple[Joinable, ...] | None = None  # a tuple whose frames did not wait, already counted

    @property
    def stats(self) -> JoinStats:
        """What became of the frames so far. What consumers lost before is in their own `stats`."""
        self._count_left()
        unjoined = tuple(dict(counts) for counts in self._unjoined)
        waiting = self._barrier.waiting
        return JoinStats(self._joined, tuple(self._received), unjoined, tuple(waiting), self._copied)

    def poll(self, timeout: float | None = 0.0) -> tuple[Joinable, ...] | None:
        """The next tuple, waiting up to `timeout` seconds (None: as long as it takes); None when there is none.

        Views in it are intact when it is returned; as of every frame, ask `is_intact` after reading, or copy.
        """
        deadline_s = None if timeout is None else time.monotonic() + seconds("timeout", timeout)
        while (found := self.take()) is None and self._open:
            left_s = SLICE_S if deadline_s is None else min(SLICE_S, deadline_s - time.monotonic())
            wait_s = self.wait_at_most(left_s) if self._has_timeout else left_s
            if not self._receive(max(0, int(wait_s * NS))) and left_s <= 0:
                return self.take()
        return found

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Joinable, ...]:
        found = self.poll(None)
        if found is None:
            raise StopIteration
        return found

    # --- inside

    def _make_rules(
        self, by: Literal["seq", "time"], tolerance: float | None, timeout: float | None, offsets: Sequence[float]
    ) -> MergeMap:
        check = _ns if by == "time" else whole_number
        shifts = [check("offsets", offset, MAX_OFFSET, -MAX_OFFSET) for offset in offsets] or [0] * len(self._consumers)
        window = 0 if tolerance is None else _ns("tolerance", tolerance)
        rules = tuple(
            MergeRule(stream_id=one.stream_id, offset=shift, window=window)
            for one, shift in zip(self._consumers, shifts, strict=True)
        )
        timeout_ns = None if timeout is None else _ns("timeout", timeout)
        return MergeMap(by=by, rules=rules, timeout_ns=timeout_ns)

    def receive(self) -> bool:
        """Take what the consumers have; whether one of them may have more."""
        return bool(self._open) and self._receive(0)

    def _receive(self, timeout_ns: int) -> bool:
        """Wait for a frame, and take one of each consumer that has one; whether one has.

        With by="latest" all that there are: older ones are replaced.
        """
        ready = _core.wait_any(self._open, timeout_ns)  # a poll that finds nothing costs more than to ask before
        frames = [consumer.poll() for consumer in ready]
        if len(frames) < len(self._consumers) or not self._is_complete(frames):
            self._accept(ready, frames)
            for _ in range(MOST_REPLACED if self._by == "latest" else 0):
                if not self._open or not (more := _core.wait_any(self._open, 0)):
                    break
                self._accept(more, [consumer.poll() for consumer in more])
        if not ready:
            for consumer in self._open:
                consumer._housekeeping()
        if self._has_timeout:
            self._barrier.expire(time.monotonic_ns())
        return bool(ready)

    def _is_complete(self, polled: list[Frame | None]) -> bool:
        """Whether these are the next tuple, as they are where every stream is on time: then they need not wait."""
        frames = [frame for frame in polled if frame is not None]
        if [frame.epoch for frame in frames] != self._epochs or not all(frame.is_intact() for frame in frames):
            return False
        if self._by == "seq":
            keys = [frame.seq for frame in frames]
        else:
            keys = [key for index, frame in enumerate(frames) if (key := self._key_of(index, frame)) is not None]
        if len(keys) < len(polled) or not self._barrier.match(keys):
            return False
        self._received = [received + 1 for received in self._received]
        self._joined += 1
        self._complete = tuple(frames)
        return True

    def _accept(self, ready: list[Consumer], frames: list[Frame | None]) -> None:
        for consumer, frame in zip(ready, frames, strict=True):
            if frame is not None:
                self._offer(self._consumers.index(consumer), frame)
            elif consumer.is_closed:
                self._open = [one for one in self._open if one is not consumer]

    def _offer(self, index: int, frame: Frame) -> None:
        self._received[index] += 1
        if frame.epoch != self._epochs[index]:
            if self._by == "seq" and self._epochs[index] is not None:
                self._barrier.restart(index)
            self._epochs[index] = frame.epoch
        if isinstance(self._barrier, KeyBarrier) and self._barrier.is_waiting(index):
            self._keep_whole(self._barrier, index, frame)
        key = self._key_of(index, frame)
        if key is None:
            self._unjoined[index][Unjoined.NO_TIME] += 1
            return
        self._barrier.offer(index, key, frame, time.monotonic_ns())
        self._has_offered = True

    def _key_of(self, index: int, frame: Frame) -> int | None:
        if self._by != "time":
            return frame.seq
        assert self.merge_map is not None
        if self.merge_map.clock_domain is not ClockDomain.MONOTONIC:
            return frame._utc_ns
        is_described = self._rules[index].source is TimestampSource.FRAME_DESCRIPTOR
        return frame.publish_timestamp_ns if is_described else frame.timestamp_ns

    def _keep_whole(self, barrier: KeyBarrier[Joinable], index: int, newest: Frame) -> None:
        """Copy the frames of an input that have waited for half of their ring, or whose epoch has ended."""
        mapped = self._consumers[index]._reader.mapped
        least_seq = newest.seq if mapped is None else newest.seq - mapped.reader.nslots // 2
        for frame in barrier.items(index):
            if isinstance(frame, Frame):
                if frame.epoch == newest.epoch and frame.seq > least_seq:
                    break
                barrier.replace(index, frame, self._kept(frame))

    def _kept(self, frame: Frame) -> Joinable | None:
        try:
            array = frame.copy()
        except FrameOverwritten:
            return None
        self._copied += 1
        array.flags.writeable = False
        return FrameCopy(
            array=array,
            stream_id=frame.stream_id,
            epoch=frame.epoch,
            seq=frame.seq,
            time=frame.time,
            timestamp_ns=frame.timestamp_ns,
            meta_version=frame.meta_version,
            trace_id=frame.trace_id,
            wire_dtype=frame.wire_dtype,
            order=frame.order,
            dropped_before=frame.dropped_before,
        )

    def take(self) -> tuple[Joinable, ...] | None:
        """The next tuple of what was received; None where there is none."""
        if self._complete is not None:
            complete, self._complete = self._complete, None
            return complete
        if not self._has_offered:
            return None
        is_new = self._barrier.waiting if self._by == "latest" else None  # frames that were not in a tuple before
        while (found := self._barrier.take()) is not None:
            are_intact = [frame.is_intact() for frame in found]
            if False not in are_intact:
                self._joined += 1
                return found
            for index, is_intact in enumerate(are_intact):
                if is_new is None or is_new[index]:
                    self._unjoined[index][Unjoined.NO_PARTNER if is_intact else Unjoined.OVERWRITTEN] += 1
        self._count_left()
        self._has_offered = any(self._barrier.waiting)
        return None

    def _count_left(self) -> None:
        left, self._barrier.left = self._barrier.left, []
        for one in left:
            self._unjoined[one.input_index][one.why] += 1

    def wait_at_most(self, timeout_s: float) -> float:
        """The time for which there is nothing to do without a frame, and at most that."""
        expiry_ns = self._barrier.next_expiry_ns()
        return timeout_s if expiry_ns is None else min(timeout_s, max(0.0, (expiry_ns - time.monotonic_ns()) / NS))


def join(
    consumers: Iterable[Consumer],
    *,
    by: By | None = None,
    tolerance: float | None = None,
    timeout: float | None = None,
    offsets: Sequence[float] = (),
    announce_as: Producer | None = None,
    rules_of: int | None = None,
    rules_timeout: float = 2.0,
) -> Join:
    """Read several streams together: an iterator over tuples of frames, one of each consumer.

    >>> for left, right in tp.join([left_eye, right_eye], by="seq"):                        # doctest: +SKIP
    ...     depth(left.array, right.array)
    >>> for image, motion in tp.join([camera, imu], by="time", tolerance=0.005):            # doctest: +SKIP
    ...     ...

    `by="seq"` joins frames of equal seqs; `by="time"` frames that were taken within `tolerance` seconds of each other,
    in UTC (half of the shortest frame interval is a good tolerance), oldest first; `by="latest"` every frame of the
    first consumer with the newest of the others. `offsets` are added to the seqs, or in seconds to the times, of each
    consumer. A frame waits for its partners at most `timeout` seconds.

    With `announce_as`, the producer of the joined frames, the rules are announced on the control stream as the merge
    map of its stream, regularly and when a consumer asks for them. With `rules_of`, the id of a joined stream, they are
    those that its producer announces: they are asked for, for at most `rules_timeout` seconds. `by="latest"` has none.

    Raises LocalProtocolError for arguments that do not fit each other, RemoteProtocolError for a map that breaks the
    rules, TensorPoolError where none is announced in time.
    """
    given: object = consumers
    consumers = [] if isinstance(given, Consumer) else list(consumers)  # a consumer is an endless iterator, over frames
    if len(consumers) < 2 or not all(isinstance(one, Consumer) for one in consumers):
        raise LocalProtocolError("join: expected a list of two consumers or more, as client.consumer(…) makes them")
    if (by is None) is (rules_of is None):
        raise LocalProtocolError(f"by = {by!r}, rules_of = {rules_of!r}: expected one of them")
    if announce_as is not None and not isinstance(announce_as, Producer):
        raise LocalProtocolError(f"announce_as = {announce_as!r:.80}: expected the producer of the joined stream")
    if rules_of is None:
        assert by is not None
        joined = Join(consumers, by, tolerance, timeout, offsets)
    else:
        if tolerance is not None or timeout is not None or offsets:
            raise LocalProtocolError("rules_of brings its own tolerance, timeout and offsets")
        merge_map = _announced_rules(consumers, rules_of, rules_timeout)
        joined = Join(consumers, merge_map.by, 0.0 if merge_map.by == "time" else None, None, (), merge_map)
    if announce_as is not None:
        _announce(joined, announce_as)
    return joined


def _ns(name: str, value: object, highest: int = MAX_OFFSET, lowest: int = 0) -> int:
    """Seconds in nanoseconds."""
    if not isinstance(value, float | int) or isinstance(value, bool) or not lowest <= value * NS <= highest:
        least = "from 0 on" if lowest == 0 else "forwards or back"
        raise LocalProtocolError(f"{name} = {value!r:.80}: expected a number of seconds, {least}")
    return round(value * NS)


def _announced_rules(consumers: Sequence[Consumer], stream_id: int, timeout: float) -> MergeMap:
    whole_number("rules_of", stream_id, 2**32 - 2)
    client, query = consumers[0]._client, MergeMapQuery(stream_id)
    conductor = client._conductor
    conductor.order(lambda now_ns: conductor.merge_queries.append(query))
    client._wait_for(query, lambda: query.is_done, arguments_timeout(timeout))
    conductor.order(lambda now_ns: conductor.merge_queries.remove(query))
    if query.merge_map is not None:
        return query.merge_map
    if query.failure is not None:
        raise query.failure
    found = "no driver announces that stream" if query.epoch is None else f"its epoch {query.epoch} has none"
    how = "its producer announces it with join(…, announce_as=producer)"
    raise TensorPoolError(f"no merge map of stream {stream_id} within {timeout} s: {found}; {how}")


def _announce(joined: Join, producer: Producer) -> None:
    merge_map = joined.merge_map
    if merge_map is None:
        raise LocalProtocolError("by = 'latest' has no rules that could be announced")
    merge_map.announce(1, 1)  # raises what is wrong with it where the caller stands
    session = producer._session
    session.conductor.order(lambda now_ns: session.set_merge_map(merge_map))
