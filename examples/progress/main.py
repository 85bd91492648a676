# SPDX-License-Identifier: Apache-2.0
"""Work on the rows of a frame that are there already, while the rest of it is still being written."""

from __future__ import annotations

import threading
import time

import numpy as np

import tensorpool as tp

ROWS, COLUMNS = 1000, 1024
BAND = 250


def scan(producer: tp.Producer) -> None:
    """A line scanner: the sensor delivers a band of rows at a time."""
    with producer.claim((ROWS, COLUMNS), np.uint8, progress="rows") as slot:
        for start in range(0, ROWS, BAND):
            time.sleep(0.1)
            slot.array[start : start + BAND] = start // BAND + 1
            slot.progress(rows=start + BAND)


def on_progress(progress: tp.Progress) -> None:
    """Called from poll. `prefix` holds the complete rows; ask `is_intact` after having read it."""
    if progress.rows and progress.rows < ROWS and progress.prefix is not None:
        newest = int(progress.prefix[-1, 0])
        if progress.is_intact():
            print(f"frame {progress.seq}: {progress.rows} of {ROWS} rows, the newest is full of {newest}")


def main() -> None:
    with (
        tp.local() as pool,
        pool.connect() as client,
        client.producer("scanner", create=True) as producer,
        client.consumer("scanner", on_progress=on_progress, progress_major_delta_units=BAND) as consumer,
    ):
        producer.wait_for_consumers()
        scanner = threading.Thread(target=scan, args=(producer,))
        scanner.start()
        frame = None
        while frame is None:
            frame = consumer.poll(timeout=0.1)
        scanner.join()
        print(f"frame {frame.seq} is complete: {frame.shape}, intact: {frame.is_intact()}")


if __name__ == "__main__":
    main()
