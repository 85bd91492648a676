# SPDX-License-Identifier: Apache-2.0
"""A camera that writes its pixels straight into shared memory: claim a slot, fill it in place, and it is published."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

import tensorpool as tp

SHAPE = (480, 640, 3)
FRAMES = 30


class Camera:
    """Stands for a driver that fills a buffer of yours, as V4L2, GenICam or a decoder does."""

    def __init__(self) -> None:
        self._column = 0

    def read_into(self, pixels: npt.NDArray[np.uint8]) -> None:
        """A bright column that moves to the right; the third frame fails."""
        self._column += 1
        if self._column == 3:
            raise TimeoutError("no frame from the sensor")
        pixels[...] = 16
        pixels[:, self._column] = 255


def main() -> None:
    camera = Camera()
    with (
        tp.local() as pool,
        pool.connect() as client,
        client.producer("camera/front", create=True) as producer,
        client.consumer("camera/front") as consumer,
    ):
        producer.set_metadata({"exposure_ms": 4, "lens": "35 mm"}, tags=["lab1"])
        producer.wait_for_consumers()
        for _ in range(FRAMES):
            try:
                with producer.claim(SHAPE, np.uint8) as slot:  # published at the end of the block
                    camera.read_into(slot.array)
            except TimeoutError as error:
                print(f"given up: {error}")  # no consumer sees that frame, and its seq is used again
                continue
            frame = consumer.poll(timeout=1.0)
            if frame is not None and frame.seq % 10 == 0:
                bright = int(frame.array[0, :, 0].argmax())
                print(f"frame {frame.seq}: bright column {bright}")
        print(f"published {producer.stats.published}, received {consumer.stats.received}, lost {consumer.stats.lost}")
        while (metadata := consumer.metadata()) is None:  # sent once a second, on a stream of its own
            time.sleep(0.01)
        print(f"lens {metadata.attributes['lens']}, tags {', '.join(metadata.tags)}")


if __name__ == "__main__":
    main()
