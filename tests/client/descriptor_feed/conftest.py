# SPDX-License-Identifier: Apache-2.0
"""Slots of a small ring, and what a native feed delivered and counted."""

from __future__ import annotations

import numpy as np

from tensorpool._core import DescriptorFeed
from tests.client.conftest import Stream, taken

NSLOTS = 8
FRAME = np.arange(6, dtype=np.float32).reshape(2, 3)

# where fields of a slot are
VALUES_LEN, PAYLOAD_SLOT, POOL_ID, PAYLOAD_OFFSET = 8, 12, 16, 18
HEADER_LENGTH, BLOCK_LENGTH, TEMPLATE_ID, SCHEMA_ID, VERSION = 60, 64, 66, 68, 70
DTYPE, MAJOR_ORDER, NDIMS, PROGRESS_UNIT, PROGRESS_STRIDE, DIMS, STRIDES = 72, 74, 76, 78, 79, 83, 115


def seqs(feed: DescriptorFeed, stream: Stream) -> list[int]:
    return [frame.seq for frame in taken(feed, stream.subscription)]


def total(feed: DescriptorFeed) -> int:
    return feed.received + sum(feed.drops.values())
