# SPDX-License-Identifier: Apache-2.0
"""An audit log: one line for each event, as many of them in a second as a disk and a reader can take.

Its lines carry `kind=audit`, which the rest of a service's log does not. What exceeds the rate is
counted, and the count is a line too. Holds no clock: callers pass `now_ns`.
"""

from __future__ import annotations

from typing import Final

from tensorpool.logs import get_logger

LINES_PER_S: Final = 20
BURST: Final = 200  # lines that may come at once


class AuditLog:
    """Writes at info.

    >>> AuditLog(service="driver").line(0, "lease_expired", stream_id=10000, lease_id=17)
    """

    def __init__(self, **fields: object) -> None:
        self._log = get_logger("audit", kind="audit", **fields)
        self._allowance = float(BURST)
        self._allowed_ns: int | None = None
        self._left_out = 0

    def line(self, now_ns: int, event: str, **fields: object) -> None:
        """One event. Fields that are None are left out."""
        self.flush(now_ns)
        if self._left_out or not self._spend():
            self._left_out += 1
            return
        self._log.info(event, **{name: value for name, value in fields.items() if value is not None})

    def flush(self, now_ns: int, *, is_last: bool = False) -> None:
        """Say how many lines were left out, once there is room for more than that."""
        since_ns = 0 if self._allowed_ns is None else now_ns - self._allowed_ns
        self._allowance = min(float(BURST), self._allowance + since_ns * LINES_PER_S / 1e9)
        self._allowed_ns = now_ns
        if self._left_out and (is_last or self._allowance >= LINES_PER_S):
            count, self._left_out = self._left_out, 0
            self._allowance -= 1
            self._log.info("audit_lines_left_out", count=count)

    def _spend(self) -> bool:
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True
