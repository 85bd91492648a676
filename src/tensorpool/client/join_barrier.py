# SPDX-License-Identifier: Apache-2.0
"""Which frames of several streams belong together. No IO, no clock: callers pass `now_ns`.

A frame waits for its partners until they are there, until none can come any more, or until its time is over. Every
frame that was offered is taken once as part of a tuple, reported once as unjoined with a reason, or still waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple


class Unjoined(StrEnum):
    """Why a frame was not joined."""

    NO_PARTNER = "NO_PARTNER"  # another stream went past it without a frame that fits
    TIMED_OUT = "TIMED_OUT"  # it waited for the whole timeout
    CROWDED_OUT = "CROWDED_OUT"  # too many frames of its stream waited: a partner is far behind, or silent
    REPLACED = "REPLACED"  # by="latest": a newer frame came before the next tuple
    OUT_OF_ORDER = "OUT_OF_ORDER"  # its seq or time went back, within an epoch
    NO_TIME = "NO_TIME"  # by="time": it has no timestamp
    OVERWRITTEN = "OVERWRITTEN"  # the ring came round before it was joined


class Waiting[T](NamedTuple):
    """A frame that was offered."""

    key: int
    item: T
    since_ns: int


class Left[T](NamedTuple):
    """A frame that is not going to be joined, and of which input it is."""

    input_index: int
    item: T
    why: Unjoined


class KeyBarrier[T]:
    """Joins frames whose keys differ by no more than `tolerance`: 0 for seqs, nanoseconds for times.

    >>> barrier = KeyBarrier(2, tolerance=0)
    >>> for index, seq in ((0, 5), (0, 6), (1, 6)):
    ...     barrier.offer(index, seq, f"frame {seq} of input {index}", 0)
    >>> barrier.take()
    ('frame 6 of input 0', 'frame 6 of input 1')
    >>> [(left.item, left.why.value) for left in barrier.left]
    [('frame 5 of input 0', 'NO_PARTNER')]

    Keys of an input grow, so the oldest waiting frames are compared: they are a tuple when they are close enough, and a
    frame further back than `tolerance` behind any other input has no partner. `windows` are tolerances of each input:
    how far its frames may be behind the newest of a tuple. `offsets` are added to the keys of each input. At most
    `limits` frames of an input wait.
    """

    def __init__(
        self,
        inputs: int,
        *,
        tolerance: int = 0,
        windows: Sequence[int] = (),
        offsets: Sequence[int] = (),
        timeout_ns: int | None = None,
        limits: Sequence[int] = (),
    ) -> None:
        self._windows: Final = tuple(windows) or (tolerance,) * inputs
        self._offsets: Final = tuple(offsets) or (0,) * inputs
        self._timeout_ns: Final = timeout_ns
        self.limits: Final = list(limits) or [2**62] * inputs
        self._queues: Final[list[deque[Waiting[T]]]] = [deque() for _ in range(inputs)]
        self._after: Final[list[int | None]] = [None] * inputs  # keys that are still to come are not below
        self.left: list[Left[T]] = []

    @property
    def waiting(self) -> list[int]:
        """How many frames of each input wait."""
        return list(map(len, self._queues))

    def is_waiting(self, index: int) -> bool:
        """Whether a frame of that input waits."""
        return bool(self._queues[index])

    def items(self, index: int) -> list[T]:
        """The frames of an input that wait, oldest first."""
        return [waiting.item for waiting in self._queues[index]]

    def offer(self, index: int, key: int, item: T, now_ns: int) -> None:
        key += self._offsets[index]
        after = self._after[index]
        if after is not None and key < after:
            self.left.append(Left(index, item, Unjoined.OUT_OF_ORDER))
            return
        self._after[index] = key + 1
        queue = self._queues[index]
        queue.append(Waiting(key, item, now_ns))
        if len(queue) > self.limits[index]:
            self._leave(index, Unjoined.CROWDED_OUT)

    def take(self) -> tuple[T, ...] | None:
        queues = self._queues
        keys = [queue[0].key for queue in queues if queue]
        if not keys:
            return None
        if len(keys) < len(queues) or not self._do_fit(keys):
            self._drop_passed()
            if not all(queues):
                return None
        # None is further back than its window behind the first of any other: they are close enough.
        return tuple([queue.popleft().item for queue in queues])

    def _do_fit(self, keys: list[int]) -> bool:
        newest = max(keys)
        if newest == min(keys):
            return True
        return all(key + window >= newest for key, window in zip(keys, self._windows, strict=True))

    def expire(self, now_ns: int) -> None:
        if self._timeout_ns is None:
            return
        for index, queue in enumerate(self._queues):
            while queue and now_ns - queue[0].since_ns >= self._timeout_ns:
                self._leave(index, Unjoined.TIMED_OUT)

    def next_expiry_ns(self) -> int | None:
        """When `expire` has something to do next."""
        if self._timeout_ns is None:
            return None
        since = [queue[0].since_ns for queue in self._queues if queue]
        return min(since) + self._timeout_ns if since else None

    def restart(self, index: int) -> None:
        queue = self._queues[index]
        while queue:
            self._leave(index, Unjoined.NO_PARTNER)
        self._after[index] = None

    def replace(self, index: int, item: T, by: T | None) -> None:
        """Another form of the same frame, such as a copy; None: it was overwritten."""
        queue = self._queues[index]
        at = next(at for at, waiting in enumerate(queue) if waiting.item is item)
        if by is None:
            del queue[at]
            self.left.append(Left(index, item, Unjoined.OVERWRITTEN))
        else:
            queue[at] = queue[at]._replace(item=by)

    def _drop_passed(self) -> None:
        """Frames that every further key of some other input is too far ahead of."""
        is_changed = True
        while is_changed:
            is_changed = False
            floors = [queue[0].key if queue else after for queue, after in zip(self._queues, self._after, strict=True)]
            floor = max((floor for floor in floors if floor is not None), default=0)
            for index, queue in enumerate(self._queues):
                while queue and queue[0].key + self._windows[index] < floor:
                    self._leave(index, Unjoined.NO_PARTNER)
                    is_changed = True

    def _leave(self, index: int, why: Unjoined) -> None:
        self.left.append(Left(index, self._queues[index].popleft().item, why))


class LatestBarrier[T]:
    """Joins every frame of the first input with the newest of each other, which may be joined again.

    >>> barrier = LatestBarrier(2)
    >>> for index, seq in ((1, 1), (1, 2), (0, 7)):
    ...     barrier.offer(index, seq, seq, 0)
    >>> barrier.take(), [(left.item, left.why.value) for left in barrier.left]
    ((7, 2), [(1, 'REPLACED')])

    Until every input has had a frame, those of the first have no partner.
    """

    def __init__(self, inputs: int) -> None:
        self._newest: Final[list[T | None]] = [None] * inputs
        self._is_new: Final = [False] * inputs  # not joined yet
        self.left: list[Left[T]] = []

    @property
    def waiting(self) -> list[int]:
        """How many frames of each input were not joined yet."""
        return list(map(int, self._is_new))

    def items(self, index: int) -> list[T]:
        """The frame of an input that was not joined yet."""
        return [item for item in self._newest[index : index + 1] if item is not None and self._is_new[index]]

    def offer(self, index: int, key: int, item: T, now_ns: int) -> None:
        self._leave(index, Unjoined.REPLACED)
        self._newest[index], self._is_new[index] = item, True
        if index == 0 and None in self._newest:
            self._leave(0, Unjoined.NO_PARTNER)

    def take(self) -> tuple[T, ...] | None:
        """The next tuple; None where there is none yet."""
        if not self._is_new[0] or None in self._newest:
            return None
        self._is_new[:] = [False] * len(self._is_new)
        return tuple(item for item in self._newest if item is not None)

    def expire(self, now_ns: int) -> None:
        """Nothing waits: a newer frame takes the place of an older one."""

    def next_expiry_ns(self) -> int | None:
        return None

    def restart(self, index: int) -> None:
        """Frames of another epoch are frames."""

    def _leave(self, index: int, why: Unjoined) -> None:
        item, self._newest[index] = self._newest[index], None
        if item is not None and self._is_new[index]:
            self.left.append(Left(index, item, why))
        self._is_new[index] = False
