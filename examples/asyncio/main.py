# SPDX-License-Identifier: Apache-2.0
"""Consumers inside an event loop: two that run side by side, and one that is cancelled half-way."""

from __future__ import annotations

import asyncio

import numpy as np

import tensorpool as tp

STREAM = "camera/front"
FRAMES = 30


async def brightest(client: tp.Client) -> None:
    """Every frame, in order."""
    best = 0
    async with client.aio.consumer(STREAM) as consumer:
        async for frame in consumer:
            best = max(best, int(frame.array.max()))
            if frame.seq == FRAMES - 1:
                break
        stats = consumer.consumer.stats
    print(f"brightest: received {stats.received}, lost {stats.lost}, the brightest pixel is {best}")


async def watchdog(client: tp.Client) -> None:
    """Waits with a timeout; the loop does other things meanwhile."""
    async with client.aio.consumer(STREAM) as consumer:
        while (frame := await consumer.poll(timeout=5.0)) is not None and frame.seq < FRAMES - 1:
            continue
    print(f"watchdog: {'the stream fell silent' if frame is None else f'frames came until {frame.seq}'}")


async def forever(client: tp.Client) -> None:
    """Ends only when its task is cancelled, which also returns its lease."""
    try:
        async with client.aio.consumer(STREAM) as consumer:
            async for frame in consumer:
                await asyncio.sleep(0.001 * (frame.seq % 2))
    finally:
        print("forever: cancelled, and cleaned up")


async def film(producer: tp.Producer) -> None:
    for number in range(FRAMES):
        producer.publish(np.full((120, 160), number, np.uint8))
        await asyncio.sleep(0.01)


async def main() -> None:
    with tp.local() as pool, pool.connect() as client, client.producer(STREAM, create=True) as producer:
        endless = asyncio.create_task(forever(client))
        readers = [asyncio.create_task(reader(client)) for reader in (brightest, watchdog)]
        await asyncio.to_thread(producer.wait_for_consumers, 3)
        await film(producer)
        endless.cancel()
        await asyncio.gather(*readers, endless, return_exceptions=True)
        print(f"camera: published {producer.stats.published}")


if __name__ == "__main__":
    asyncio.run(main())
