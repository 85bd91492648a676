# SPDX-License-Identifier: Apache-2.0
"""Frames of a live stream as they come: an iterable dataset.

It holds no connection: each process that iterates makes a client and a consumer of its own and gives them back at the
end, so a dataset can be pickled, and workers may be forked or spawned. Samples are verified copies: a frame that the
producer overwrites meanwhile is counted, never delivered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tensorpool.client import Consumer, DropReason, Frame, arguments, connect
from tensorpool.errors import ConfigError, FrameOverwritten
from tensorpool.torch.bases import IterableDataset, worker_of
from tensorpool.torch.sample import sample_of
from tensorpool.torch.worker_counts import LiveCounts, WorkerCounts, WorkerState

if TYPE_CHECKING:
    from tensorpool.driver.config import DriverConfig

LOOK_UP_EVERY_S: Final = 0.5  # while no frame comes


class _State(msgspec.Struct, frozen=True):
    """What `state_dict` gives, as plain dicts, lists and numbers."""

    stream: str | int
    workers: tuple[WorkerState, ...]


class LiveDataset(IterableDataset):
    """Samples of a live stream: every frame, or with `latest` the newest whenever you ask.

    >>> frames = LiveDataset("camera/front", count=1000, timeout=10)                   # doctest: +SKIP
    >>> loader = torch.utils.data.DataLoader(frames, batch_size=8, num_workers=2)      # doctest: +SKIP
    >>> frames.counts                                                                  # doctest: +SKIP
    LiveCounts(received=998, lost=2, skipped=0)

    A sample is a copy of the frame's array, or what `transform` makes of its Sample. An iteration ends after `count`
    samples, or `timeout` seconds without a frame; with neither it goes on until you stop it. The workers of a
    DataLoader divide the stream: worker w of n takes the frames with seq % n == w. Where you divide it yourself,
    between the ranks of a distributed training or processes of your own, give each its `share`, such as (0, 4) for
    the first of four; `count` then belongs to the share. The other arguments are those of `tensorpool.connect`.
    Iteration raises as `connect` and `Client.consumer` do.
    """

    def __init__(
        self,
        stream: str | int,
        *,
        latest: bool = False,
        count: int | None = None,
        timeout: float | None = None,
        transform: Callable[[Any], Any] | None = None,
        share: tuple[int, int] = (0, 1),
        aeron_dir: str | None = None,
        config: DriverConfig | Path | str | None = None,
        overrides: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        arguments.callback("transform", transform)
        self._stream: Final = stream
        self._latest: Final = latest
        self._count: Final = None if count is None else arguments.whole_number("count", count, 2**63 - 1)
        self._timeout: Final = None if timeout is None else arguments.seconds("timeout", timeout)
        self._transform: Final = transform
        of = arguments.whole_number("share[1]", share[1], 2**31 - 1, 1)
        self._share: Final = arguments.whole_number("share[0]", share[0], of - 1), of
        self._aeron_dir: Final = aeron_dir
        self._config: Final = config
        self._overrides: Final = dict(overrides)
        self._counts = WorkerCounts()

    @property
    def counts(self) -> LiveCounts:
        """What became of the frames in all iterations so far, in every worker: readable while they run."""
        return self._counts.total()

    def __iter__(self) -> Iterator[Any]:
        worker, workers = worker_of() or (0, 1)
        row = self._counts.row(worker)
        if row["resumes"] and row["workers"] != workers:
            raise ConfigError("num_workers", workers, f"{row['workers']}, with which the state was saved")
        if not row["resumes"]:
            row["taken"] = row["epoch"] = row["next_seq"] = 0
        row["workers"], row["resumes"] = workers, 0
        count = None if self._count is None else (self._count + workers - 1 - worker) // workers
        if count is None or row["taken"] < count:
            yield from self._samples(worker, workers, count)
        row["taken"] = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the workers are in the stream, and what they counted."""
        found: dict[str, Any] = msgspec.to_builtins(_State(self._stream, tuple(self._counts.states())))
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting, and let the next iteration take what was left of `count`. Raises ConfigError.

        A live stream does not wait: its frames since then are counted as lost, where its epoch is still the same. The
        number of workers has to be the same, too.
        """
        try:
            known = msgspec.convert(state, _State)
        except msgspec.ValidationError as error:
            raise ConfigError("state", type(state).__name__, f"a state_dict of a LiveDataset ({error})") from None
        if known.stream != self._stream:
            raise ConfigError("state", f"stream {known.stream!r}", f"the state of stream {self._stream!r}")
        own = worker_of()  # in a worker, which loads it too: the other rows are those of others
        for worker, saved in enumerate(known.workers):
            if own is None or own[0] == worker:
                self._counts.load(worker, saved)

    def __repr__(self) -> str:
        return f"<LiveDataset {self._stream!r}: {self.counts}>"

    def _samples(self, worker: int, workers: int, count: int | None) -> Iterator[Any]:
        row = self._counts.row(worker)
        first, of = self._share
        with (
            connect(self._aeron_dir, config=self._config, overrides=self._overrides) as client,
            client.consumer(self._stream) as consumer,
        ):
            reader = _ShareReader(consumer, row, first + of * worker, of * workers, self._latest)
            while (count is None or row["taken"] < count) and (frame := reader.next(self._timeout)) is not None:
                try:
                    array = frame.copy()
                except FrameOverwritten:
                    reader.count_overwritten()
                    continue
                row["taken"] += 1
                row["received"] += 1
                if self._transform is None:
                    yield array
                else:
                    find = partial(consumer.metadata, frame.meta_version, epoch=frame.epoch)
                    yield self._transform(sample_of(frame, array, find))


class _ShareReader:
    """Reads the frames whose seq, divided by `of`, leaves `remainder`, and counts those of them that it missed."""

    def __init__(self, consumer: Consumer, row: Any, remainder: int, of: int, latest: bool) -> None:
        self._consumer: Final = consumer
        self._row: Final = row
        self._remainder: Final = remainder
        self._of: Final = of
        self._poll: Final = self._newest if latest else consumer.poll
        self._accounted: tuple[int, int] | None = None  # drops and skips of the consumer, at the frame before

    def next(self, timeout: float | None) -> Frame | None:
        """The next frame of the share; None after `timeout` seconds without any frame, or when our parent has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LOOK_UP_EVERY_S if deadline is None else deadline - time.monotonic()
            frame = self._poll(max(min(left, LOOK_UP_EVERY_S), 0.0))
            if frame is not None:
                self._account(frame)
                if frame.seq % self._of == self._remainder:
                    return frame
                deadline = None if timeout is None else time.monotonic() + timeout
            elif (deadline is not None and time.monotonic() >= deadline) or _is_orphan():
                return None

    def count_overwritten(self) -> None:
        """The frame returned last was overwritten before it was copied."""
        self._row["lost"] += 1
        self._accounted = self._totals()

    def _newest(self, timeout: float) -> Frame | None:
        frame = self._consumer.latest()
        if frame is None or self._is_seen(frame):
            self._consumer.wait(timeout)
            frame = self._consumer.latest()
        return None if frame is None or self._is_seen(frame) else frame

    def _is_seen(self, frame: Frame) -> bool:
        return bool(frame.epoch == self._row["epoch"] and frame.seq < self._row["next_seq"])

    def _account(self, frame: Frame) -> None:
        row = self._row
        is_same_epoch = frame.epoch == row["epoch"]
        if self._accounted is None:  # the first: what passed since the saved state
            if is_same_epoch and row["next_seq"]:
                row["lost"] += self._own(frame.seq, max(frame.seq - int(row["next_seq"]), 0))
            self._accounted = self._totals()
        elif frame.dropped_before or not is_same_epoch or frame.seq != row["next_seq"]:
            totals = self._totals()
            drops, skips = (max(now - before, 0) for now, before in zip(totals, self._accounted, strict=True))
            skipped = self._own(frame.seq, skips)
            row["skipped"] += skipped
            row["lost"] += self._own(frame.seq, drops + skips) - skipped
            self._accounted = totals
        row["epoch"], row["next_seq"] = frame.epoch, frame.seq + 1

    def _totals(self) -> tuple[int, int]:
        stats = self._consumer.stats
        skips = stats.drops.get(DropReason.SKIPPED, 0)
        return stats.lost - skips, skips

    def _own(self, seq: int, missing: int) -> int:
        """How many of the frames that are missing before `seq` belong to the share."""
        before = self._remainder + 1
        return (seq - before) // self._of - (seq - missing - before) // self._of


def _is_orphan() -> bool:
    """Whether the process that started this worker has ended: it must not hold its lease for ever."""
    parent = parent_process()
    return parent is not None and not parent.is_alive()
