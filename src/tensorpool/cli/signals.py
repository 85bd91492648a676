# SPDX-License-Identifier: Apache-2.0
"""How services are stopped: SIGTERM or Ctrl-C once to end in order, twice to end at once."""

from __future__ import annotations

import contextlib
import os
import select
import signal


class StopSignals:
    """SIGTERM and SIGINT as something to wait for; installed before there is anything to leave behind.

    The handler takes no lock, only writes to a pipe: it runs in the midst of whatever the main thread is doing, also in
    the midst of `wait`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.name = ""
        self._heard, self._told = os.pipe()
        for end in (self._heard, self._told):
            os.set_blocking(end, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait(self, timeout_s: float) -> bool:
        """Whether a further signal arrived."""
        if not select.select([self._heard], [], [], timeout_s)[0]:
            return False
        os.read(self._heard, 4096)
        return True

    def _on_signal(self, number: int, _: object) -> None:
        self.count += 1
        self.name = signal.Signals(number).name
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._told, b"!")
