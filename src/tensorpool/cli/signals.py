# SPDX-License-Identifier: Apache-2.0
"""How services are stopped: SIGTERM or Ctrl-C once to end in order, twice to end at once."""

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
    """A handler that interrupts, and remembers it: libraries have bare `except`s that an interrupt can end in."""

    def __init__(self) -> None:
        self.has_come = False

    def __call__(self, number: int, _: object) -> None:
        self.has_come = True
        raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Until `StopSignals` takes over, SIGTERM and Ctrl-C interrupt whatever waits: nothing has begun yet."""
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
    """SIGTERM and SIGINT as something to wait for; installed before there is anything to leave behind.

    The handler takes no lock, only writes to a pipe: it runs in the midst of whatever the main thread is doing, also in
    the midst of `wait`. Raises KeyboardInterrupt where one came before, inside `interruptible`, and got lost.
    """

    def __init__(self) -> None:
        self.count = 0
        self.name = ""
        self._heard, self._told = os.pipe()
        for end in (self._heard, self._told):
            os.set_blocking(end, False)
        before = [signal.signal(number, self._on_signal) for number in NUMBERS]
        if any(isinstance(handler, _Interrupt) and handler.has_come for handler in before):
            raise KeyboardInterrupt

    def wait(self, timeout_s: float) -> bool:
        """Whether a further signal arrived."""
        if not select.select([self._heard], [], [], timeout_s)[0]:
            return False
        os.read(self._heard, 4096)
        return True

    def _on_signal(self, number: int, _: object) -> None:
        self.count += 1
        self.name = signal.Signals(number).name
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._told, b"!")
