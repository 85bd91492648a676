# SPDX-License-Identifier: Apache-2.0
"""In which dialect to ask one driver for leases.

    as specified ──silence──► 2026-01 ──silence──► as specified …       what was answered is kept for later requests

A driver that knows one dialect drops requests of the other without a word. So a client asks in the other one after
three announce periods without an answer, while such a driver announces. Our own driver knows both, and takes its time
only where it has to: it is never asked anew. Holds no clock and does no IO. Decision K9.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from tensorpool.errors import RegionRejected
from tensorpool.wire.attach import Dialect
from tensorpool.wire.region_uri import RegionUri

SILENT_PERIODS: Final = 3
MAX_FOLDERS: Final = 16


class AttachDialects:
    """What is known of one driver. `is_ours` says whether a driver of ours holds a namespace's directory."""

    def __init__(
        self,
        configured: str = Dialect.SPECIFIED,
        announce_period_ns: int = 0,
        is_ours: Callable[[str], bool] = lambda folder: False,
    ) -> None:
        self.is_fixed = configured != "auto"
        self.first = Dialect(configured) if self.is_fixed else Dialect.SPECIFIED  # of the next request
        self._silence_ns = SILENT_PERIODS * announce_period_ns
        self._is_ours = is_ours
        self._folders: OrderedDict[str, int] = OrderedDict()  # when each namespace was last announced

    def on_announce(self, header_region_uri: str, now_ns: int) -> None:
        """A fresh announce on the driver's stream."""
        try:
            path = RegionUri.parse(header_region_uri).path
        except RegionRejected:
            path = ""
        folder = path.rsplit("/", 3)[0]  # without stream, epoch and file
        self._folders[folder] = now_ns
        self._folders.move_to_end(folder)
        if len(self._folders) > MAX_FOLDERS:
            self._folders.popitem(last=False)

    def on_answer(self, dialect: Dialect) -> None:
        """The driver has read a request in this dialect."""
        if not self.is_fixed:
            self.first = dialect

    def is_to_change(self, asked_ns: int, now_ns: int) -> bool:
        """Whether a request since `asked_ns` went unanswered because its driver does not know the dialect."""
        if self.is_fixed or now_ns - asked_ns < self._silence_ns:
            return False
        since_ns = max(asked_ns, now_ns - self._silence_ns)
        heard = [folder for folder, heard_ns in self._folders.items() if heard_ns >= since_ns]
        return bool(heard) and not any(map(self._is_ours, heard))
