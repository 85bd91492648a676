# SPDX-License-Identifier: Apache-2.0
"""A slower copy of a stream: a consumer that receives at most so many frames a second, and a producer.

Seqs, timestamps, metadata and the source's clock are kept. A seq may not go back within an epoch, so an epoch of the
source becomes an epoch of the copy.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec

from tensorpool.client import arguments
from tensorpool.client.fitting_ring import attach_producer
from tensorpool.client.wall_clock import ClockPair
from tensorpool.closing import ClosesOnExit
from tensorpool.errors import FrameOverwritten, LocalProtocolError
from tensorpool.logs import get_logger
from tensorpool.wire.control import Dtype

if TYPE_CHECKING:
    from tensorpool.client.client import Client
    from tensorpool.client.frame import Frame
    from tensorpool.client.producer import Producer

MAX_RATE_HZ: Final = 2**32 - 1
FOLLOW_S: Final = 5.0  # that consumers have to follow to a larger ring
OVERWRITTEN: Final = "OVERWRITTEN"
SEQ_WENT_BACK: Final = "SEQ_WENT_BACK"


class Limited(msgspec.Struct, frozen=True):
    """What became of the source's frames: received + skipped + lost are all of them."""

    received: int  # by the limiter
    published: int
    skipped: int  # to keep the rate
    lost: int  # for any other reason before they were received
    dropped: dict[str, int]  # received, and not published: by reason


class Gate:
    """Lets at most so many frames a second pass: with an interval between them, or later.

    >>> gate = Gate(0.5)
    >>> [gate.admits(second * 1_000_000_000) for second in (10, 11, 12, 13.9, 14)]
    [True, False, True, False, True]
    """

    def __init__(self, rate_hz: float) -> None:
        self._interval_ns = round(1e9 / rate_hz)
        self._due_ns: int | None = None

    def admits(self, now_ns: float) -> bool:
        if self._due_ns is not None and now_ns < self._due_ns:
            return False
        # By the schedule, so that frames a little late do not lower the rate; a pause begins a new one.
        is_on_time = self._due_ns is not None and now_ns < self._due_ns + self._interval_ns
        self._due_ns = (self._due_ns or 0) + self._interval_ns if is_on_time else round(now_ns) + self._interval_ns
        return True


class RateLimiter(ClosesOnExit):
    """Publishes at most `rate_hz` frames a second of one stream as another.

    >>> with RateLimiter(client, "camera/front", "camera/front/slow", rate_hz=10) as limiter:    # doctest: +SKIP
    ...     while True:
    ...         limiter.step(timeout=1.0)

    `timeout` is that of `Client.consumer`. The stream `target` is made with a ring that fits, and made anew, as another
    epoch, for frames that have grown. Raises like `Client.consumer`, and, from `step`, like `Client.producer`, and
    FrameTooLarge where the driver makes no ring that holds such a frame.
    """

    def __init__(
        self, client: Client, source: int | str, target: int | str, *, rate_hz: float, timeout: float | None = None
    ) -> None:
        if not 0 < rate_hz <= MAX_RATE_HZ:
            raise LocalProtocolError(f"rate_hz = {rate_hz!r}: expected a number above 0, at most {MAX_RATE_HZ}")
        if arguments.stream(source) == arguments.stream(target):
            raise LocalProtocolError(f"target = {target!r}: expected another stream than the source")
        self._client = client
        self._target = target
        self._log = get_logger("limit", target=target)
        self._rate_hz = rate_hz
        whole_hz = math.ceil(rate_hz)
        self._gate = None if whole_hz == rate_hz else Gate(rate_hz)
        self._consumer = client.consumer(source, mode="rate_limited", max_rate_hz=whole_hz, timeout=timeout)
        self._producer: Producer | None = None
        self._epoch = 0  # of the source
        self._said: int | None = None  # the meta_version
        self._skipped = self._published = 0
        self._dropped: Counter[str] = Counter()

    @property
    def counts(self) -> Limited:
        """So far."""
        stats = self._consumer.stats
        limited = sum(count for reason, count in stats.drops.items() if reason.name == "RATE_LIMITED")
        dropped = Counter(self._dropped)
        if self._producer is not None:
            dropped.update({reason.name: count for reason, count in self._producer.stats.dropped.items()})
        return Limited(
            received=stats.received - self._skipped,
            published=self._published,
            skipped=self._skipped + limited,
            lost=stats.lost - limited,
            dropped={reason: count for reason, count in dropped.items() if count},
        )

    def step(self, timeout: float = 0.0) -> bool:
        """Wait for a frame, at most so many seconds, and publish it; False where there was none to publish."""
        frame = self._consumer.poll(timeout)
        if frame is None:
            return False
        if self._gate is not None and not self._gate.admits(time.monotonic_ns()):
            self._skipped += 1
            return False
        return self._publish(frame)

    def close(self) -> None:
        """Give both leases back. Consumers may read the last frames until the driver removes the memory."""
        self._consumer.close()
        self._detach()

    def _publish(self, frame: Frame) -> bool:
        if self._producer is None or frame.epoch != self._epoch:
            self._detach()
            self._attach(frame)
        elif 0 < self._producer.max_frame_bytes < frame.nbytes:
            self._attach_anew(frame)
        assert self._producer is not None
        if frame.seq < self._producer.next_seq:
            self._dropped[SEQ_WENT_BACK] += 1
            return False
        self._say(frame)
        is_bits = frame.wire_dtype is Dtype.BIT
        slot = self._producer.claim(
            frame.shape,
            frame.wire_dtype if is_bits else frame.numpy_dtype,
            frame.order,
            timestamp_ns=frame.timestamp_ns or 0,
            meta_version=frame.meta_version,
            trace_id=frame.trace_id,
            seq=frame.seq,
        )
        try:
            with slot:
                frame.copy_into(slot.array)
        except FrameOverwritten:
            self._dropped[OVERWRITTEN] += 1
            return False
        self._published += slot.seq is not None
        return slot.seq is not None

    def _attach(self, frame: Frame) -> None:
        self._producer = attach_producer(
            self._client,
            self._target,
            max(1, frame.nbytes),
            self._rate_hz,
            create=True,
            timeout=None,
            on_state=None,
            on_note=lambda note: self._log.warning("smaller_ring", note=note),
            has_own_clock=False,
        )
        self._epoch, self._said = frame.epoch, None
        stamp_ns, utc_ns = frame.timestamp_ns, frame._utc_ns
        is_known = stamp_ns is not None and utc_ns is not None
        self._producer.set_clock(ClockPair(stamp_ns, utc_ns) if is_known else None)  # type: ignore[arg-type]

    def _attach_anew(self, frame: Frame) -> None:
        """With a ring for a frame that is larger than all before it; consumers follow to the new epoch."""
        assert self._producer is not None
        consumers = self._producer.consumers
        self._producer.drain(FOLLOW_S)
        self._detach()
        self._attach(frame)
        assert self._producer is not None
        self._producer.wait_for_consumers(consumers, FOLLOW_S)

    def _say(self, frame: Frame) -> None:
        """The metadata that a frame refers to, where they are not the ones that were said last."""
        assert self._producer is not None
        version = frame.meta_version
        if version == self._said or not version:
            return
        metadata = self._consumer.metadata(version, epoch=frame.epoch)
        if metadata is not None:
            self._producer.repeat_metadata(metadata.message(self._producer.stream_id))
            self._said = version

    def _detach(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()
            self._dropped.update({reason.name: count for reason, count in producer.stats.dropped.items()})
