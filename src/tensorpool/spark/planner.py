# SPDX-License-Identifier: Apache-2.0
"""A query's eyes: leases on its streams, and what their rings hold.

Lives in the one process beside the Spark driver that plans a query, for as long as the query does.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

import msgspec

from tensorpool._core import SlotFrame
from tensorpool.client import Client, connect
from tensorpool.client.watch import Watch, WatchedEpoch
from tensorpool.errors import ConfigError, RemoteProtocolError
from tensorpool.logs import get_logger
from tensorpool.spark import offsets
from tensorpool.spark.losses import LossLog
from tensorpool.spark.offsets import Held, Loss, Offsets, Position, SeqRange
from tensorpool.spark.options import Ago, LiveOptions, Where
from tensorpool.spark.rings import RingPart, this_host

ATTACH_TIMEOUT_S: Final = 10.0
END_S: Final = 10.0  # that a planner may take to give back what it holds
KEEP_S: Final = 60.0  # a planner of batch reads, after the last
SAMPLES: Final = 8  # frames that are looked at to guess the size of all


class Planner:
    """Watches the streams of a query. Raises as `Client.watch` does when they cannot be had."""

    def __init__(self, options: LiveOptions) -> None:
        self._losses = LossLog(get_logger("spark", streams=list(options.streams)))
        self._client: Client = connect(options.aeron_dir, config=options.config, overrides=options.overrides)
        self._bases = tuple(self._client.config.shm.allowed_base_dirs)
        self._watches: dict[int, Watch] = {}
        try:
            for stream in options.streams:
                watch = self._client.watch(stream, timeout=ATTACH_TIMEOUT_S)
                if watch.stream_id in self._watches:
                    raise ConfigError("option streams", list(options.streams), f"stream {watch.stream_id} only once")
                self._watches[watch.stream_id] = watch
        except BaseException:
            self._client.close()
            raise

    def held(self) -> list[Held]:
        """What every ring has right now."""
        return [
            _held(stream_id, epoch)
            for stream_id, watch in sorted(self._watches.items())
            for epoch in sorted(watch.epochs, key=lambda epoch: epoch.epoch)
        ]

    def resolve(self, option: str, where: Where) -> Offsets:
        """Turn "earliest", an age, and the like into positions. Raises ConfigError for what cannot be."""
        held = self.held()
        if where == "earliest":
            return offsets.earliest(held)
        if isinstance(where, Offsets):
            return self._checked(option, where, held)
        if isinstance(where, Ago):
            oldest_ns = time.monotonic_ns() - where.age_ns
            return Offsets({stream: _since(watch, oldest_ns) for stream, watch in self._watches.items()})
        return offsets.latest(held)

    def check(self, start: Offsets, held: Sequence[Held]) -> None:
        """Raises RemoteProtocolError for a checkpoint of another deployment, which would never advance."""
        for stream, epoch, newest in offsets.ahead(start, held):
            raise RemoteProtocolError(
                f"the checkpoint is in epoch {epoch} of stream {stream}, which is only in epoch {newest}: "
                "it belongs to another deployment; use a new checkpoint"
            )

    def part(self, piece: SeqRange, lost_before: int = 0) -> RingPart | None:
        """A range with what a task needs to read it; None where its epoch is not known any more."""
        epoch = self.epoch(piece)
        return None if epoch is None else RingPart(piece, epoch.regions, self._bases, this_host(), lost_before)

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

    def _checked(self, option: str, given: Offsets, held: Sequence[Held]) -> Offsets:
        unknown = set(given.positions) - set(self._watches)
        if unknown:
            accepted = f"streams of this query: {', '.join(map(str, sorted(self._watches)))}"
            raise ConfigError(f"option {option}", sorted(unknown), accepted)
        for stream, epoch, newest in offsets.ahead(given, held):
            raise ConfigError(f"option {option}", f"epoch {epoch} of stream {stream}", f"up to the newest, {newest}")
        return Offsets(offsets.latest(held).positions | given.positions)


def exit_in_order(close: Callable[[], object]) -> None:
    """Spark ends a planner with SIGTERM and never calls `stop`: what it holds is given back all the same."""
    atexit.register(close)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Spark asks more than once; the end is not to be interrupted
    watchdog = threading.Timer(END_S, os._exit, (128 + number,))
    watchdog.daemon = True
    watchdog.start()
    raise SystemExit(128 + number)


def _held(stream_id: int, epoch: WatchedEpoch) -> Held:
    end = epoch.end
    first = max(0, end - epoch.mapped.reader.nslots)
    return Held(stream_id, epoch.epoch, first, end, _frame_bytes(epoch, first, end))


def _frame_bytes(epoch: WatchedEpoch, first: int, end: int) -> int:
    """The mean of some frames."""
    reader = epoch.mapped.reader
    step = max(1, (end - first) // SAMPLES)
    slots = [reader.read(seq) for seq in range(end - 1, first - 1, -step)]
    sizes = [slot.values_len_bytes for slot in slots if isinstance(slot, SlotFrame)]
    return sum(sizes) // len(sizes) if sizes else 0


def _since(watch: Watch, oldest_ns: int) -> Position:
    """The first frame captured at or after a moment; the rings are short, so a bisection is not worth it."""
    for epoch in sorted(watch.epochs, key=lambda epoch: epoch.epoch):
        for seq in range(epoch.first, epoch.end):
            slot = epoch.mapped.reader.read(seq)
            if isinstance(slot, SlotFrame) and slot.timestamp_ns >= oldest_ns:
                return Position(epoch.epoch, seq)
    newest = max(watch.epochs, key=lambda epoch: epoch.epoch)
    return Position(newest.epoch, newest.end)


# --- batch reads, whose reader lives for one query only: the lease must outlive its tasks


class _Kept(msgspec.Struct):
    planner: Planner
    timer: threading.Timer


_kept: dict[bytes, _Kept] = {}
_lock = threading.Lock()


def kept_planner(options: LiveOptions) -> Planner:
    """A planner that is kept for a while after its last use."""
    key = msgspec.msgpack.encode([options.streams, options.aeron_dir, options.config, options.overrides])
    with _lock:
        kept = _kept.pop(key, None)
        if kept is not None:
            kept.timer.cancel()
        planner = Planner(options) if kept is None else kept.planner
        if kept is None:
            exit_in_order(planner.close)
        timer = threading.Timer(KEEP_S, _let_go, (key, planner))
        timer.daemon = True
        timer.start()
        _kept[key] = _Kept(planner, timer)
        return planner


def _let_go(key: bytes, planner: Planner) -> None:
    with _lock:
        kept = _kept.get(key)
        if kept is not None and kept.planner is planner and kept.timer is threading.current_thread():
            del _kept[key]
            planner.close()
