# SPDX-License-Identifier: Apache-2.0
"""What a peer of the comparison is, and what its two processes do: one writes frames, the other visits them.

A frame is an array of uint64 whose first and last word carry the time at which the writer began to publish it
(CLOCK_MONOTONIC, nanoseconds), so that every frame that arrives shows its latency and whether it is complete. The
writer takes its frames from arrays of its own, in turn, as a program does whose camera fills a few buffers: getting the
bytes from there into the transport is the peer's business and part of every figure.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import resource
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

Frame = NDArray[np.uint64]

SOURCES = 4  # arrays that the writer takes its frames from in turn
PAGE_BYTES = 4096
PAGE_WORDS = PAGE_BYTES // 8
WARM_UP_S = 0.08  # until every slot has been touched by both processes
TAIL_S = 0.03  # the writer goes on after the reader's window

memcpy = ctypes.PyDLL(None).memcpy  # PyDLL: without giving up the GIL around the call
memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memcpy.restype = None


def new_frame(size: int) -> Frame:
    """An array in ordinary memory that begins a page.

    Some processors copy at a tenth of their speed between certain distances from a page: the benchmark avoids them.
    """
    room = np.zeros(size + PAGE_BYTES, np.uint8)
    begin = -room.ctypes.data % PAGE_BYTES
    return room[begin : begin + size].view(np.uint64)


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. `rate_hz` None is as fast as it goes, 0 is silence."""

    seconds: float
    rate_hz: float | None = None
    copying: bool = False

    @property
    def total_s(self) -> float:
        return WARM_UP_S + self.seconds + TAIL_S


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """What the reader saw during a phase. A wrong frame is one whose stamps disagree or that came out of order."""

    frames: int
    per_second: float
    latencies_ns: list[int]
    wrong: int
    torn: int
    cpu: float


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What made a process end."""

    words: str


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What the writer did during a phase: its share of a core, frames, and the CPU time of its own thread for each."""

    cpu: float
    frames: int
    us_per_frame: float


class Visit:
    """What the reader does with every frame: note when it had it, touch its pages unless it was copied, check it."""

    def __init__(self, *, touching: bool) -> None:
        self.stamps: list[int] = []
        self.arrivals: list[int] = []
        self.mismatches: list[int] = []
        self.torn = 0
        self._touching = touching

    def __call__(self, frame: Frame) -> None:
        self.arrivals.append(time.monotonic_ns())
        if self._touching:
            frame[::PAGE_WORDS].tobytes()
        stamp = frame.item(0)
        if stamp != frame.item(-1):
            self.mismatches.append(stamp)
        self.stamps.append(stamp)

    def take_back(self) -> None:
        """The transport says that the frame just visited was overwritten meanwhile: it counts as lost."""
        self.torn += 1
        self.arrivals.pop()
        stamp = self.stamps.pop()
        if self.mismatches and self.mismatches[-1] == stamp:
            self.mismatches.pop()

    def sight(self, phase: Phase, cpu: float) -> Sight:
        arrivals, stamps = np.array(self.arrivals, np.int64), np.array(self.stamps, np.int64)
        wrong = len(self.mismatches) + int((np.diff(stamps) <= 0).sum())
        opens_ns = (arrivals[0] if arrivals.size else 0) + WARM_UP_S * 1e9
        inside = (arrivals >= opens_ns) & (arrivals < opens_ns + phase.seconds * 1e9)
        return Sight(
            frames=int(inside.sum()),
            per_second=float(inside.sum() / phase.seconds),
            latencies_ns=(arrivals - stamps)[inside].tolist() if phase.rate_hz else [],
            wrong=wrong,
            torn=self.torn,
            cpu=cpu,
        )


class Writer(Protocol):
    """The sending end. Made only when it can reach the reader."""

    def source(self, size: int) -> Frame:
        """An array in ordinary memory that frames of this size are published from."""

    def publish(self, frame: Frame, /) -> object:
        """Hand the frame over, or drop it. May wait for the reader, but not for long."""

    def finish(self) -> None:
        """A phase is over."""

    def close(self) -> None: ...


class Reader(Protocol):
    """The receiving end."""

    def run(self, visit: Visit, into: Frame | None, deadline_s: float, wait_s: float) -> None:
        """Visit every frame that comes, in place or copied to `into`, until after the deadline nothing has come.

        `wait_s` is how long one wait may last.
        """

    def close(self) -> None: ...


class Peer(Protocol):
    """Carries frames from one process to another."""

    name: str
    package: str | None  # its distribution on PyPI, if it is not the standard library
    module: str  # what to import of it
    says: str  # how it is used here, for the output

    def host(self, size: int, depth: int, folder: Path, readers: int) -> AbstractContextManager[Any]:
        """What has to exist before the processes, and is cleaned up after them. Yields what they are given."""

    def writer(self, shared: Any, size: int, depth: int) -> Writer: ...

    def reader(self, shared: Any, size: int, depth: int) -> Reader: ...


def version(peer: Peer) -> str | None:
    """The version of the peer's package, "" for the standard library, None where it is missing."""
    if peer.package is None:
        return ""
    try:
        return importlib.metadata.version(peer.package)
    except importlib.metadata.PackageNotFoundError:
        return None


def run_writer(peer: Peer, shared: Any, size: int, depth: int, commands: Connection) -> None:
    """The writing process: publishes what the runner asks for, answers with what it did."""
    with _telling(commands):
        _await_opening(peer, commands)
        with contextlib.closing(peer.writer(shared, size, depth)) as writer:
            sources = [writer.source(size) for _ in range(SOURCES)]
            commands.send("ready")
            for phase in iter(commands.recv, None):
                began_ns = time.thread_time_ns()
                with Cpu() as cpu:
                    frames = _write(writer, sources, phase)
                us = (time.thread_time_ns() - began_ns) / 1e3 / max(frames, 1)
                commands.send(Work(cpu=cpu.share, frames=frames, us_per_frame=us))


def run_reader(peer: Peer, shared: Any, size: int, depth: int, commands: Connection) -> None:
    """The reading process: answers every phase with what it saw."""
    with _telling(commands):
        _await_opening(peer, commands)
        with contextlib.closing(peer.reader(shared, size, depth)) as reader:
            own = new_frame(size)
            commands.send("ready")
            for phase in iter(commands.recv, None):
                visit = Visit(touching=not phase.copying)
                deadline_s = time.monotonic() + phase.total_s
                wait_s = 0.5 if phase.rate_hz == 0 else 0.05
                with Cpu() as cpu:
                    reader.run(visit, own if phase.copying else None, deadline_s, wait_s)
                commands.send(visit.sight(phase, cpu.share))


@contextlib.contextmanager
def _telling(commands: Connection) -> Iterator[None]:
    """Reports an error to the runner before it ends the process."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):
            commands.send(Failure(words=f"{type(error).__name__}: {error}"))
        raise


def _await_opening(peer: Peer, commands: Connection) -> None:
    """Processes start at once and open one after the other: iceoryx2 fails when many open at the same time."""
    os.dup2(2, 1)  # what libraries print is not among the figures
    if peer.package is not None:
        importlib.import_module(peer.module)
    commands.send("started")
    commands.recv()


def _write(writer: Writer, sources: list[Frame], phase: Phase) -> int:
    """How many frames it published."""
    words = [memoryview(source).cast("B").cast("Q") for source in sources]
    turns = list(zip(words, sources, strict=True))
    publish, clock = writer.publish, time.monotonic_ns
    started_ns = clock()
    end_ns = started_ns + int(phase.total_s * 1e9)
    frames = 0
    if phase.rate_hz is None:
        while True:
            for word, source in turns:
                word[0] = word[-1] = stamp = clock()
                publish(source)
            frames += SOURCES
            if stamp >= end_ns:
                break
    elif phase.rate_hz == 0:
        time.sleep(phase.total_s)
    else:
        period_ns = int(1e9 / phase.rate_hz)
        for turn, due_ns in enumerate(range(started_ns, end_ns, period_ns)):
            time.sleep(max(0, due_ns - clock()) / 1e9)
            word, source = turns[turn % SOURCES]
            word[0] = word[-1] = clock()
            publish(source)
            frames += 1
    writer.finish()
    return frames


class Cpu:
    """The share of a core that this process takes, all threads, within the block."""

    share = 0.0

    def __enter__(self) -> Self:
        self._started, self._before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        return self

    def __exit__(self, *_: object) -> None:
        after, before = resource.getrusage(resource.RUSAGE_SELF), self._before
        used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.share = used_s / (time.monotonic() - self._started)
