# SPDX-License-Identifier: Apache-2.0
"""Datasets for training: frames of a lake by index, and frames of a live stream as they come.

They are datasets of PyTorch where it is installed (`pip install 'aeron-tensorpool[torch]'`). Their samples are numpy
arrays, of which a DataLoader makes tensors, so that they also serve programs without PyTorch.
"""

from tensorpool.torch.lake_dataset import LakeDataset
from tensorpool.torch.live_dataset import LiveDataset
from tensorpool.torch.sample import Sample
from tensorpool.torch.worker_counts import LiveCounts

__all__ = ["LakeDataset", "LiveCounts", "LiveDataset", "Sample"]
