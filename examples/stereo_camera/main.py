# SPDX-License-Identifier: Apache-2.0
"""A stereo camera: two streams, joined by seq. An eye loses frames now and then; the other eye's have no partner."""

from __future__ import annotations

import threading

import numpy as np

import tensorpool as tp

PAIRS = 60
LOST = {"eye/left": {7, 20}, "eye/right": {20, 33, 50}}  # frames that never come from the sensor
PROFILE = {"header_nslots": 128, "payload_pools": [{"pool_id": 1, "stride_bytes": 65536}]}


def film(producers: dict[str, tp.Producer]) -> None:
    """Both eyes see the same edge, the right one further to the left: that is how far away it is."""
    for seq in range(PAIRS):
        for name, producer in producers.items():
            if seq in LOST[name]:
                continue
            image = np.zeros((120, 160), np.uint8)
            image[:, seq + (20 if name == "eye/left" else 12) :] = 255
            producer.publish(image, seq=seq)


def disparity(left: np.ndarray, right: np.ndarray) -> int:
    """How far the edge moved between the eyes, in pixels."""
    return int(left[0].argmax()) - int(right[0].argmax())


def main() -> None:
    with tp.local(overrides={"profiles.default": PROFILE}) as pool, pool.connect() as client:
        producers = {name: client.producer(name, create=True) for name in LOST}
        eyes = [client.consumer(name) for name in LOST]
        for producer in producers.values():
            producer.wait_for_consumers(1)
        threading.Thread(target=film, args=(producers,)).start()
        join = tp.join(eyes, by="seq")
        pairs, found = 0, set()
        for left, right in join:
            found.add(disparity(left.array, right.array))
            pairs += left.is_intact() and right.is_intact()
            if left.seq == PAIRS - 1:
                break
        stats = join.stats
        print(f"pairs {pairs}, disparities {sorted(found)}")
        for name, eye, unjoined in zip(LOST, eyes, stats.unjoined, strict=True):
            reasons = {why.value: count for why, count in unjoined.items()}
            print(f"{name}: {eye.stats.lost} lost, not joined {reasons}")


if __name__ == "__main__":
    main()
