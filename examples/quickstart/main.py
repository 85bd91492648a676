# SPDX-License-Identifier: Apache-2.0
"""Publish three frames and receive them, with everything embedded in this process."""

import numpy as np

import tensorpool as tp

with (
    tp.local() as pool,  # a driver of our own; tp.connect() joins one that is running already
    pool.connect() as client,
    client.producer("camera/front", create=True) as producer,
    client.consumer("camera/front") as consumer,
):
    producer.wait_for_consumers()
    for shade in (10, 20, 30):
        producer.publish(np.full((720, 1280, 3), shade, np.uint8))
    for _ in range(3):
        frame = consumer.poll(timeout=1.0)  # a view of shared memory: nothing was copied
        if frame is not None:
            print(f"frame {frame.seq}: {frame.shape} {frame.dtype}, mean {frame.array.mean():.0f}")
