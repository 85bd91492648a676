# SPDX-License-Identifier: Apache-2.0
"""The process beside the Spark driver that plans a query: how it ends, and which planners it keeps for batches."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

import msgspec

from tensorpool.lake.live_options import LiveOptions
from tensorpool.lake.query_planner import Planner

END_S: Final = 10.0  # that a planner may take to give back what it holds
KEEP_S: Final = 60.0  # a planner of batch reads, after the last


def exit_in_order(close: Callable[[], object]) -> None:
    """Spark ends a planner with SIGTERM and never calls `stop`: what it holds is given back all the same."""
    atexit.register(close)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Spark asks more than once; the end is not to be interrupted
    watchdog = threading.Timer(END_S, os._exit, (128 + number,))
    watchdog.daemon = True
    watchdog.start()
    raise SystemExit(128 + number)


# --- batch reads, whose reader lives for one query only: the lease must outlive its tasks


class _Kept(msgspec.Struct):
    planner: Planner
    timer: threading.Timer


_kept: dict[bytes, _Kept] = {}
_lock = threading.Lock()


def kept_planner(options: LiveOptions) -> Planner:
    """A planner that is kept for a while after its last use."""
    key = msgspec.msgpack.encode(
        [options.streams, options.stream_pattern, options.aeron_dir, options.config, options.overrides]
    )
    with _lock:
        kept = _kept.pop(key, None)
        if kept is not None:
            kept.timer.cancel()
        planner = Planner(options) if kept is None else kept.planner
        if kept is None:
            exit_in_order(planner.close)
        timer = threading.Timer(KEEP_S, _let_go, (key, planner))
        timer.daemon = True
        timer.start()
        _kept[key] = _Kept(planner, timer)
        return planner


def _let_go(key: bytes, planner: Planner) -> None:
    with _lock:
        kept = _kept.get(key)
        if kept is not None and kept.planner is planner and kept.timer is threading.current_thread():
            del _kept[key]
            planner.close()
