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
    With `hangup` SIGHUP is an event too, for a command that reads its configuration again; else it ends the process.
    """

    def __init__(self, *, hangup: bool = False) -> None:
        self.count = 0
        self.name = ""
        self._is_hung_up = False
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        before = [signal.signal(number, self._on_signal) for number in NUMBERS]
        if hangup:
            signal.signal(signal.SIGHUP, self._on_hangup)
        if any(isinstance(handler, _Interrupt) and handler.has_arrived for handler in before):
            raise KeyboardInterrupt

    def wait(self, timeout_s: float) -> bool:
        """Whether a further signal arrived."""
        if not select.select([self._read_end], [], [], timeout_s)[0]:
            return False
        os.read(self._read_end, 4096)
        return True

    def take_hangup(self) -> bool:
        """Whether a SIGHUP arrived since the last call."""
        is_hung_up, self._is_hung_up = self._is_hung_up, False
        return is_hung_up

    def _on_hangup(self, number: int, _: object) -> None:
        self._is_hung_up = True
        self._wake()

    def _on_signal(self, number: int, _: object) -> None:
        self.count += 1
        self.name = signal.Signals(number).name
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the reader as well
            os.write(self._write_end, b"!")
