# SPDX-License-Identifier: Apache-2.0
"""Find streams by name and tag, and read the one that was found."""

import time

import numpy as np

import tensorpool as tp

with (
    tp.local() as pool,  # its driver answers for its own streams; registries answer for a fleet
    pool.connect() as client,
    client.producer("camera/front", create=True) as front,
    client.producer("camera/rear", create=True) as rear,
):
    front.set_metadata({"lens_mm": 35}, tags=["lab1", "colour"])
    rear.set_metadata({"lens_mm": 16}, tags=["lab1"])
    while len(client.discover(tags=["lab1"])) < 2:  # producers announce themselves once a second
        time.sleep(0.05)
    for stream in client.discover(tags=["lab1"]):
        print(f"{stream.data_source_name}: {', '.join(stream.tags)}, at {stream.driver_instance_id}")
    (colour,) = client.discover(tags=["lab1", "colour"])
    with client.consumer(colour.data_source_name or colour.stream_id) as consumer:  # attached at the driver it names
        front.wait_for_consumers()
        front.publish(np.full((4, 4), 7, np.uint8))
        frame = consumer.poll(timeout=1.0)
        if frame is not None:
            print(f"frame {frame.seq} of {colour.data_source_name}: mean {frame.array.mean():.0f}")
