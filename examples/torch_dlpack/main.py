# SPDX-License-Identifier: Apache-2.0
"""Frames as torch tensors, or those of any library that knows DLPack, without a copy."""

from __future__ import annotations

import importlib.util

import numpy as np

import tensorpool as tp


def mean_of(frame: tp.Frame) -> float:
    """The mean, computed by torch where it is installed, else by numpy: both on the frame's own memory."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        # torch has no read-only tensors and refuses memory that is; copy() gives it a frame of its own.
        tensor = torch.from_dlpack(frame.copy())
        print(f"torch: {tuple(tensor.shape)} {tensor.dtype}")
        return float(tensor.float().mean())
    array = np.from_dlpack(frame)
    print(f"numpy: {array.shape} {array.dtype}, read-only: {not array.flags.writeable}")
    print("torch is not installed; `pip install torch` shows the same with torch tensors")
    return float(array.mean())
