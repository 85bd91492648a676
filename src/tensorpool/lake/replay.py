# SPDX-License-Identifier: Apache-2.0
"""Recorded streams published again, in step and in their own time. Needs no Spark and no JVM.

Every frame has a moment on one absolute schedule, made from the recorded times: what was late once does not delay what
follows, and a gap is a pause. Files are read ahead by a thread per stream. An epoch of the recording becomes an epoch
of the replay while seqs are preserved, because a seq may not go back within one.
"""

from __future__ import annotations

import contextlib
import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

import msgspec
import numpy as np

from tensorpool.client import Client, ClockPair, Producer
from tensorpool.errors import ConfigError, FrameTooLarge
from tensorpool.lake import Lake
from tensorpool.lake.payloads import array_of, dtype_named
from tensorpool.lake.playback import Prefetch, Recorded, Span, Track, recorded_metadata
from tensorpool.lake.traces import RecordedLinks
from tensorpool.wire.control import Attribute, DataSourceMeta

LEAD_NS: Final = 50_000_000  # between the first frame's being ready and its moment
LATE_NS: Final = 10_000_000
DRAIN_S: Final = 2.0
ATTACH_S: Final = 5.0
BACK_S: Final = 5.0  # for consumers to follow into the next epoch
SLICE_S: Final = 0.1
BUFFER_BYTES: Final = 256 << 20

type Keep = Literal["preserve", "renew"]
type Pause = Callable[[float], bool]  # sleep so long; True: stop


class Part(msgspec.Struct, frozen=True):
    """A recorded stream, and the stream that it is published as."""

    stream_id: int
    target: int | str


class ReplayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to play, and how. `speed` None is as fast as it goes."""

    parts: tuple[Part, ...]
    span: Span = Span()
    speed: float | None = 1.0
    loop: bool = False
    seq: Keep = "preserve"
    timestamps: Keep = "renew"
    wait_consumers: int = 0
    max_pause_ns: int | None = None
    create: bool = True


class Played(msgspec.Struct):
    """What became of one stream."""

    stream_id: int
    target: int | str
    frames: int = 0
    bytes: int = 0
    late: int = 0
    most_late_ms: float = 0.0
    epochs: int = 0
    meta_versions: int = 0
    dropped: dict[str, int] = {}


class Summary(msgspec.Struct, frozen=True):
    """What became of a replay."""

    streams: list[Played]
    rounds: int
    seconds: float
    end: Literal["end", "signal"]

    @property
    def frames(self) -> int:
        return sum(one.frames for one in self.streams)


class Schedule:
    """When frames are due: their own distances, divided by the speed; pauses no longer than `max_pause_ns`.

    >>> schedule = Schedule(start_ns=1000, speed=2.0)
    >>> [schedule.due_ns(time_ns) for time_ns in (500, 600, 590, 800)]
    [1000, 1050, 1050, 1150]
    """

    def __init__(self, start_ns: int, speed: float, max_pause_ns: int | None = None) -> None:
        self._start_ns = start_ns
        self._speed = speed
        self._max_pause_ns = max_pause_ns
        self._last_ns: int | None = None
        self._played_ns = 0

    def due_ns(self, time_ns: int) -> int:
        """Times that go back are due at once."""
        if self._last_ns is not None and time_ns > self._last_ns:
            step_ns = time_ns - self._last_ns
            self._played_ns += step_ns if self._max_pause_ns is None else min(step_ns, self._max_pause_ns)
        if self._last_ns is None or time_ns > self._last_ns:
            self._last_ns = time_ns
        return self._start_ns + round(self._played_ns / self._speed)

    def delay(self, by_ns: int) -> None:
        """Everything from here on is due so much later."""
        self._start_ns += by_ns


class Replay:
    """Plays recorded streams into a running driver.

    >>> options = ReplayOptions(parts=(Part(10000, "camera/front"),), speed=2.0)       # doctest: +SKIP
    >>> Replay(Lake.open("/data/lake"), client, options).run()                         # doctest: +SKIP

    Raises ConfigError for a stream that was not recorded, and like `Client.producer`.
    """

    def __init__(
        self,
        lake: Lake,
        client: Client,
        options: ReplayOptions,
        *,
        pause: Pause | None = None,
        on_frame: Callable[[Replay], object] | None = None,
    ) -> None:
        self._client = client
        self._options = options
        self._pause: Pause = pause or _sleep
        self._on_frame = on_frame
        self._is_stopped = False
        self._started_ns = time.monotonic_ns()
        self.rounds = 0
        self._tracks = tracks_of(lake, options.parts, options.span)
        self.streams = [
            _ReplayStream(part, track, lake, options) for part, track in zip(options.parts, self._tracks, strict=True)
        ]

    def run(self) -> Summary:
        """Until the end of the recording, or until `pause` says stop."""
        try:
            for stream in self.streams:
                stream.attach(self._client, stream.first)
            self._await_consumers()
            self._started_ns = time.monotonic_ns()
            while not self._is_stopped:
                self._play()
                self.rounds += 1
                if not self._options.loop:
                    break
            for stream in self.streams:
                stream.drain(lambda: self._pause(0.0))
        finally:
            for stream in self.streams:
                stream.close()
        return self.summary()

    def summary(self) -> Summary:
        """So far."""
        seconds = (time.monotonic_ns() - self._started_ns) / 1e9
        end: Literal["end", "signal"] = "signal" if self._is_stopped else "end"
        return Summary([stream.played() for stream in self.streams], self.rounds, round(seconds, 3), end)

    def _play(self) -> None:
        """One round."""
        share = max(BUFFER_BYTES // len(self._tracks), 1)
        with contextlib.ExitStack() as stack:
            reading = [stack.enter_context(Prefetch(track, share)) for track in self._tracks]
            for prefetch in reading:
                while not prefetch.wait_ready(SLICE_S):
                    if self._wait_slice():
                        return
            options = self._options
            speed = options.speed or 1.0
            schedule = Schedule(time.monotonic_ns() + LEAD_NS, speed, options.max_pause_ns)
            frames = [_numbered(prefetch, index) for index, prefetch in enumerate(reading)]
            for frame, index in heapq.merge(*frames, key=lambda pair: (pair[0].time_ns, pair[1])):
                stream = self.streams[index]
                schedule.delay(stream.prepare(frame, self.rounds, self._client, self._wait_slice))
                due_ns = schedule.due_ns(frame.time_ns)
                if self._is_stopped or (options.speed is not None and self._wait_until(due_ns)):
                    return
                stream.publish(frame, None if options.speed is None else due_ns)
                if self._on_frame is not None:
                    self._on_frame(self)
                if options.speed is None and self._wait_slice():
                    return

    def _await_consumers(self) -> None:
        wanted = self._options.wait_consumers
        for stream in self.streams if wanted else []:
            while not stream.producer.wait_for_consumers(wanted, SLICE_S):
                if self._wait_slice():
                    return

    def _wait_until(self, due_ns: int) -> bool:
        """True: stop."""
        while (left_ns := due_ns - time.monotonic_ns()) > 0:
            if self._pause(min(left_ns / 1e9, SLICE_S)):
                self._is_stopped = True
                break
        return self._is_stopped

    def _wait_slice(self) -> bool:
        if self._pause(0.0):
            self._is_stopped = True
        return self._is_stopped


def tracks_of(lake: Lake, parts: Sequence[Part], span: Span) -> list[Track]:
    """What to read of a lake. Raises ConfigError for a stream without frames, and where nothing is left to play."""
    recorded = sorted({file.stream_id for file in lake.files()})
    seen: set[int] = set()
    tracks = []
    for part in parts:
        if part.stream_id not in recorded:
            raise ConfigError(
                "--stream", part.stream_id, f"a recorded stream: {', '.join(map(str, recorded)) or 'none'}"
            )
        if part.stream_id in seen:
            raise ConfigError("--stream", part.stream_id, "each stream once")
        seen.add(part.stream_id)
        tracks.append(Track(lake, part.stream_id, span))
    start_ns = min(track.first_ns for track in tracks)
    for track in tracks:
        track.begin_at(start_ns)
    return tracks


def _numbered(prefetch: Prefetch, index: int) -> Iterator[tuple[Recorded, int]]:
    return ((frame, index) for frame in prefetch)


class _ReplayStream:
    """One stream of a replay: its producer, and what was said on it."""

    def __init__(self, part: Part, track: Track, lake: Lake, options: ReplayOptions) -> None:
        self._part = part
        self._options = options
        self._metadata_history = recorded_metadata(lake, part.stream_id)
        self._links = RecordedLinks(lake, part.stream_id)
        self.first: Final = track.first
        self._producer: Producer | None = None
        self._life: tuple[int, int] | None = None
        self._said: tuple[int, int] | None = None
        self._dropped: Counter[str] = Counter()
        self._played = Played(part.stream_id, part.target)

    @property
    def producer(self) -> Producer:
        assert self._producer is not None
        return self._producer

    def attach(self, client: Client, frame: Recorded) -> None:
        """Raises FrameTooLarge where frames do not fit the stream's memory."""
        self._producer = client.producer(
            self._part.target,
            create=self._options.create,
            timeout=ATTACH_S,
            has_own_clock=self._options.timestamps == "renew",
        )
        self._played.epochs += 1
        self._said = None
        if frame.utc_ns is not None and frame.timestamp_ns is not None and self._options.timestamps == "preserve":
            self._producer.set_clock(ClockPair(frame.timestamp_ns, frame.utc_ns))
        try:
            self._producer.check_fits(frame.nbytes)
        except FrameTooLarge:
            self.close()
            raise
        self._say(frame)

    def prepare(self, frame: Recorded, round_number: int, client: Client, is_stopped: Callable[[], bool]) -> int:
        """Have the epoch and the metadata that a frame needs; how many nanoseconds that took."""
        life = (round_number, frame.epoch)
        spent_ns = 0
        if self._options.seq == "preserve" and self._life not in (None, life):
            begun_ns = time.monotonic_ns()
            consumers = self.producer.consumers
            self.drain(is_stopped)
            self.close()
            self.attach(client, frame)
            deadline_ns = time.monotonic_ns() + round(BACK_S * 1e9)
            while consumers and not self.producer.wait_for_consumers(consumers, SLICE_S):
                if is_stopped() or time.monotonic_ns() > deadline_ns:
                    break
            spent_ns = time.monotonic_ns() - begun_ns
        self._life = life
        self._say(frame)
        return spent_ns

    def publish(self, frame: Recorded, due_ns: int | None) -> None:
        producer, options = self.producer, self._options
        if not frame.payload.nbytes and frame.has_elements:
            self._dropped["NO_PAYLOAD"] += 1
            return
        seq = frame.seq if options.seq == "preserve" else None
        if seq is not None and seq < producer.next_seq:
            self._dropped["SEQ_WENT_BACK"] += 1  # recorded twice
            return
        stamp_ns = due_ns if options.timestamps == "renew" else frame.timestamp_ns or 0
        dtype = dtype_named(frame.dtype)
        slot = producer.claim(
            frame.shape,
            dtype,
            "F" if frame.order == "F" else "C",
            timestamp_ns=stamp_ns,
            meta_version=frame.meta_version,
            trace_id=frame.trace_id or 0,
            parents=self._links.parents_of(frame.trace_id) if frame.trace_id else (),
            seq=seq,
        )
        with slot:
            np.copyto(slot.array, array_of(frame.payload, frame.dtype, frame.shape, frame.order))
        if slot.seq is None:
            return
        played = self._played
        played.frames += 1
        played.bytes += frame.nbytes
        if due_ns is not None:
            late_ns = time.monotonic_ns() - due_ns
            played.late += late_ns > LATE_NS
            played.most_late_ms = max(played.most_late_ms, round(late_ns / 1e6, 3))

    def drain(self, is_enough: Callable[[], bool]) -> None:
        """Let consumers see the last frame before the epoch goes."""
        deadline_ns = time.monotonic_ns() + round(DRAIN_S * 1e9)
        while not self.producer.drain(SLICE_S):
            if time.monotonic_ns() > deadline_ns or is_enough():
                return

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()
            for reason, count in self._producer.stats.dropped.items():
                self._dropped[reason.name] += count
            self._producer = None

    def played(self) -> Played:
        dropped = Counter(self._dropped)
        if self._producer is not None:
            for reason, count in self._producer.stats.dropped.items():
                dropped[reason.name] += count
        return msgspec.structs.replace(self._played, dropped={name: count for name, count in dropped.items() if count})

    def _say(self, frame: Recorded) -> None:
        """The metadata of a frame, where they are not the ones that were said last."""
        metadata = self._metadata_history.of(
            frame.meta_version, frame.time_ns if frame.timestamp_ns is None else frame.timestamp_ns
        )
        if metadata is None or (metadata.meta_version, metadata.timestamp_ns or 0) == self._said:
            return
        if not metadata.meta_version:
            return  # it tells of the clock only, which the replay's producer does itself
        self._said = metadata.meta_version, metadata.timestamp_ns or 0
        stamp_ns = metadata.timestamp_ns if self._options.timestamps == "preserve" else None
        entries = tuple(Attribute(key=one.key, format=one.format, value=one.value) for one in metadata.attributes)
        self.producer.repeat_metadata(
            DataSourceMeta(
                stream_id=self.producer.stream_id,
                meta_version=metadata.meta_version,
                timestamp_ns=time.monotonic_ns() if stamp_ns is None else stamp_ns,
                attributes=entries,
            )
        )
        self._played.meta_versions += 1


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
