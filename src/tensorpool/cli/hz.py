# SPDX-License-Identifier: Apache-2.0
"""`tensorpool hz`: measures how often a stream really publishes, from its descriptors.

Subscribes to the public descriptor stream and takes no lease, so it works with any producer and changes nothing. Times
are those of arrival in this process. Wire §10.2.1.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import click
import msgspec

from tensorpool.cli import format, options
from tensorpool.cli.signals import StopSignals
from tensorpool.errors import TensorPoolError

if TYPE_CHECKING:
    from tensorpool.supervisor.observer import Observer
    from tensorpool.supervisor.snapshot import StreamStatus

PARK_NS: Final = 200_000  # the latest that a frame is noticed
FIND_PERIODS: Final = 5  # announce periods to wait for a stream
MAX_WINDOW: Final = 1_000_000
SETTLE_NS: Final = 100_000_000
SECOND: Final = 1_000_000_000


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Rate and intervals of the frames in the window."""

    stream_id: int
    name: str | None
    epoch: int | None
    seq: int | None
    rate_hz: float | None
    mean_ms: float | None
    min_ms: float | None
    max_ms: float | None
    jitter_ms: float | None  # the standard deviation of the intervals
    window: int  # intervals
    frames: int  # since the command began
    missed: int  # seqs without a descriptor
    silent_s: float | None  # since the last frame

    def __str__(self) -> str:
        if self.rate_hz is None:
            return f"no rate yet: {self.frames} frames"
        silence = f"  silent for {self.silent_s:.1f} s" if (self.silent_s or 0) > 1 else ""
        missed = f"  missed {self.missed}" if self.missed else ""
        return (
            f"{self.rate_hz:10.2f} Hz   mean {self.mean_ms:.3f} ms  min {self.min_ms:.3f}  max {self.max_ms:.3f}  "
            f"jitter {self.jitter_ms:.3f}  window {self.window}{missed}{silence}"
        )


class Gauge:
    """Counts the frames of one stream and the time between them. Holds no clock."""

    def __init__(self, stream_id: int, window: int) -> None:
        self._stream_id = stream_id
        self._times_ns: deque[int] = deque(maxlen=window + 1)
        self._first_ns: int | None = None
        self.frames = 0
        self.missed = 0
        self.epoch: int | None = None
        self.seq: int | None = None

    def add(self, epoch: int, seq: int, now_ns: int) -> None:
        """Count a descriptor. A new epoch empties the window; a repeated descriptor counts once.

        Descriptors that arrive together with the very first one may be old ones of Aeron's log, and do not count.
        """
        if self._first_ns is None:
            self._first_ns = now_ns
        if now_ns - self._first_ns < SETTLE_NS:
            return
        if epoch == self.epoch and self.seq is not None:
            if seq <= self.seq:
                return
            self.missed += seq - self.seq - 1
        elif self.epoch is not None:
            self._times_ns.clear()
        self.epoch, self.seq = epoch, seq
        self.frames += 1
        self._times_ns.append(now_ns)

    def figures(self, name: str | None, now_ns: int) -> Figures:
        times = list(self._times_ns)
        gaps = [(later - earlier) / 1e6 for earlier, later in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps) if gaps else None
        return Figures(
            stream_id=self._stream_id,
            name=name,
            epoch=self.epoch,
            seq=self.seq,
            rate_hz=1e3 / mean if mean else None,
            mean_ms=mean,
            min_ms=min(gaps, default=None),
            max_ms=max(gaps, default=None),
            jitter_ms=math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) if mean is not None else None,
            window=len(gaps),
            frames=self.frames,
            missed=self.missed,
            silent_s=(now_ns - times[-1]) / 1e9 if times else None,
        )


@click.command(name="hz")
@click.argument("stream")
@options.count_option("frames")
@options.seconds_option()
@click.option(
    "--window",
    type=click.IntRange(min=1, max=MAX_WINDOW),
    default=10_000,
    show_default=True,
    metavar="N",
    help="Measure over the latest N intervals.",
)
@options.json_option("Print a line of JSON each second, and one at the end.")
@options.connection_options
def command(
    stream: str,
    count: int,
    seconds: float | None,
    window: int,
    as_json: bool,
    connection: options.Connection,
) -> None:
    """Measure the rate of STREAM, an id or a name: each second mean, shortest and longest interval, and jitter.

    Takes no lease and changes nothing. Ends with Ctrl-C, after --count frames or --seconds, with a line for the whole
    time.
    """
    from tensorpool import aeron
    from tensorpool.supervisor.config import SupervisorConfig
    from tensorpool.supervisor.observer import Observer

    config = SupervisorConfig.of(connection.load())
    stop = StopSignals()
    gauges: list[Gauge] = []
    target: list[int] = []

    def on_descriptor(stream_id: int, epoch: int, seq: int, publish_ns: int | None) -> None:
        if target and stream_id == target[0] and not (count and gauges[0].frames > count):
            gauges[0].add(epoch, seq, time.monotonic_ns())

    observer = Observer(connection.aeron_dir, config, on_descriptor=on_descriptor)
    idle = aeron.BackoffIdle(max_park_ns=PARK_NS)
    observer.on_start()
    try:
        found = _find(observer, stream, stop)
        if found is None:
            return
        gauges.append(Gauge(found.stream_id, window))
        target.append(found.stream_id)
        if not as_json:
            click.echo(f"listening to {_label(found)}: {_state(found)}", err=True)
        began_ns = time.monotonic_ns()
        print_ns = began_ns + SECOND
        last_line = ""
        gauge = gauges[0]
        while not stop.count and not (count and gauge.frames > count):
            idle.idle(observer.do_work())
            now_ns = time.monotonic_ns()
            if seconds and now_ns - began_ns >= seconds * SECOND:
                break
            if now_ns >= print_ns:
                print_ns += SECOND
                last_line = _print(gauge, observer, found, as_json=as_json, before=last_line)
        _print(gauge, observer, found, as_json=as_json, before="", is_last=True)
    finally:
        observer.on_close()


def _find(observer: Observer, text: str, stop: StopSignals) -> StreamStatus | None:
    """The stream with this id or name, as soon as it is announced. Raises TensorPoolError; None: stopped."""
    period_s = observer.config.announce_period_ns / 1e9
    deadline = time.monotonic() + max(1.0, FIND_PERIODS * period_s)
    while not stop.count:
        observer.do_work()
        streams = observer.snapshot().streams
        found = [stream for stream in streams if text in (str(stream.stream_id), stream.name)]
        if len(found) > 1:
            ids = ", ".join(str(stream.stream_id) for stream in found)
            raise TensorPoolError(f"{text!r} is the name of streams {ids}; give one of the ids")
        is_late = time.monotonic() > deadline
        if found and (found[0].announced_age_ns is not None or is_late):  # an announce names the producer
            return found[0]
        if is_late:
            announced = ", ".join(_label(stream) for stream in streams[:10]) or "none"
            raise TensorPoolError(
                f"no stream {text!r} was announced at {observer.aeron_dir} within {FIND_PERIODS * period_s:g} s; "
                f"announced: {announced}"
            )
        time.sleep(0.01)
    return None


def _print(
    gauge: Gauge, observer: Observer, found: StreamStatus, *, as_json: bool, before: str, is_last: bool = False
) -> str:
    now_ns = time.monotonic_ns()
    status = next((it for it in observer.snapshot().streams if it.stream_id == found.stream_id), found)
    figures = gauge.figures(status.name, now_ns)
    if as_json:
        click.echo(msgspec.json.encode(msgspec.structs.asdict(figures) | {"is_last": is_last}))
        return ""
    if gauge.frames:
        line = str(figures)
    else:
        line = f"no frame: {_state(status)}"
        if status.rate_hz:
            line += f"; it publishes {status.rate_hz:.1f} Hz on a private descriptor stream"
    if line != before:
        click.echo(line)
    return line if not gauge.frames else ""


def _label(stream: StreamStatus) -> str:
    return f"{format.printable(stream.name)} ({stream.stream_id})" if stream.name else str(stream.stream_id)


def _state(stream: StreamStatus) -> str:
    if stream.announced_age_ns is None:
        return "not announced yet"
    producer = "without a producer" if stream.producer_id is None else f"producer {stream.producer_id}"
    return f"{stream.state}, epoch {stream.epoch}, {producer}"
