# SPDX-License-Identifier: Apache-2.0
"""Publishing what a source gives: into the memory of the stream, on our clock, opened again when a live source ends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from tensorpool._core import DropReason
from tensorpool.client import Client, Producer, ProducerStats, StateChange
from tensorpool.client.fitting_ring import attach_producer
from tensorpool.sources.protocol import RATE_KEY, Source, SourceFailed, SourceFrame
from tensorpool.sources.source_clock import MissingFrames, SourceClock

SLICE_S: Final = 0.1  # the longest time that a stop waits
FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 30.0
FOLLOW_S: Final = 2.0  # how long consumers are waited for when a larger ring replaces theirs
CATCH_UP_NS: Final = 1_000_000_000  # a pause longer than this is not caught up


class Totals(msgspec.Struct, frozen=True):
    """What became of the frames of a source so far."""

    published: int
    bytes: int
    dropped: dict[DropReason, int]  # that we had, and could not publish
    missing: int  # that the source did not give, by its own times
    reconnects: int


class BackOff:
    """How long to wait before the next attempt: twice as long each time, until a frame arrives.

    >>> wait = BackOff()
    >>> wait.next_s(), wait.next_s(), wait.next_s()
    (0.5, 1.0, 2.0)
    """

    def __init__(self) -> None:
        self._next_s = FIRST_WAIT_S

    def next_s(self) -> float:
        found_s = self._next_s
        self._next_s = min(2 * found_s, LONGEST_WAIT_S)
        return found_s

    def reset(self) -> None:
        self._next_s = FIRST_WAIT_S


class Ingest:
    """Publishes a source on a stream. The producer is attached at the first frame, whose size is known then.

    >>> with Ingest(client, "camera/front", OpenCvSource(0)) as ingest:     # doctest: +SKIP
    ...     ingest.run(lambda: not is_over)                                 # until is_over, or the file ends

    Nothing is published before there are `wanted_consumers`. A source that is not live is played at the pace of its
    times, or of `rate_hz`; 0 is as fast as possible.
    """

    def __init__(
        self,
        client: Client,
        stream: int | str,
        source: Source,
        *,
        rate_hz: float | None = None,
        create: bool = True,
        timeout: float | None = None,
        wanted_consumers: int = 0,
        on_state: Callable[[StateChange], object] | None = None,
        on_problem: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._client = client
        self._stream = stream
        self._source = source
        self._rate_hz = rate_hz
        self._create = create
        self._timeout = timeout
        self._wanted = wanted_consumers
        self._on_state = on_state
        self._on_problem = on_problem
        self._clock = SourceClock()
        self._missing = MissingFrames()
        self._pace: _Pace | None = None
        self._about: Mapping[str, Any] | None = None
        self._reconnects = 0
        self._earlier: list[ProducerStats] = []  # of producers whose ring was too small
        self.producer: Producer | None = None

    @property
    def totals(self) -> Totals:
        stats = [*self._earlier, *([] if self.producer is None else [self.producer.stats])]
        dropped: Counter[DropReason] = Counter()
        for one in stats:
            dropped.update(one.dropped)
        published, nbytes = sum(one.published for one in stats), sum(one.bytes for one in stats)
        return Totals(published, nbytes, dict(dropped), self._missing.count, self._reconnects)

    def run(self, goes_on: Callable[[], bool], on_frame: Callable[[SourceFrame], object] = lambda frame: None) -> None:
        """Publish until `goes_on()` is False or a source that is not live ends.

        Raises SourceFailed where such a source fails; a live one is opened again, after longer and longer pauses.
        """
        back_off = BackOff()
        while goes_on():
            failure = self._run_once(goes_on, on_frame, back_off)
            if not self._source.is_live:
                if failure is not None:
                    raise failure
                return
            if not goes_on():
                return
            wait_s = back_off.next_s()
            self._on_problem(f"{failure or 'the source ended'}; opening it again in {wait_s:g} s")
            until_s = time.monotonic() + wait_s
            while goes_on() and time.monotonic() < until_s:
                time.sleep(max(0.0, min(SLICE_S, until_s - time.monotonic())))
            self._reconnects += 1
            self._missing.restart()

    def _run_once(
        self, goes_on: Callable[[], bool], on_frame: Callable[[SourceFrame], object], back_off: BackOff
    ) -> SourceFailed | None:
        """From opening the source to its end; why it failed, None where it ended."""
        frames = self._source.frames()
        try:
            while goes_on():
                try:
                    frame = next(frames)
                    if frame is not None and self._publish(frame, goes_on):
                        back_off.reset()
                        on_frame(frame)
                except StopIteration:
                    return None
                except (SourceFailed, OSError) as error:
                    return error if isinstance(error, SourceFailed) else SourceFailed(str(error))
            return None
        finally:
            close = getattr(frames, "close", None)
            if close is not None:
                close()

    def _publish(self, frame: SourceFrame, goes_on: Callable[[], bool]) -> bool:
        """False: it was stopped before the frame was due."""
        now_ns = time.monotonic_ns()
        producer = self._attached(frame)
        while self._wanted and not producer.wait_for_consumers(self._wanted, SLICE_S):
            if not goes_on():
                return False
        self._wanted = 0
        stamp_ns = None
        if not self._source.is_live:
            if self._pace is None:
                self._pace = _Pace(self._rate_hz, self._rate())
            while not self._pace.is_due(frame.time_ns):
                if not goes_on():
                    return False
        elif frame.time_ns is not None:
            stamp_ns = self._clock.stamp_ns(frame.time_ns, now_ns)
        if frame.time_ns is not None:
            self._missing.add(frame.time_ns, self._rate())
        with producer.claim(frame.shape, frame.dtype, timestamp_ns=stamp_ns) as slot:
            frame.fill(slot.array)
        return True

    def _rate(self) -> float:
        rate = self._source.about.get(RATE_KEY)
        return float(rate) if isinstance(rate, int | float) else 0.0

    def _attached(self, frame: SourceFrame) -> Producer:
        """The producer, with metadata that is up to date. Raises FrameTooLarge where no ring fits the frame."""
        producer = self.producer
        if producer is None:
            producer = self.producer = self._attach(frame.nbytes)
        elif self._create and 0 < producer.max_frame_bytes < frame.nbytes:
            producer = self.producer = self._attach_anew(producer, frame.nbytes)
        about = self._source.about
        if about != self._about:
            self._about = dict(about)
            producer.set_metadata(self._about)
        return producer

    def _attach(self, nbytes: int) -> Producer:
        rate_hz = self._rate() if self._rate_hz is None else self._rate_hz
        return attach_producer(
            self._client,
            self._stream,
            nbytes,
            rate_hz,
            create=self._create,
            timeout=self._timeout,
            on_state=self._on_state,
            on_note=self._on_problem,
        )

    def _attach_anew(self, before: Producer, nbytes: int) -> Producer:
        """With a ring for a frame that is larger than all before it; consumers follow to the new epoch."""
        consumers = before.consumers
        before.drain(FOLLOW_S)
        before.close()
        self._earlier.append(before.stats)
        self._about = None
        producer = self._attach(nbytes)
        producer.wait_for_consumers(consumers, FOLLOW_S)
        return producer

    def close(self) -> None:
        """Give the stream back. Call `producer.drain()` before, so that consumers see the last frame."""
        if self.producer is not None:
            self.producer.close()

    def __enter__(self) -> Ingest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Pace:
    """When a frame of a file is due: by its time in the file, or by a rate. After a long pause it starts anew."""

    def __init__(self, rate_hz: float | None, own_rate_hz: float) -> None:
        self._rate_hz = own_rate_hz if rate_hz is None else rate_hz
        self._by_times = rate_hz is None
        self._start_ns: int | None = None
        self._given = 0

    def is_due(self, time_ns: int | None) -> bool:
        """Sleep until then, but at most for a slice: then False."""
        now_ns = time.monotonic_ns()
        if self._by_times and time_ns is not None:
            at_ns = time_ns
        elif self._rate_hz:
            at_ns = round(self._given * 1e9 / self._rate_hz)
        else:
            return True
        if self._start_ns is None or not -CATCH_UP_NS < self._start_ns + at_ns - now_ns < 60 * CATCH_UP_NS:
            self._start_ns = now_ns - at_ns
        left_s = (self._start_ns + at_ns - now_ns) / 1e9
        if left_s > 0:
            time.sleep(min(left_s, SLICE_S))
        if left_s > SLICE_S:
            return False
        self._given += 1
        return True
