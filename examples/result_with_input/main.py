# SPDX-License-Identifier: Apache-2.0
"""A detector publishes a box for each image, linked to it; a display joins each result with its image."""

from __future__ import annotations

import threading
import time

import numpy as np

import tensorpool as tp
from tensorpool.client.live_trace import trace_live

FRAMES = 30
PROFILE = {"header_nslots": 128, "payload_pools": [{"pool_id": 1, "stride_bytes": 65536}]}


def film(camera: tp.Producer) -> None:
    """A bright square that moves."""
    for number in range(FRAMES):
        image = np.zeros((120, 160), np.uint8)
        image[40:60, number : number + 20] = 255
        camera.publish(image)
        time.sleep(0.01)


def detect(images: tp.Consumer, boxes: tp.Producer) -> None:
    """Where the square is, under the seq of its image, and linked to it."""
    for image in images:
        rows, columns = np.nonzero(image.array)
        box = np.array([rows.min(), columns.min(), rows.max() + 1, columns.max() + 1], np.int32)
        boxes.publish(box, seq=image.seq, parents=[image])
        if image.seq == FRAMES - 1:
            return


def main() -> None:
    with tp.local(overrides={"profiles.default": PROFILE}) as pool, pool.connect() as client:
        camera = client.producer("camera", create=True, trace_ids=True)
        boxes = client.producer("boxes", create=True)
        to_detect, to_show, results = (client.consumer(name) for name in ("camera", "camera", "boxes"))
        camera.wait_for_consumers(2)
        boxes.wait_for_consumers(1)
        threads = [
            threading.Thread(target=film, args=(camera,)),
            threading.Thread(target=detect, args=(to_detect, boxes)),
        ]
        for thread in threads:
            thread.start()
        inside = 0
        last = None
        for image, result in tp.join([to_show, results], by="seq"):
            top, left, bottom, right = result.array
            inside += bool((image.array[top:bottom, left:right] == 255).all())
            last = result
            if image.seq == FRAMES - 1:
                break
        for thread in threads:
            thread.join()
        print(f"boxes that fit their image: {inside} of {FRAMES}")
        names = {camera.stream_id: "camera", boxes.stream_id: "boxes"}
        assert last is not None
        for step in trace_live(client, last.trace_id, timeout=20):
            print("  " * step.depth + ", ".join(f"{names[place.stream_id]} frame {place.seq}" for place in step.frames))


if __name__ == "__main__":
    main()
