# SPDX-License-Identifier: Apache-2.0
"""`tensorpool consume`: receives a stream, prints rates and losses, and checks every byte of what `produce` painted."""

from __future__ import annotations

import sys
import time
from typing import Final, Literal

import click
import msgspec

from tensorpool.cli import format, options, progress
from tensorpool.cli.signals import StopSignals, interruptible
from tensorpool.cli.test_pattern import Checked
from tensorpool.client import Consumer, DropReason, Frame, connect

SLICE_S: Final = 0.1  # the longest time that a signal waits
ATTACH_S: Final = 1e9

_ON_PURPOSE: Final = (DropReason.SKIPPED.name, DropReason.RATE_LIMITED.name)

type End = Literal["count", "timeout", "signal", "difference"]


@click.command(name="consume")
@click.argument("stream")
@options.count_option("frames")
@options.timeout_option(10.0, "End when no frame arrives for S seconds; 0: never.")
@click.option("--latest", is_flag=True, help="Take the newest frame each time, and skip older ones.")
@click.option("--max-rate-hz", type=click.IntRange(min=1), metavar="HZ", help="Receive at most HZ frames a second.")
@click.option("--verify", is_flag=True, help="Check every byte against `produce --pattern checked`.")
@options.json_option("Print the summary as JSON.")
@options.connection_options
def command(
    stream: str,
    count: int,
    timeout: float,
    latest: bool,
    max_rate_hz: int | None,
    verify: bool,
    as_json: bool,
    connection: options.Connection,
) -> None:
    """Receive the frames of STREAM: an id, or a name.

    Ctrl-C and SIGTERM end with a summary. Exit code 1: no frame arrived within --timeout, fewer than --count arrived,
    or --verify found a wrong byte.
    """
    config = connection.load()
    with progress.LiveLine(is_quiet=as_json) as line, interruptible():
        job = _Job(stream, line, Checked() if verify else None)
        is_limited = max_rate_hz is not None and not latest
        with connect(connection.aeron_dir, config=config) as client:
            with line.noting_a_wait(f"waiting for {stream}: no producer, or no lease of the driver, so far"):
                consumer = client.consumer(
                    stream,
                    mode="rate_limited" if is_limited else "stream",
                    max_rate_hz=max_rate_hz or 0 if is_limited else 0,
                    timeout=timeout or ATTACH_S,
                    on_state=line.on_state,
                )
            with consumer:
                stop = StopSignals()
                job.announce(consumer)
                source = _Source(consumer, latest, max_rate_hz if latest else None)
                end = job.run(consumer, source, stop, count, timeout)
                line.end()
                summary = job.summarise(consumer, end)
    click.echo(msgspec.json.encode(summary) if as_json else summary.text())
    failure = summary.failure(count, timeout)
    if failure:
        click.echo(f"error: {failure}", err=True)
        sys.exit(1)


class _Source:
    """Takes frames from a consumer: each in order, or the newest one at most `sample_hz` times a second."""

    def __init__(self, consumer: Consumer, is_latest: bool, sample_hz: int | None) -> None:
        self._consumer = consumer
        self._is_latest = is_latest
        self._interval_s = 1 / sample_hz if sample_hz else 0.0
        self._next_s = 0.0
        self._seen = (0, -1)

    def take(self) -> Frame | None:
        """The next frame; None when none arrives within a slice."""
        if not self._is_latest:
            return self._consumer.poll(SLICE_S)
        left = self._next_s - time.monotonic()
        if left > 0:
            time.sleep(min(left, SLICE_S))
            if left > SLICE_S:
                return None
        frame = self._consumer.latest()
        if frame is None or (frame.epoch, frame.seq) == self._seen:
            self._consumer.wait(SLICE_S)
            return None
        self._seen = frame.epoch, frame.seq
        self._next_s = time.monotonic() + self._interval_s
        return frame


class _Job:
    """One run of a consumer."""

    def __init__(self, stream: str, line: progress.LiveLine, checked: Checked | None) -> None:
        self._stream = stream
        self._line = line
        self._checked = checked
        self._meter = progress.Meter()
        self._ages = progress.Ages()
        self._verified = 0
        self._overwritten = 0
        self._wrong: _WrongFrame | None = None

    def announce(self, consumer: Consumer) -> None:
        self._line.note(f"consuming {format.named(consumer.stream_id, consumer.name)}")

    def run(self, consumer: Consumer, source: _Source, stop: StopSignals, count: int, timeout: float) -> End:
        received_s = time.monotonic()
        while not stop.count:
            frame = source.take()
            if frame is not None:
                self._ages.add(frame.age_ns)
                self._meter.add(frame.nbytes)
                received_s = time.monotonic()
                if self._checked is not None and not self._is_right(frame, self._checked):
                    return "difference"
                if self._meter.frames == count:
                    return "count"
            elif timeout and time.monotonic() - received_s >= timeout:
                return "timeout"
            if self._line.is_due:
                self._line.show(self._now(consumer))
        return "signal"

    def _is_right(self, frame: Frame, checked: Checked) -> bool:
        difference = checked.find(frame.array, frame.seq)
        if not frame.is_intact():
            self._overwritten += 1  # during the check, which therefore proves nothing
            return True
        if difference is None:
            self._verified += 1
            return True
        self._wrong = _WrongFrame(frame.epoch, frame.seq, difference.offset, difference.expected, difference.found)
        return False

    def _now(self, consumer: Consumer) -> str:
        stats, ages = consumer.stats, self._ages.percentiles_ms()
        parts = [self._stream, str(self._meter.recent()), f"{self._meter.frames} received"]
        parts.append(f"{stats.lost} lost" + (f": {progress.drops(stats.drops)}" if stats.lost else ""))
        if ages is not None:
            parts.append(f"age {format.latency(ages[0])}, p99 {format.latency(ages[1])}")
        return "  ".join(parts)

    def summarise(self, consumer: Consumer, end: End) -> _Summary:
        stats, overall, ages = consumer.stats, self._meter.overall, self._ages.percentiles_ms()
        metadata = consumer.metadata()
        pattern = None if metadata is None else metadata.attributes.get("pattern")
        return _Summary(
            stream_id=consumer.stream_id,
            name=consumer.name,
            epoch=stats.epoch,
            epochs=stats.epochs,
            received=self._meter.frames,
            bytes=self._meter.bytes,
            seconds=round(self._meter.seconds, 6),
            rate_hz=round(overall.hz, 3),
            mib_per_s=round(overall.mib_per_s, 3),
            age_p50_ms=None if ages is None else round(ages[0], 4),
            age_p99_ms=None if ages is None else round(ages[1], 4),
            lost=stats.lost,
            drops=progress.drops_by_name(stats.drops),
            drops_gap=stats.drops_gap,
            drops_late=stats.drops_late,
            pattern=pattern if isinstance(pattern, str) else None,
            verified=None if self._checked is None else self._verified,
            overwritten=self._overwritten,
            difference=self._wrong,
            end=end,
        )


class _WrongFrame(msgspec.Struct, frozen=True):
    """The first frame with a wrong byte."""

    epoch: int
    seq: int
    offset: int
    expected: int
    found: int


class _Summary(msgspec.Struct, frozen=True):
    """How many frames were received, lost and verified."""

    stream_id: int
    name: str | None
    epoch: int | None
    epochs: int
    received: int
    bytes: int
    seconds: float
    rate_hz: float
    mib_per_s: float
    age_p50_ms: float | None
    age_p99_ms: float | None
    lost: int
    drops: dict[str, int]
    drops_gap: int
    drops_late: int
    pattern: str | None  # from the producer's metadata
    verified: int | None  # frames; None: without --verify
    overwritten: int  # during their check
    difference: _WrongFrame | None
    end: End

    def text(self) -> str:
        rate = progress.Rate(self.rate_hz, self.mib_per_s)
        lines = [f"received {self.received} frames, {format.size(self.bytes)}, in {self.seconds:.1f} s: {rate}"]
        skipped = {reason: count for reason, count in self.drops.items() if reason in _ON_PURPOSE}
        lost = {reason: count for reason, count in self.drops.items() if reason not in _ON_PURPOSE}
        lines.append(f"lost     {_counts(lost)}")
        if skipped:
            lines.append(f"skipped  {_counts(skipped)}, as requested")
        if self.age_p50_ms is not None and self.age_p99_ms is not None:
            half, most = format.latency(self.age_p50_ms), format.latency(self.age_p99_ms)
            lines.append(f"age      p50 {half}, p99 {most}")
        if self.verified is not None:
            overwritten = f"; {self.overwritten} more were overwritten during the check" if self.overwritten else ""
            lines.append(f"verified {self.verified} frames, every byte{overwritten}")
        return "\n".join(lines)

    def failure(self, count: int, timeout: float) -> str | None:
        """Why the command fails; None where it succeeds."""
        wrong = self.difference
        if wrong is not None:
            where = f"frame {wrong.seq} (epoch {wrong.epoch}) is wrong: byte {wrong.offset} is 0x{wrong.found:02x}"
            hint = "" if self.pattern == "checked" else "; only frames of `produce --pattern checked` can be verified"
            return f"{where} instead of 0x{wrong.expected:02x}{hint}"
        if self.end != "timeout":
            return None
        if not self.received:
            return f"no frame arrived within {timeout:g} s"
        return f"{self.received} of {count} frames arrived, then none for {timeout:g} s" if count else None


def _counts(drops: dict[str, int]) -> str:
    reasons = format.counts(drops)
    return f"{sum(drops.values())}" + (f": {reasons}" if reasons else "")
