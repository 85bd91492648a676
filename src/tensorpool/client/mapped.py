# SPDX-License-Identifier: Apache-2.0
"""An epoch in a consumer's address space: the reader of its header ring, and views of its payloads. Wire §15.18."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tensorpool._core import RingReader, SlotFrame
from tensorpool.shm import MappedRing

if TYPE_CHECKING:
    from tensorpool.shm.arrays import Array


class MappedEpoch:
    """One epoch as a consumer has it mapped."""

    __slots__ = ("epoch", "pools", "reader", "ring", "stream_id")

    def __init__(self, ring: MappedRing) -> None:
        self.ring: Final = ring
        self.stream_id: Final = ring.stream_id
        self.epoch: Final = ring.epoch
        self.reader: Final[RingReader] = ring.reader()
        self.pools: Final = [mapping for _, _, mapping in self.reader.pools]

    def view(self, slot: SlotFrame) -> Array:
        """A view of a frame's payload: a new array object each time, so that nobody reshapes somebody else's."""
        kept = self.reader.kept_view(slot)
        if kept is not None:
            return kept
        from tensorpool.shm.arrays import view_of_frame  # numpy: whoever only watches does without

        view = view_of_frame(self.pools[slot.pool], slot)
        if slot.layout.extent_bytes <= slot.values_len_bytes:
            self.reader.keep_view(slot, view)
        return view[...]
