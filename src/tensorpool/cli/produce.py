# SPDX-License-Identifier: Apache-2.0
"""`tensorpool produce`: publishes synthetic frames, to try out consumers, drivers and machines."""

from __future__ import annotations

import time
from typing import Any, Final

import click
import msgspec
import numpy as np

from tensorpool.cli import format, options, progress, publishing
from tensorpool.cli.publishing import SLICE_S
from tensorpool.cli.signals import StopSignals, interruptible
from tensorpool.cli.test_pattern import PATTERNS, Painter
from tensorpool.client import Producer, connect
from tensorpool.client.fitting_ring import attach_producer
from tensorpool.shm.arrays import Order, layout_for

CATCH_UP_S: Final = 1.0
DROPPED_S: Final = 0.01  # pause after a frame that could not be published


@click.command(name="produce")
@click.argument("stream")
@click.option(
    "--shape", type=options.shape, default="720x1280x3", show_default=True, metavar="NxM…", help="Shape of a frame."
)
@click.option(
    "--dtype",
    type=click.Choice(options.DTYPES),
    default="uint8",
    show_default=True,
    metavar="NAME",
    help="A dtype of numpy.",
)
@click.option("--order", type=click.Choice(["C", "F"]), default="C", show_default=True, help="Row or column major.")
@click.option(
    "--pattern",
    type=click.Choice(list(PATTERNS)),
    default="gradient",
    show_default=True,
    help="What frames show; `consume --verify` checks every byte of `checked`.",
)
@click.option(
    "--rate",
    type=options.Number(min=0),
    default=60.0,
    show_default=True,
    metavar="HZ",
    help="Frames a second; 0: as many as possible.",
)
@options.count_option("frames")
@click.option(
    "--wait-for-consumers",
    "wanted",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Begin once there are N consumers.",
)
@click.option("--create/--no-create", default=True, show_default=True, help="Create the stream if it does not exist.")
@options.timeout_option(5.0, "Give up when the driver has not granted the stream after S seconds.", least=0.1)
@options.json_option("Print the summary as JSON.")
@options.connection_options
def command(
    stream: str,
    shape: tuple[int, ...],
    dtype: str,
    order: Order,
    pattern: str,
    rate: float,
    count: int,
    wanted: int,
    create: bool,
    timeout: float,
    as_json: bool,
    connection: options.Connection,
) -> None:
    """Publish synthetic frames on STREAM: an id, or a name.

    Frames are painted in place, in shared memory. Ctrl-C and SIGTERM end with a summary once consumers have seen the
    last frame; a second signal ends at once.
    """
    nbytes = layout_for(shape, np.dtype(dtype), order).extent_bytes
    config = connection.load()
    with progress.LiveLine(is_quiet=as_json) as line, interruptible():
        job = _Job(stream, shape, np.dtype(dtype), order, rate, count, PATTERNS[pattern](), line)
        with (
            connect(connection.aeron_dir, config=config) as client,
            attach_producer(
                client,
                stream,
                nbytes,
                rate,
                create=create,
                timeout=timeout,
                on_state=line.on_state,
                on_note=line.note,
            ) as producer,
        ):
            stop = StopSignals()
            producer.set_metadata({"pattern": pattern, "rate_hz": rate})
            job.announce(producer, wanted, nbytes)
            job.run(producer, wanted, stop)
            line.end()
            is_drained = publishing.drain(producer, stop)
            summary = _Summary.of(producer, job.meter, is_drained=is_drained)
    click.echo(msgspec.json.encode(summary) if as_json else summary.text())


class _Job:
    """One run of a producer."""

    def __init__(
        self,
        stream: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        order: Order,
        rate: float,
        count: int,
        painter: Painter,
        line: progress.LiveLine,
    ) -> None:
        self.meter = progress.Meter()
        self._stream = stream
        self._shape = shape
        self._dtype = dtype
        self._order: Order = order
        self._rate = rate
        self._count = count
        self._painter = painter
        self._line = line

    def announce(self, producer: Producer, wanted: int, nbytes: int) -> None:
        frame = f"{format.shape(self._shape)} {self._dtype} frames of {format.size(nbytes)}"
        self._line.note(f"producing {format.named(producer.stream_id, producer.name)}: {frame}")
        if producer.consumers < wanted:
            self._line.note(f"waiting for {format.counted(wanted, 'consumer')}")

    def run(self, producer: Producer, wanted: int, stop: StopSignals) -> None:
        while not stop.count and wanted and not producer.wait_for_consumers(wanted, SLICE_S):
            continue
        self._painter.paint(np.empty(self._shape, self._dtype, self._order), 0)  # fills the painter's tables
        pace, given = _Pace(self._rate), 0
        while not stop.count and (not self._count or given < self._count):
            if not pace.is_due():
                continue
            with producer.claim(self._shape, self._dtype, self._order) as slot:
                self._painter.paint(slot.array, slot.seq or 0)
            given += 1
            if slot.seq is not None:
                self.meter.add(slot.array.nbytes)
            elif not self._rate:
                time.sleep(DROPPED_S)
            if self._line.is_due:
                self._line.show(self._now(producer))

    def _now(self, producer: Producer) -> str:
        stats = producer.stats
        dropped = sum(stats.dropped.values())
        return (
            f"{self._stream}  {self.meter.recent()}  {stats.published} published  "
            f"{format.counted(producer.consumers, 'consumer')}  "
            + (f"{dropped} dropped: {progress.drops(stats.dropped)}" if dropped else "0 dropped")
        )


class _Pace:
    """When the next frame is due. After a pause longer than CATCH_UP_S it does not catch up."""

    def __init__(self, rate_hz: float) -> None:
        self._interval_s = 1 / rate_hz if rate_hz else 0.0
        self._next_s = time.monotonic()

    def is_due(self) -> bool:
        """Sleep until then, but at most for a slice: then False."""
        if not self._interval_s:
            return True
        left = self._next_s - time.monotonic()
        if left > 0:
            time.sleep(min(left, SLICE_S))
        if left > SLICE_S:
            return False
        self._next_s += self._interval_s
        if left < -CATCH_UP_S:
            self._next_s = time.monotonic() + self._interval_s
        return True


class _Summary(publishing.PublishSummary, frozen=True, kw_only=True):
    """Which epochs it had, and what consumers saw."""

    epoch: int | None
    epochs: int
    descriptors_unheard: int
    descriptors_lost: int
    consumers: int
    is_drained: bool

    @classmethod
    def of(cls, producer: Producer, meter: progress.Meter, *, is_drained: bool) -> _Summary:
        stats = producer.stats
        return publishing.summarize(
            cls,
            producer,
            meter,
            published=stats.published,
            nbytes=stats.bytes,
            dropped=stats.dropped,
            epoch=producer.epoch,
            epochs=stats.epochs,
            descriptors_unheard=stats.descriptors_unheard,
            descriptors_lost=stats.descriptors_lost,
            consumers=producer.consumers,
            is_drained=is_drained,
        )

    def more_lines(self) -> list[str]:
        lines = []
        if self.descriptors_unheard:
            frames = "any frame" if self.descriptors_unheard == self.published else f"{self.descriptors_unheard} frames"
            lines.append(f"no consumer was connected for {frames}")
        if self.descriptors_lost:
            lines.append(f"consumers missed the descriptors of {self.descriptors_lost} frames: they were too slow")
        if self.consumers:
            seen = "have seen the last frame" if self.is_drained else "have NOT all seen the last frame"
            lines.append(f"consumers: {self.consumers}, {seen}")
        return lines
