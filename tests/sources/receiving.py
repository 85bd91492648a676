# SPDX-License-Identifier: Apache-2.0
"""A source published and received in one process, every frame kept."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

import tensorpool as tp
from tensorpool.sources import Ingest, Source
from tensorpool.sources.ingest import Totals
from tests.support.processes import wait_until


class Received(msgspec.Struct):
    """What came out at the other end."""

    arrays: list[npt.NDArray[Any]]
    stamps: list[int]
    metadata: dict[str, Any]
    lost: int
    totals: Totals


def through(client: tp.Client, stream: str, source: Source, *, count: int = 0, **how: Any) -> Received:
    """Publish a source until it ends, or `count` frames of it, and receive all of it meanwhile."""
    with Ingest(client, stream, source, wanted_consumers=1, **how) as ingest:
        given: list[object] = []
        failures: list[BaseException] = []

        def run() -> None:
            try:
                ingest.run(lambda: not count or len(given) < count, given.append)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="ingest", daemon=True)
        thread.start()
        received = Received([], [], {}, 0, ingest.totals)
        wait_until(lambda: ingest.producer is not None or failures, "the source has a first frame")
        if failures:
            raise failures[0]
        with client.consumer(stream, timeout=60) as consumer:
            is_over, newest = False, (0, 0)
            while True:
                frame = consumer.poll(0.2)
                if frame is None:
                    if is_over:
                        break
                    is_over = not thread.is_alive()
                    continue
                newest = frame.epoch, frame.meta_version
                received.arrays.append(frame.copy())
                received.stamps.append(frame.timestamp_ns or 0)
            wait_until(lambda: consumer.metadata(newest[1], epoch=newest[0]), "the metadata of the last frame")
            found = consumer.metadata(newest[1], epoch=newest[0])
            assert found is not None
            received.metadata = dict(found.attributes)
            received.lost = consumer.stats.lost
        if failures:
            raise failures[0]
        received.totals = ingest.totals
    return received


def spacing_ms(received: Received) -> float:
    """The mean time between two frames, by their timestamps."""
    return float(np.diff(received.stamps).mean()) / 1e6
