# SPDX-License-Identifier: Apache-2.0
"""Stopping a command: the first SIGTERM or Ctrl-C ends it in order, the second one at once."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import Final

import click

NUMBERS: Final = (signal.SIGTERM, signal.SIGINT)


class _Interrupt:
    """A handler that raises KeyboardInterrupt and remembers it: a library's bare `except` may swallow the exception."""

    def __init__(self) -> None:
        self.has_arrived = False

    def __call__(self, number: int, _: object) -> None:
        self.has_arrived = True
        raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Until `StopSignals` takes over, SIGTERM and Ctrl-C interrupt any wait: the command has not begun yet."""
    interrupt = _Interrupt()
    before = {number: signal.signal(number, interrupt) for number in NUMBERS}
    try:
        yield
    except KeyboardInterrupt:
        click.echo("stopped before it began", err=True)
        sys.exit(0)
    finally:
        for number in NUMBERS:
            if signal.getsignal(number) is interrupt:
                signal.signal(number, before[number])


class StopSignals:
    """SIGTERM and SIGINT as an event to wait for; installed before the command creates anything.

    The handler takes no lock and only writes to a pipe, because it may interrupt the main thread anywhere, also in
    `wait`. The constructor raises KeyboardInterrupt where a signal arrived inside `interruptible` and was swallowed.
    """

    def __init__(self) -> None:
        self.count = 0
        self.name = ""
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        before = [signal.signal(number, self._on_signal) for number in NUMBERS]
        if any(isinstance(handler, _Interrupt) and handler.has_arrived for handler in before):
            raise KeyboardInterrupt

    def wait(self, timeout_s: float) -> bool:
        """Whether a further signal arrived."""
        if not select.select([self._read_end], [], [], timeout_s)[0]:
            return False
        os.read(self._read_end, 4096)
        return True

    def _on_signal(self, number: int, _: object) -> None:
        self.count += 1
        self.name = signal.Signals(number).name
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the reader as well
            os.write(self._write_end, b"!")
