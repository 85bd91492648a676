# SPDX-License-Identifier: Apache-2.0
"""The processes of one peer: a writer and its readers, which stay for all measurements and are silent in between."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.machine import Conditions, Ticks
from benchmarks.peer import Cpu, Failure, Peer, Phase, Sight, Work, run_reader, run_writer
from benchmarks.peer_report import Starved

READY_S = 30.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement: what each reader saw, what the writer did, and the share of a core of all their processes."""

    sights: list[Sight]
    work: Work
    cpu: float

    @property
    def sight(self) -> Sight:
        return self.sights[0]


class Group:
    """One writer and up to `most` readers; ends with them."""

    def __init__(
        self,
        peer: Peer,
        size: int,
        depth: int,
        folder: Path,
        conditions: Conditions,
        *,
        readers: int = 1,
        most: int = 1,
    ) -> None:
        self.peer = peer
        self.wrong = 0  # frames whose stamps disagree or that came out of order
        self._size, self._depth, self._conditions = size, depth, conditions
        self._host = peer.host(size, depth, folder, most)
        self._processes: list[BaseProcess] = []
        self._ends: list[Connection] = []
        self._segments: set[Path] = set()
        self._shared = self._host.__enter__()
        try:
            self._readers: list[Connection] = []
            self.grow(readers)
            self._writer = self._open(self._start(run_writer))
        except BaseException:
            self.close()
            raise

    def grow(self, readers: int) -> None:
        """Start readers until there are so many: processes at once, their openings one after the other."""
        started = [self._start(run_reader) for _ in range(readers - len(self._readers))]
        self._readers += [self._open(end) for end in started]

    def run(self, phase: Phase, *, readers: int | None = None) -> Outcome:
        """Measure; only the first `readers` take part, the others are attached and idle.

        Raises Starved when frames came at a rate and none arrived: there is no latency. As fast as it goes, none is a
        figure.
        """
        active = self._readers[:readers]
        before = Ticks.now()
        with Cpu() as host:
            for end in active:
                end.send(phase)
            self._writer.send(phase)
            work: Work = self._expect(self._writer, phase.total_s + READY_S)
            sights: list[Sight] = [self._expect(end, phase.total_s + READY_S) for end in active]
        cpu = host.share + work.cpu + sum(sight.cpu for sight in sights)
        self._conditions.add(before, cpu)
        self.wrong += sum(sight.wrong for sight in sights)
        if phase.rate_hz and not all(sight.frames for sight in sights):
            raise Starved("a reader received nothing")
        return Outcome(sights=sights, work=work, cpu=cpu)

    def close(self) -> None:
        for process in self._processes:
            self._segments |= _segments(process.pid)
        for end in reversed(self._ends):
            with contextlib.suppress(OSError):
                end.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._host.__exit__(None, None, None)
        for segment in self._segments:
            segment.unlink(missing_ok=True)

    def _start(self, target: Callable[..., None]) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (self.peer, self._shared, self._size, self._depth, theirs)
        process = context.Process(target=target, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._ends.append(ours)
        return ours

    def _open(self, end: Connection) -> Connection:
        self._expect(end, READY_S)
        end.send("open")
        self._expect(end, READY_S)
        return end

    def _expect(self, end: Connection, seconds: float) -> Any:
        if not end.poll(seconds):
            raise TimeoutError(f"no answer within {seconds:.0f} s")
        answer = end.recv()
        if isinstance(answer, Failure):
            raise RuntimeError(answer.words)
        return answer


@contextlib.contextmanager
def busy_neighbour() -> Iterator[None]:
    """A third process that computes all the time."""
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _spin() -> None:
    while True:
        sum(range(10_000))


def _segments(pid: int | None) -> set[Path]:
    """Files in /dev/shm that the process has mapped: what is left of them afterwards is ours to remove."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {Path(path) for path in re.findall(r"(/dev/shm/(?!sem\.)\S+)$", maps, re.MULTILINE)}
