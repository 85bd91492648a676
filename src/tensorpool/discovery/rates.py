# SPDX-License-Identifier: Apache-2.0
"""Rate limits for requests: one for each client, one for all together.

Holds no clock and does no IO. A client chooses its own client_id: one that takes a new id for each request meets
the second limit. Discovery §5.1; decision F11.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

S: Final = 1_000_000_000  # nanoseconds
BURST_S: Final = 2  # a bucket holds the tokens of so long
MAX_CLIENTS: Final = 10_000


class Bucket:
    """Fills at `per_s` tokens a second, and holds those of two seconds."""

    __slots__ = ("_filled_ns", "_per_s", "_tokens", "_volume")

    def __init__(self, per_s: int, now_ns: int, volume: int | None = None) -> None:
        self._per_s = per_s
        self._volume = float(per_s * BURST_S if volume is None else volume)
        self._tokens = self._volume
        self._filled_ns = now_ns

    def take(self, now_ns: int) -> bool:
        """Whether there was a token to take."""
        gained = max(now_ns - self._filled_ns, 0) * self._per_s / S
        self._filled_ns = now_ns
        self._tokens = min(self._tokens + gained, self._volume)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Rates:
    """One bucket for each client that asked lately, and one for all."""

    def __init__(self, *, client_per_s: int, total_per_s: int, now_ns: int) -> None:
        self._client_per_s = client_per_s
        self._total = Bucket(total_per_s, now_ns)
        self._clients: OrderedDict[int, Bucket] = OrderedDict()

    def admits(self, client_id: int, now_ns: int) -> bool:
        """Whether a request of this client is answered. A client over its own limit takes nothing from the others."""
        bucket = self._clients.pop(client_id, None) or Bucket(self._client_per_s, now_ns)
        self._clients[client_id] = bucket
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        return bucket.take(now_ns) and self._total.take(now_ns)
