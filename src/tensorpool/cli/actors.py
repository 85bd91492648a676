# SPDX-License-Identifier: Apache-2.0
"""The processes of the demo: a camera that paints frames in place, and readers that check every byte of them.

Each has a pipe to the demo: reports go out, the word to stop comes in. When the pipe ends, so do they.
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

from tensorpool.cli.figures import Ages, Meter, Rate
from tensorpool.cli.pattern import checkable
from tensorpool.client import Client, Consumer, DropReason, Frame, Producer, connect
from tensorpool.driver import DriverConfig
from tensorpool.errors import TensorPoolError

STREAM: Final = "demo/camera"
START_S: Final = 30.0
DRAIN_S: Final = 10.0
SLICE_S: Final = 0.05
REPORT_EVERY_S: Final = 0.05


class Part(msgspec.Struct, frozen=True):
    """What an actor is told."""

    name: str
    aeron_dir: str
    config: DriverConfig
    shape: tuple[int, ...]
    rate: float
    seconds: float
    readers: int
    delay_s: float = 0.0  # that a reader takes over each frame
    is_led: bool = False  # begins and ends when it is told, not by itself

    def connect(self) -> Client:
        return connect(self.aeron_dir, config=self.config)


class Report(msgspec.Struct, frozen=True):
    """How far an actor is. `frames` were published by the camera, and received by a reader."""

    name: str
    frames: int = 0
    recent: Rate = Rate()
    overall: Rate = Rate()
    seconds: float = 0.0
    drops: dict[DropReason, int] = {}
    ages_ms: tuple[float, float] | None = None
    checked: int = 0  # frames with every byte right
    checked_bytes: int = 0
    overwritten: int = 0  # frames that were overwritten while they were checked, and known to be
    wrong: str = ""  # the first frame with a wrong byte
    failure: str = ""
    is_final: bool = False

    @property
    def lost(self) -> int:
        return sum(self.drops.values())


def play_camera(part: Part, pipe: Connection) -> None:
    """Publish frames at the rate asked for, wait until the readers have seen the last, report, and leave."""
    _play(part, pipe, _film)


def play_reader(part: Part, pipe: Connection) -> None:
    """Check frames until the camera has left and each of its frames is accounted for."""
    _play(part, pipe, _read)


def _play(part: Part, pipe: Connection, act: Callable[[Part, Connection], Report]) -> None:
    with contextlib.suppress(EOFError, BrokenPipeError):  # the demo is gone
        try:
            report = act(part, pipe)
        except TensorPoolError as error:
            report = Report(part.name, failure=str(error))
        pipe.send(msgspec.structs.replace(report, is_final=True))


def _film(part: Part, pipe: Connection) -> Report:
    painter, meter = checkable(part.shape), Meter()
    painter.paint(np.empty(part.shape, np.uint8), 0)  # makes its tables
    with part.connect() as client, client.producer(STREAM, create=True, timeout=START_S) as producer:
        if not producer.wait_for_consumers(part.readers, START_S):
            return Report(part.name, failure="the readers did not come")
        pipe.send(Report(part.name))  # it is there
        if part.is_led and pipe.recv() != "go":
            return Report(part.name)
        report_s = started_s = time.monotonic()
        end_s = math.inf if part.is_led else part.seconds
        while not _is_stopped(pipe) and (elapsed_s := time.monotonic() - started_s) < end_s:
            left_s = (meter.frames + sum(producer.stats.dropped.values())) / part.rate - elapsed_s
            if left_s > 0:
                time.sleep(min(left_s, SLICE_S))
                continue
            with producer.claim(part.shape) as slot:
                painter.paint(slot.array, slot.seq or 0)
            if slot.seq is not None:
                meter.add(slot.array.nbytes)
            if time.monotonic() >= report_s:
                report_s += REPORT_EVERY_S
                pipe.send(_of_camera(part, producer, meter))
        if not part.is_led:
            producer.drain(DRAIN_S)
            return _of_camera(part, producer, meter)
        report = _of_camera(part, producer, meter)
        pipe.send(msgspec.structs.replace(report, is_final=True))
        pipe.recv()  # with us goes the epoch: others may still be at it
        return report


def _is_stopped(pipe: Connection) -> bool:
    return pipe.poll() and pipe.recv() == "stop"


def _of_camera(part: Part, producer: Producer, meter: Meter) -> Report:
    stats = producer.stats
    return Report(
        part.name,
        frames=stats.published,
        recent=meter.recent(),
        overall=meter.overall,
        seconds=meter.seconds,
        drops=stats.dropped,
    )


def _read(part: Part, pipe: Connection) -> Report:
    reading = _Reading(part.shape)
    with part.connect() as client, client.consumer(STREAM, timeout=START_S) as consumer:
        report_s, end_s = time.monotonic(), None
        published: int | None = None
        while True:
            frame = consumer.poll(SLICE_S)
            if frame is not None:
                reading.take(frame)
                time.sleep(part.delay_s if published is None else 0)
            elif published is not None and end_s is not None:
                stats = consumer.stats
                if stats.received + stats.lost >= published or time.monotonic() > end_s:
                    return reading.report(part, consumer)
            if published is None and pipe.poll():
                published = pipe.recv()
                end_s = time.monotonic() + DRAIN_S
            if time.monotonic() >= report_s:
                report_s = time.monotonic() + REPORT_EVERY_S
                pipe.send(reading.report(part, consumer))


class _Reading:
    """What a reader has found so far."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._pattern = checkable(shape)
        self._pattern.paint(np.empty(shape, np.uint8), 0)  # makes its tables
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

    def report(self, part: Part, consumer: Consumer) -> Report:
        stats = consumer.stats
        return Report(
            part.name,
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
