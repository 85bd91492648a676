# SPDX-License-Identifier: Apache-2.0
"""Two readers of one stream, each in a process of its own: a recorder wants every frame, a display only the newest."""

from __future__ import annotations

import multiprocessing as mp
import time

import numpy as np

import tensorpool as tp

STREAM = "camera/front"
FRAMES = 100
RATE_HZ = 100
PROFILE = {"header_nslots": 128, "payload_pools": [{"pool_id": 1, "stride_bytes": 32768}]}  # a second of small frames


def record(aeron_dir: str, config: tp.DriverConfig) -> None:
    """Every frame, in order."""
    with tp.connect(aeron_dir, config=config) as client, client.consumer(STREAM) as consumer:
        for frame in consumer:
            kept = frame.copy()  # yours; the view in frame.array lasts until the ring comes round
            if frame.seq == FRAMES - 1:
                break
        stats = consumer.stats
        print(f"recorder: received {stats.received}, lost {stats.lost}, the last is full of {kept[0, 0]}", flush=True)


def display(aeron_dir: str, config: tp.DriverConfig) -> None:
    """The newest frame, ten times a second: whatever came between is skipped, and counted."""
    with tp.connect(aeron_dir, config=config) as client, client.consumer(STREAM) as consumer:
        seq = -1
        while seq < FRAMES - 1:
            frame = consumer.latest()
            if frame is not None:
                seq = frame.seq
            time.sleep(0.1)
        stats = consumer.stats
        skipped = stats.drops.get(tp.DropReason.SKIPPED, 0)
        print(f"display: showed {stats.received}, skipped {skipped}, lost {stats.lost - skipped}", flush=True)


def main() -> None:
    with (
        tp.local(overrides={"profiles.default": PROFILE}) as pool,
        pool.connect() as client,
        client.producer(STREAM, create=True) as producer,
    ):
        context = mp.get_context("spawn")
        where = (pool.aeron_dir, pool.config)
        readers = [context.Process(target=reader, args=where) for reader in (record, display)]
        for reader in readers:
            reader.start()
        producer.wait_for_consumers(len(readers))
        for number in range(FRAMES):
            producer.publish(np.full((120, 160), number, np.uint8))
            time.sleep(1 / RATE_HZ)
        for reader in readers:
            reader.join()
        print(f"camera: published {producer.stats.published}")


if __name__ == "__main__":
    main()
