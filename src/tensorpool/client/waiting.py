# SPDX-License-Identifier: Apache-2.0
"""One thread for many consumers: wait for whichever has a frame, or have a function called with every frame.

The thread sleeps on the next slots of all rings at once (futex_waitv), without the GIL. Kernels before Linux 5.16 watch
one ring at a time; then, and with more than 128 streams, the thread looks at all of them every millisecond.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Final

from tensorpool import _core
from tensorpool.client.arguments import seconds
from tensorpool.client.consumer import SLICE_NS, Consumer
from tensorpool.client.frame import Frame
from tensorpool.errors import LocalProtocolError

LOOK_AROUND_S: Final = 0.1  # how long `run` waits before it looks for consumers that were added


def wait_any(consumers: Iterable[Consumer], timeout: float | None = None) -> list[Consumer]:
    """Wait until one of the consumers has something for `poll`; returns those that do, none when the time is over.

    >>> for consumer in wait_any(consumers, timeout=1.0):     # doctest: +SKIP
    ...     frame = consumer.poll()

    A consumer that is closed is returned at once: take it out of the list. One whose media driver has ended may be
    returned, too, and its `poll` gives None. Callbacks of the consumers (`on_state`, `on_progress`) run in here as in
    `poll`. Raises LocalProtocolError for a list that is empty or has a consumer twice, and where another thread polls
    one of them; Closed in a process that was forked from the one that attached.
    """
    waited = consumers if type(consumers) is list else list(consumers)
    if not waited:
        raise LocalProtocolError("wait_any: expected at least one consumer, got none")
    deadline_ns = None if timeout is None else time.monotonic_ns() + round(seconds("timeout", timeout) * 1e9)
    while True:
        left_ns = SLICE_NS if deadline_ns is None else max(0, deadline_ns - time.monotonic_ns())
        ready: list[Consumer] = _core.wait_any(waited, min(left_ns, SLICE_NS))
        if ready or (deadline_ns is not None and time.monotonic_ns() >= deadline_ns):
            return ready
        for consumer in waited:
            consumer._housekeeping()


def run(on_frame: Callable[[Consumer, Frame], object], consumers: list[weakref.ref[Consumer]]) -> None:
    """Call `on_frame` with every frame of the consumers, which may become more; return when all are closed."""
    if not callable(on_frame):
        raise LocalProtocolError(f"on_frame = {on_frame!r:.80}: expected a function of a consumer and a frame")
    known, waited = _still_open(consumers)
    if not waited:
        raise LocalProtocolError("run: this client has no open consumer; open some with client.consumer() first")
    while waited:
        for consumer in wait_any(waited, LOOK_AROUND_S):
            frame = consumer.poll()
            if frame is not None:
                on_frame(consumer, frame)
            elif consumer.is_closed:
                known = []
        if known != consumers:
            known, waited = _still_open(consumers)


def _still_open(consumers: list[weakref.ref[Consumer]]) -> tuple[list[weakref.ref[Consumer]], list[Consumer]]:
    known = list(consumers)
    alive = (consumer for reference in known if (consumer := reference()) is not None)
    return known, [consumer for consumer in alive if not consumer.is_closed and not consumer.is_awaited]
