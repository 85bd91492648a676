# SPDX-License-Identifier: Apache-2.0
"""How services are stopped: SIGTERM or Ctrl-C once to end in order, twice to end at once."""

from __future__ import annotations

import signal
import threading


class StopSignals:
    """SIGTERM and SIGINT as something to wait for; installed before there is anything to leave behind."""

    def __init__(self) -> None:
        self.count = 0
        self.name = ""
        self._arrived = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def wait(self, timeout_s: float) -> bool:
        """Whether a further signal arrived."""
        arrived = self._arrived.wait(timeout_s)
        self._arrived.clear()
        return arrived

    def _on_signal(self, number: int, _: object) -> None:
        self.count += 1
        self.name = signal.Signals(number).name
        self._arrived.set()
