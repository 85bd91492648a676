# SPDX-License-Identifier: Apache-2.0
"""A driver with streams for the length of a block, and a camera in a process of its own that fills them at a rate."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

import tensorpool as tp
from tensorpool.cli.test_pattern import Scene

STREAM_ID: Final = 20_000  # the first; others follow
ATTACH_S: Final = 180.0  # gigabytes of memory are allocated meanwhile
PICTURES: Final = 16  # painted beforehand, published in turn
LOOK_EVERY_S: Final = 0.2


class Site:
    """A driver whose streams have one pool, for the length of a block."""

    def __init__(self, shape: tuple[int, ...], nslots: int) -> None:
        stride = 1 << (int(np.prod(shape)) - 1).bit_length()
        profile = {"header_nslots": nslots, "payload_pools": [{"pool_id": 1, "stride_bytes": stride}]}
        self.pool = tp.local(overrides={"profiles.default": profile})
        self.options = {"aeronDir": self.pool.aeron_dir, "shm.base_dir": self.pool.config.shm.base_dir}

    @property
    def settings(self) -> dict[str, Any]:
        return {"aeron_dir": self.pool.aeron_dir, "overrides": {"shm.base_dir": self.pool.config.shm.base_dir}}

    def __enter__(self) -> Site:
        self.pool.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.pool.__exit__(*error)


class Camera:
    """The process that publishes, and what it did."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self._pipe = pipe

    def end(self) -> int:
        """Stop publishing; how many frames there were."""
        self._pipe.send("stop")
        published: int = self._pipe.recv()
        return published


@contextmanager
def camera(site: Site, shape: tuple[int, ...], rate_hz: float, streams: int = 1) -> Iterator[Camera]:
    """Publish at a rate into each of so many streams."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=film, args=(site.settings, shape, rate_hz, streams, theirs), daemon=True)
    process.start()
    theirs.close()  # so that the end of a failed camera is noticed
    ours.recv()
    assert process.pid is not None
    try:
        yield Camera(process.pid, ours)
    finally:
        ours.close()
        process.join(10)
        process.kill()


def film(settings: dict[str, Any], shape: tuple[int, ...], rate_hz: float, streams: int, pipe: Connection) -> None:
    scene, pictures = Scene(), [np.empty(shape, np.uint8) for _ in range(PICTURES)]
    for seq, picture in enumerate(pictures):
        scene.paint(picture, seq)
    with tp.connect(settings["aeron_dir"], overrides=settings["overrides"]) as client:
        producers = [client.producer(STREAM_ID + number, create=True, timeout=ATTACH_S) for number in range(streams)]
        for producer in producers:
            producer.publish(pictures[0])
        pipe.send("ready")
        began_s, count = time.monotonic(), 1
        while not (count % PICTURES == 0 and pipe.poll()):
            time.sleep(max(0.0, began_s + count / rate_hz - time.monotonic()))
            for producer in producers:
                producer.publish(pictures[count % PICTURES])
            count += 1
        with suppress(BrokenPipeError):  # the reader has ended
            pipe.send(sum(producer.stats.published for producer in producers))
            pipe.poll(60)


class CpuMeter:
    """Seconds of processor that this process and all below it use during a block.

    Looks often, from a thread: of a process that ends, or whose parent ends, nothing is forgotten.
    """

    def __init__(self, *, without: int | None = None) -> None:
        self._without = without
        self._ticks: dict[tuple[str, str], int] = {}  # by pid and start
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpu-meter", daemon=True)

    def __enter__(self) -> Self:
        self._look()
        self._before = sum(self._ticks.values())
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._look()
        self.seconds = (sum(self._ticks.values()) - self._before) / os.sysconf("SC_CLK_TCK")

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        children: dict[str, list[str]] = {}
        found: dict[str, tuple[str, int]] = {}
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(fields[1], []).append(pid)
            found[pid] = fields[19], int(fields[11]) + int(fields[12])
        waiting = [str(os.getpid())]
        while waiting:
            pid = waiting.pop()
            if pid in found and pid != str(self._without):
                started, ticks = found[pid]
                self._ticks[pid, started] = ticks
                waiting += children.get(pid, [])


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError(f"not within {seconds:.0f} s")
        time.sleep(0.1)
