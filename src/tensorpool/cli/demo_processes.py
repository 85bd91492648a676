# SPDX-License-Identifier: Apache-2.0
"""The processes of the demo: a camera that paints frames in place, and readers that check every byte of them.

Each has a pipe to the demo: it sends reports, and receives when to begin and to stop. It ends when the pipe closes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

import msgspec
import numpy as np

from tensorpool.cli.progress import Ages, Meter, Rate
from tensorpool.cli.test_pattern import checkable
from tensorpool.client import Client, Consumer, DropReason, Frame, Producer, connect
from tensorpool.driver import DriverConfig
from tensorpool.errors import TensorPoolError

STREAM: Final = "demo/camera"
START_S: Final = 30.0
DRAIN_S: Final = 10.0
SLICE_S: Final = 0.05
REPORT_EVERY_S: Final = 0.05


class ProcessSettings(msgspec.Struct, frozen=True):
    """What a process of the demo needs to know."""

    name: str
    aeron_dir: str
    config: DriverConfig
    shape: tuple[int, ...]
    rate: float
    seconds: float
    readers: int
    delay_s: float = 0.0  # that a reader spends on each frame
    is_remote_controlled: bool = False  # begins and ends when the demo sends it, not by itself

    def connect(self) -> Client:
        return connect(self.aeron_dir, config=self.config)


class Report(msgspec.Struct, frozen=True):
    """Counts of one process. `frames` are those that the camera published, or that a reader received."""

    name: str
    frames: int = 0
    recent: Rate = Rate()
    overall: Rate = Rate()
    seconds: float = 0.0
    drops: dict[DropReason, int] = {}
    ages_ms: tuple[float, float] | None = None
    checked: int = 0  # frames with every byte right
    checked_bytes: int = 0
    overwritten: int = 0  # frames that were overwritten during the check, and reported so by `is_intact`
    wrong: str = ""  # the first frame with a wrong byte
    failure: str = ""
    is_final: bool = False

    @property
    def lost(self) -> int:
        return sum(self.drops.values())


def run_camera(settings: ProcessSettings, pipe: Connection) -> None:
    """Publish frames at the requested rate, wait until the readers have seen the last, report, and end."""
    _run(settings, pipe, _publish)


def run_reader(settings: ProcessSettings, pipe: Connection) -> None:
    """Check frames until the camera has ended and each of its frames is accounted for."""
    _run(settings, pipe, _read)


def _run(settings: ProcessSettings, pipe: Connection, work: Callable[[ProcessSettings, Connection], Report]) -> None:
    with contextlib.suppress(EOFError, BrokenPipeError):  # the demo has ended
        try:
            report = work(settings, pipe)
        except TensorPoolError as error:
            report = Report(settings.name, failure=str(error))
        pipe.send(msgspec.structs.replace(report, is_final=True))


def _publish(settings: ProcessSettings, pipe: Connection) -> Report:
    painter, meter = checkable(settings.shape), Meter()
    painter.paint(np.empty(settings.shape, np.uint8), 0)  # fills its tables
    with settings.connect() as client, client.producer(STREAM, create=True, timeout=START_S) as producer:
        if not producer.wait_for_consumers(settings.readers, START_S):
            return Report(settings.name, failure=f"the readers did not attach within {START_S:g} s")
        pipe.send(Report(settings.name))  # the camera is ready
        if settings.is_remote_controlled and pipe.recv() != "go":
            return Report(settings.name)
        report_s = started_s = time.monotonic()
        end_s = math.inf if settings.is_remote_controlled else settings.seconds
        while not _is_stopped(pipe) and (elapsed_s := time.monotonic() - started_s) < end_s:
            left_s = (meter.frames + sum(producer.stats.dropped.values())) / settings.rate - elapsed_s
            if left_s > 0:
                time.sleep(min(left_s, SLICE_S))
                continue
            with producer.claim(settings.shape) as slot:
                painter.paint(slot.array, slot.seq or 0)
            if slot.seq is not None:
                meter.add(slot.array.nbytes)
            if time.monotonic() >= report_s:
                report_s += REPORT_EVERY_S
                pipe.send(_camera_report(settings, producer, meter))
        if not settings.is_remote_controlled:
            producer.drain(DRAIN_S)
            return _camera_report(settings, producer, meter)
        report = _camera_report(settings, producer, meter)
        pipe.send(msgspec.structs.replace(report, is_final=True))
        pipe.recv()  # the epoch ends with the producer: the recorder may still read it
        return report


def _is_stopped(pipe: Connection) -> bool:
    return pipe.poll() and pipe.recv() == "stop"


def _camera_report(settings: ProcessSettings, producer: Producer, meter: Meter) -> Report:
    stats = producer.stats
    return Report(
        settings.name,
        frames=stats.published,
        recent=meter.recent(),
        overall=meter.overall,
        seconds=meter.seconds,
        drops=stats.dropped,
    )


def _read(settings: ProcessSettings, pipe: Connection) -> Report:
    checks = _Checks(settings.shape)
    with settings.connect() as client, client.consumer(STREAM, timeout=START_S) as consumer:
        report_s, end_s = time.monotonic(), None
        published: int | None = None
        while True:
            frame = consumer.poll(SLICE_S)
            if frame is not None:
                checks.take(frame)
                time.sleep(settings.delay_s if published is None else 0)
            elif published is not None and end_s is not None:
                stats = consumer.stats
                if stats.received + stats.lost >= published or time.monotonic() > end_s:
                    return checks.report(settings, consumer)
            if published is None and pipe.poll():
                published = pipe.recv()
                end_s = time.monotonic() + DRAIN_S
            if time.monotonic() >= report_s:
                report_s = time.monotonic() + REPORT_EVERY_S
                pipe.send(checks.report(settings, consumer))


class _Checks:
    """Results of a reader's checks so far."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._pattern = checkable(shape)
        self._pattern.paint(np.empty(shape, np.uint8), 0)  # fills its tables
        self._meter = Meter()
        self._ages = Ages()
        self._checked = 0
        self._checked_bytes = 0
        self._overwritten = 0
        self._wrong = ""

    def take(self, frame: Frame) -> None:
        self._ages.add(frame.age_ns)
        self._meter.add(frame.nbytes)
        difference = self._pattern.find(frame.array, frame.seq)
        if not frame.is_intact():
            self._overwritten += 1
        elif difference is None:
            self._checked += 1
            self._checked_bytes += frame.nbytes
        else:
            self._wrong = self._wrong or f"frame {frame.seq} at byte {difference.offset}"

    def report(self, settings: ProcessSettings, consumer: Consumer) -> Report:
        stats = consumer.stats
        return Report(
            settings.name,
            frames=stats.received,
            recent=self._meter.recent(),
            overall=self._meter.overall,
            seconds=self._meter.seconds,
            drops=stats.drops,
            ages_ms=self._ages.percentiles_ms(),
            checked=self._checked,
            checked_bytes=self._checked_bytes,
            overwritten=self._overwritten,
            wrong=self._wrong,
        )
