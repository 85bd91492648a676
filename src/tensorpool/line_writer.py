# SPDX-License-Identifier: Apache-2.0
"""Lines for a reader that may stand still, such as a log collector that hangs or a terminal that Ctrl-S stopped.

    waiting ──written──► the reader            more than MAX_WAITING_BYTES ──► dropped and counted

A thread of its own writes, so that only this thread waits for the reader. Making the descriptor non-blocking would do
the same to every process that shares it, and to what a command prints as its result.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

MAX_WAITING_BYTES: Final = 256 << 10


class LineWriter:
    """Writes lines to a descriptor, in order, and never makes its callers wait. Any thread may call.

    Once a line is dropped all are, until those before it are written; then `dropped_line` gives the line that tells
    how many are missing there.
    """

    def __init__(self, fd: int, dropped_line: Callable[[int], str]) -> None:
        self._fd = fd
        self._dropped_line = dropped_line
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_writing = False
        self._is_broken = False  # the last write failed: another line is tried before any count
        self._untold = 0  # of the dropped ones
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def write(self, text: str) -> None:
        """One line, or several that belong together."""
        line = text.encode("utf-8", "backslashreplace") + b"\n"
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
                self._thread.start()
            is_full = self._waiting_bytes + len(line) > MAX_WAITING_BYTES
            if is_full or self._owes_count:
                self._untold += 1
                self.dropped += 1
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Whether everything is written, after `timeout_s` at most."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_idle and not self._is_writing, timeout_s)

    @property
    def _owes_count(self) -> bool:
        return self._untold > 0 and not self._is_broken

    @property
    def _is_idle(self) -> bool:
        return not self._waiting and not self._owes_count

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._is_idle)
                self._is_writing = True
                count = 0
                if self._waiting:
                    line = self._waiting.popleft()
                    self._waiting_bytes -= len(line)
                else:
                    count, self._untold = self._untold, 0
            if count:
                line = self._dropped_line(count).encode() + b"\n"
            is_written = self._write(line)
            with self._changed:
                self._is_broken = not is_written
                if not is_written:
                    self._untold += count or 1
                    self.dropped += 0 if count else 1

    def _write(self, line: bytes) -> bool:
        """False: the reader is gone."""
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # made non-blocking by another process that shares it
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:
                return False
        return True
