# SPDX-License-Identifier: Apache-2.0
"""Whether a duty cycle turns."""

from __future__ import annotations

from typing import Final

STILL_NS: Final = 5_000_000_000  # a duty cycle that does not turn for longer stands still


def standing_still(silent_ns: int) -> str | None:
    """What is wrong with a duty cycle that turned `silent_ns` ago; None: nothing."""
    return f"the duty cycle stands still since {silent_ns / 1e9:.0f} s" if silent_ns > STILL_NS else None
