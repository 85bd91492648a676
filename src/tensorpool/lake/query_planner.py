# SPDX-License-Identifier: Apache-2.0
"""Holds the leases of a query or of a recording, and reports what each ring contains."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Final

from tensorpool._core import SlotFrame
from tensorpool.client import Client, connect
from tensorpool.client.discovery_query import DiscoveredStream
from tensorpool.client.metadata import Metadata
from tensorpool.client.ring_watch import RingWatch, WatchedEpoch
from tensorpool.client.wall_clock import ClockPair, utc_ns
from tensorpool.errors import ConfigError, DriverUnreachable, RemoteProtocolError, TensorPoolError
from tensorpool.lake import offsets
from tensorpool.lake.live_options import Ago, LiveOptions, Moment, Where
from tensorpool.lake.losses import LossLog
from tensorpool.lake.offsets import Loss, Offsets, Position, RingExtent, SeqRange
from tensorpool.lake.ring_reader import RingPart, this_host
from tensorpool.lake.selection import Bounds, Selection
from tensorpool.logs import get_logger

ATTACH_TIMEOUT_S: Final = 10.0
JOIN_EVERY_S: Final = 2.0
CLOCK_WAIT_S: Final = 0.5  # producers of other implementations publish none
SLACK_US: Final = 1_000_000  # between the clocks by which a planner and a task see a frame of an unknown clock
SAMPLES: Final = 8  # frames that are looked at to guess the size of all


class Planner:
    """Watches the streams of a query. Raises as `Client.watch` does when they cannot be had."""

    def __init__(self, options: LiveOptions) -> None:
        self._log = get_logger("spark", streams=list(options.streams) or options.stream_pattern)
        self._losses = LossLog(self._log)
        self._client: Client = connect(options.aeron_dir, config=options.config, overrides=options.overrides)
        self._bases = tuple(self._client.config.shm.allowed_base_dirs)
        self._watches: dict[int, RingWatch] = {}
        self._pattern = None if options.stream_pattern is None else re.compile(options.stream_pattern)
        self._look_s = 0.0  # when to ask again which streams there are
        self._unusable: set[tuple[int, int]] = set()  # stream and epoch
        try:
            for stream in options.streams:
                watch = self._client.watch(stream, timeout=ATTACH_TIMEOUT_S)
                if watch.stream_id in self._watches:
                    raise ConfigError("option streams", list(options.streams), f"stream {watch.stream_id} only once")
                self._watches[watch.stream_id] = watch
            self.join()
            self._await_clocks()
        except BaseException:
            self._client.close()
            raise

    def _await_clocks(self) -> None:
        """Producers publish their clock when we come; with it all batches agree on the times of frames."""
        deadline_s = time.monotonic() + CLOCK_WAIT_S
        waiting = list(self._watches.values())
        while waiting and time.monotonic() < deadline_s:
            waiting = [watch for watch in waiting if all(epoch.mapped.clock is None for epoch in watch.epochs)]
            time.sleep(0.002 if waiting else 0.0)

    def join(self) -> None:
        """Watch streams too that match the pattern by now. Asks which there are every JOIN_EVERY_S at most.

        Raises DriverUnreachable where no driver answers the first time.
        """
        if self._pattern is None or time.monotonic() < self._look_s:
            return
        try:
            found = self._client.discover(timeout=ATTACH_TIMEOUT_S)
        except DriverUnreachable:
            if not self._look_s:
                raise
            found = []  # a driver that restarts
        for stream in found:
            name, key = stream.data_source_name, (stream.stream_id, stream.epoch)
            if name is None or stream.stream_id in self._watches or key in self._unusable:
                continue
            if self._pattern.fullmatch(name):
                self._join(stream)
        self._look_s = time.monotonic() + JOIN_EVERY_S

    def _join(self, stream: DiscoveredStream) -> None:
        try:
            watch = self._client.watch(
                stream.stream_id, timeout=ATTACH_TIMEOUT_S, driver_instance_id=stream.driver_instance_id
            )
        except TensorPoolError as error:
            self._unusable.add((stream.stream_id, stream.epoch))
            self._log.warning("stream_not_joined", name=stream.data_source_name, problem=str(error))
            return
        self._watches[watch.stream_id] = watch
        self._log.info("stream_joined", name=stream.data_source_name, stream_id=stream.stream_id)
        self._await_clocks()

    def metadata(self, piece: SeqRange) -> dict[int, Metadata]:
        """What the producer has published about its frames by now, by meta_version."""
        watch = self._watches.get(piece.stream_id)
        return {} if watch is None else watch.metadata.versions(piece.epoch)

    def held(self, *, is_exact: bool = True) -> list[RingExtent]:
        """What every ring has right now; without `is_exact` it is cheaper, and may lack frames after skipped seqs."""
        return [
            _held(stream_id, epoch, epoch.end if is_exact else epoch.recent_end())
            for stream_id, watch in sorted(self._watches.items())
            for epoch in sorted(watch.epochs, key=lambda epoch: epoch.epoch)
        ]

    def resolve(self, option: str, where: Where, held: Sequence[RingExtent] | None = None) -> Offsets:
        """Turn "earliest", an age, and the like into positions of rings as they are, or as they were when `held`.

        Raises ConfigError for what cannot be.
        """
        held = self.held() if held is None else held
        if where == "earliest":
            return offsets.earliest(held)
        if isinstance(where, Offsets):
            return self._checked(option, where, held)
        if isinstance(where, Ago):
            oldest_ns = time.monotonic_ns() - where.age_ns
            return self._since(lambda slot, _: slot.timestamp_ns >= oldest_ns)
        if isinstance(where, Moment):
            now = ClockPair(time.monotonic_ns(), time.time_ns())
            return self._since(lambda slot, epoch: _is_since(where.utc_ns, slot, epoch, now))
        return offsets.latest(held)

    def check(self, start: Offsets, held: Sequence[RingExtent]) -> None:
        """Raises RemoteProtocolError for a checkpoint of another deployment, which would never advance."""
        for stream, epoch, newest in offsets.ahead(start, held):
            raise RemoteProtocolError(
                f"the checkpoint is in epoch {epoch} of stream {stream}, which is only in epoch {newest}: "
                "it belongs to another deployment; use a new checkpoint"
            )

    def narrowed(self, ranges: Sequence[SeqRange], wanted: Selection) -> list[SeqRange]:
        """What is to be read of ranges for the frames that are wanted; by time it is more than those, by a second."""
        if wanted.is_all:
            return list(ranges)
        found = [
            SeqRange(part.stream_id, part.epoch, lo, hi)
            for part in ranges
            if wanted.has_epoch(part.stream_id, part.epoch)
            for lo, hi in wanted.seq.spans(part.lo, part.hi)
        ]
        return found if wanted.time.is_all else [kept for part in found for kept in self._in_time(part, wanted.time)]

    def part(self, piece: SeqRange, lost_before: int = 0, lost_reason: str | None = None) -> RingPart | None:
        """A range with what a task needs to read it; None where its epoch is not known any more."""
        epoch = self.epoch(piece)
        if epoch is None:
            return None
        return RingPart(
            piece,
            epoch.regions,
            self._bases,
            this_host(),
            lost_before,
            lost_reason if lost_before else None,
            epoch.mapped.clock,
        )

    def epoch(self, piece: SeqRange) -> WatchedEpoch | None:
        """The epoch of a range, as long as it is known."""
        watch = self._watches.get(piece.stream_id)
        known = [] if watch is None else watch.epochs
        return next((epoch for epoch in known if epoch.epoch == piece.epoch), None)

    def count(self, losses: Sequence[Loss]) -> None:
        """Say what is lost, or that it is over; called for every batch."""
        self._losses.note(losses, time.monotonic())

    def close(self) -> None:
        self._client.close()

    def _since(self, is_since: Callable[[SlotFrame, WatchedEpoch], bool]) -> Offsets:
        return Offsets({stream: _first(watch, is_since) for stream, watch in self._watches.items()})

    def _in_time(self, part: SeqRange, time_us: Bounds) -> list[SeqRange]:
        """From the first to the last frame of a range that has a time within bounds, or none that is known."""
        epoch = self.epoch(part)
        if epoch is None:
            return [part]
        now = ClockPair(time.monotonic_ns(), time.time_ns())
        seqs = []
        for seq in range(part.lo, part.hi):
            slot = epoch.mapped.reader.read(seq)
            at_ns = utc_ns(slot.timestamp_ns, epoch.mapped.clock, now) if isinstance(slot, SlotFrame) else None
            if at_ns is None or time_us.overlaps(at_ns // 1000 - SLACK_US, at_ns // 1000 + SLACK_US):
                seqs.append(seq)
        return [SeqRange(part.stream_id, part.epoch, seqs[0], seqs[-1] + 1)] if seqs else []

    def _checked(self, option: str, given: Offsets, held: Sequence[RingExtent]) -> Offsets:
        unknown = set(given.positions) - set(self._watches)
        if unknown:
            accepted = f"streams of this query: {', '.join(map(str, sorted(self._watches)))}"
            raise ConfigError(f"option {option}", sorted(unknown), accepted)
        for stream, epoch, newest in offsets.ahead(given, held):
            raise ConfigError(f"option {option}", f"epoch {epoch} of stream {stream}", f"up to the newest, {newest}")
        return Offsets(offsets.latest(held).positions | given.positions)


def _held(stream_id: int, epoch: WatchedEpoch, end: int) -> RingExtent:
    first = max(0, end - epoch.mapped.reader.nslots)
    return RingExtent(stream_id, epoch.epoch, first, end, _frame_bytes(epoch, first, end))


def _frame_bytes(epoch: WatchedEpoch, first: int, end: int) -> int:
    """The mean of some frames."""
    reader = epoch.mapped.reader
    step = max(1, (end - first) // SAMPLES)
    slots = [reader.read(seq) for seq in range(end - 1, first - 1, -step)]
    sizes = [slot.values_len_bytes for slot in slots if isinstance(slot, SlotFrame)]
    return sum(sizes) // len(sizes) if sizes else 0


def _is_since(utc: int, slot: SlotFrame, epoch: WatchedEpoch, now: ClockPair) -> bool:
    """A frame whose time is not known is taken."""
    at_ns = utc_ns(slot.timestamp_ns, epoch.mapped.clock, now)
    return at_ns is None or at_ns >= utc


def _first(watch: RingWatch, is_since: Callable[[SlotFrame, WatchedEpoch], bool]) -> Position:
    """The first frame captured at or after a moment; the rings are short, so a bisection is not worth it."""
    for epoch in sorted(watch.epochs, key=lambda epoch: epoch.epoch):
        for seq in range(epoch.first, epoch.end):
            slot = epoch.mapped.reader.read(seq)
            if isinstance(slot, SlotFrame) and is_since(slot, epoch):
                return Position(epoch.epoch, seq)
    newest = max(watch.epochs, key=lambda epoch: epoch.epoch)
    return Position(newest.epoch, newest.end)
