# SPDX-License-Identifier: Apache-2.0
"""How much of the machine pictures may take. Holds no clock and does no IO.

Three limits at once: pictures a second of a stream, pictures a second of the console, and processor time of all of them
together, so that a look that is expensive makes fewer pictures, not more load.
"""

from __future__ import annotations

from typing import Final

STREAM_HZ: Final = 15.0
CONSOLE_HZ: Final = 60.0
CORE_SHARE: Final = 0.10  # of one core
BURST_S: Final = 0.1  # what may be used ahead, in seconds of each rate


class Allowance:
    """So much a second; what is not used within BURST_S is lost. It may be overdrawn: then it takes longer."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._at_ns = 0

    def left(self, now_ns: int) -> float:
        """How much there is now."""
        self._left = min(self._burst, self._left + max(now_ns - self._at_ns, 0) * self._per_s / 1e9)
        self._at_ns = max(now_ns, self._at_ns)
        return self._left

    def use(self, amount: float) -> None:
        self._left -= amount

    def take(self, now_ns: int) -> bool:
        """Use one, if there is one."""
        if self.left(now_ns) < 1.0:
            return False
        self.use(1.0)
        return True

    def wait_ns(self, now_ns: int, amount: float = 1.0) -> int:
        """How long until there is so much."""
        return max(0, round((amount - self.left(now_ns)) / self._per_s * 1e9))


class ConsoleBudget:
    """What all streams of a console share."""

    def __init__(self, hz: float = CONSOLE_HZ, core_share: float = CORE_SHARE) -> None:
        self.pictures = Allowance(hz, max(1.0, hz * BURST_S))
        self.core_s = Allowance(core_share, core_share * BURST_S)


class StreamBudget:
    """Of one stream, within that of its console."""

    def __init__(self, console: ConsoleBudget, hz: float = STREAM_HZ) -> None:
        self._console = console
        self._pictures = Allowance(hz, 1.5)  # a picture waits for its frame: that time is not lost

    def wait_ns(self, now_ns: int) -> int:
        """How long until a picture may be made; 0: now."""
        console = self._console
        core_ns = console.core_s.wait_ns(now_ns, 0.0)
        return max(self._pictures.wait_ns(now_ns), console.pictures.wait_ns(now_ns), core_ns)

    def use(self, core_s: float) -> None:
        """A picture was made, in so much time of a core."""
        self._pictures.use(1.0)
        self._console.pictures.use(1.0)
        self._console.core_s.use(core_s)
