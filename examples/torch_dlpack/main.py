# SPDX-License-Identifier: Apache-2.0
"""Frames as tensors of torch, or of any library that knows DLPack, without a copy."""

from __future__ import annotations

import importlib.util

import numpy as np

import tensorpool as tp


def with_torch(frame: tp.Frame) -> float:
    import torch

    tensor = torch.from_dlpack(frame)  # the memory of the frame itself: read it, never write to it
    is_same = tensor.data_ptr() == frame.array.ctypes.data
    print(f"torch: {tuple(tensor.shape)} {tensor.dtype}, without a copy: {is_same}")
    return float(tensor.mean())


def with_numpy(frame: tp.Frame) -> float:
    array = np.from_dlpack(frame)
    print(f"numpy: {array.shape} {array.dtype}, without a copy: {np.shares_memory(array, frame.array)}")
    print("torch is not installed; after `pip install torch` this example uses it")
    return float(array.mean())


def main() -> None:
    has_torch = importlib.util.find_spec("torch") is not None
    with (
        tp.local() as pool,
        pool.connect() as client,
        client.producer("model/input", create=True) as producer,
        client.consumer("model/input") as consumer,
    ):
        producer.wait_for_consumers()
        producer.publish(np.arange(12, dtype=np.float32).reshape(3, 4))
        for frame in consumer:
            mean = with_torch(frame) if has_torch else with_numpy(frame)
            if frame.is_intact():  # else the producer needed the slot while we were computing
                print(f"frame {frame.seq}: mean {mean}")
            break


if __name__ == "__main__":
    main()
