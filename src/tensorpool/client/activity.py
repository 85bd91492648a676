# SPDX-License-Identifier: Apache-2.0
"""When a producer refreshes the activity stamp of its regions, because its driver does not.

Drivers may refresh it or leave it to the producer, and nothing on the wire says which (C9). A stamp that stands still
while the driver goes on announcing the epoch is left to us. A dead driver announces nothing: its regions become stale,
as they must. Holds no clock and does no IO. Wire §15.14; Driver Model §2; decision C9.
"""

from __future__ import annotations


class ActivityDuty:
    """Of one epoch."""

    def __init__(self) -> None:
        self._stamp_ns: int | None = None  # as it was seen last
        self._own_ns: int | None = None  # the last that we wrote
        self._since_ns = 0  # when it was seen to change
        self._announces = 0  # of the epoch, since then

    def on_announce(self) -> None:
        """A fresh announce of the epoch came."""
        self._announces += 1

    def is_due(self, stamp_ns: int, now_ns: int, period_ns: int) -> bool:
        """Whether to refresh now.

        One announce more than the one that a driver sends with a refresh of its own shows that it does not refresh.
        """
        if stamp_ns != self._stamp_ns:
            self._stamp_ns, self._since_ns, self._announces = stamp_ns, now_ns, 0
        needed = 1 if stamp_ns == self._own_ns else 2
        return self._announces >= needed and now_ns - self._since_ns >= period_ns

    def on_refreshed(self, stamp_ns: int, now_ns: int) -> None:
        self._stamp_ns = self._own_ns = stamp_ns
        self._since_ns, self._announces = now_ns, 0
