# SPDX-License-Identifier: Apache-2.0
"""How the states of streams and consumers are shown: a sign, a colour and the word, so that no colour alone says it.

The colours are those of Okabe and Ito, which colour-blind people tell apart. The page of the console has the same.
"""

from __future__ import annotations

from typing import Final

from rich.text import Text

from tensorpool.supervisor.snapshot import ConsumerState, StreamState

GOOD: Final = "#0072b2"
WARN: Final = "#e69f00"
BAD: Final = "#d55e00"
QUIET: Final = "#808080"

_SHOWN: Final = {
    StreamState.LIVE: ("●", GOOD),
    StreamState.IDLE: ("○", QUIET),
    StreamState.NO_PRODUCER: ("–", QUIET),
    StreamState.STALE: ("✕", BAD),
    ConsumerState.OK: ("●", GOOD),
    ConsumerState.REDIRECTED: ("↷", QUIET),
    ConsumerState.LAGGING: ("▲", WARN),
    ConsumerState.DROPPING: ("▼", WARN),
    ConsumerState.STALE: ("✕", BAD),
    ConsumerState.EXPIRED: ("✕", BAD),
}
_SERVICES: Final = {"running": ("●", GOOD), "paused": ("‖", QUIET), "draining": ("↓", QUIET)}
_OTHER: Final = ("◌", QUIET)


def shown(state: StreamState | ConsumerState, count: int | None = None) -> Text:
    """ "● live", or "✕ 2 stale" of several."""
    sign, colour = _SHOWN[state]
    return Text(f"{sign} {state}" if count is None else f"{sign} {count} {state}", style=colour)


def service_shown(state: str, *, is_stale: bool) -> Text:
    """ "● running"; of one whose heartbeats have ended what it said last."""
    if is_stale:
        return Text(f"✕ no heartbeat ({state})", style=BAD)
    sign, colour = _SERVICES.get(state, _OTHER)
    return Text(f"{sign} {state}", style=colour)
