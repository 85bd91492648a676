# SPDX-License-Identifier: Apache-2.0
"""What PyTorch, where it is installed, wants of a dataset: its base classes, and which worker this process is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:

    class Dataset: ...

    class IterableDataset: ...

else:
    try:
        from torch.utils.data import Dataset, IterableDataset  # a DataLoader tells the two kinds apart by these
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        Dataset = IterableDataset = object

__all__ = ["Dataset", "IterableDataset", "worker_of"]


def worker_of() -> tuple[int, int] | None:
    """The number of this worker of a DataLoader, and how many there are; None in any other process."""
    data = sys.modules.get("torch.utils.data")
    info = None if data is None else data.get_worker_info()
    return None if info is None else (info.id, info.num_workers)
