# SPDX-License-Identifier: Apache-2.0
"""A camera at 25 Hz and an inertial sensor at 200 Hz, joined by time: each image gets the motion of its moment."""

from __future__ import annotations

import asyncio
import math
import time

import numpy as np

import tensorpool as tp

IMAGES = 25
CAMERA_HZ, IMU_HZ = 25, 200
CAMERA_LATE_S = 0.012  # the camera stamps a frame when it is read out, so long after it was exposed
PROFILE = {"header_nslots": 512, "payload_pools": [{"pool_id": 1, "stride_bytes": 65536}]}


def angle(at_s: float) -> float:
    """How the rig turns, in degrees."""
    return 30.0 * math.sin(2.0 * at_s)


async def work(camera: tp.Producer, imu: tp.Producer) -> None:
    """Publish what the sensors measure, each with its own stamp."""
    start_s = time.monotonic()
    for tick in range(IMAGES * IMU_HZ // CAMERA_HZ + 1):
        at_s = tick / IMU_HZ
        await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
        imu.publish(np.array([angle(at_s)]), timestamp_ns=round((start_s + at_s) * 1e9))
        if tick % (IMU_HZ // CAMERA_HZ) == 0:
            image = np.full((60, 80), round(angle(at_s)), np.int16)
            camera.publish(image, timestamp_ns=round((start_s + at_s + CAMERA_LATE_S) * 1e9))


async def join(client: tp.Client) -> None:
    """Tolerance: half of the faster sensor's interval. The offset takes the camera's delay back out of its stamps."""
    sensors = [client.aio.consumer("camera"), client.aio.consumer("imu")]
    options = {"by": "time", "tolerance": 0.5 / IMU_HZ, "offsets": (-CAMERA_LATE_S, 0.0)}
    async with client.aio.join(sensors, **options) as joined:
        errors: list[float] = []
        while len(errors) < IMAGES:
            found = await joined.poll(20)
            assert found is not None, joined.stats
            image, motion = found
            errors.append(abs(float(image.array[0, 0]) - float(motion.array[0])))
        stats = joined.stats
    print(f"images with their motion: {len(errors)}, all within a degree: {max(errors) < 1}")
    print(f"images without: {sum(stats.unjoined[0].values())}")


async def main() -> None:
    with tp.local(overrides={"profiles.default": PROFILE}) as pool, pool.connect() as client:
        camera, imu = (client.producer(name, create=True) for name in ("camera", "imu"))
        joining = asyncio.create_task(join(client))
        await asyncio.to_thread(lambda: [producer.wait_for_consumers(1) for producer in (camera, imu)])
        await work(camera, imu)
        await joining


if __name__ == "__main__":
    asyncio.run(main())
